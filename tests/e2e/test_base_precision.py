"""Frozen weights below adapters in the precision of their file, in fp16 or int8: less memory, and what is planned."""

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
from teamtr.session.checks import RadiusNotVisible, measure_floors, require_visible
from teamtr.session.export import export
from teamtr.session.forecast import Where, _cluster, _setup
from teamtr.session.memory import demand_of
from teamtr.session.resume import OtherRun
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


def test_matrices_take_half_and_what_is_planned_is_what_is_there(here: Path) -> None:
    plain, short = built(here), built(here, "learner.base=file")
    assert set(dtypes(plain).values()) == {torch.float32}
    linear = {name for name, dtype in dtypes(short).items() if dtype == torch.bfloat16}
    assert linear == {name for name in dtypes(short) if "proj" in name or "embed" in name}, "all but norms"
    sizes = {name: p.numel() for name, p in plain.engine.learner("left").policy.causal_lm.named_parameters()}
    assert weight_bytes(plain) - weight_bytes(short) == 2 * sum(sizes[name] for name in linear)
    for session in (plain, short):
        settings = session.team_file
        there = _setup(settings, session.plan, _cluster(settings, Where("cpu")), demand_of(session))
        assert held(there).weights == weight_bytes(session)


ONE_COPY = (
    "learner.base=fp16",
    "learner.precision=fp16",
    "sampling.engine=paged",
    "sampling.precision=fp16",
    "sampling.adapters=by_row",
)


@pytest.mark.parametrize(
    ("changes", "copied", "bytes_a_weight"),
    [
        ((), True, 8),
        (("learner.base=file",), True, 4),
        (("learner.base=file", "sampling.precision=bf16"), False, 2),
        (("learner.base=fp16",), False, 2),
    ],
)
def test_a_matrix_is_held_three_times_twice_or_once(
    here: Path, changes: tuple[str, ...], copied: bool, bytes_a_weight: int
) -> None:
    """float32, fp16 to train with and fp16 to sample from: 8 bytes, but for an embedding that nobody trains with."""
    session = built(here, *ONE_COPY[1:], "learner.base=fp32", *changes)
    settings, demand = session.team_file, demand_of(session)
    sizes = {n: p.numel() for n, p in session.engine.learner("left").policy.causal_lm.named_parameters() if p.ndim == 2}
    matrices = sum(size for name, size in sizes.items() if "lora_" not in name)
    found = loaded.held(session.engine.learners, list(demand.messages))
    norms = sum(p.numel() for p in session.engine.learner("left").policy.causal_lm.parameters() if p.ndim == 1)
    [served] = found.served
    assert found.weights + found.halves + served.copy_bytes == bytes_a_weight * matrices + 6 * norms
    assert served.shared_bytes == (0 if copied else 2 * matrices)
    computed = held(_setup(settings, session.plan, _cluster(settings, Where("cpu")), demand))
    assert (computed.weights, computed.halves, computed.cast) == (found.weights, found.halves, found.cast)
    assert computed.served == found.served


@pytest.mark.parametrize(
    ("changes", "embedding"),
    [((), 2), (("sampling.precision=fp32",), 2 + 4), (("sampling.adapters=merged",), 2 + 2)],
)
def test_a_base_in_8_bits_is_planned_as_it_is_there(here: Path, changes: tuple[str, ...], embedding: int) -> None:
    """A byte a weight of linear layers and four a row, for learner and sampler together; merged, two more to sample."""
    session = built(here, *ONE_COPY, "learner.base=int8", *changes)
    settings, demand = session.team_file, demand_of(session)
    model = session.engine.learner("left").policy.causal_lm
    sizes = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    linears = [p for name, p in sizes.items() if "proj" in name]
    words, norms = model.get_input_embeddings().weight.numel(), sum(p.numel() for p in sizes.values() if p.ndim == 1)
    found = loaded.held(session.engine.learners, list(demand.messages))
    [served] = found.served
    merged, size = "sampling.adapters=merged" in changes, 4 if "sampling.precision=fp32" in changes else 2
    body = sum(p.numel() for p in linears) * (1 + 2 * merged) + 4 * sum(len(p) for p in linears)
    assert {p.dtype for p in linears} == {torch.int8}
    assert found.weights + found.halves + served.copy_bytes == body + embedding * words + (4 + size) * norms
    assert (served.cast > 0) == (served.shared_bytes > 0) == (not merged)
    computed = held(_setup(settings, session.plan, _cluster(settings, Where("cpu")), demand))
    assert (computed.weights, computed.halves, computed.cast) == (found.weights, found.halves, found.cast)
    assert computed.served == found.served


