"""Graders for your own data: a built-in rule or your function, plus additional reward functions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from teamtr.errors import UserError
from teamtr.grading import Result, WorkerPool, exact_match, last_number, normalize
from teamtr.grading.thinking import after_thinking
from teamtr.tasks.data.rows import DataError
from teamtr.tasks.rewards import BadReward, Part, Value, breakdown_of, messages_of
from teamtr.types import Problem, Verdict

PYTHON = "python:"
GRADERS = ("exact", "number", "regex", "python:path/to/file.py:function")
IN_PROCESS = ("exact", "number")
"""Built-in graders that run no user code and need no worker."""
GIVEN = ("prompts", "completions", "conversations")
"""What a Python reward gets besides the columns of the data."""

Episodes = Sequence[tuple[Problem, str, Sequence[str]]]


@dataclass(frozen=True)
class ExtraReward:
    """A function whose rewards, times ``weight``, are added to the grader's."""

    function: str
    weight: float = 1.0


class _Judged(NamedTuple):
    """The result of the grader itself: a verdict, and the value that its reward comes from."""

    verdict: Verdict
    value: Value


class AnswerGrader:
    """Grades answers to rows with these columns.

    The grader decides what is right. Its reward and those of ``extra`` functions, each times its weight, are added up.
    ``failures`` counts the failures of graders, by message.
    """

    def __init__(
        self,
        grader: str,
        pattern: str | None,
        threshold: float,
        extra: Sequence[ExtraReward],
        columns: Sequence[str],
        pool: WorkerPool,
        failures: Counter[str],
    ) -> None:
        self._threshold = threshold
        self._columns = list(columns)
        self._pool = pool
        self._failures = failures
        self._judge = self._choose(grader, pattern)
        self._name = function_name(grader) if grader.startswith(PYTHON) else grader
        self._extra = [(each, self._loaded(each.function)) for each in extra]
        names = [self._name, *(function_name(each.function) for each in extra)]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"two rewards are called {twice[0]!r}: give their functions different names")

    def grade(self, episodes: Episodes) -> list[Verdict]:
        """A grader that crashes or times out is counted and gives 0. A reward that is not finite becomes ``nan``, so
        that its group is left out of training."""
        judged = self._judge(episodes)
        added = [self._submit(setup, episodes) for _, setup in self._extra]
        return [
            self._verdict(judged[k], [results[k] for results in added], texts)
            for k, (_, _, texts) in enumerate(episodes)
        ]

    def _verdict(self, judged: _Judged, added: Sequence[Result], texts: Sequence[str]) -> Verdict:
        verdict = judged.verdict
        if verdict.failed:
            return verdict
        parts = [Part(self._name, judged.value)]
        for (extra, _), result in zip(self._extra, added, strict=True):
            if result.kind != "ok":
                return self._failed(result)
            parts.append(Part(function_name(extra.function), result.value, extra.weight))
        try:
            made = breakdown_of(parts, texts)
        except BadReward as error:
            return self._failed(Result("crash", message=str(error)))
        reward = made.reward
        if not math.isfinite(reward):
            self._failures[f"the reward is {reward}"] += 1
            return Verdict("crash", math.nan)
        told = made if made.is_personal or len(parts) > 1 else None
        return Verdict(verdict.kind, reward, verdict.extracted, told)

    # -- the grader -------------------------------------------------------------------------------------------

    def _choose(self, grader: str, pattern: str | None) -> Callable[[Episodes], list[_Judged]]:
        if (grader == "regex") != (pattern is not None):
            raise ValueError(f"a pattern goes with grader 'regex' and only with it; got {grader!r} and {pattern!r}")
        if grader == "exact":
            return lambda episodes: [_ruled(_exact(str(p.answer), after_thinking(text))) for p, text, _ in episodes]
        if grader == "number":
            return lambda episodes: [_ruled(_number(str(p.answer), after_thinking(text))) for p, text, _ in episodes]
        if pattern is not None:
            _check_pattern(pattern)
            return lambda episodes: self._by_pattern(pattern, episodes)
        if grader.startswith(PYTHON):
            setup = self._loaded(grader)
            return lambda episodes: [self._by_reward(result) for result in self._submit(setup, episodes)]
        raise ValueError(f"no grader {grader!r}: use one of {', '.join(GRADERS)}")

    def _by_pattern(self, pattern: str, episodes: Episodes) -> list[_Judged]:
        items = [{"text": after_thinking(text)} for _, text, _ in episodes]
        results = self._pool.submit("regex", items, {"pattern": pattern})
        return [
            _ruled(_group(str(problem.answer), result.value) if result.kind == "ok" else self._failed(result))
            for (problem, _, _), result in zip(episodes, results, strict=True)
        ]

    def _by_reward(self, result: Result) -> _Judged:
        if result.kind != "ok":
            return _ruled(self._failed(result))
        reward = Part("", result.value).total
        return _Judged(Verdict("right" if reward >= self._threshold else "wrong", reward), result.value)

    # -- Python rewards ---------------------------------------------------------------------------------------

    def _loaded(self, function: str) -> dict[str, Any]:
        """Check that the workers can load a function; returns its setup."""
        file, _, name = function.removeprefix(PYTHON).rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise UserError(f"a Python reward is named python:path/to/file.py:function, got {function!r}")
        found = Path(file).resolve()
        if not found.is_file():
            raise UserError(f"{function!r}: there is no file {found}")
        if taken := [name for name in GIVEN if name in self._columns]:
            raise DataError(f"a Python reward gets {', '.join(GIVEN)}: rename the data's own column {taken[0]!r}")
        setup = {"path": str(found), "function": name, "columns": self._columns}
        self._pool.load("reward", setup)
        return setup

    def _submit(self, setup: Mapping[str, Any], episodes: Episodes) -> list[Result]:
        items = [
            {"prompt": p.prompt, "completion": text, "conversation": messages_of(texts), "columns": dict(p.columns)}
            for p, text, texts in episodes
        ]
        return self._pool.submit("reward", items, setup)

    def _failed(self, result: Result) -> Verdict:
        assert result.kind != "ok"
        self._failures[result.message] += 1
        return Verdict(result.kind, 0.0)


