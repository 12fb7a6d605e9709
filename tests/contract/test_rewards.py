"""Reward functions: what they are given, what they may return, what is added up, and what they print."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from made_run import update_record, write_log
from teamtr.analysis.report import build_report
from teamtr.analysis.report.section import shown
from teamtr.api.rewards import RewardTask
from teamtr.batches import RolloutBatch
from teamtr.cli.progress import TrainingScreen
from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.grading import WorkerPool
from teamtr.grading.printed import LONGEST, Printed
from teamtr.session.inputs import _programs
from teamtr.session.train import train
from teamtr.store import read_episodes
from teamtr.tasks import DataTask
from teamtr.tasks.data.graders import ExtraReward
from teamtr.tasks.rewards import BadReward, Part, breakdown_of
from teamtr.trackers import point
from teamtr.training.rewards import rewards_of
from teamtr.types import Breakdown, Episode, Message, Problem, Reply, Transcript, Turn, Verdict

FUNCTIONS = '''
def right(completions, answer, **_):
    print("judging", len(completions))
    return [float(c == a) for c, a in zip(completions, answer)]

def spoken_by(conversations):
    """Each agent earns the length of what it said."""
    return [{m["name"]: float(len(m["content"])) for m in talk} for talk in conversations]

def by_turn(conversations):
    return [[float(m["role"] == "assistant") for m in talk if m["role"] == "assistant"] for talk in conversations]

def roles(conversations):
    return [float([m["role"] for m in talk] == ["user", "assistant", "tool", "assistant"]) for talk in conversations]

def forgets(completions):
    return [{"ann": 1.0} for _ in completions]

def short(completions):
    return [1.0 / (1 + len(c)) for c in completions]

def breaks(completions):
    import sys
    print("before", file=sys.stderr)
    if "bad" in completions:
        raise RuntimeError("broken")
    return [1.0 for _ in completions]

def much(completions):
    print("x" * 100_000)
    return [1.0 for _ in completions]
'''


def turn(agent: str, text: str, round: int = 0, results: tuple[Message, ...] = ()) -> Turn:
    blank = np.zeros(0, np.int32)
    return Turn(agent, round, blank, blank, np.zeros(0, np.float32), "stop", "v", text, results)


TALK = Transcript([turn("ann", "think"), turn("bob", "yes", 1)])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    rows = [{"question": f"q{k}", "answer": "yes"} for k in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def data(files: Path) -> Iterator[Any]:
    made: list[DataTask] = []

    def make(grader: str, *extra: tuple[str, float], **settings: Any) -> DataTask:
        named = [name if name in ("exact", "number") else f"python:{files}/rewards.py:{name}" for name in (grader,)]
        rewards = [ExtraReward(f"python:{files}/rewards.py:{name}", weight) for name, weight in extra]
        made.append(DataTask(files / "rows.jsonl", held_out=0, grader=named[0], rewards=rewards, **settings))
        return made[-1]

    yield make
    for task in made:
        task.close()


def graded(task: DataTask, answer: str = "yes", talk: Transcript = TALK) -> Any:
    return task.grade([(task.problems("train")[0], answer, talk)])[0]


# -- what they are given and may return -----------------------------------------------------------------------


def test_a_transcript_is_its_texts_and_knows_who_said_them():
    replies = [Reply((Message("host", "ask"),)), Reply((Message("host", "more"),))]
    talk = Transcript([turn("ann", "a", 0, (Message("tool", "3"),)), turn("bob", "b", 1)], replies)
    assert talk == ("a", "b")
    assert talk.speakers == ("ann", "bob")
    assert [tuple(each) for each in talk.spoken] == [
        ("user", "host", "ask"), ("assistant", "ann", "a"), ("tool", "tool", "3"), ("user", "host", "more"),
        ("assistant", "bob", "b"),
    ]  # fmt: skip


@pytest.mark.long
def test_a_reward_sees_the_conversation_and_rewards_agents_or_turns(data: Any):
    by_agent = graded(data("spoken_by", threshold=8.0))
    assert (by_agent.kind, by_agent.reward) == ("right", 8.0)
    assert by_agent.breakdown == Breakdown(by_agent={"ann": 5.0, "bob": 3.0}, parts={"spoken_by": 8.0})
    by_turn = graded(data("by_turn"))
    assert by_turn.breakdown == Breakdown(by_turn=(1.0, 1.0), parts={"by_turn": 2.0})
    talk = Transcript([turn("ann", "a", 0, (Message("tool", "3"),)), turn("bob", "b")], [Reply((Message("x", "?"),))])
    assert graded(data("roles"), talk=talk).reward == 1.0


def test_one_number_and_no_more_is_told_as_before(data: Any):
    assert graded(data("right")).breakdown is None


def test_functions_are_added_with_their_weights_and_the_grader_decides_what_is_right(data: Any):
    task = data("exact", ("short", 0.5), ("spoken_by", -0.25))
    right, wrong = graded(task), graded(task, "no")
    assert (right.kind, wrong.kind) == ("right", "wrong")
    assert right.breakdown.parts == {"exact": 1.0, "short": 0.5 / 4, "spoken_by": -2.0}
    assert right.reward == 1.0 + 0.125 - 2.0
    assert wrong.reward == pytest.approx(0.5 / 3 - 2.0)
    assert right.breakdown.by_agent == {"ann": -1.25, "bob": -0.75}
    assert right.breakdown.shared == 1.125
    assert task.reward_range is None, "nobody states the range of a function"


def test_parts_of_agents_and_turns_come_together_by_hand():
    parts = [Part("a", 2.0), Part("b", {"ann": 1.0, "bob": 3.0}, 2.0), Part("c", [1.0, 2.0], 10.0), Part("d", [1, 1])]
    made = breakdown_of(parts, TALK)
    assert made == Breakdown(2.0, {"ann": 2.0, "bob": 6.0}, (11.0, 21.0), {"a": 2.0, "b": 8.0, "c": 30.0, "d": 2.0})
    assert made.reward == 42.0 == sum(made.parts.values())
    with pytest.raises(BadReward, match="b gives no reward to bob; it names ann, bbo: give one to every agent"):
        breakdown_of([Part("b", {"ann": 1.0, "bbo": 2.0})], TALK)
    with pytest.raises(BadReward, match="c gives 3 rewards to an episode with 2 messages of agents: give one to each"):
        breakdown_of([Part("c", [1.0, 2.0, 3.0])], TALK)


@pytest.mark.long
def test_a_reward_that_does_not_fit_the_episode_is_a_failure_of_the_grader(data: Any):
    task = data("forgets")
    assert (graded(task).kind, graded(task).reward) == ("crash", 0.0)
    assert list(task.failures) == ["forgets gives no reward to bob; it names ann: give one to every agent that spoke"]
    extra = data("exact", ("breaks", 1.0))
    assert graded(extra, "bad").kind == "crash"
    assert graded(extra, "yes").reward == 2.0


def test_the_data_may_not_have_a_column_of_that_name(files: Path):
    (files / "rows.jsonl").write_text('{"question": "q", "answer": "a", "conversations": 1}\n')
    with pytest.raises(UserError, match="rename the data's own column 'conversations'"):
        DataTask(files / "rows.jsonl", held_out=0, grader=f"python:{files}/rewards.py:right")


def test_weights_in_python_and_their_refusals():
    def length(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    def turns(conversations: list[Any]) -> list[list[float]]:
        return [[1.0 for _ in talk] for talk in conversations]

    rows = [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "a"}]
    task = RewardTask([length, turns, length], rows, rows, weights=[0.5, 2.0, 1.0], threshold=8.0)
    verdict = graded(task)
    assert (verdict.reward, verdict.kind) == (3 * 0.5 + 2 * 2.0 + 3, "right")
    assert verdict.breakdown.parts == {"length": 1.5, "turns": 4.0, "length-2": 3.0}
    assert verdict.breakdown.by_turn == (2.0, 2.0)
    assert task.describe().startswith("0.5*")
    with pytest.raises(UserError, match="reward_weights must be 1 finite numbers"):
        RewardTask(length, rows, rows, weights=[1.0, 2.0])


# -- what they print ------------------------------------------------------------------------------------------


def test_what_a_reward_prints_is_kept_once_whatever_is_tried_again(files: Path):
    heard: list[str] = []
    with WorkerPool(printed=heard.append) as pool:
        setup = {"path": str(files / "rewards.py"), "function": "breaks", "columns": []}
        items = [{"completion": word, "columns": {}} for word in ("good", "bad", "good", "good")]
        assert [r.kind for r in pool.submit("reward", items, setup)] == ["ok", "crash", "ok", "ok"]
        assert heard == ["before\n" * 3], "good, bad, and the last two together: of the calls that counted"
        pool.submit("reward", items[:1], {**setup, "function": "much"})
        assert heard[1].startswith("xxx")
        assert heard[1].endswith("bytes more\n")
        assert len(heard[1]) < 17 << 10


def test_what_is_printed_is_kept_up_to_a_length():
    printed = Printed()
    printed.add("a\n")
    printed.add("b" * LONGEST)
    assert printed.take().endswith("b\n... and 2 characters more")
    assert printed.take() == ""


def test_what_a_function_in_this_process_prints_is_shown_and_kept(capsys: pytest.CaptureFixture[str]):
    def talks(completions: list[str]) -> list[float]:
        print("judging", *completions)
        assert sys.stdout.encoding, "it is a stream like any other"
        return [1.0 for _ in completions]

    task = RewardTask(talks, [{"prompt": "p"}], [{"prompt": "q"}])
    graded(task)
    assert capsys.readouterr().out == "judging yes\n"
    assert task.printed.take() == "judging yes"


def batch_of(*verdicts: Verdict) -> RolloutBatch:
    turns = (turn("ann", "think"), turn("bob", "yes", 1))
    episodes = tuple(Episode("p", g, turns, "yes", verdict, "v") for g, verdict in enumerate(verdicts))
    return RolloutBatch((Problem("p", "?"),), episodes, len(verdicts))


def test_the_parts_sum_to_the_mean_reward_where_the_grader_failed_on_some():
    made = Breakdown(1.0, {"ann": 2.0, "bob": 0.5}, parts={"right": 1.0, "spoken_by": 2.5})
    failed, unknown = Verdict("timeout", 0.0), Verdict("crash", math.nan)
    report = rewards_of(batch_of(Verdict("right", 3.5, breakdown=made), failed, failed, failed, unknown))
    assert report is not None
    assert report.parts == {"right": 0.25, "spoken_by": 0.625}
    assert sum(report.parts.values()) == 3.5 / 4
    assert report.agents == {"ann": 0.5, "bob": 0.125}


def test_a_function_that_rewards_agents_in_some_episodes_and_the_team_in_others():
    made = Breakdown(by_agent={"ann": 2.0, "bob": -1.0}, parts={"mixed": 1.0})
    report = rewards_of(batch_of(Verdict("right", 1.0, breakdown=made), Verdict("right", 5.0)))
    assert report is not None
    assert report.parts == {"mixed": 3.0}
    assert report.agents == {"ann": 1.0, "bob": -0.5}


# -- in a run -------------------------------------------------------------------------------------------------

TEAM = """\
name: shaped
task:
  name: data
  path: rows.jsonl
  grader: python:rewards.py:right
  rewards: [{function: "python:rewards.py:short", weight: 0.5}, {function: "python:rewards.py:spoken_by"}]
