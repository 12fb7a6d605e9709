"""Your own data: questions and answers, and four ways to grade them.

DataTask("sums.jsonl", grader="number")
DataTask("sums.jsonl", grader="regex", pattern=r"#### (.+)")
DataTask("sums.jsonl", grader="python:rewards.py:reward")       # f(prompts, completions, **columns) -> rewards
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, Strict

from teamtr.grading import Container, WorkerPool, last_number, normalize
from teamtr.grading.thinking import after_thinking
from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal, hint, show
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, NonEmpty, Share, of_form
from teamtr.tasks.base import Benchmark, Data, Source, WrongAnswer, called, sources, to_be_had
from teamtr.tasks.config import BenchmarkConfig, TaskContext, TeamSection
from teamtr.tasks.data.graders import IN_PROCESS, PYTHON, AnswerGrader, ExtraReward, reward_folders
from teamtr.tasks.data.problems import ProblemReader
from teamtr.tasks.data.rows import DataError, Row, splits_in
from teamtr.tasks.data.split import unit_hash
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Transcript, Turn, Verdict

HELD_OUT = 0.1
"""Share of a single source that is held out, unless a team file says otherwise."""
STORED = "team"
"""The author of a stored reply, as reward functions see it."""
ContainerKind = Literal["none", "bubblewrap"]


def _one_group(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have exactly one group, round the answer, got {groups}; write (?:...) for others")
    return value


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_one_group)]
Grader = Annotated[
    str,
    of_form(r"exact|number|regex|python:.+:[^\W\d]\w*", "must be exact, number, regex or python:FILE:FUNCTION"),
]
Function = Annotated[str, of_form(r"python:.+:[^\W\d]\w*", "must be python:FILE:FUNCTION")]


class RewardConfig(Section):
    """A function whose rewards are added to the grader's."""

    function: Function = Field(description="python:FILE:FUNCTION (FILE relative to the team file).")
    weight: Annotated[float, Strict()] = key(1.0, "How often its reward counts; below 0 it is a punishment.")