def function_name(function: str) -> str:
    """The name of a part of the reward: the function in python:FILE:FUNCTION."""
    return function.rpartition(":")[2]


def reward_folders(grader: str, extra: Sequence[ExtraReward]) -> tuple[Path, ...]:
    """The folders of the files of all Python rewards."""
    named = [each for each in (grader, *(one.function for one in extra)) if each.startswith(PYTHON)]
    return tuple(dict.fromkeys(Path(each.removeprefix(PYTHON).rpartition(":")[0]).resolve().parent for each in named))


def _ruled(verdict: Verdict) -> _Judged:
    return _Judged(verdict, verdict.reward)


def _exact(answer: str, text: str) -> Verdict:
    if not text.strip():
        return Verdict("unparsed", 0.0)
    return _right_or_wrong(exact_match(text, answer), normalize(text))


def _number(answer: str, text: str) -> Verdict:
    said, right = last_number(text), last_number(answer)
    if said is None or right is None:
        return Verdict("unparsed", 0.0)
    return _right_or_wrong(said.same(right), str(said))


def _group(answer: str, group: str | None) -> Verdict:
    if group is None:
        return Verdict("unparsed", 0.0)
    return _right_or_wrong(exact_match(group, answer), normalize(group))


def _right_or_wrong(right: bool, extracted: str) -> Verdict:
    return Verdict("right", 1.0, extracted) if right else Verdict("wrong", 0.0, extracted)


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(
            f"pattern {pattern!r} has {groups} groups: put exactly one round what is the answer, (?:...) else"
        )
