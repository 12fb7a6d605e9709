"""Grades a batch's episodes; if the task allows it, finished ones are graded while others are still played.

A thread grades early. Its verdicts are used only for an episode with the same problem, answer and messages. Everything
else is graded at the end, in one call and with nothing running beside it. So a verdict always refers to exactly the
episode's messages; an answer whose grader timed out or crashed beside the sampler is graded again without that load;
and a grader that cannot be used at all fails as if nothing had been tried before.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Self

from teamtr.ports import Task
from teamtr.types import Problem, Spoken, Transcript, Verdict

Asked = tuple[Problem, str, Sequence[str]]
"""What a task grades: the problem, the team's answer, and the texts of all messages (a ``Transcript``)."""

SECONDS_AT_ONCE = 0.5
"""Target duration of one early call: stopping the thread waits for the call in progress."""


class Grading:
    """Grading of one batch. A context manager, so that no thread outlives the batch."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._waiting: deque[Asked] = deque()
        self._more = threading.Condition()
        self._over = False
        self._found: dict[_Key, list[tuple[Asked, Verdict]]] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def is_early(self) -> bool:
        """Whether the task allows early grading; otherwise ``ended`` does nothing."""
        return self._task.grades_early

    def ended(self, asked: Asked) -> None:
        """Queue a finished episode for early grading."""
        if not self.is_early:
            return
        with self._more:
            self._waiting.append(asked)
            self._more.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._grade_early, name="grading", daemon=True)
            self._thread.start()

    def verdicts(self, asked: Sequence[Asked]) -> list[Verdict]:
        """One verdict per episode, in order; grades those that have no early verdict."""
        self._stop()
        verdicts = {k: found.pop()[1] for k, one in enumerate(asked) if (found := self._found.get(_key(one)))}
        left = [k for k in range(len(asked)) if k not in verdicts]
        verdicts.update(zip(left, self._task.grade([asked[k] for k in left]) if left else (), strict=True))
        return [verdicts[k] for k in range(len(asked))]

    def _stop(self) -> None:
        """Stop early grading; waits for the call in progress."""
        with self._more:
            self._over = True
            self._more.notify()
        if self._thread is not None:
            self._thread.join()

    def _grade_early(self) -> None:
        most = 1
        while part := self._next(most):
            began, before = time.perf_counter(), Counter(self._task.failures)
            try:
                found = list(zip(part, self._task.grade(part), strict=True))
            except Exception:
                self._forget_failures(before)
                return  # ``verdicts`` grades the same again, and raises to its caller
            good = [(one, verdict) for one, verdict in found if not verdict.failed]
            if len(good) < len(found):
                self._forget_failures(before)
            for one, verdict in good:
                self._found.setdefault(_key(one), []).append((one, verdict))
            seconds = time.perf_counter() - began
            most = max(1, min(2 * len(part), int(len(part) * SECONDS_AT_ONCE / max(seconds, 1e-9))))

    def _next(self, most: int) -> list[Asked]:
        """At most ``most`` of the queued episodes, oldest first; waits for one. Empty once stopped."""
        with self._more:
            while not self._waiting and not self._over:
                self._more.wait()
            if self._over:
                return []
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _forget_failures(self, before: Counter[str]) -> None:
        """Restore the failure counts: what failed is graded, and counted, again."""
        self._task.failures.clear()
        self._task.failures.update(before)


_Key = tuple[int, str, tuple[Spoken | str, ...]]


def _key(asked: Asked) -> _Key:
    """The problem itself counts, not its id: rows of a data set may share one. A verdict is kept with what was asked,
    so that no other problem takes the place of this one in memory."""
    problem, answer, texts = asked
    return id(problem), answer, texts.spoken if isinstance(texts, Transcript) else tuple(texts)