@pytest.mark.parametrize("base", ["fp16", "int8"])
def test_a_team_on_one_copy_learns_and_an_unseen_radius_is_refused(here: Path, base: str) -> None:
    once = (*ONE_COPY, f"learner.base={base}")
    records = list(train(load_team_file(here / "team.yaml", once), here / f"one-{base}"))
    assert "accepted" in [r["outcome"] for r in records if r["kind"] == "update"]
    narrow = built(here, *once, "plan.radius_nats_per_message=1e-11")
    with pytest.raises(RadiusNotVisible, match="in fp16"):
        require_visible(narrow, measure_floors(narrow))


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


def test_a_run_on_a_base_in_8_bits_resumes_to_the_same_bits(here: Path) -> None:
    changes = ("learner.base=int8", "plan.stages=2")
    ends = []
    for name, parts in (("at-once", (False,)), ("in-parts", (True, False))):
        for killed in parts:
            settings = load_team_file(here / "team.yaml", changes)
            for record in train(settings, here / name):
                if killed and record["kind"] == "update":
                    break
        commit = RunFolder.read(here / name).checkpoints.latest()
        assert commit is not None
        ends.append((commit.agents, commit.progress["versions"]))
    assert ends[0] == ends[1]
    with pytest.raises(OtherRun, match=r"other settings \(learner\.base\)"):
        list(train(load_team_file(here / "team.yaml", ["learner.base=fp16", "plan.stages=2"]), here / "in-parts"))
    models = [built(here, f"learner.base={base}").engine.info("left").base_version for base in ("fp32", "fp16", "int8")]
    assert models[0] == models[1] != models[2], "messages of a base in 8 bits bear another name"


def test_an_adapter_is_merged_into_the_base_of_its_file_however_that_was_rounded(here: Path, tmp_path: Path) -> None:
    list(train(load_team_file(here / "team.yaml", ["learner.base=int8"]), here / "to-export"))
    [told] = export(here / "to-export", tmp_path / "left", agent="left", form="merged")
    merged, file = load_file(told.folder / "model.safetensors"), load_file(here / "model" / "model.safetensors")
    checkpoints = RunFolder.read(here / "to-export").checkpoints
    stored = load_file(checkpoints.folder_of(checkpoints.latest(), "left") / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    down, up = (stored[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert up.abs().max() > 0, "nothing was learnt: this proves nothing"
    scale = load_team_file(here / "team.yaml").team.agents[0].lora.alpha / len(down)
    expected = file[f"{name}.weight"].float() + scale * up @ down
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(merged[f"{name}.weight"], expected.bfloat16())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            "sampling: {engine: vllm, vllm: {urls: ['http://localhost:1']}}\n",
            r"vLLM servers sample from the one in",
        ),
        ("", r'agent "left" trains all its weights: set train: lora'),
    ],
)
def test_8_bits_are_refused_where_they_cannot_be(more: str, told: str) -> None:
    team = TEAM if more else TEAM.replace("team: {", "team: {train: full, ").replace("lora: {rank: 2}, ", "")
    with pytest.raises(ConfigError, match=told):
        loads(f"{team}learner: {{base: int8}}\n{more}")


@pytest.mark.parametrize("base", ["file", "fp16", "int8"])
def test_a_base_that_is_spread_is_float32(base: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.shard_base spreads it"):
        loads(f"{TEAM}learner: {{base: {base}}}\ncluster: {{engine: ray, workers: 2, shard_base: true}}\n")
