r"""Math problems with one answer: AIME, MATH-500, GSM8K, your own, and two training sets.

    Math500("math500.jsonl")                                              # all of it is the test split
    Gsm8k(train="train.jsonl", test="openai/gsm8k:main:test")             # files or hub ids
    Dapo("dapo.parquet", against=["math500.jsonl", "aime24.jsonl"])       # evaluation problems are not trained on

No data is shipped with TeamTR. A prompt asks for what the grader reads (``Rule.instruction``).
``grading/math/statement.py`` finds the answer in a reply, ``grading/math/same.py`` compares it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal, Self

import numpy as np

from teamtr.errors import UserError
from teamtr.grading.math.gsm8k import gsm8k_answer
from teamtr.grading.math.rules import GSM8K, GSM8K_OR_STATED, RULES, MathGrader, Rule
from teamtr.grading.math.statement import LONGEST_ANSWER, last_boxed, stated_answer
from teamtr.grading.math.text import clean, numeral
from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal, show
from teamtr.settings.section import key
from teamtr.settings.values import Above0, NonEmpty, Positive
from teamtr.tasks.base import Benchmark, Data, Source, WrongAnswer, called, sources, to_be_had
from teamtr.tasks.config import BenchmarkConfig
from teamtr.tasks.data.overlap import Overlap, find_overlap, folded
from teamtr.tasks.data.rows import DataError, Row, read_rows
from teamtr.tasks.data.split import digest, unit_hash, with_own_ids
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Verdict

QUESTION_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "ground_truth", "gt", "target", "final_answer", "reward_model")
ID_KEYS = ("id", "unique_id", "problem_id", "idx")

# Instructions that other collections add to a problem; ours is the rule's.
_WRAPPERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\s*Let's think step by step and output the final answer within \\boxed\{\}\.?\s*$",
        r"^Solve the following math problem step by step\. The last line of your response should be of the form Answer:"
        r" \$?\\?\$?Answer \(without quotes\) where \$?\\?\$?Answer is the answer to the problem\.\s*",
        r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*$",
    )
)


@task("math")
class Math(Benchmark):
    """Any rows with an ``answer``.

    Args:
        path: one file or hub id; a share ``held_out`` of its problems is the test split.
        train, test: instead of ``path``, a file or hub id for either split.
        grader: one of ``rules``: "default"; "deepscaler" and "dapo", which mirror those verifiers; "last_number",
            which is the default but takes the last number if a reply states no answer.
        held_out: share of ``path`` in the test split; a problem's split depends on its text alone.
        against: evaluation data that must not be trained on. Problems that repeat it, or the test split, are dropped
            from the train split; ``overlap`` says which.
        seconds_per_item, workers: of the killable workers.

    The train split leaves out rows without a usable answer, problems with two different answers, and repetitions;
    ``warnings`` says how many.
    """

    class Config(BenchmarkConfig):
        """Math problems with one answer."""

        grader: Literal["default", "deepscaler", "dapo", "last_number", "official"] = key(
            "default", "How answers are extracted and compared, see docs/graders.md; official is for gsm8k only."
        )
        against: tuple[NonEmpty, ...] = key((), "Evaluation files or hub ids whose problems must not be trained on.")
        seconds_per_item: Above0 = key(2.0, "Seconds of processor time for one answer; by the clock ten times that.")
        workers: Positive = key(2, "Grading processes.")

        def anchored(self, anchor: Anchor) -> Self:
            against = tuple(str(anchor.source(source)) for source in self.against)
            return super().anchored(anchor).model_copy(update={"against": against})

        def _refusals(self) -> Iterator[Refusal]:
            yield from super()._refusals()
            own = tuple(Gsm8k.rules if self.name == Gsm8k.name else RULES)
            if self.grader not in own:
                message = f"task {self.name} is graded by one of {', '.join(own)}, got {show(self.grader)}"
                yield Refusal(("task", "grader"), message, (("task", "name"), ("task", "grader")))

    rules: ClassVar[Mapping[str, Rule]] = RULES
    held_out: ClassVar[float] = 0.1

    def __init__(
        self,
        path: Source | None = None,
        *,
        train: Source | None = None,
        test: Source | None = None,
        grader: str = "default",
        held_out: float | None = None,
        against: Sequence[Source] = (),
        seconds_per_item: float = 2.0,
        workers: int = 2,
    ) -> None:
        super().__init__()
        if grader not in self.rules:
            raise UserError(f"{self.name} has no grader {grader!r}: use one of {', '.join(self.rules)}")
        if path is not None and (train is not None or test is not None):
            raise UserError(f"{self.name}: give either one path, or train and test")
        self._rule = self.rules[grader]
        self._grader = MathGrader(self._rule, seconds_per_item=seconds_per_item, workers=workers)
        self.failures = self._grader.failures
        self.verdicts = self._grader.counts
        self.overlap = Overlap({}, {})
        asked = {split: list(read_rows(source)) for split, source in (("train", train), ("test", test)) if source}
        if path is not None:
            asked = self._shared_out(list(read_rows(path)), self.held_out if held_out is None else held_out)
        known = [self._question(row) for source in against for row in read_rows(source)]
        self._splits = self._read(asked, known)

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        with to_be_had():
            if isinstance(data, Mapping):
                return called(name, cls, **sources(name, data), **options)
            return called(name, cls, data, **options)

    # Reading

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The problem of a row, which needs nothing but an answer."""
        answer = _answer(row)
        if answer is None:
            found = sorted(row)
            raise DataError(f"{where or 'this row'}: no answer: none of {list(ANSWER_KEYS)} is usable among {found}")
        truth, question = self.truth(answer), _question(row)
        if len(truth) > LONGEST_ANSWER:
            raise DataError(
                f"{where or 'this row'}: the answer has {len(truth)} characters, and a reply may state {LONGEST_ANSWER}"
            )
        return Problem(
            id=_id(row, question),
            prompt=f"{question}\n\n{self._rule.instruction}" if question else "",
            answer=truth,
            columns={**{key: value for key, value in row.items() if key not in QUESTION_KEYS}, "problem": question},
        )

    def truth(self, answer: str) -> str:
        """The final answer, also if the row gives a whole solution."""
        dollars = re.fullmatch(r"\s*\$([^$]+)\$\s*", answer)
        return last_boxed(answer) or gsm8k_answer(answer) or (dollars[1] if dollars else answer).strip()

    def _question(self, row: Row) -> str:
        question = _question(row.cells)
        if not question:
            found = sorted(row.cells)
            raise DataError(f"{row.where}: no problem: none of {list(QUESTION_KEYS)} is text among {found}")
        return question

    def _shared_out(self, rows: list[Row], held_out: float) -> dict[str, list[Row]]:
        if not 0 <= held_out <= 1:
            raise UserError(f"{self.name}: held_out is a share from 0 to 1, got {held_out}")
        if held_out in (0, 1):
            return {"test" if held_out else "train": rows}
        split: dict[str, list[Row]] = {"train": [], "test": []}
        for row in rows:
            split["test" if unit_hash(folded(self._question(row))) < held_out else "train"].append(row)
        return {name: kept for name, kept in split.items() if kept}

    def _read(self, rows: Mapping[str, list[Row]], known: list[str]) -> dict[str, tuple[Problem, ...]]:
        asked = {split: [_Asked(self._question(row), row) for row in kept] for split, kept in rows.items()}
        if "train" in asked:
            known = known + [item.question for item in asked.get("test", [])]
            asked["train"] = self._fit_to_train(asked["train"], known)
        return {
            split: with_own_ids(self.problem(item.row.cells, item.row.where) for item in items)
            for split, items in asked.items()
        }

    def _fit_to_train(self, items: list[_Asked], known: list[str]) -> list[_Asked]:
        answered = [item for item in items if self._can_be_stated(_answer(item.row.cells))]
        self._report(len(items) - len(answered), "rows have no usable answer and were left out")
        times = Counter(item.question for item in answered)
        answers: defaultdict[str, set[str]] = defaultdict(set)  # of problems that stand there more than once
        for item in answered:
            if times[item.question] > 1:
                answers[item.question].add(_canonical(self.truth(_answer(item.row.cells) or "")))
        doubtful = {question for question, said in answers.items() if len(said) > 1}
        self._report(len(doubtful), "problems stand there with two different answers and were left out")
        clear = [item for item in answered if item.question not in doubtful]
        once = list({item.question: item for item in reversed(clear)}.values())[::-1]
        self._report(len(clear) - len(once), "rows repeat a problem and were left out")
        self.overlap = find_overlap([item.question for item in once], known)
        if self.overlap.rows:
            self.warnings += (f"{self.name}: {self.overlap}; they were left out",)
        return [item for place, item in enumerate(once) if place not in self.overlap.rows]

    def _can_be_stated(self, answer: str | None) -> bool:
        return answer is not None and _balanced(answer) and len(self.truth(answer)) <= LONGEST_ANSWER

    def _report(self, count: int, what: str) -> None:
        if count:
            self.warnings += (f"{self.name}: {count} {what}",)

    # Grading

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return self._grader.grade([(reply, str(problem.answer)) for problem, reply in replies])

    def extract(self, text: str) -> str | None:
        said = self._rule.judge(text, "").extracted
        return None if said is None else _canonical(said)

    def gold(self, problem: Problem) -> str:
        return f"I have thought about it.\n\n{self._rule.state(str(problem.answer))}"

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        truth, state = str(problem.answer), self._rule.state
        other = f"{rng.integers(1, 8) * 1000 + 7}/104729"  # a reduced fraction that is no problem's answer
        return [
            WrongAnswer("unrelated", state(other)),
            WrongAnswer("a number changed", state(_changed(truth))),
            WrongAnswer("no answer", "I could not solve this one, I am sorry."),
            WrongAnswer("empty", state("")),
            WrongAnswer("only thought of", f"<think>Perhaps {truth}?</think>\nI am not at all sure of it."),
            WrongAnswer("two answers", state(f"{other} or {truth}")),
        ]

    def close(self) -> None:
        self._grader.close()