team: {model: tabular, max_tokens: 2, agents: [{name: ann}, {name: bob}]}
plan: {credit: own, stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.1}
eval: {every: 0}
"""


@pytest.mark.long
def test_a_run_logs_the_parts_of_its_reward_and_what_was_printed(files: Path):
    (files / "team.yaml").write_text(TEAM)
    team_file = loads(TEAM, "team.yaml").anchored(files)
    records = list(train(team_file, files / "run"))
    first = next(record for record in records if record["kind"] == "update")
    parts = first["rewards"]["parts"]
    assert list(parts) == ["right", "short", "spoken_by"]
    assert sum(parts.values()) == pytest.approx(first["reward"])
    assert first["rewards"]["agents"].keys() == {"ann", "bob"}
    assert first["rewards"]["printed"] == "judging 8"
    values = point(first).values
    assert values["train/reward_part/short"] == parts["short"]
    assert values["bob/own_reward"] == first["rewards"]["agents"]["bob"]
    stored = read_episodes(next((files / "run" / "episodes").glob("*000*")))
    assert all(e.verdict.breakdown.reward == e.reward for e in stored.episodes)
    assert {"task.grader", "task.rewards.0.function", "task.rewards.1.function"} <= {k for k, _ in _programs(team_file)}


def test_the_page_draws_parts_and_shows_what_was_printed(tmp_path: Path):
    def record(number: int) -> dict[str, Any]:
        rewards = {
            "parts": {"right": 0.5, "short": 0.1 * number},
            "agents": {"left": 0.25},
            "printed": f"hello {number}",
        }
        return update_record(number, 0, number - 1, "left", rewards=rewards)

    start = {"kind": "start", "floors": {}, "name": "r", "stages": 1, "agents": ["left"], "threads": 1, "time": 1e9}
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run", [start, record(1), record(2)])
    section = next(each for each in shown(build_report(tmp_path / "run").data) if each.key == "rewards")
    parts, earned = section.parts[0].parts
    assert [(series.label, list(series.y)) for series in parts.series] == [("right", [0.5, 0.5]), ("short", [0.1, 0.2])]
    assert [(series.label, list(series.y)) for series in earned.series] == [("left", [0.25, 0.25])]
    assert section.parts[-1].text == "before update 1:\nhello 1\nbefore update 2:\nhello 2"


def test_the_screen_shows_the_first_lines():
    out = io.StringIO()
    screen = TrainingScreen()
    screen.console = Console(file=out, width=200)
    printed = "\n".join(f"line {k}" for k in range(8))
    list(screen.watch([update_record(1, 0, 0, "left", rewards={"parts": {}, "agents": {}, "printed": printed})]))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("reward: ")]
    assert lines == [*(f"reward: line {k}" for k in range(5)), "reward: ... 3 more lines in the log and the report"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("short", "right"), "two rewards are called"),
        (("weight: 0.5", "weight: much"), "weight"),
        (("python:rewards.py:short", "short"), "must be python:FILE:FUNCTION"),
        (("credit: own", "credit: mine"), "credit"),
    ],
)
def test_a_team_file_that_says_it_wrong(change: tuple[str, str], said: str):
    with pytest.raises(UserError, match=said):
        loads(TEAM.replace(*change), "team.yaml")
