"""Frozen weights below adapters in the precision of their file: half the memory, and the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr.config import ConfigError, load_team_file, loads
from teamtr.engines import memory as loaded
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.planning.memory import held
from teamtr.session.build import Session, build
from teamtr.session.forecast import Where, _cluster, _setup
from teamtr.session.memory import demand_of
from teamtr.session.train import train
from teamtr.store import RunFolder

pytestmark = pytest.mark.long

TEAM = """\
name: half
task: {name: data, path: rows.jsonl, grader: 'python:reward.py:reward'}
team: {model: model, max_tokens: 3, lora: {rank: 2}, agents: [{name: left}, {name: right}]}
plan: {stages: 1, problems: 3, group_size: 4, radius_nats_per_message: 0.5}
eval: {every: 0}
"""
REWARD = """\
def reward(prompts, completions, **columns):
    return [len(set(text)) / 3 for text in completions]
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team on a model in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"say {c}"}) + "\n" for c in "abcdefgh"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "team.yaml").write_text(TEAM)
    model, tokenizer = tiny_model(TinyShape(layers=2, width=16, heads=2), seed=1)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def built(here: Path, *changes: str) -> Session:
    return build(load_team_file(here / "team.yaml", changes))


def dtypes(session: Session) -> dict[str, torch.dtype]:
    """Of the base's weights, by name."""
    model = session.engine.learner("left").policy.causal_lm
    return {name: p.dtype for name, p in model.named_parameters() if "lora_" not in name}


def weight_bytes(session: Session) -> int:
    return loaded.held(session.engine.learners, ["left", "right"]).weights


def test_the_run_ends_with_the_same_bits(here: Path) -> None:
    ends = []
    for base in ("fp32", "file"):
        settings = load_team_file(here / "team.yaml", [f"learner.base={base}"])
        outcomes = [r["outcome"] for r in train(settings, here / base) if r["kind"] == "update"]
        assert "accepted" in outcomes, "nothing was learnt: this proves nothing"
        commit = RunFolder.read(here / base).checkpoints.latest()
        assert commit is not None
        ends.append((commit.agents, commit.progress["versions"], commit.progress["inputs"]["models"], outcomes))
    assert ends[0] == ends[1]


def test_linear_layers_take_half_and_what_is_planned_is_what_is_there(here: Path) -> None:
    plain, short = built(here), built(here, "learner.base=file")
    assert set(dtypes(plain).values()) == {torch.float32}
    linear = {name for name, dtype in dtypes(short).items() if dtype == torch.bfloat16}
    assert linear == {name for name in dtypes(short) if "proj" in name}
    sizes = {name: p.numel() for name, p in plain.engine.learner("left").policy.causal_lm.named_parameters()}
    assert weight_bytes(plain) - weight_bytes(short) == 2 * sum(sizes[name] for name in linear)
    for session in (plain, short):
        settings = session.team_file
        there = _setup(settings, session.plan, _cluster(settings, Where("cpu")), demand_of(session))
        assert held(there).weights == weight_bytes(session)


def test_a_weight_that_would_lose_something_stays(here: Path, tmp_path: Path) -> None:
    file = here / "model" / "model.safetensors"
    weights = {name: tensor.float() if "q_proj" in name else tensor for name, tensor in load_file(file).items()}
    weights["model.layers.0.self_attn.q_proj.weight"] += 1e-6
    (tmp_path / "model").mkdir()
    for other in (here / "model").iterdir():
        (tmp_path / "model" / other.name).write_bytes(other.read_bytes())
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    found = dtypes(built(here, "learner.base=file", f"team.model={tmp_path / 'model'}"))
    kept = {name for name, dtype in found.items() if "proj" in name and dtype == torch.float32}
    assert {name.replace(".base_layer", "") for name in kept} == {"model.layers.0.self_attn.q_proj.weight"}


def test_a_base_that_is_spread_is_float32() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.shard_base spreads it"):
        loads(f"{TEAM}learner: {{base: file}}\ncluster: {{engine: ray, workers: 2, shard_base: true}}\n")
