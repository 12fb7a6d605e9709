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

from teamtr.analysis.report import build_report, report_page
from teamtr.config import ConfigError, TeamFile, load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.model_files import ModelError
from teamtr.errors import UserError
from teamtr.session import warmup
from teamtr.session.build import Session, build
from teamtr.session.export import export
from teamtr.session.resume import StoredRun
from teamtr.session.train import train
from teamtr.session.warmup import examples_of, planned_steps
from teamtr.store import RunFolder
from teamtr.tasks.data.rows import DataError
from teamtr.types import Problem

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


def logits(session: Session, agent: str) -> np.ndarray:
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


# -- warm-up --------------------------------------------------------------------------------------------------

EXAMPLES = [{"prompt": f"say {c}", "completion": c + c} for c in "abcdefgh"]
EXAMPLES.append(
    {"agent": "checker", "prompt": "say z", "history": [{"agent": "solver", "text": "z"}], "completion": "z"}
)


def with_examples(here: Path, folder: Path, rows: list[dict], *changes: str) -> TeamFile:
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [f"warmup.path={folder / 'examples.jsonl'}", "warmup.tokens=2000", "warmup.learning_rate=0.02", *changes]
    return load_team_file(here / "team.yaml", ["team.lora.rank=8", *told])


def likelihood(session: Session, agent: str, prompt: str, completion: str) -> float:
    """Log-probability of the completion, by transformers' own forward pass."""
    problem = Problem("x", prompt)
    ids = session.context.prompt(session.team, session.team[agent], problem, [])
    message = session.context.codecs[agent].encode_message(completion)
    policy = session.engine.learner(agent).policy
    with torch.no_grad(), policy.computing():
        found = policy.causal_lm(input_ids=torch.tensor([[*ids, *message[:-1]]])).logits[0, len(ids) - 1 :]
    return float(torch.log_softmax(found.float(), -1)[range(len(message)), message].sum())


@pytest.mark.long
def test_a_warm_up_learns_its_examples_within_its_budget_and_is_told(here: Path, tmp_path: Path) -> None:
    settings = with_examples(here, tmp_path, EXAMPLES, "warmup.batch=4", "team.train=full")
    bare = likelihood(build(settings), "solver", "say a", "aa")
    run = tmp_path / "run"
    started, *rest = train(settings, run)
    found = started["warmup"]
    assert [found[name]["examples"] for name in ("solver", "checker")] == [8, 9]
    assert {each["source"] for each in found.values()} == {"examples.jsonl"}
    for each in found.values():
        assert 900 < each["tokens"] <= 1000, "half of the budget, but for the rest of an example"
        assert each["loss_after"] < each["loss_before"] - 0.5
    assert started["seconds"]["warmup"] > 0
    tokens = RunFolder.read(run).checkpoints.latest().progress["account"]["tokens"]
    assert {name: spent["warmup"] for name, spent in tokens.items()} == {name: found[name]["tokens"] for name in found}
    trained = sum(r["tokens"]["trained"] for r in rest if r["kind"] == "update" and r["agent"] == "solver")
    assert tokens["solver"]["trained"] == trained, "and not among what updates trained on"
    session, _ = StoredRun.read(run).build()
    assert likelihood(session, "solver", "say a", "aa") > bare + 1.0
    page = report_page(build_report(run))
    assert "Warm-up" in page
    assert "examples.jsonl" in page
    (tmp_path / "examples.jsonl").unlink()
    again = load_team_file(run / "team.yaml", ["plan.stages=2"])
    assert [record["kind"] for record in train(again, run)][-1] == "finished", "a run begins once"
    assert "tokens of examples from examples.jsonl" in exported_card(run, tmp_path / "card")


def exported_card(run: Path, out: Path) -> str:
    export(run, out, agent="solver")
    return (out / "README.md").read_text()