@task("data")
class DataTask(Benchmark):
    """Problems from files, folders or the hub, graded by rule or by your own function.

    Args:
        path: one source; a share ``held_out`` of its questions becomes the test split. In a folder with a file
            ``train...`` and a file ``test...``, these are the splits.
        split_files: instead of ``path``, a source per split: ``{"train": ..., "test": ...}``; empty to grade replies
            to other problems.
        held_out: share of questions in the test split. A question's split depends on its text alone, so it does not
            change when rows are added.
        question: its column; by default the first of ``prompt``, ``question``, ``problem``, ``messages`` that exists.
            It holds text, or messages in chat format.
        answer: its column; by default the first of ``answer``, ``solution``, ``target``, or else the assistant's reply
            in the question's messages. May be absent from the data if a Python reward grades.
        columns: other names for columns, NEW: COLUMN; COLUMN may be a field of a nested column.
        private: for each agent named here, the column shown to it alone.
        grader: ``exact`` (up to case and white space), ``number`` (the last number of the text), ``regex`` (the
            group of ``pattern`` in its last match), or ``python:file.py:function``. The first three read the text after
            the reasoning; a Python reward gets the whole reply, reasoning included.
        pattern: for ``regex``, with exactly one group.
        threshold: a Python reward of at least this makes the verdict "right".
        rewards: functions whose rewards are added to the grader's, each times its weight. They do not change what is
            right.
        grade_early: a Python reward judges every completion by itself, so that some may be graded while others are
            still sampled. ``regex`` without ``rewards`` is always graded early.
        seconds_per_item, workers, memory_bytes: of the killable workers that run ``regex`` and ``python``.
        container: what those workers run in, ``none`` or ``bubblewrap``. The latter has no network and can read only
            Python, its packages and the folder of the Python reward.

    Attributes:
        warnings: oddities of the data that do not prevent its use, such as a question with two different answers.
        failures: how often a grader crashed, timed out or gave a reward that is not finite, by message.
        agents: empty: any team can answer the questions.
        reward_range: 1 for right or wrong; None with Python rewards, whose range is unknown.
    """

    class Config(BenchmarkConfig):
        """Your own questions and answers."""

        path: NonEmpty | None = unset(
            "A .jsonl, .json (a list of rows), .csv, .tsv or .parquet file or a folder of them (relative to the team "
            "file), or a hub id; split by held_out. Of a folder with a file train... and a file test... these are the "
            "splits."
        )
        question: NonEmpty | None = unset(
            "Column of the question, text or chat messages; default: prompt, question, problem or messages."
        )
        answer: NonEmpty | None = unset(
            "Column of the answer; default: answer, solution or target, or the assistant's message behind the question."
        )
        columns: dict[NonEmpty, NonEmpty] = key(
            {},
            "Other names for columns, NEW: COLUMN, as reward functions are given them; COLUMN may be a field of a "
            "nested one, such as reward_model.ground_truth.",
        )
        held_out: Share | None = unset("Share of path that is held out for evaluation; default: 0.1.")
        grader: Grader = key("exact", "exact, number, regex, or python:FILE:FUNCTION (FILE relative to the team file).")
        pattern: Pattern | None = unset(
            "For grader regex: a pattern whose one group is the answer; the last match in a message counts."
        )
        threshold: Annotated[float, Strict()] = key(1.0, "A reward of the grader of at least this counts as right.")
        rewards: tuple[RewardConfig, ...] = key(
            (),
            "More reward functions: what each returns, times its weight, is added to the grader's reward, and does not "
            "change what is right.",
        )
        private: dict[str, NonEmpty] = key({}, "Agent name to the column that only this agent sees.")
        seconds_per_item: Above0 = key(5.0, "Seconds of processor time for one answer; by the clock ten times that.")
        grade_early: Annotated[bool, Strict()] = key(
            False,
            "For grader python: grade episodes while others are still sampled. Only for a function that judges every "
            "completion by itself: it is then called with some of them at a time.",
        )
        container: ContainerKind = key(
            "none",
            "Where grader regex or python runs: bubblewrap has no network and reads nothing but Python, its packages "
            "and the grader's own folder; none is a process with your rights.",
        )

        def anchored(self, anchor: Anchor) -> Self:
            rewards = tuple(
                each.model_copy(update={"function": _anchored(each.function, anchor)}) for each in self.rewards
            )
            update = {"grader": _anchored(self.grader, anchor), "rewards": rewards}
            return super().anchored(anchor).model_copy(update=update)

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            rewards = tuple(ExtraReward(each.function, each.weight) for each in self.rewards)
            return {**super().arguments(context), "rewards": rewards}

        def _settle(self) -> None:
            """Fill in the default share that is held out of ``path``."""
            if self.path is not None and self.held_out is None:
                object.__setattr__(self, "held_out", HELD_OUT)

        def _refusals(self) -> Iterator[Refusal]:
            yield from super()._refusals()
            both = (("task", "grader"), ("task", "pattern"))
            if self.grader == "regex" and self.pattern is None:
                yield Refusal(("task", "grader"), 'task.grader is "regex", which needs task.pattern', both)
            if self.grader != "regex" and self.pattern is not None:
                message = f'task.pattern is used by grader "regex" only, and task.grader is "{self.grader}"'
                yield Refusal(("task", "pattern"), message, both)
            if self.threshold != 1.0 and not self.grader.startswith(PYTHON):
                message = (
                    "task.threshold is about rewards of a grader of your own (python:FILE:FUNCTION), and "
                    f'"{self.grader}" says itself what is right: leave it out'
                )
                yield Refusal(("task", "threshold"), message, (("task", "grader"),), at_key=True, idle=True)
            names = Counter(name.rpartition(":")[2] for name in (self.grader, *(r.function for r in self.rewards)))
            for name, count in names.items():
                if count > 1:
                    message = f"task.rewards: two rewards are called {show(name)}: give their functions different names"
                    yield Refusal(("task", "rewards"), message, at_key=True)
            own = self.grader.startswith(PYTHON) or bool(self.rewards)
            if self.grade_early and not own:
                message = f'task.grade_early is for graders of your own (python:FILE:FUNCTION), not for "{self.grader}"'
                yield Refusal(("task", "grade_early"), message, (("task", "grader"), ("task", "grade_early")))
            if self.container != "none" and self.grader in IN_PROCESS and not self.rewards:
                message = f'task.container is for graders that run code, not for "{self.grader}": leave it out'
                yield Refusal(("task", "container"), message, (("task", "grader"), ("task", "container")))

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            """Private columns must belong to agents of the team."""
            for name in self.private:
                if name not in team.names:
                    message = f"task.private names no agent {show(name)}{hint(name, team.names, 'the agents are')}"
                    yield Refusal(("task", "private", name), message, at_key=True)

    samples = 4

    def __init__(
        self,
        path: Source | None = None,
        *,
        split_files: Mapping[str, Source] | None = None,
        held_out: float = HELD_OUT,
        question: str | None = None,
        answer: str | None = None,
        columns: Mapping[str, str] | None = None,
        private: Mapping[str, str] | None = None,
        grader: str = "exact",
        pattern: str | None = None,
        threshold: float = 1.0,
        rewards: Sequence[ExtraReward] = (),
        seconds_per_item: float = 5.0,
        grade_early: bool = False,
        workers: int = 1,
        memory_bytes: int | None = 4 << 30,
        container: ContainerKind = "none",
    ) -> None:
        self.grades_early = grade_early or (grader == "regex" and not rewards)
        self._is_number = grader == "number"
        self._pattern = pattern
        self.reward_range = None if grader.startswith(PYTHON) or rewards else 1.0
        self._reader = ProblemReader(
            question,
            answer,
            dict(columns or {}),
            dict(private or {}),
            needs_answer=":" not in grader,
            needs_number=self._is_number,
        )
        walls = None if container == "none" else Container(reward_folders(grader, rewards))
        self._pool = WorkerPool(
            workers, seconds_per_item, memory_bytes=memory_bytes, container=walls, printed=self.printed.add
        )
        self._splits = self._read(path, split_files, held_out)
        self._check_duplicates()
        if left_out := self._reader.without_system:
            self.warnings += (f"the system prompts of {left_out} rows are left out: give agents a system_prompt",)
        self._make_grader = partial(
            AnswerGrader, grader, pattern, threshold, tuple(rewards), pool=self._pool, failures=self.failures
        )
        every = [problem for problems in self._splits.values() for problem in problems]
        self._grader = self._make_grader(columns=_columns(every)) if every else None

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        with to_be_had():
            if data is None or isinstance(data, Mapping):
                options["split_files"] = {} if data is None else sources(name, data)
                data = None
            made: Benchmark = called(name, cls, data, **options)
            return made

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        # Without data of its own, every call may have problems with other columns.
        grader = self._grader or self._make_grader(columns=_columns([problem for problem, _, _ in episodes]))
        return grader.grade(episodes)

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return self.grade([(problem, reply, Transcript([_stored(reply)])) for problem, reply in replies])

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        return self._reader.problem(Row(where, row))

    def gold(self, problem: Problem) -> str | None:
        return None

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        return []

    def extract(self, text: str) -> str | None:
        said = after_thinking(text)
        if self._is_number:
            number = last_number(said)
            return None if number is None else str(number.worth)
        if self._pattern is not None:
            [found] = self._pool.submit("regex", [{"text": said}], {"pattern": self._pattern})
            said = found.value or ""  # None if nothing matches, or if the search failed
        return normalize(said) or None

    def close(self) -> None:
        self._pool.close()

    # Reading

    def _read(
        self, path: Source | None, split_files: Mapping[str, Source] | None, held_out: float
    ) -> dict[str, tuple[Problem, ...]]:
        if (path is None) == (split_files is None):
            raise ValueError("give either one data file as path, or split_files with a file for each split")
        if path is not None and Path(path).is_dir():
            split_files = splits_in(Path(path))
            if split_files is not None and held_out != HELD_OUT:
                self.warnings += (
                    f"task.held_out: {held_out} changes nothing: {path} holds a file to train on and one to test on",
                )
        if split_files is not None:
            return {split: tuple(self._reader.problems(source)) for split, source in split_files.items()}
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is a share from 0 to below 1, got {held_out}")
        assert path is not None
        every = list(self._reader.problems(path))
        if held_out == 0:
            return {"train": tuple(every)}
        hashes = sorted({unit_hash(p.prompt) for p in every})
        if len(hashes) < 2:
            raise DataError(f"{path}: at least two different questions are needed, one to train on and one held out")
        # In a small file, all hashes may be on one side; the nearest question then goes to the other.
        limit = min(max(held_out, math.nextafter(hashes[0], 1.0)), hashes[-1])
        return {
            "train": tuple(p for p in every if unit_hash(p.prompt) >= limit),
            "test": tuple(p for p in every if unit_hash(p.prompt) < limit),
        }

    def _check_duplicates(self) -> None:
        answers: dict[_Question, list[str]] = {}
        sides: dict[_Question, set[str]] = {}
        for split, problems in self._splits.items():
            for problem in problems:
                question = problem.prompt, tuple(sorted(problem.private.items()))
                sides.setdefault(question, set()).add(split)
                said = answers.setdefault(question, [])
                if str(problem.answer) not in said:
                    said.append(str(problem.answer))
        for (prompt, _), said in answers.items():
            if len(said) > 1:
                self.warnings += (f"one question, {len(said)} different answers {said}: {shown(prompt)}",)
        for (prompt, _), splits in sides.items():
            if len(splits) > 1:
                self.warnings += (f"one question in several splits {sorted(splits)}: {shown(prompt)}",)


_Question = tuple[str, tuple[tuple[str, str], ...]]
"""What agents are shown: the prompt, and what is private to some of them."""


def _columns(problems: Sequence[Problem]) -> list[str]:
    return sorted({key for problem in problems for key in problem.columns})


def _stored(reply: str) -> Turn:
    nothing = np.zeros(0, np.int32)
    return Turn(STORED, 0, nothing, nothing, np.zeros(0, np.float32), "stop", "", reply)


def _anchored(grader: str, anchor: Anchor) -> str:
    if not grader.startswith(PYTHON):
        return grader
    file, _, function = grader.removeprefix(PYTHON).rpartition(":")
    return f"{PYTHON}{anchor.path(file)}:{function}"
