"""``TeamTrainer``: what the Python API promises, on the built-in model and on tiny transformers objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fake_vllm
import teamtr
from teamtr import Agent, Callback, GroupAdvantage, LoraConfig, Plan, TeamTrainer, UserError
from teamtr.api.rewards import RewardTask
from teamtr.cli import app
from teamtr.config.plan import PlanConfig, plan_keys
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.presets import PRESETS
from teamtr.session.inputs import OtherInputs
from teamtr.session.resume import OtherRun
from teamtr.store import RunFolder
from teamtr.tasks import CodeExchange, Task
from teamtr.team import Schedule
from teamtr.types import Problem, Turn, Verdict

ROWS = [{"prompt": f"say {letter}", "answer": letter, "weight": 1.0} for letter in "abcdef"]
PLAN = Plan.preset("teamtr", radius=0.05, stages=1, problems=2, group_size=4)
TINY = {
    "tiny.layers": 1,
    "tiny.width": 16,
    "tiny.heads": 2,
    "tiny.warmup_steps": 0,
    "eval.every": 0,
    "learner.epochs": 1,
    "learner.minibatches": 2,
}
LORA = LoraConfig(rank=2, alpha=4.0)


def vowels(prompts, completions, **columns) -> list[float]:
    """Has a signal on what an untrained model says: any text."""
    return [len(set(text) & set("aeiouAEIOU0123456789")) / 3 for text in completions]


def made(folder: Path, **changes: Any) -> TeamTrainer:
    """A trainer of two tiny agents; ``changes`` are other arguments."""
    given: dict[str, Any] = {
        "agents": [Agent("solver", "tiny", max_tokens=3), Agent("checker", "tiny", max_tokens=3)],
        "reward_funcs": vowels,
        "train_dataset": ROWS,
        "args": PLAN,
        "output_dir": folder,
        "config": TINY,
    }
    return TeamTrainer(**{**given, **changes})


def model_object(seed: int = 0) -> tuple[Any, Any]:
    return tiny_model(TinyShape(layers=1, width=16, heads=2), seed=seed)


def weights(folder: Path) -> dict[str, bytes]:
    """Everything that the last commit of a run holds of its agents."""
    checkpoints = RunFolder.read(folder).checkpoints
    commit = checkpoints.latest()
    assert commit is not None
    files = {name: checkpoints.folder_of(commit, name) for name in commit.agents}
    return {
        f"{name}/{file.name}": file.read_bytes()
        for name, inside in files.items()
        for file in sorted(inside.glob("*.safetensors"))
    }


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


def kinds(records: Sequence[Any]) -> list[str]:
    return [record["kind"] for record in records]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TeamTrainer:
    """A finished run of a whole model and an adapter, both objects."""
    model, tokenizer = model_object()
    trainer = made(
        tmp_path_factory.mktemp("objects") / "run",
        agents=[
            Agent("solver", model, tokenizer, system_prompt="Be short.", max_tokens=3),
            Agent("checker", model, tokenizer, lora=LORA, max_tokens=3),
        ],
    )
    trainer.train()
    return trainer


# -- the same run as the command line ------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_from_python_ends_with_the_weights_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(
        """\
