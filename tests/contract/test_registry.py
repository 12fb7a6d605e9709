"""Benchmarks by name: built from files, by team files, tested before a run; and the examples of docs/tasks.md."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from own_rows import OWN, write_rows
from small_taubench import TASKS, write_world
from teamtr.config import ConfigError, load_team_file, loads
from teamtr.errors import Refused, UserError
from teamtr.presets import Overlong
from teamtr.rollout import play
from teamtr.rollout.cost import Account
from teamtr.session import checks
from teamtr.session import train as run
from teamtr.session.build import build
from teamtr.session.task import build_task
from teamtr.tasks import Benchmark, WrongAnswer, benchmark
from teamtr.tasks.benchmarks.arbench.endpoint import EndpointPlayer
from teamtr.tasks.benchmarks.taubench import Airline, Retail
from teamtr.tasks.benchmarks.taubench.task import TauBench
from teamtr.tasks.players import PolicyPlayer
from teamtr.tasks.registry import benchmark_names, task_names
from teamtr.types import Verdict

DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"
TEAM = """\
name: small
task: {task}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
team: {{model: tiny, max_tokens: 8, agents: [{agents}], router: {{rounds: {rounds}}}}}
plan: {{stages: 1, problems: 2, group_size: 2}}
"""


def team_of(task: str, *, agents: str = "{name: a}", rounds: int = 1) -> str:
    return TEAM.format(task=task, agents=agents, rounds=rounds)


# -- names ----------------------------------------------------------------------------------------------------


def test_the_team_file_knows_the_same_names() -> None:
    patterns = {"gym:NAME", "python:FILE:CLASS"}
    of_folders = {"taubench:airline", "taubench:retail"}
    assert set(benchmark_names()) == {"data", *OWN, *of_folders, *patterns}
    assert set(task_names()) == {"code", "roles", "sums", "lookup", "data", "object", *OWN, *of_folders, *patterns}


@pytest.mark.parametrize("name", OWN)
def test_every_benchmark_is_built_from_a_file_and_from_split_files(name: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path, OWN[name])
    task = benchmark(name, {"train": file, "test": write_rows(tmp_path, OWN[name][:1], "test.jsonl")})
    assert len(task.problems("test")) == 1
    alone = benchmark(name, str(file), held_out=1.0)
    assert len(alone.problems("test")) == len(OWN[name])
    assert alone.name == name
    problem = alone.problems("test")[0]
    rng = np.random.default_rng(0)
    wrong = alone.wrong(problem, rng)
    verdicts = alone.grade_replies([(problem, alone.gold(problem)), *((problem, each.reply) for each in wrong)])
    assert [verdict.right for verdict in verdicts] == [True] + [False] * len(wrong)
    for each in (task, alone):
        each.close()


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("math50", None, {}, "there is no benchmark 'math50'; the nearest is 'math500'"),
        ("arbench", None, {}, "the nearest is 'arbench:"),
        ("zebralogic", None, {"partal": True}, "zebralogic has no option 'partal'; it has partial, template"),
        ("math500", {"dev": "x.jsonl"}, {}, "the splits are train and test, got dev"),
        ("math500", "nowhere.jsonl", {}, "nowhere.jsonl: there is no such data file"),
        ("planbench", None, {"held_out": 0.5}, "there is no data: leave it out"),
        ("gym:chain_sum", "x.jsonl", {}, "reads no data"),
        ("python:nowhere.py:Task", None, {}, "there is no file"),
        ("taubench:retail", None, {}, "taubench:retail needs its data even to grade: give the folder that holds db_"),
        ("taubench:retail", "nowhere", {}, "nowhere: there is no such data file"),
    ],
)
def test_what_cannot_be_built_is_explained(name: str, data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(name, data, **options)


@pytest.mark.parametrize("domain", [Airline, Retail])
def test_a_domain_of_tau_bench_is_built_from_its_folder_or_files_in_it(domain: type[TauBench], tmp_path: Path) -> None:
    name, folder = domain.name, write_world(tmp_path, domain)
    tasks, count = folder / "tasks_test.jsonl", len(TASKS[domain])

    def ids(task: Benchmark) -> dict[str, list[str]]:
        return {split: [problem.id for problem in task.problems(split)] for split in ("train", "test")}

    numbers = [str(k) for k in range(count)]
    assert ids(benchmark(name, folder)) == {"train": [], "test": numbers}
    assert ids(benchmark(name, str(tasks))) == {"train": [], "test": numbers}
    assert ids(benchmark(name, tasks, held_out=0.0)) == {"train": numbers, "test": []}
    (folder / "tasks_train.jsonl").write_bytes(tasks.read_bytes())
    training = [f"train-{number}" for number in numbers]
    assert ids(benchmark(name, folder)) == {"train": training, "test": numbers}
    assert ids(benchmark(name, {"train": folder / "tasks_train.jsonl"})) == {"train": training, "test": []}
    problem = benchmark(name, folder).problems("test")[0]
    assert problem.prompt == "Be kind."
    with pytest.raises(UserError, match="held_out is a share of one file"):
        benchmark(name, folder, held_out=0.5)
    with pytest.raises(UserError, match="all splits must share one folder"):
        benchmark(name, {"train": folder, "test": write_world(tmp_path / "other", domain)})
    with pytest.raises(UserError, match="has no option 'grader'; it has held_out"):
        benchmark(name, folder, grader="x")
    (folder / "db_users.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=r"db_users.json: a table must be an object of records"):
        benchmark(name, folder)
    (folder / "db_users.json").write_text('{"eve": {"name": "Eve"}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"db_users.json: record 'eve' has no '"):
        benchmark(name, folder)
    (folder / "db_users.json").unlink()
    with pytest.raises(UserError, match=r"db_users.json: there is no such data file"):
        benchmark(name, folder)


def test_tau_bench_is_played_with_somebody_who_plays_the_user() -> None:
    with pytest.raises(ConfigError, match="taubench:retail is a dialogue with a user, whom somebody must play: give"):
        loads(team_of("{name: 'taubench:retail', path: retail}"))
    with pytest.raises(ConfigError, match=r"(?s)the user must be able to reply.*team.router.rounds to 26"):
        loads(team_of("{name: 'taubench:retail', path: retail, player: {model: tiny}}"))


# -- team files -----------------------------------------------------------------------------------------------


def test_a_team_file_passes_its_options_on(tmp_path: Path) -> None:
    write_rows(tmp_path, OWN["zebralogic"])
    (tmp_path / "team.yaml").write_text(
        team_of("{name: zebralogic, path: rows.jsonl, held_out: 0.5, partial: true}"), encoding="utf-8"
    )
    task = build_task(load_team_file(tmp_path / "team.yaml"))
    assert isinstance(task, Benchmark)
    assert len(task.problems("train")) + len(task.problems("test")) == 8
    assert 0 < len(task.problems("train")) < 8
    problem = task.problems("test")[0]
    one_wrong = next(w.reply for w in task.wrong(problem, np.random.default_rng(0)) if w.kind == "one cell wrong")
    assert 0 < task.grade_replies([(problem, one_wrong)])[0].reward < 1


def test_paths_are_relative_to_the_team_file_and_hub_ids_stay(tmp_path: Path) -> None:
    team_file = loads(team_of("{name: gsm8k, train: a.jsonl, test: 'openai/gsm8k:main:test', against: [b.json]}"))
    task: Any = team_file.anchored(tmp_path).task
    assert task.train == str(tmp_path / "a.jsonl")
    assert task.test == "openai/gsm8k:main:test"
    assert task.against == (str(tmp_path / "b.json"),)
    own: Any = loads(team_of("{name: 'python:mine.py:Mine'}")).anchored(tmp_path).task
    assert own.name == f"python:{tmp_path / 'mine.py'}:Mine"


REFEREE = "{name: a}, {name: b, frozen: true}"


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("{name: math50, path: x}", {}, 'got "math50"; did you mean "math500"?'),
        ("{name: 'gym:Chain Sum'}", {}, "task.name must be gym:NAME"),
        ("{name: math500}", {}, "task math500 needs its data, which does not come along"),
        ("{name: math500, path: x, test: y}", {}, "not both"),
        ("{name: math500, test: y, held_out: 0.5}", {}, "task.held_out is a share of task.path"),
        ("{name: gsm8k, path: x, grader: dapo}", {}, 'gsm8k is graded by one of default, official, got "dapo"'),
        ("{name: math500, path: x, partial: true}", {}, 'unknown key "partial" in task'),
        ("{name: 'arbench:gn', path: x}", {}, "set team.router.rounds to 26 for the 25 rounds"),
        ("{name: 'arbench:gn', path: x, player: {agent: a}}", {"rounds": 3}, "needs no task.player"),
        ("{name: 'arbench:sp', path: x}", {"rounds": 3}, "give task.player"),
        ("{name: 'arbench:sp', path: x, player: {agent: a}}", {"rounds": 3}, "set frozen: true"),
        ("{name: 'arbench:sp', path: x, player: {agent: c}}", {"rounds": 3, "agents": REFEREE}, "names no agent"),
        ("{name: 'arbench:sp', path: x, player: {}}", {"rounds": 3}, "needs either an agent of the team, or a model"),
        (
            "{name: 'arbench:sp', path: x, player: {agent: b, base_url: u}}",
            {"rounds": 3},
            "goes with task.player.model",
        ),
    ],
)
def test_mistakes_of_a_benchmark_are_told(task: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loads(team_of(task, **more))


@pytest.mark.parametrize(
    ("player", "kind"),
    [
        ("{agent: b, max_tokens: 4}", PolicyPlayer),
        ("{model: tiny, max_tokens: 4}", PolicyPlayer),
        ("{base_url: 'http://127.0.0.1:9/v1', model: m}", EndpointPlayer),
    ],
)
def test_the_player_is_put_in_its_place(player: str, kind: type, tmp_path: Path) -> None:
    file = write_rows(tmp_path, OWN["arbench:sp"])
    team_file = loads(
        team_of(f"{{name: 'arbench:sp', path: '{file}', player: {player}}}", agents=REFEREE, rounds=2),
        overrides=["team.router.order=[a]"],
    )
    session = build(team_file)
    task: Any = session.task
    assert isinstance(task.player, kind)
    if kind is PolicyPlayer:
        batch = play(session.context, session.current_team(), task.problems("test")[:1], 1, seed=0)
        assert {m.author for m in batch.episodes[0].messages} >= {"referee", "environment", "a"}


def test_seconds_of_the_environment_are_in_the_account(tmp_path: Path) -> None:
    from teamtr.rollout import Ledger

    account = Account()
    account.sampled(Ledger(environment_seconds=2.0))
    account.sampled(Ledger(environment_seconds=1.0))
    assert account.seconds["team"]["environment"] == 3.0


# -- the self-test at the start of a run ----------------------------------------------------------------------


class _Sums(Benchmark):
    """Sums whose parts can be broken one by one."""

    name = "test"

    def __init__(self) -> None:
        super().__init__({"train": [self.problem(row) for row in OWN["math"]], "test": []})

    def problem(self, row: Any, where: str = "") -> Any:
        from teamtr.types import Problem

        return Problem(id=row["id"], prompt=row["problem"], answer=row["answer"])

    def grade_replies(self, replies: Any) -> list[Verdict]:
        return [
            Verdict("right", 1.0, reply) if self.extract(reply) == problem.answer else Verdict("wrong", 0.0, reply)
            for problem, reply in replies
        ]

    def extract(self, text: str) -> str | None:
        found = re.findall(r"=\s*(\d+)", text)
        return found[-1] if found else None

    def gold(self, problem: Any) -> str:
        return f"= {problem.answer}"

    def wrong(self, problem: Any, rng: np.random.Generator) -> list[WrongAnswer]:
        return [WrongAnswer("one more", f"= {int(problem.answer) + 1}"), WrongAnswer("nothing", "")]


class _TakesAll(_Sums):
    def grade_replies(self, replies: Any) -> list[Verdict]:
        return [Verdict("right", 1.0, reply) for _, reply in replies]


class _TakesNothing(_Sums):
    def grade_replies(self, replies: Any) -> list[Verdict]:
        return [Verdict("wrong", 0.0, reply) for _, reply in replies]


class _LosesVotes(_Sums):
    """The grader is sound, but votes cannot be counted."""

    def grade_replies(self, replies: Any) -> list[Verdict]:
        return _Sums().grade_replies(replies)

    def extract(self, text: str) -> str | None:
        return None


class _Unwritable(_Sums):
    """The tiny model's tokenizer has no such letters: what is said is not what is read."""

    def gold(self, problem: Any) -> str:
        return f"＝{problem.answer}"

    def extract(self, text: str) -> str | None:
        found = re.findall(r"＝(\d+)", text)
        return found[-1] if found else None