@pytest.mark.long
def test_a_step_of_the_warm_up_is_the_gradient_of_the_log_likelihood(here: Path, tmp_path: Path) -> None:
    """The port's gradient of a ratio at the policy itself, beside autograd on the mean log-likelihood."""
    session = build(with_examples(here, tmp_path, EXAMPLES))
    batch = examples_of(session)["solver"].rows([0, 3])
    learner = session.engine.learner("solver")
    learner.begin(batch)
    learner._accumulate(np.arange(2), np.ones(2), warmup._LIKELIHOOD, 0.0)
    ours = {name: p.grad.clone() for name, p in learner.policy.parameters().items() if p.grad is not None}
    learner.end()
    for parameter in learner.policy.parameters().values():
        parameter.grad = None
    with learner.policy.computing():
        total = 0.0
        for prompt, message in zip(batch.prompts, batch.messages, strict=True):
            ids = torch.tensor([[*prompt, *message[:-1]]])
            logits = learner.policy.causal_lm(input_ids=ids).logits[0, len(prompt) - 1 :]
            total = total - torch.log_softmax(logits.float(), -1)[range(len(message)), message].sum()
        (total / batch.lengths_M.sum()).backward()
    assert ours
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, learner.policy.parameters()[name].grad, rtol=1e-4, atol=1e-7)


def test_the_steps_of_a_warm_up_by_hand() -> None:
    steps = planned_steps([5, 5, 5], batch=2, budget=22, rng=np.random.default_rng(0))
    assert [len(rows) for rows in steps] == [2, 2]
    assert sorted(np.concatenate(steps)[:3].tolist()) == [0, 1, 2], "every example once before any comes again"
    assert planned_steps([5], batch=4, budget=4, rng=np.random.default_rng(0)) == []


@pytest.mark.long
def test_a_task_s_own_examples_are_the_default_for_any_model(tmp_path: Path) -> None:
    text = """\
name: own
task: {name: code, symbols: AB, half_length: 1, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
team: {model: tiny, max_tokens: 3, agents: [{name: left}, {name: right}, {name: speaker, frozen: true}]}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.5}
warmup: {tokens: 3000, learning_rate: 0.01}
eval: {every: 0}
"""
    started = next(train(loads(text, "own"), tmp_path / "run"))
    assert set(started["warmup"]) == {"left", "right"}, "who is frozen learns nothing"
    assert {each["source"] for each in started["warmup"].values()} == {"code"}
    assert all(each["loss_after"] < each["loss_before"] for each in started["warmup"].values())


UNUSABLE = {
    "a column": ({"prompt": "a", "completion": "b", "answer": "c"}, "a column 'answer'"),
    "no completion": ({"prompt": "a"}, "'completion' must be text"),
    "nobody": ({"agent": "nobody", "prompt": "a", "completion": "b"}, "is no agent of the team"),
    "too long": ({"prompt": "a", "completion": "bbbb"}, "who may write 3: raise max_tokens"),
    "a stranger": ({"prompt": "a", "completion": "b", "history": [{"agent": "x", "text": "y"}]}, "never speaks"),
    "no history": ({"prompt": "a", "completion": "b", "history": ["y"]}, "is a list of"),
    "nobody's secret": ({"prompt": "a", "completion": "b", "private": "y"}, "give 'agent' too"),
}


@pytest.mark.long
def test_examples_that_cannot_be_used_are_named_before_anything_is_trained(here: Path, tmp_path: Path) -> None:
    session = build(with_examples(here, tmp_path, EXAMPLES))
    for row, told in UNUSABLE.values():
        (tmp_path / "examples.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(DataError, match=f"line 2: .*{told}"):
            examples_of(session)
    (tmp_path / "examples.jsonl").write_text("")
    with pytest.raises(UserError, match="has no examples"):
        examples_of(session)
    small = build(with_examples(here, tmp_path, EXAMPLES, "warmup.tokens=9"))
    with pytest.raises(UserError, match=r"warmup\.tokens is 9, 4 for each of 2 agents"):
        examples_of(small)


def test_what_a_warm_up_cannot_go_with() -> None:
    with pytest.raises(ConfigError, match="needs a budget"):
        loads(f"{TEAM}warmup: {{path: rows.jsonl}}\n")
    with pytest.raises(ConfigError, match="draw the team back to before its warm-up"):
        loads(f"{TEAM.replace('stages: 1', 'stages: 1, reference_kl: 0.1')}warmup: {{tokens: 10}}\n")


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
