r"""Rules for grading math answers, each a value: how the answer is requested, extracted and compared.

    with MathGrader(RULES["default"]) as grader:
        grader.grade([(r"so it is \boxed{\frac{1}{2}}", "0.5")])     # [Verdict("right", 1.0, "\\frac{1}{2}")]

A rule decides in this process what string operations can decide. What needs algebra goes to workers that can be killed
(``workers/pool.py``), so that no reply can hang or crash a run. ``docs/graders.md`` lists where the default differs
from the verifier that the paper used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.grading.math.dapo import dapo_answer, dapo_normalise
from teamtr.grading.math.deepscaler import judge as deepscaler_judge
from teamtr.grading.math.gsm8k import gsm8k_answer
from teamtr.grading.math.statement import LONGEST_ANSWER, stated_answer
from teamtr.grading.math.text import quick_same
from teamtr.grading.thinking import after_thinking
from teamtr.grading.workers.pool import GIB, Result, WorkerPool
from teamtr.types import Verdict

LONGEST_IN_PROCESS = 200
"""Maximum length of an answer that is compared in this process, where nothing can be killed; longer ones go to a
worker."""

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
ANSWER_LINE = (
    "Please reason step by step. The last line of your response should be of the form: Answer: the answer alone."
)
HASHES = "Please reason step by step, and end with a line of the form: #### the number alone."


@dataclass(frozen=True)
class Judgement:
    """A rule's judgment of a reply. ``extracted`` is None if it states no answer. ``right`` is None if the rule's
    worker has to decide ``item``."""

    extracted: str | None
    right: bool | None = None
    item: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Rule:
    """A way of grading.

    Args:
        instruction: the part of the prompt that asks for an answer in the form that ``judge`` reads.
        state: makes a reply that states a given answer in that form.
        judge: judges (reply, truth) without algebra.
        worker: the factory of a grader that decides an ``item``, True or False; "" if every reply is judged at once.
        preload: modules that its workers import before they are forked.
    """

    instruction: str
    state: Callable[[str], str]
    judge: Callable[[str, str], Judgement]
    worker: str = ""
    preload: tuple[str, ...] = ()


def _boxed(answer: str) -> str:
    return f"The answer is \\boxed{{{answer}}}."


def _same(said: str | None, truth: str) -> Judgement:
    if said is None:
        return Judgement(None)
    if max(len(said), len(truth)) > LONGEST_IN_PROCESS:
        return Judgement(said, None, {"given": said, "truth": truth})
    right = quick_same(said, truth)
    return Judgement(said, right, {"given": said, "truth": truth} if right is None else None)


def _default(reply: str, truth: str) -> Judgement:
    return _same(stated_answer(reply), truth)


def _last_number(reply: str, truth: str) -> Judgement:
    return _same(stated_answer(reply, last_number=True), truth)


def _deepscaler(reply: str, truth: str) -> Judgement:
    said = deepscaler_answer(reply)
    if said is None or len(said) > LONGEST_ANSWER:
        return Judgement(None)
    judged = deepscaler_judge(said, truth)
    if isinstance(judged, bool):
        return Judgement(said, judged)
    return Judgement(said, None, {"parts": judged})


def deepscaler_answer(reply: str) -> str | None:
    """The content of the last ``\\boxed{``, if its braces balance, after the thinking.

    Unlike the original, this does not discard replies without a ``</think>``: that would silently zero every reward of
    a model that does not use think tags.
    """
    if "<think>" in reply and "</think>" in reply:
        reply = reply.split("</think>")[1]
    start = reply.rfind("\\boxed")
    if start < 0 or not reply.startswith("\\boxed{", start):
        return None
    depth = 0
    for at in range(start + len("\\boxed"), min(len(reply), start + 2 * LONGEST_ANSWER)):
        depth += (reply[at] == "{") - (reply[at] == "}")
        if depth == 0:
            return reply[start + len("\\boxed{") : at]
    return None


def _dapo(reply: str, truth: str) -> Judgement:
    said = dapo_answer(reply)
    return Judgement(said, None if said is None else dapo_normalise(said) == dapo_normalise(truth))


def _gsm8k(reply: str, truth: str) -> Judgement:
    said = gsm8k_answer(reply)
    return Judgement(said, None if said is None else said == truth.replace(",", ""))


def _gsm8k_or_stated(reply: str, truth: str) -> Judgement:
    judged = _gsm8k(after_thinking(reply), truth)
    return judged if judged.extracted is not None else _default(reply, truth)


_SAME = "teamtr.grading.math.same"

DEFAULT = Rule(BOXED, _boxed, _default, f"{_SAME}:graders", (_SAME,))
LAST_NUMBER = Rule(BOXED, _boxed, _last_number, f"{_SAME}:graders", (_SAME,))
DEEPSCALER = Rule(BOXED, _boxed, _deepscaler, "teamtr.grading.math.deepscaler:proofs", ("sympy.parsing.sympy_parser",))
DAPO = Rule(ANSWER_LINE, lambda answer: f"Answer: {answer}", _dapo)
GSM8K = Rule(HASHES, lambda answer: f"#### {answer}", _gsm8k)
GSM8K_OR_STATED = Rule(HASHES, lambda answer: f"#### {answer}", _gsm8k_or_stated, f"{_SAME}:graders", (_SAME,))

RULES: Mapping[str, Rule] = {
    "default": DEFAULT,
    "last_number": LAST_NUMBER,
    "deepscaler": DEEPSCALER,
    "dapo": DAPO,
}


class MathGrader:
    """Grades (reply, truth) pairs by one rule.

    Args:
        seconds_per_item, workers, memory_bytes: settings of the killable workers, see ``WorkerPool``.

    Attributes:
        failures: counts of the messages about workers that timed out or died.
        counts: counts of the kinds of verdicts.
    """

    def __init__(
        self, rule: Rule, *, seconds_per_item: float = 2.0, workers: int = 2, memory_bytes: int | None = 2 * GIB
    ) -> None:
        self.rule = rule
        self.failures: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._pool = WorkerPool(workers, seconds_per_item, memory_bytes=memory_bytes, preload=rule.preload)

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers now instead of at exit."""
        self._pool.close()

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict per (reply, truth). No text makes it raise."""
        judged = [self.rule.judge(reply, truth) for reply, truth in pairs]
        decided = self._decide([judgement.item for judgement in judged if judgement.item is not None])
        verdicts = [
            _verdict(judgement)
            if judgement.item is None
            else self._verdict_of(judgement, decided[_key(judgement.item)])
            for judgement in judged
        ]
        self.counts.update(verdict.kind for verdict in verdicts)
        return verdicts

    def _decide(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
        """Decide each distinct item once: the samples of one problem often state the same answer."""
        different = {_key(item): item for item in items}
        if not different:
            return {}
        results = self._pool.submit(self.rule.worker, list(different.values()))
        return dict(zip(different, results, strict=True))

    def _verdict_of(self, judgement: Judgement, result: Result) -> Verdict:
        if result.kind == "ok":
            return _verdict(Judgement(judgement.extracted, bool(result.value)))
        self.failures[result.message] += 1
        return Verdict(result.kind, 0.0, judgement.extracted)


def _key(item: Mapping[str, Any]) -> str:
    return json.dumps(item, sort_keys=True)


def _verdict(judgement: Judgement) -> Verdict:
    if judgement.extracted is None:
        return Verdict("unparsed", 0.0)
    return Verdict("right", 1.0, judgement.extracted) if judgement.right else Verdict("wrong", 0.0, judgement.extracted)
