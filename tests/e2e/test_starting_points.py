"""A run starts from what exists: an exported adapter, a merged folder, and worked examples of messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr.config import ConfigError, load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.model_files import ModelError
from teamtr.session.build import build
from teamtr.session.export import export
from teamtr.session.resume import StoredRun
from teamtr.session.train import train

TEAM = """\
name: start
task: {name: data, path: rows.jsonl, grader: 'python:reward.py:reward'}
team:
  model: model
  max_tokens: 3
  lora: {rank: 2}
  agents: [{name: solver}, {name: checker}]
plan: {stages: 1, problems: 3, group_size: 4, radius_nats_per_message: 0.5}
eval: {every: 0}
"""
REWARD = """\
def reward(prompts, completions, **columns):
    return [len(set(text)) / 3 for text in completions]
"""
IDS = torch.tensor([[3, 40, 41, 4, 42]])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team file with all that it names, a finished run, and its agents exported."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"say {c}"}) + "\n" for c in "abcdefgh"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "team.yaml").write_text(TEAM)
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=3)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    for _ in train(load_team_file(folder / "team.yaml"), folder / "run"):
        continue
    export(folder / "run", folder / "out")
    export(folder / "run", folder / "merged", agent="solver", form="merged")
    return folder


def logits(session, agent: str) -> np.ndarray:
    policy = session.engine.learner(agent).policy
    with torch.no_grad(), policy.computing():
        return policy.head()(policy._body(input_ids=IDS).last_hidden_state[0]).numpy()


@pytest.mark.long
def test_an_exported_adapter_is_where_the_next_run_starts(here: Path, tmp_path: Path) -> None:
    """One base for both, each with its own adapter: the new team is the old one at its end, to the bit."""
    old, team = StoredRun.read(here / "run").build()
    starts = [f"team.agents.{name}.lora.start=out/{name}" for name in team.names]
    settings = load_team_file(here / "team.yaml", starts)
    new = build(settings)
    bare = build(load_team_file(here / "team.yaml"))
    for name in team.names:
        assert new.engine.version(name) == old.engine.version(name)
        np.testing.assert_array_equal(logits(new, name), logits(old, name))
        assert np.abs(logits(bare, name) - logits(new, name)).max() > 1e-5, "the adapter changes something"
    shutil.copytree(here, tmp_path / "copy", ignore=shutil.ignore_patterns("run"))
    settings = load_team_file(tmp_path / "copy" / "team.yaml", [*starts, "plan.stages=2"])
    records = train(settings, tmp_path / "copy" / "next")
    while next(records)["kind"] != "update":
        continue
    records.close()
    shutil.rmtree(tmp_path / "copy" / "out")
    kinds = [record["kind"] for record in train(settings, tmp_path / "copy" / "next")]
    assert kinds[0] == "resume", "what it started from is over"
    assert kinds[-1] == "finished"


@pytest.mark.long
def test_a_merged_folder_is_where_the_next_run_starts(here: Path) -> None:
    old, _ = StoredRun.read(here / "run").build()
    new = build(load_team_file(here / "team.yaml", ["team.model=merged"]))
    np.testing.assert_allclose(logits(new, "checker"), logits(old, "solver"), atol=1e-5)


def edit(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def first_infinite(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights[min(weights)][0, 0] = float("inf")
    return weights


REFUSED = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "a whole model": (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter"),
    "another rank": (lambda folder: edit(folder, r=4), r"set lora\.rank: 4"),
    "another scale": (lambda folder: edit(folder, lora_alpha=2), r"lora\.alpha: 2"),
    "no plain LoRA": (lambda folder: edit(folder, use_dora=True), "no plain LoRA adapter"),
    "a damaged config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is damaged"),
    "a pickle": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "pickled weights are not read"),
    "a layer less": (lambda folder: edit_weights(folder, lambda w: dict(sorted(w.items())[2:])), "has no"),
    "a layer more": (lambda folder: edit_weights(folder, lambda w: w | {"x.lora_A.weight": torch.ones(1)}), "no place"),
    "another width": (
        lambda folder: edit_weights(folder, lambda w: {k: t[:, :1].contiguous() for k, t in w.items()}),
        "another base",
    ),
    "not finite": (lambda folder: edit_weights(folder, first_infinite), "not finite"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused(here: Path, tmp_path: Path, case: str) -> None:
    harm, told = REFUSED[case]
    shutil.copytree(here / "out" / "solver", tmp_path / "adapter")
    harm(tmp_path / "adapter")
    settings = load_team_file(here / "team.yaml", [f"team.agents.solver.lora.start={tmp_path / 'adapter'}"])
    with pytest.raises(ModelError, match=told):
        build(settings)


@pytest.mark.long
def test_an_adapter_of_another_base_is_told(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "out" / "solver", tmp_path / "adapter")
    edit(tmp_path / "adapter", base_model_name_or_path="OWNER/OTHER")
    settings = load_team_file(here / "team.yaml", [f"team.agents.solver.lora.start={tmp_path / 'adapter'}"])
    with pytest.warns(UserWarning, match="was trained on OWNER/OTHER"):
        build(settings)


def test_an_adapter_given_as_the_model_is_told_its_place(here: Path) -> None:
    with pytest.raises(ModelError, match=re.escape("lora: {start: ")):
        build(load_team_file(here / "team.yaml", ["team.model=out/solver"]))


def test_a_whole_model_has_no_adapter_to_start(tmp_path: Path) -> None:
    team = loads(
        TEAM.replace("{rank: 2}", "{rank: 2, start: one}").replace("name: checker", "name: checker, train: full")
    )
    assert [agent.lora.start for agent in team.team.agents] == ["one", None], "the team's is for adapters"
    with pytest.raises(ConfigError, match="has no adapter to start"):
        loads(TEAM.replace("name: checker", "name: checker, train: full, lora: {start: one}"))
