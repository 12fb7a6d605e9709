"""reasoning-gym: a hundred families of generated questions, each with its own scorer. ``gym:chain_sum``.

The family's scorer decides, and many give partial credit: the score is the reward, and only a score of 1 is right. It
gets the text between the last ``<answer>`` and ``</answer>``, or the whole reply without these tags.

A question is identified by family and seed, and is the same on every machine with the same version of reasoning-gym.
Train and test use disjoint seeds. If a family with few questions repeats one nevertheless, it is kept once, in the test
split rather than in training.

Scorers run in killable workers only; see ``teamtr.grading.gym`` for those that evaluate the text of a model.

Of the 106 families of reasoning-gym 0.1.25, ``UNUSABLE`` names the four that cannot be used, and why. All others give
their own answers full marks, except for two kinds of question, which are left out: those whose stated answer is empty
(some of ``ab``), and integrals that are stated as their own answer (some of ``intermediate_integration``). Known to be
lenient: ``puzzle24`` accepts any four numbers in range that make 24, not only those of the question; ``number_sorting``
accepts each number within 1 of the right one; ``gsm_symbolic`` takes the first number of the text; several give 0.01
for any text at all.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

import numpy as np

from teamtr.errors import UserError
from teamtr.grading import Result, WorkerPool
from teamtr.grading.gym import EVALUATED
from teamtr.grading.thinking import after_thinking
from teamtr.randomness import seed_of
from teamtr.settings.section import key
from teamtr.settings.values import Above0, Positive, of_form
from teamtr.tasks.base import Benchmark, Data, WrongAnswer, called
from teamtr.tasks.config import TaskConfig, TaskContext
from teamtr.tasks.data.rows import DataError
from teamtr.tasks.data.split import digest, name_of
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Verdict

UNUSABLE = {
    "composite": "it is a mixture of other families: name those",
    "boxnet": "it states no answer to test its scorer with",
    "rush_hour": "it states no answer to test its scorer with",
    "game_of_life_halting": "its scorer takes any text for right",
}

# Families with several right answers, one of which is stated in the metadata rather than as the answer.
_STATED_IN_METADATA = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}

MOST_PER_SPLIT = 1 << 20
SIZES = {"train": 1000, "test": 100}
SECONDS_PER_QUESTION = 60.0


PREFIX = "gym:"
GymName = Annotated[
    str, of_form(r"gym:[a-z][a-z0-9_]*", "must be gym:NAME, with the name of a family of reasoning-gym")
]


@task("gym:NAME")
class Gym(Benchmark):
    """One family of reasoning-gym.

    Args:
        family: its name, such as ``chain_sum``.
        parameters: of the family, such as ``{"max_terms": 3}``; by default its own defaults.
        sizes: number of questions to draw per split; a question drawn twice counts once.
        seed: of the draw.
        workers, seconds_per_item: of the killable workers that score.
    """

    class Config(TaskConfig):
        """A family of reasoning-gym."""

        name: GymName
        parameters: dict[str, Any] = key({}, "Parameters of the family, such as max_terms: 3.")
        train_problems: Positive = key(1000, "Problems generated for training.")
        test_problems: Positive = key(100, "Problems generated for evaluation.")
        seconds_per_item: Above0 = key(5.0, "Seconds of processor time for one answer; by the clock ten times that.")
        workers: Positive = key(1, "Scoring processes.")

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            return {
                "parameters": self.parameters,
                "sizes": {"train": self.train_problems, "test": self.test_problems},
                "seed": context.seed,
                "seconds_per_item": self.seconds_per_item,
                "workers": self.workers,
            }

    grades_early = True

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        if data is not None:
            raise UserError(f"{name} has problems of its own and reads no data: leave path, train and test out")
        return called(name, cls, name.removeprefix(PREFIX), **options)

    def __init__(
        self,
        family: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        workers: int = 1,
        seconds_per_item: float = 5.0,
    ) -> None:
        super().__init__()
        if family in UNUSABLE:
            raise UserError(f"gym:{family} cannot be used: {UNUSABLE[family]}")
        _require_package(family)
        self.name = f"{PREFIX}{family}"  # one class serves all families
        self._family = family
        self._parameters = dict(parameters or {})
        self._sizes = dict(SIZES if sizes is None else sizes)
        self._seed = seed
        self._check()
        self._setup = {"family": family, "parameters": self._parameters}
        self._pool = WorkerPool(workers, seconds_per_item, preload=["reasoning_gym"])
        try:
            self._require_family()
            self._pool.load("teamtr.grading.gym:scores", self._setup)
        except UserError:
            self._pool.close()
            raise

    def problems(self, split: str) -> Sequence[Problem]:
        if not self._splits:
            self._splits = self._draw()
        return super().problems(split)

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The problem of an entry of reasoning-gym: ``question``, ``answer`` and ``metadata``."""
        question, metadata = row.get("question"), row.get("metadata")
        if not isinstance(question, str) or not isinstance(metadata, Mapping):
            complaint = f"an entry needs 'question' as text and 'metadata' as an object; found {shown(dict(row))}"
            raise DataError(f"{where}: {complaint}" if where else complaint)
        entry = {"question": question, "answer": row.get("answer"), "metadata": dict(metadata)}
        return Problem(
            id=name_of(row, ("id",), f"{self._family}-{digest(question)}"),
            prompt=question,
            answer=self._stated(entry),
            columns={"entry": entry},
        )

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        said = [self.extract(text) for _, text in replies]
        asked = [
            {"answer": answer, "entry": problem.columns["entry"]}
            for (problem, _), answer in zip(replies, said, strict=True)
            if answer is not None
        ]
        results = iter(self._pool.submit("teamtr.grading.gym:scores", asked, self._setup))
        return [Verdict("unparsed", 0.0) if answer is None else self._verdict(answer, next(results)) for answer in said]

    def extract(self, text: str) -> str | None:
        said = after_thinking(text)
        head, closed, _ = said.rpartition("</answer>")
        _, opened, inside = head.rpartition("<answer>")
        return (inside if opened and closed else said).strip() or None

    def gold(self, problem: Problem) -> str:
        return _tagged(str(problem.answer))

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        nonsense = "".join(rng.choice(list("qxzjvkwy"), size=24))
        return [
            WrongAnswer("nothing", ""),
            WrongAnswer("an empty answer", _tagged("")),
            WrongAnswer("no answer", _tagged("I do not know.")),
            WrongAnswer("nonsense", _tagged(nonsense)),
            WrongAnswer("only a claim", _tagged("This is the right answer.")),
            WrongAnswer("taken back", f"{self.gold(problem)} No. {_tagged('I do not know.')}"),
        ]

    def labels(self, problem: Problem) -> dict[str, str]:
        difficulty = problem.columns["entry"]["metadata"].get("difficulty")
        return {} if difficulty is None else {"difficulty": _described(difficulty)}

    def close(self) -> None:
        self._pool.close()

    def _check(self) -> None:
        reserved = sorted({"seed", "size"} & set(self._parameters))
        if reserved:
            raise UserError(
                f"{self.name}: {reserved[0]!r} is not a parameter of the family: give seed and sizes instead"
            )
        for split, size in self._sizes.items():
            if split not in SIZES or not 0 < size <= MOST_PER_SPLIT:
                raise UserError(
                    f"{self.name}: sizes are of train and test, each from 1 to {MOST_PER_SPLIT}; got {size}"
                )

    def _require_family(self) -> None:
        (known,) = self._pool.submit("teamtr.grading.gym:families", [{}])
        if known.kind != "ok":
            raise UserError(f"{self.name}: reasoning-gym cannot be used: {known.message}")
        if self._family not in known.value:
            near = difflib.get_close_matches(self._family, known.value, n=1, cutoff=0.0)
            raise UserError(
                f"{self.name}: reasoning-gym has no family {self._family!r}; the nearest is {near[0]!r}, "
                f"of {len(known.value)}: {', '.join(known.value)}"
            )

    def _draw(self) -> dict[str, tuple[Problem, ...]]:
        """Draw the questions. Question n of a dataset comes from its seed + n, so the splits' seeds are far apart."""
        first = seed_of(self._seed, "gym", self._family) % (1 << 30)
        starts = {"test": first, "train": first + MOST_PER_SPLIT}
        orders = [
            {"seed": start, "size": self._sizes[split], "index": index}
            for split, start in starts.items()
            for index in range(self._sizes.get(split, 0))
        ]
        with WorkerPool(1, SECONDS_PER_QUESTION) as pool:
            results = iter(pool.submit("teamtr.grading.gym:entries", orders, self._setup))
        seen: set[str] = set()
        return {
            split: tuple(self._new_questions(split, start, list(islice(results, self._sizes[split])), seen))
            for split, start in starts.items()
            if split in self._sizes
        }

    def _new_questions(self, split: str, start: int, results: Sequence[Result], seen: set[str]) -> list[Problem]:
        made: list[Problem] = []
        for index, result in enumerate(results):
            if result.kind != "ok":
                self.failures[f"making a question: {result.message}"] += 1
                continue
            problem = self.problem({**result.value, "id": f"{self._family}-{start + index}"})
            if problem.prompt not in seen and self._has_a_fair_answer(problem):
                seen.add(problem.prompt)
                made.append(problem)
        if not made:
            raise UserError(
                f"{self.name}: none of {len(results)} questions drawn for {split!r} can be used: they fail, repeat or "
                f"have no fair answer {dict(self.failures) or ''}"
            )
        if len(made) < len(results):
            self.warnings += (
                f"{self.name}: {split} has {len(made)} questions; {len(results) - len(made)} more fail, repeat or have "
                "no fair answer",
            )
        return made

    def _has_a_fair_answer(self, problem: Problem) -> bool:
        """Whether a reply could give the stated answer, and the scorer may be given it."""
        check = EVALUATED.get(self._family)
        return bool(problem.answer.strip()) and (check is None or check(problem.answer))

    def _stated(self, entry: Mapping[str, Any]) -> str:
        stated = entry["answer"]
        if stated is None and self._family in _STATED_IN_METADATA:
            stated = entry["metadata"].get(_STATED_IN_METADATA[self._family])
        return stated if isinstance(stated, str) else json.dumps(stated)

    def _verdict(self, answer: str, result: Result) -> Verdict:
        if result.kind != "ok":
            self.failures[result.message] += 1
            return Verdict(result.kind, 0.0, answer)
        if result.value is None:
            return Verdict("unparsed", 0.0, answer)
        if not math.isfinite(result.value):
            self.failures[f"the score is {result.value}"] += 1
            return Verdict("crash", math.nan, answer)
        reward = min(max(result.value, 0.0), 1.0)
        return Verdict("right" if reward == 1 else "wrong", reward, answer)


def _require_package(family: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"gym:{family} needs reasoning-gym: pip install 'teamtr[gym]'")


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _described(difficulty: Any) -> str:
    """``num_terms 2-6, num_digits 1-4``: ranges as reasoning-gym states them."""
    if not isinstance(difficulty, Mapping):
        return str(difficulty)
    return ", ".join(
        f"{name} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in sorted(difficulty.items())
    )