@task("aime24")
class Aime24(Math):
    """AIME 2024: 30 problems whose answers are integers from 0 to 999, compared as integers."""

    samples = 64
    held_out: ClassVar[float] = 1.0


@task("aime25")
class Aime25(Aime24):
    """AIME 2025: 30 problems."""


@task("math500")
class Math500(Math):
    """MATH-500: 500 problems of seven subjects and five levels."""

    samples = 4
    held_out: ClassVar[float] = 1.0

    def labels(self, problem: Problem) -> dict[str, str]:
        return {key: str(problem.columns[key]) for key in ("subject", "level") if key in problem.columns}


@task("gsm8k")
class Gsm8k(Math):
    """GSM8K. Its own rule comes first (the first ``#### n``, compared as text). If that finds nothing, a reply is read
    like those of other tasks, except with grader "official"."""

    held_out: ClassVar[float] = 1.0
    rules: ClassVar[Mapping[str, Rule]] = {"default": GSM8K_OR_STATED, "official": GSM8K}

    def truth(self, answer: str) -> str:
        return gsm8k_answer(answer) or stated_answer(answer) or answer.strip()

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """Unlike for the other tasks: the rule takes the first marked number, whatever follows."""
        truth, state = str(problem.answer), self._rule.state
        other = str(int(rng.integers(1, 8)) * 1_000_000 + 7)
        return [
            WrongAnswer("unrelated", state(other)),
            WrongAnswer("a number changed", state(_changed(truth))),
            WrongAnswer("one digit more", state(truth + "3")),
            WrongAnswer("no answer", f"I could not solve this one; {truth} is a guess and no more than that."),
            WrongAnswer("empty", state("")),
            WrongAnswer("corrected too late", f"{state(other)}\nNo, wait.\n{state(truth)}"),
        ]