@pytest.fixture(scope="module")
def small() -> Any:
    return build(loads(team_of("{name: sums}")))


def with_task(session: Any, task: Any, *, answer: str = "last") -> Any:
    return replace(session, task=task, context=replace(session.context, task=task, answer=answer))


@pytest.mark.parametrize("answer", ["last", "majority", "a"])
def test_a_sound_task_passes(small: Any, answer: str) -> None:
    assert checks.self_test(with_task(small, _Sums(), answer=answer)) == []
    assert checks.self_test(small) == []


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (_TakesAll, r"one more: graded right"),
        (_TakesNothing, r"gold: graded wrong"),
        (_LosesVotes, r"gold: no answer is found in it when votes are counted"),
        (_Unwritable, r"gold: graded wrong"),
    ],
)
def test_a_broken_task_is_refused(small: Any, task: type, message: str) -> None:
    with pytest.raises(Refused, match=message):
        checks.self_test(with_task(small, task()))


def test_a_run_does_not_begin_with_a_broken_task(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "build", lambda team_file, **_: with_task(small, _TakesAll()))
    with pytest.raises(Refused, match="rewards would mean nothing"):
        next(iter(run.train(small.team_file, tmp_path / "run")))


def test_too_few_tokens_for_any_answer_is_a_warning(small: Any) -> None:
    class Wordy(_Sums):
        def gold(self, problem: Any) -> str:
            return f"It must surely be this: = {problem.answer}"

    [warning] = checks.self_test(with_task(small, Wordy()))
    assert "agent 'a' may write 8 tokens" in warning