name: python
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 5, warmup_learning_rate: 1e-2}
team: {model: tiny, max_tokens: 3, agents: [{name: left}, {name: right}, {name: speaker}]}
plan: {stages: 2, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
eval: {every: 0}
"""
    )
    code, said = invoke("train", tmp_path / "team.yaml", "--out", tmp_path / "command")
    assert code == 0, said
    config = TINY | {"tiny.warmup_steps": 5, "tiny.warmup_learning_rate": 1e-2}
    trainer = TeamTrainer(
        [Agent(name, "tiny", max_tokens=3) for name in ("left", "right", "speaker")],
        CodeExchange(symbols="AB", held_out=0.5, skill=0.9),
        args=replace(PLAN, stages=2),
        output_dir=tmp_path / "python",
        config={key: value for key, value in config.items() if not key.startswith("learner.")},
    )
    records = trainer.train()
    assert kinds(records) == ["start", *["update"] * 3, "stage", *["update"] * 3, "stage", "finished"]
    assert any(record.get("outcome") == "accepted" for record in records)
    assert weights(tmp_path / "python") == weights(tmp_path / "command")


@pytest.mark.long
def test_the_folder_is_a_run_folder_and_its_report_is_made(run: TeamTrainer, tmp_path: Path) -> None:
    assert {"team.yaml", "log.jsonl", "checkpoints", "episodes"} <= {p.name for p in run.output_dir.iterdir()}
    code, said = invoke("report", run.output_dir, "--out", tmp_path / "report.html")
    assert code == 0, said
    assert "solver" in (tmp_path / "report.html").read_text()
    own = run.report(tmp_path / "own.html")
    assert "checker" in own.read_text()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_the_command_line_refuses_to_go_on_with_objects(run: TeamTrainer, command: str) -> None:
    before = weights(run.output_dir)
    code, said = invoke(command, run.output_dir)
    assert code == 2, said
    assert "TeamTrainer" in said
    assert "vowels" in said
    assert weights(run.output_dir) == before


# -- models --------------------------------------------------------------------------------------------------


def test_objects_are_trained_and_left_as_they_were(run: TeamTrainer) -> None:
    updates = [r for r in RunFolder.read(run.output_dir).log.read() if r["kind"] == "update"]
    assert [r["agent"] for r in updates] == ["solver", "checker"]
    assert {r["outcome"] for r in updates} == {"accepted"}
    given, untouched = run._agents[0].model, model_object()[0]
    for name, weight in untouched.state_dict().items():
        assert torch.equal(given.state_dict()[name], weight), name


@pytest.mark.long
def test_a_folder_is_a_model_and_ends_like_the_object_it_was_saved_from(tmp_path: Path) -> None:
    model, tokenizer = model_object()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made(tmp_path / "a", agents=[Agent("solver", tmp_path / "model", max_tokens=3)]).train()
    made(tmp_path / "b", agents=[Agent("solver", model, tokenizer, max_tokens=3)]).train()
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.long
def test_an_object_in_half_precision_is_trained_in_float32_and_leaves_as_it_came(tmp_path: Path) -> None:
    model, tokenizer = model_object()
    trainer = made(tmp_path / "run", agents=[Agent("solver", model.to(torch.bfloat16), tokenizer, max_tokens=3)])
    (update,) = [r for r in trainer.train() if r["kind"] == "update"]
    assert update["outcome"] == "accepted"
    stored = next((tmp_path / "run" / "checkpoints" / "agents" / "solver").glob("*/model.safetensors"))
    assert {tensor.dtype for tensor in load_file(stored).values()} == {torch.float32}
    trainer.agents["solver"].save_pretrained(tmp_path / "out")
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert model.dtype == torch.bfloat16, "what was given is left alone"


def test_peft_s_lora_config_means_the_same(tmp_path: Path) -> None:
    from peft import LoraConfig as PeftLoraConfig

    theirs = PeftLoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ours = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
    files = [made(tmp_path, agents=[Agent("a", "tiny", lora=lora)]).team_file for lora in (theirs, ours)]
    assert files[0] == files[1]
    assert files[0].team.agents[0].train == "lora"


# -- rewards and rows ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_reward_function_sees_prompts_completions_and_columns(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def reward(prompts, completions, answer, weight, **columns):
        seen.append({"prompts": prompts, "completions": completions, "answer": answer, "weight": weight, **columns})
        return [float(k % 2) for k in range(len(completions))]

    made(tmp_path / "run", reward_funcs=reward).train()
    for call in seen:
        assert {len(column) for column in call.values()} == {len(call["prompts"])}
        assert [prompt.removeprefix("say ") for prompt in call["prompts"]] == call["answer"]
        assert set(call["weight"]) == {1.0}
        assert all(
            [said["name"] for said in messages] == ["solver", "checker"] and messages[-1]["content"] == answer
            for messages, answer in zip(call["conversations"], call["completions"], strict=True)
        )
    assert max(len(call["prompts"]) for call in seen) >= 8


def test_several_functions_add_up_and_one_may_name_only_what_it_needs() -> None:
    def length(completions):
        return [len(text) for text in completions]

    task = RewardTask([length, lambda answer, **_: [10.0] * len(answer)], ROWS, ROWS[:1], threshold=12.0)
    (problem,) = task.problems("test")
    verdicts = task.grade([(problem, "ab", ["x", "ab"]), (problem, "a", ["x", "a"])])
    assert [(v.reward, v.kind) for v in verdicts] == [(12.0, "right"), (11.0, "wrong")]


def test_a_reward_that_is_not_finite_is_a_crash_of_the_grader() -> None:
    task = RewardTask(lambda completions: [float("nan")] * len(completions), ROWS, ROWS[:1])
    assert task.grade([(task.problems("test")[0], "a", ["a"])])[0].kind == "crash"
    assert task.failures.total() == 1


def test_rows_come_from_any_iterable_and_prompts_may_be_chats() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"prompt": [{"role": "system", "content": "no"}, {"role": "user", "content": "hello"}], "id": "x"}
        yield {"question": "how?", "solution": 4}
        yield {"problem": "how?", "target": 5}

    problems = RewardTask(vowels, rows(), ROWS[:1]).problems("train")
    assert [p.prompt for p in problems] == ["hello", "how?", "how?"]
    assert [p.answer for p in problems] == [None, 4, 5]
    assert len({p.id for p in problems}) == 3
    assert problems[0].id == "x"


def test_a_dataset_of_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    there = RewardTask(vowels, datasets.Dataset.from_list(ROWS), ROWS[:1]).problems("train")
    assert there == RewardTask(vowels, ROWS, ROWS[:1]).problems("train")


def test_without_held_out_rows_a_tenth_of_the_prompts_is_held_out_and_no_prompt_is_on_both_sides() -> None:
    rows = [{"prompt": f"p{k // 2}"} for k in range(60)]
    task = RewardTask(vowels, rows)
    train, test = ({p.prompt for p in task.problems(split)} for split in ("train", "test"))
    assert (len(train), len(test)) == (27, 3)
    assert not train & test


class Letters(Task):
    """The first letter of the answer, whatever the problem."""

    reward_range = 1.0

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [Verdict("right", 1.0) if k % 2 else Verdict("wrong", 0.0) for k in range(len(episodes))]


def letters(words: str = "abc") -> Letters:
    return Letters({"train": [Problem(w, w) for w in words], "test": [Problem("z", "z")]})


@pytest.mark.long
def test_a_task_is_a_reward(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", reward_funcs=letters(), train_dataset=None)
    updates = [record for record in trainer.train() if record["kind"] == "update"]
    assert [update["success"] for update in updates] == [0.5, 0.5]
    assert all(update["certificates"] for update in updates), "the reward's range is known"
    with pytest.raises(OtherInputs, match="problems of train: some"):
        made(tmp_path / "run", reward_funcs=letters("abd"), train_dataset=None).train()


# -- evaluation, callbacks, stopping, resuming ---------------------------------------------------------------


@pytest.mark.long
def test_evaluation_before_and_after(tmp_path: Path) -> None:
    def first(completions, **_):
        return [1.0 if text[:1].islower() else 0.0 for text in completions]

    trainer = made(tmp_path / "run", reward_funcs=first, eval_dataset=ROWS[:2])
    before = trainer.evaluate(samples=8)
    assert not (tmp_path / "run").exists(), "looking at a team begins no run"
    assert trainer.evaluate(samples=8) == before
    assert (before.problems, before.samples) == (2, 8)
    trainer.train()
    after = trainer.evaluate(samples=8)
    assert after == made(tmp_path / "run", reward_funcs=first, eval_dataset=ROWS[:2]).evaluate(samples=8)
    assert trainer.evaluate(split="train", problems=1, samples=2).problems == 1


class Watch(Callback):
    """Keeps what it sees, in order, twice: as it comes and by kind."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.updates: list[Any] = []

    def on_record(self, record, trainer) -> None:
        self.all.append(record)
        super().on_record(record, trainer)

    def on_update(self, record, trainer) -> None:
        self.updates.append(record)


@pytest.mark.long
def test_callbacks_see_the_log(tmp_path: Path) -> None:
    watch, told = Watch(), []
    trainer = made(tmp_path / "run", callbacks=[watch, told.append], config=TINY | {"eval.every": 1, "eval.samples": 2})
    records = trainer.train()
    assert kinds(records) == ["start", "eval", "update", "update", "stage", "eval", "finished"]
    assert watch.all == told == records
    logged = RunFolder.read(tmp_path / "run").log.read()
    assert logged == [r for r in json.loads(json.dumps(records)) if r["kind"] != "finished"]
    assert [r["agent"] for r in watch.updates] == ["solver", "checker"]


class StopAfter(Callback):
    def __init__(self, updates: int) -> None:
        self.left = updates
        self.stopped = 0

    def on_update(self, record, trainer) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.stop()

    def on_stopped(self, record, trainer) -> None:
        self.stopped += 1


@pytest.mark.long
def test_a_stopped_run_goes_on_to_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    model, tokenizer = model_object(1)
    team = [Agent("solver", "tiny", max_tokens=3), Agent("checker", model, tokenizer, lora=LORA, max_tokens=3)]
    two = replace(PLAN, stages=2)
    made(tmp_path / "whole", agents=team, args=two, config=TINY | {"name": "run"}).train()

    stop = StopAfter(1)
    first = made(tmp_path / "run", agents=team, args=two, callbacks=[stop]).train()
    assert kinds(first) == ["start", "update", "stopped"]
    assert stop.stopped == 1
    again = made(tmp_path / "run", agents=team, args=two, callbacks=[lambda record: record["kind"] == "stage"])
    assert kinds(again.train()) == ["resume", "update", "stage", "stopped"]
    trainer = made(tmp_path / "run", agents=team, args=two)
    assert kinds(trainer.train()) == ["resume", "update", "update", "stage", "finished"]
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert kinds(trainer.train()) == ["resume", "finished"], "nothing is left to do"
    further = made(tmp_path / "run", agents=team, args=replace(PLAN, stages=3))
    assert kinds(further.train()) == ["resume", "update", "update", "stage", "finished"]


@pytest.mark.long
def test_records_come_one_at_a_time(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run")
    seen = []
    for record in trainer.records():
        seen.append(record["kind"])
        if record["kind"] == "update":
            trainer.stop()
    assert seen == ["start", "update", "stopped"]


def other_name(prompts, completions, **columns) -> list[float]:
    return vowels(prompts, completions)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward_funcs": other_name}, r"python\.task"),
        ({"reward_funcs": [vowels, other_name]}, r"python\.task"),
        ({"agents": 7}, r"team\.agents\.solver\.model"),
        ({"args": replace(PLAN, advantage=GroupAdvantage(eps=1e-3))}, r"python\.advantage"),
        ({"router": Schedule.repeated(["solver", "checker"], 2)}, r"python\.router"),
        ({"seed": 1}, "seed"),
    ],
)
def test_another_run_is_refused(run: TeamTrainer, changes: dict[str, Any], named: str) -> None:
    if "agents" in changes:
        model, tokenizer = model_object(changes["agents"])
        changes = {"agents": [replace(agent, model=model, tokenizer=tokenizer) for agent in run._agents]}
    other = made(run.output_dir, **{"agents": run._agents, **changes})
    before = weights(run.output_dir)
    for act in (other.train, other.evaluate, lambda: other.agents["solver"].save_pretrained(run.output_dir / "x")):
        with pytest.raises(OtherRun, match=named):
            act()
    assert weights(run.output_dir) == before