@task("deepscaler")
class DeepScaleR(Math):
    """A training set: competition problems with answers of every form."""

    held_out: ClassVar[float] = 0.0


@task("dapo")
class Dapo(Math):
    """A training set: competition problems whose answers are integers, some of them in Chinese."""

    held_out: ClassVar[float] = 0.0


@dataclass(frozen=True)
class _Asked:
    question: str
    row: Row


def _question(row: Mapping[str, Any]) -> str:
    """The problem's text, "" if the row has none; in a chat, the last user message."""
    for column in QUESTION_KEYS:
        text = row.get(column)
        if isinstance(text, list):
            said = [turn.get("content") for turn in text if isinstance(turn, dict) and turn.get("role") == "user"]
            text = said[-1] if said else None
        if isinstance(text, str) and text.strip():
            for wrapper in _WRAPPERS:
                text = wrapper.sub("", text)
            return text.strip()
    return ""


def _answer(row: Mapping[str, Any]) -> str | None:
    """The row's answer, a number or text that is not blank; None if it has none."""
    for column in ANSWER_KEYS:
        value = row.get(column)
        if isinstance(value, Mapping):
            value = value.get("ground_truth")
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    return None


def _id(row: Mapping[str, Any], question: str) -> str:
    for column in ID_KEYS:
        if isinstance(row.get(column), str | int):
            return str(row[column])
    return digest(question or shown(dict(row)))


def _balanced(answer: str) -> bool:
    """Whether the braces balance, so that the answer can be put in a box."""
    depth = 0
    for brace in re.findall(r"[{}]", re.sub(r"\\[{}]", "", answer)):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _canonical(answer: str) -> str:
    """A form that is equal for answers that are written alike or are the same plain number. A percentage is a number of
    hundredths, but 500% is not 5: where the truth is an integer, only one of the two is right."""
    cleaned = clean(answer)
    number = numeral(cleaned)
    if number is None:
        return cleaned.replace(" ", "")
    return f"{number.value}%" if number.percent and number.worth.denominator == 1 else str(number.worth)


def _changed(answer: str) -> str:
    """A wrong variant of an answer: a plain number plus one, else each number in it changed, else "not" before it."""
    number = numeral(clean(answer))
    if number is not None:
        return str(number.value + 1)
    more = count(101, 1009)  # uneven, so that no fraction or equation keeps its value
    changed = re.sub(r"\d+", lambda found: str(int(found.group()) + next(more)), answer)
    return changed if changed != answer else f"not {answer}"
