"""Episodes are graded while others are still sampled: the batch is the same to the bit, whatever the grader does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small import SameLetter, World
from teamtr.answers import Sample
from teamtr.batches import RolloutBatch
from teamtr.config import ConfigError, loads
from teamtr.randomness import uniforms
from teamtr.rollout import Ledger, RolloutContext, play
from teamtr.rollout.grading import SECONDS_AT_ONCE, Grading
from teamtr.session.build import build
from teamtr.session.resume import MAY_CHANGE, differences
from teamtr.session.train import train
from teamtr.store import RunFolder, read_episodes
from teamtr.streams import InTurns
from teamtr.tasks.data.task import DataTask
from teamtr.types import Problem, Verdict

PLAIN = """
name: plain
task: {name: sums}
team: {model: tiny, agents: [{name: a}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
"""
PATIENCE_S = 60.0
"""For what another thread does at once, unless it never does."""


class Early(SameLetter):
    """Says of every call whether it was made by the thread beside the sampler, and with how many."""

    grades_early = True

    def __init__(self, failing: Callable[[bool, str], str | None] = lambda early, word: None) -> None:
        super().__init__()
        self.failing = failing
        self.calls: list[tuple[bool, int]] = []
        self.graded_one = threading.Event()

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        early = threading.current_thread() is not threading.main_thread()
        self.calls.append((early, len(episodes)))
        verdicts = super().grade(episodes)
        for k, (_, answer, _) in enumerate(episodes):
            if (kind := self.failing(early, answer)) is not None:
                self.failures[f"{kind} of {answer!r}"] += 1
                verdicts[k] = Verdict(kind, 0.0)  # type: ignore[arg-type]
        self.graded_one.set()
        return verdicts

    @property
    def early(self) -> int:
        return sum(count for early, count in self.calls if early)


class Waiting(InTurns):
    """An engine whose last speaker does not return before the grader has graded something beside it."""

    def __init__(self, world: World, task: Early, last: str = "y") -> None:
        self.engine, self.task, self.last = world.engine, task, last
        self.version = world.engine.version

    def sample(self, agent: str, prompts: Any, noise_BT: Any, **settings: Any) -> list[Sample]:
        samples = self.engine.sample(agent, prompts, noise_BT, **settings)
        assert agent != self.last or self.task.graded_one.wait(PATIENCE_S), "nothing was graded beside the sampler"
        return samples


def played(world: World, context: RolloutContext, group: int = 8) -> RolloutBatch:
    return play(context, world.team, context.task.problems("train"), group, seed=3)


def assert_same(one: RolloutBatch, other: RolloutBatch) -> None:
    for a, b in zip(one.episodes, other.episodes, strict=True):
        assert (a.problem_id, a.answer, a.verdict) == (b.problem_id, b.answer, b.verdict)
        for s, t in zip(a.turns, b.turns, strict=True):
            assert (s.agent, s.text, s.token_ids.tolist()) == (t.agent, t.text, t.token_ids.tolist())
            assert s.sampler_logprobs.tobytes() == t.sampler_logprobs.tobytes()


def nothing_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "grading"]


@pytest.mark.long
@pytest.mark.parametrize("made_of", ["tables", "layers"])
def test_messages_are_heard_of_in_the_order_in_which_they_end(made_of: str):
    """And not when all of them have: whoever listens has the short ones while the long ones are written."""
    agent, tokens, rows = ("x", 3, 32) if made_of == "tables" else ("a", 64, 32)
    engine = World().engine if made_of == "tables" else build(loads(PLAIN, "plain")).engine
    heard: list[Sample] = []
    prompts = [np.array([3, 2, k], dtype=np.int32) for k in range(rows)]
    engine.sample(agent, prompts, uniforms(2, rows, tokens), heard=lambda row, sample: heard.append(sample))
    lengths = [len(sample.token_ids) for sample in heard]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1, "all messages are as long: this proves nothing"


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_batch_graded_beside_the_sampler_is_the_same_to_the_bit(rounds: int):
    world, task = World(rounds=rounds), Early()
    expected = played(world, world.context)
    context = replace(world.context, sampler=Waiting(world, task) if rounds == 1 else world.engine, task=task)
    assert_same(played(world, context), expected)
    assert sum(count for _, count in task.calls) == len(expected.episodes), "each is graded once"
    assert nothing_runs()


def test_two_problems_of_one_id_keep_their_own_verdicts():
    """Ids come from rows, and a class of one's own need not make them differ."""

    class ByAnswer(Early):
        def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
            super().grade(episodes)
            return [Verdict("right", 1.0) if p.answer == said else Verdict("wrong", 0.0) for p, said, _ in episodes]

    task = ByAnswer()
    asked = [(Problem("twice", "?", answer), "a", ("a",)) for answer in ("a", "b")]
    with Grading(task) as grading:
        for one in asked:
            grading.ended(one)
            assert task.graded_one.wait(PATIENCE_S)
        while task.early < 2:
            time.sleep(0.01)
        assert [verdict.right for verdict in grading.verdicts(asked)] == [True, False]


def test_what_is_graded_early_is_not_graded_again():
    world, task = World(), Early()
    graded = threading.Event()

    class Patient(Waiting):
        def sample(self, agent: str, prompts: Any, noise_BT: Any, **settings: Any) -> list[Sample]:
            samples = super().sample(agent, prompts, noise_BT, **settings)
            while agent == self.last and task.early < len(prompts):
                assert not graded.wait(0.01)
            return samples

    ledger = Ledger()
    context = replace(world.context, sampler=Patient(world, task), task=task)
    play(context, world.team, task.problems("train"), 8, seed=3, ledger=ledger)
    assert {early for early, _ in task.calls} == {True}
    assert ledger.episodes == 24
    sizes = [count for _, count in task.calls]
    assert sizes[0] == 1
    assert all(later <= 2 * size for size, later in pairwise(sizes)), "never far too many at once"


def test_a_task_that_does_not_say_so_is_graded_at_the_end_at_once():
    world, task = World(), Early()
    task.grades_early = False
    expected = played(world, world.context)
    assert_same(played(world, replace(world.context, task=task)), expected)
    assert task.calls == [(False, 24)]


def test_a_verdict_on_other_words_than_were_said_is_never_taken():
    """The sampler tells of messages that it then does not return, as one that has to sample again does."""
    world, task = World(), Early()
    expected = played(world, world.context)

    class Mistaken(Waiting):
        def sample(self, agent: str, prompts: Any, noise_BT: Any, *, heard: Any, **settings: Any) -> list[Sample]:
            self.engine.sample(agent, prompts, 1.0 - noise_BT, heard=heard, **settings)
            if agent == self.last:
                assert task.graded_one.wait(PATIENCE_S)
            return self.engine.sample(agent, prompts, noise_BT, **settings)

    assert_same(played(world, replace(world.context, sampler=Mistaken(world, task), task=task)), expected)
    assert task.early, "nothing was graded early: this proves nothing"


@pytest.mark.parametrize("kind", ["timeout", "crash"])
def test_a_failure_beside_the_sampler_is_judged_once_more_in_peace(kind: str):
    """A machine that samples is busy: a grader that is late there may be in time alone."""
    world = World()
    task = Early(failing=lambda early, word: kind if early else None)
    expected = played(world, world.context)
    assert_same(played(world, replace(world.context, sampler=Waiting(world, task), task=task)), expected)
    assert task.early
    assert not task.failures, "what came right in the end did not fail"


def test_an_answer_that_fails_each_time_is_counted_once():
    world = World()
    plain = Early(failing=lambda early, word: "timeout" if word[:1] == "a" else None)
    plain.grades_early = False
    expected = played(world, replace(world.context, task=plain))
    task = Early(failing=plain.failing)
    assert_same(played(world, replace(world.context, sampler=Waiting(world, task), task=task)), expected)
    assert list(task.failures.items()) == list(plain.failures.items())
    assert task.early
    assert plain.failures


def test_a_grader_that_cannot_be_used_fails_as_it_always_did():
    world = World()

    class Broken(Early):
        def grade(self, episodes: Any) -> list[Verdict]:
            super().grade(episodes)
            raise RuntimeError(f"no grader for {len(episodes)}")

    task = Broken()
    with pytest.raises(RuntimeError, match="no grader for 24"):
        played(world, replace(world.context, sampler=Waiting(world, task), task=task))
    assert task.calls[0] == (True, 1)
    assert nothing_runs()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_sampler_that_is_interrupted_leaves_no_grader_behind(error: type[BaseException]):
    world, task = World(), Early()

    class Interrupted(Waiting):
        def sample(self, *arguments: Any, **settings: Any) -> list[Sample]:
            super().sample(*arguments, **settings)
            if arguments[0] == self.last:
                raise error
            return self.engine.sample(*arguments)

    with pytest.raises(error):
        played(world, replace(world.context, sampler=Interrupted(world, task), task=task))
    assert task.early
    assert nothing_runs()


def test_what_waits_when_it_is_stopped_is_not_graded_any_more():
    stopped = threading.Event()

    class Stopped(Grading):
        def _stop(self) -> None:
            assert task.asked.wait(PATIENCE_S)
            with self._more:
                self._over = True
            stopped.set()
            super()._stop()

    class Held(Early):
        asked = threading.Event()

        def grade(self, episodes: Any) -> list[Verdict]:
            self.asked.set()
            assert stopped.wait(PATIENCE_S)
            return super().grade(episodes)

    task = Held()
    with Stopped(task) as grading:
        for _ in range(9):
            grading.ended((task.problems("train")[0], "a", ["a", "a"]))
    assert task.calls == [(True, 1)]
    assert nothing_runs()


def test_one_call_takes_as_many_as_may_be_done_soon(monkeypatch: pytest.MonkeyPatch):
    """So that whoever stops has not long to wait: of answers that take two fifths of the time, two at once."""
    now = [0.0]
    monkeypatch.setattr("teamtr.rollout.grading.time.perf_counter", lambda: now[0])
    sizes: list[int] = []
    enough = threading.Event()

    class Slow(Early):
        def grade(self, episodes: Any) -> list[Verdict]:
            sizes.append(len(episodes))
            now[0] += len(episodes) * SECONDS_AT_ONCE / 2.5
            if sum(sizes) == 9:
                enough.set()
            return super().grade(episodes)

    task = Slow()
    problem = task.problems("train")[0]
    with Grading(task) as grading:
        for _ in range(9):
            grading.ended((problem, "a", ["a", "a"]))
        assert enough.wait(PATIENCE_S)
    assert max(sizes) <= 2


@pytest.mark.slow
def test_a_hanging_process_is_gone_when_sampling_is_interrupted(tmp_path: Path):
    """The thread ends with the grader's time limit, and what hung is killed by then."""
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"question": "{c}", "answer": "{c}"}}' for c in "abc"))
    (tmp_path / "reward.py").write_text(
        "import os, time\ndef reward(prompts, completions, **columns):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(1000)\n"
    )
    grader = f"python:{tmp_path / 'reward.py'}:reward"
    world = World()
    task = DataTask(tmp_path / "rows.jsonl", held_out=0, grader=grader, grade_early=True, seconds_per_item=0.5)

    class Interrupted(InTurns):
        version = world.engine.version

        def sample(self, agent: str, *arguments: Any, **settings: Any) -> list[Sample]:
            samples = world.engine.sample(agent, *arguments, **settings)
            while agent == "y" and not (tmp_path / "pid").exists():
                assert threading.active_count() > 1, "nothing is graded beside the sampler"
            if agent == "y":
                raise KeyboardInterrupt
            return samples

    with pytest.raises(KeyboardInterrupt):
        played(world, replace(world.context, sampler=Interrupted(), task=task))
    assert nothing_runs()
    assert not task.failures
    text = (tmp_path / "pid").read_text()
    assert not text or not Path("/proc", text).exists()
    task.close()