def vowels_that_cost(prompts, completions, **columns) -> list[float]:
    return [-reward for reward in vowels(prompts, completions)]


vowels_that_cost.__qualname__ = vowels.__qualname__


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train_dataset": [*ROWS, {"prompt": "say g", "answer": "g", "weight": 1.0}]}, "problems of train: there are"),
        ({"train_dataset": [{**row, "weight": 2.0} for row in ROWS]}, "problems of train: some"),
        ({"train_dataset": ROWS[::-1]}, "problems of train: .* in another order"),
        ({"reward_funcs": vowels_that_cost}, "task: the code has changed"),
    ],
)
def test_a_run_does_not_go_on_with_other_data_or_rewards_unless_asked_to(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    first = made(tmp_path / "run", callbacks=[lambda record: record["kind"] == "update"])
    first.train()
    before = weights(tmp_path / "run")
    other = made(tmp_path / "run", agents=first._agents, **changes)
    with pytest.raises(OtherInputs, match=named):
        other.train()
    assert weights(tmp_path / "run") == before
    resumed = other.train(accept_changes=True)
    assert resumed[0]["kind"] == "resume"
    assert any(re.search(named, text) for text in resumed[0]["changes"])
    assert other.train()[0]["changes"] == [], "what was accepted is what the run has now"


@pytest.mark.long
def test_another_tokenizer_object_is_refused(run: TeamTrainer) -> None:
    def exchanged(agent: Agent) -> Agent:
        if not agent.is_object:
            return agent
        tokenizer = deepcopy(agent.tokenizer)
        tokenizer.chat_template = tokenizer.chat_template + " "
        return replace(agent, tokenizer=tokenizer)

    other = made(run.output_dir, agents=[exchanged(agent) for agent in run._agents])
    for act in (other.train, other.evaluate):
        with pytest.raises(OtherInputs, match="its chat template has changed"):
            act()


# -- saving and publishing -----------------------------------------------------------------------------------

PROMPT = torch.tensor([[3, 4, 5, 6]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def test_a_whole_model_loads_in_plain_transformers(run: TeamTrainer, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.agents["solver"].save_pretrained(tmp_path / "solver")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    assert not torch.equal(logits(model), logits(model_object()[0])), "it was trained"
    card = (folder / "README.md").read_text()
    assert "a model of a Python program" in card
    assert "base_model" not in card, "an object is no model of the hub"
    assert "| task | vowels |" in card


@pytest.mark.long
def test_an_adapter_on_an_object_loads_in_peft_and_merges_to_the_same(run: TeamTrainer, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    folder = run.agents["checker"].save_pretrained(tmp_path / "checker")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.testing.assert_close(logits(base), logits(model_object()[0]))
    adapted = logits(PeftModel.from_pretrained(base, folder))
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), adapted)
    merged = run.agents["checker"].save_pretrained(tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), adapted, atol=1e-5, rtol=1e-4)
    assert not torch.equal(adapted, logits(model_object()[0])), "it was trained"


def test_there_is_nothing_to_save_before_training(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run")
    assert list(trainer.agents) == ["solver", "checker"]
    with pytest.raises(UserError, match=r"call train\(\) first"):
        trainer.agents["solver"].save_pretrained(tmp_path / "out")


class Hub:
    """What is asked of the hub."""

    made: ClassVar[list[tuple[str, bool]]] = []
    uploads: ClassVar[list[tuple[str, set[str]]]] = []

    def __init__(self, token: str | None = None) -> None:
        assert token == "secret"

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.made.append((repo_id, private))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
        self.uploads.append((repo_id, {p.name for p in Path(folder_path).iterdir()}))
        return f"https://hub/{repo_id}"


@pytest.mark.long
def test_publishing(run: TeamTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "made", [])
    monkeypatch.setattr(Hub, "uploads", [])
    assert run.agents["solver"].push_to_hub("me/solver", token="secret") == "https://hub/me/solver"
    run.agents["checker"].push_to_hub("me/checker", merge=True, private=False, token="secret")
    assert Hub.made == [("me/solver", True), ("me/checker", False)]
    for _, files in Hub.uploads:
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files
        assert not files & {"optimizer.safetensors", "state.json", "manifest.json"}
    with pytest.raises(UserError, match="merge=True"):
        run.agents["checker"].push_to_hub("me/checker", token="secret")
    assert len(Hub.uploads) == 2
    assert len(Hub.made) == 2


# -- plans, routers, estimators ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_team_file(name: str) -> None:
    for plan in (PRESETS[name], Plan.preset(name, radius=0.03, stages=3, group_size=5)):
        assert PlanConfig(**plan_keys(plan)).plan() == plan
        assert PRESETS[plan_keys(plan)["preset"]] == PRESETS[name]


@pytest.mark.long
def test_the_team_file_holds_the_plan_that_runs(tmp_path: Path) -> None:
    for name in PRESETS:
        trainer = made(tmp_path, args=Plan.preset(name, radius=0.03, stages=2))
        assert trainer.team_file.plan.plan() == trainer.plan


@pytest.mark.parametrize("agents", [["solver", "checker"], "solver", {"solver": Agent("solver", "tiny")}])
def test_what_is_no_agent_is_refused(agents: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agents must be a list of Agent\(NAME, MODEL\), got '"):
        made(tmp_path, agents=agents)


def test_a_preset_with_changes_and_without_sense() -> None:
    plan = Plan.preset("grpo", radius=0.05, stages=7)
    assert (plan.radii.nats, plan.stages, plan.objective) == (0.05, 7, PRESETS["grpo"].objective)
    with pytest.raises(UserError, match=r"'teamrt' \(did you mean 'teamtr'\?\); there are teamtr, "):
        Plan.preset("teamrt")
    with pytest.raises(UserError, match="a plan has no 'stage'; it has radius, "):
        Plan.preset(stage=3)


def turns_of(folder: Path) -> list[str]:
    from teamtr.store import batch_name, read_episodes

    batch = read_episodes(RunFolder.read(folder).episodes / batch_name(0, 0))
    (order,) = {tuple(turn.agent for turn in episode.turns) for episode in batch.episodes}
    return list(order)


@pytest.mark.long
def test_a_router_as_in_the_team_file(tmp_path: Path) -> None:
    made(tmp_path / "run", router={"order": ["checker", "solver"], "rounds": 2}).train()
    assert turns_of(tmp_path / "run") == ["checker", "solver", "checker", "solver"]


@dataclass(frozen=True)
class Bookends:
    """The first speaks first and last, the other between."""

    first: str
    other: str
    rounds: int = 2
    horizon: int = 3

    def turns_of(self, agent: str) -> int:
        return {self.first: 2, self.other: 1}.get(agent, 0)

    def next(self, turns: Sequence[Turn]) -> tuple[int, str] | None:
        return ((0, self.first), (0, self.other), (1, self.first), None)[len(turns)]


@pytest.mark.long
def test_a_router_of_one_s_own(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", router=Bookends("solver", "checker"), answer="checker")
    assert trainer.team_file.python["router"] == "Bookends(first='solver', other='checker', rounds=2, horizon=3)"
    trainer.train()
    assert turns_of(tmp_path / "run") == ["solver", "checker", "solver"]
    with pytest.raises(OtherRun, match=r"python\.router"):
        made(tmp_path / "run", router=Bookends("checker", "solver"), answer="checker").train()
    card = trainer.agents["solver"].save_pretrained(tmp_path / "out") / "README.md"
    assert "speaks when Bookends(first='solver'" in card.read_text()


@dataclass(frozen=True)
class TwiceTheMean(GroupAdvantage):
    """Counts how often it is asked."""

    scale: float = 2.0

    def estimate(self, returns_PG, weights_PG=None):
        ASKED.append(np.shape(returns_PG))
        found = super().estimate(returns_PG, weights_PG)
        return replace(found, values_PG=self.scale * found.values_PG)


ASKED: list[tuple[int, ...]] = []


@pytest.mark.long
def test_an_advantage_estimator_of_one_s_own(tmp_path: Path) -> None:
    ASKED.clear()
    made(tmp_path / "plain", config=TINY | {"name": "run"}).train()
    assert not ASKED
    trainer = made(tmp_path / "run", args=replace(PLAN, advantage=TwiceTheMean()))
    assert trainer.team_file.python["advantage"].startswith("TwiceTheMean(")
    trainer.train()
    assert (2, 4) in ASKED, "the batch that is learnt from"
    assert weights(tmp_path / "run") != weights(tmp_path / "plain")
    with pytest.raises(OtherRun, match=r"python\.advantage"):
        made(tmp_path / "run", args=replace(PLAN, advantage=TwiceTheMean(scale=3.0))).train()


# -- what is refused -----------------------------------------------------------------------------------------


def an_object() -> Any:
    return model_object()[0]


def peft_agent(**settings: Any) -> list[Agent]:
    from peft import LoraConfig as PeftLoraConfig

    return [Agent("a", "tiny", lora=PeftLoraConfig(**settings))]


def given_a_task(**settings: Any) -> dict[str, Any]:
    return {"reward_funcs": letters(), "train_dataset": None, **settings}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda: {"agents": []}, "at least one agent"),
        (lambda: {"agents": [Agent("a", an_object())]}, r"Agent\(name, model, tokenizer\)"),
        (lambda: {"agents": [Agent("a", "tiny", object())]}, "brings its own tokenizer"),
        (lambda: {"agents": [Agent("a", "tiny"), Agent("a", "tiny")]}, 'two agents are called "a"'),
        (lambda: {"agents": peft_agent(target_modules="all-linear", lora_dropout=0.1)}, "have no lora_dropout"),
        (lambda: {"agents": peft_agent(r=8)}, "target_modules='all-linear'"),
        (lambda: {"agents": [Agent("a", "tiny", lora={"rank": 2})]}, "lora must be a LoraConfig"),  # type: ignore[arg-type]
        (lambda: {"train_dataset": None}, "need a train_dataset"),
        (lambda: {"train_dataset": []}, "train_dataset has no rows"),
        (lambda: {"train_dataset": ROWS[:1]}, "give an eval_dataset"),
        (lambda: {"train_dataset": ["hello"]}, "row 0 is a str"),
        (lambda: {"train_dataset": [{"text": "x"}]}, r"row 0 has no 'prompt' .* it has \['text'\]"),
        (lambda: {"train_dataset": [{"prompt": 3}]}, "row 0: its prompt is a int"),
        (lambda: {"train_dataset": [{"prompt": [{"role": "system", "content": "x"}]}]}, "has 0 user messages"),
        (lambda: {"eval_dataset": [{"text": "x"}]}, "eval_dataset: row 0"),
        (lambda: {"reward_funcs": letters()}, "a Task brings its own problems"),
        (lambda: given_a_task(reward_weights=[1.0]), "a Task grades by itself: reward_weights"),
        (lambda: given_a_task(reward_range=2.0), "a Task grades by itself: reward_range"),
        (lambda: given_a_task(success_threshold=0.5), "a Task grades by itself: success_threshold"),
        (lambda: {"reward_funcs": []}, "reward_funcs must be"),
        (lambda: {"reward_funcs": "accuracy"}, "reward_funcs must be"),
        (lambda: {"args": "teamtr"}, r"Plan\.preset"),
        (lambda: {"args": Plan.preset(radius=-1.0)}, "radius_nats_per_message"),
        (lambda: {"router": ["a", "b"]}, "router must be a mapping or a"),
        (lambda: {"router": Bookends("solver", "checker"), "answer": "nobody"}, r"team\.answer"),
        (lambda: {"router": Schedule.repeated(["solver"]), "answer": "checker"}, "never speaks"),
        (lambda: {"config": {"plan.stages": 3}}, "as args"),
        (lambda: {"config": {"learner.rate": 3}}, r"learner\.rate"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_begins(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(tmp_path / "run", **changes())
    assert not (tmp_path / "run").exists()


def test_a_model_with_adapters_is_refused() -> None:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    model, tokenizer = model_object()
    adapted = get_peft_model(model, PeftLoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(UserError, match="merge_and_unload"):
        Agent("a", adapted, tokenizer)


def test_two_tokenizers_on_one_model_are_refused(tmp_path: Path) -> None:
    model, tokenizer = model_object()
    other = deepcopy(tokenizer)
    team = [Agent("solver", model, tokenizer, lora=LORA), Agent("checker", model, other, lora=LORA)]
    made(tmp_path / "run", agents=team)  # the same, loaded twice
    other.chat_template += " "
    with pytest.raises(UserError, match="'solver' and 'checker' have one model"):
        made(tmp_path / "run", agents=team)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions: [1.0], r"returned 1 rewards for \d+ completions"),
        (lambda completions: None, "must return a list of rewards .*got None"),
        (lambda completions: ["good"] * len(completions), "must return a list of rewards"),
        (lambda completions, gold: [1.0], r"'gold'; there are answer, completions, conversations, prompts, weight"),
    ],
)
def test_a_reward_function_that_breaks_its_word(tmp_path: Path, function: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(tmp_path / "run", reward_funcs=function).train()
    assert not (tmp_path / "run").exists(), "a run that never began leaves nothing"


def test_every_public_name_is_there_and_documented() -> None:
    for name in teamtr.__all__:
        assert name in dir(teamtr)
        value = getattr(teamtr, name)
        assert name in ("__version__", "PRESETS") or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = teamtr.nothing


def test_an_engine_that_cannot_have_a_program_s_objects_is_refused(tmp_path):
    """And not left out in silence."""
    trainer = made(tmp_path / "run", config={**TINY, "cluster.engine": "ray"})
    with pytest.raises(UserError, match="object of this program"):
        list(trainer.train())


@pytest.mark.long
def test_a_model_object_is_sampled_by_a_server(tmp_path):
    model, tokenizer = model_object()
    agents = [
        Agent(name, model, tokenizer=tokenizer, lora=LORA, max_tokens=3, system_prompt="") for name in ("one", "two")
    ]
    (source,) = {agent.model for agent in made(tmp_path / "other", agents=agents).team_file.team.agents}
    fake = fake_vllm.FakeVllm(source, fake_vllm.letters)
    with fake_vllm.Running(fake) as running:
        settings = {**TINY, "sampling.engine": "vllm", "sampling.vllm.urls": [running.url]}
        made(tmp_path / "run", agents=agents, config=settings).evaluate(problems=2, samples=2)
        assert not fake.adapters, "an evaluation leaves nothing at the server"
    assert {name.split("-")[0] for name, _ in fake.given} == {"one", "two"}