def test_right_answers_that_would_be_punished_for_their_length_are_a_warning(small: Any) -> None:
    strict = replace(small, plan=replace(small.plan, overlong=Overlong(cache=1.0)))
    [warning] = checks.self_test(with_task(strict, _Sums()))
    assert "of 8 tokens and is punished for its length" in warning
    assert "plan.overlong_cache" in warning
    mild = replace(small, plan=replace(small.plan, overlong=Overlong(cache=0.2)))
    assert checks.self_test(with_task(mild, _Sums())) == []


# -- the document ---------------------------------------------------------------------------------------------


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The Python of docs/tasks.md as one file, as a reader would put it together."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## A benchmark in thirty lines")[2]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    assert len(blocks[0].strip().splitlines()) <= 45
    file = tmp_path / "backwards.py"
    file.write_text("\n".join(blocks), encoding="utf-8")
    return file


def test_the_documented_task_trains(examples: Path, tmp_path: Path) -> None:
    team_file = loads(team_of(f"{{name: 'python:{examples}:Backwards', options: {{words: [stone, river]}}}}"))
    kinds = [record["kind"] for record in run.train(team_file, tmp_path / "run")]
    assert kinds[0] == "start"
    assert kinds[-1] == "finished"


def test_the_documented_environment_is_played(examples: Path) -> None:
    spec = importlib.util.spec_from_file_location("backwards", examples)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from teamtr.types import Situation

    task = module.LetterByLetter(words=("stone", "river"))
    [problem] = task.problems("test")
    told = task.reply([Situation(problem, (), (), 2), Situation(problem, ("2",), ((),), 1)], seed=0)
    assert [reply.messages[0].text for reply in told] == ["2 questions are left.", "t. 1 questions are left."]
    [last] = task.reply([Situation(problem, ("enots",), ((),), 1)], seed=0)
    assert last.ends
    session = build(loads(team_of(f"{{name: 'python:{examples}:LetterByLetter'}}", rounds=3)))
    batch = play(session.context, session.current_team(), session.task.problems("train")[:1], 2, seed=0)
    assert [len(episode.replies) for episode in batch.episodes] == [3, 3]