# -- through a whole run -----------------------------------------------------------------------------------

TEAM = """
name: early
task: {name: data, path: PATH, grader: 'python:REWARD:reward', seconds_per_item: 0.3}
team: {model: tiny, max_tokens: 6, agents: [{name: a}, {name: b}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {preset: PRESET, stages: 2, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {micro_batch: 16}
eval: {every: 1, problems: 2, samples: 2}
"""
REWARD = """
import os
def reward(prompts, completions, **columns):
    for text in completions:
        if HANGS and len(text) % 7 == 3:
            while True:  # a grader that sleeps is found by the clock, ten times as late
                pass
        if HANGS and len(text) % 7 == 4:
            os._exit(3)
    return [float(len(text) % 3 == 0) for text in completions]
"""


def run_of(folder: Path, preset: str, hangs: bool, early: bool) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(f'{{"question": "q{k}?", "answer": "{k}"}}' for k in range(12)))
    (folder / "reward.py").write_text(REWARD.replace("HANGS", str(hangs)))
    text = TEAM.replace("PATH", str(folder / "rows.jsonl")).replace("REWARD", str(folder / "reward.py"))
    out = folder / f"early-{early}"
    given = ("plan.sampling_cost=0.05",) if preset == "auto" else ()  # measured, it depends on how busy the machine is
    overrides = (f"task.grade_early={str(early).lower()}", *given)
    list(train(loads(text.replace("PRESET", preset), "early", overrides), out))
    return out


def timeless(record: Any) -> Any:
    if isinstance(record, dict):
        return {k: timeless(v) for k, v in record.items() if k not in ("time", "seconds", "samplers")}
    return record


def found_in(out: Path) -> dict[str, Any]:
    run = RunFolder.read(out)
    commit = run.checkpoints.latest()
    assert commit is not None
    return {
        "agents": dict(commit.agents),
        "records": [timeless(record) for record in run.log.read()],
        "verdicts": {
            file.name: [episode.verdict for episode in read_episodes(file).episodes]
            for file in sorted(run.episodes.iterdir())
        },
    }


@pytest.mark.long
@pytest.mark.parametrize(("preset", "hangs"), [("auto", False), pytest.param("teamtr", True, marks=pytest.mark.slow)])
def test_a_run_that_grades_early_has_the_same_weights_log_and_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, hangs: bool
):
    monkeypatch.setattr("teamtr.grading.workers.pool.PATIENCE", 10_000)  # none is late for a machine that stops it
    plain = found_in(run_of(tmp_path, preset, hangs, early=False))
    assert found_in(run_of(tmp_path, preset, hangs, early=True)) == plain
    kinds = {verdict.kind for verdicts in plain["verdicts"].values() for verdict in verdicts}
    assert ({"timeout", "crash"} & kinds != set()) == hangs, kinds
    assert {"right", "wrong"} <= kinds


def test_only_a_grader_of_ones_own_is_asked_whether_it_may_be_early(tmp_path: Path):
    task = "{name: data, path: x, grader: exact, grade_early: true}"
    with pytest.raises(ConfigError, match=r"task.grade_early is for graders of your own \(python:FILE:FUNCTION\)"):
        loads(f"name: n\ntask: {task}\nteam: {{model: tiny, agents: [{{name: a}}]}}", "n")
    (tmp_path / "rows.jsonl").write_text('{"question": "a?", "answer": "1"}\n{"question": "b?", "answer": "2"}')
    assert DataTask(tmp_path / "rows.jsonl", grader="regex", pattern="(.)").grades_early
    assert not DataTask(tmp_path / "rows.jsonl").grades_early


def test_a_run_may_go_on_with_it_changed(tmp_path: Path):
    text = TEAM.replace("PRESET", "teamtr")
    one, other = (loads(text, "early", (f"task.grade_early={early}",)) for early in ("false", "true"))
    assert differences(one, other, MAY_CHANGE) == []
    assert np.array_equal(differences(one, other, ()), ["task.grade_early"])
