"""PlanBench, Blocksworld and its mystery variant: a plan in words, graded by executing it.

A reply is parsed as by the benchmark's own evaluator (``blocks.py`` states the rules), and any plan counts that can be
executed and reaches the goal (``strips.py``).

The benchmark has no training set. A share of its *instance numbers* is held out, by a hash of the number alone: the
mystery problem of a number is the plain one under other names, and the zero-shot prompt of a number states the same
problem, so all three are in one split. A one-shot prompt solves another instance before its own; one that would show a
held-out problem is left out of training (and counted in ``warnings``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np

from teamtr.errors import UserError
from teamtr.grading.thinking import after_thinking
from teamtr.tasks.base import Benchmark, WrongAnswer
from teamtr.tasks.benchmarks.planbench.blocks import (
    BLOCKSWORLD,
    LANGUAGES,
    Language,
    pddl_in_query,
    steps_in,
    steps_in_pddl,
    tower_plan,
    zero_shot_prompt,
)
from teamtr.tasks.benchmarks.planbench.strips import (
    PddlError,
    PlanningProblem,
    Step,
    domain_named_in,
    flaw,
    read_domain,
    read_problem,
    written,
)
from teamtr.tasks.config import BenchmarkConfig
from teamtr.tasks.data.rows import DataError, Row
from teamtr.tasks.data.split import digest
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Verdict


@task("planbench")
class PlanBench(Benchmark):
    """Rows have ``problem_pddl``, or a ``query`` in the benchmark's words, and optionally ``instance_id``, ``path``,
    ``example_instance_ids``, ``ground_truth_plan`` and a ``domain_pddl`` of their own.

    A row without a query gets our prompt; one without a reference plan gets a plan of our planner as its gold answer.
    With a ``domain_pddl`` other than the two built in, plans are read in the planner's form only, and the row must
    have a query.
    """

    class Config(BenchmarkConfig):
        """Plans for block worlds, graded by executing them."""

    samples = 8

    @classmethod
    def from_rows(cls, rows: Iterable[Row], *, held_out: float | None = None, **options: Any) -> Self:
        """Splits ``train`` and ``test``; ``held_out`` is the share of instance numbers in the test split."""
        made = super().from_rows(rows, held_out=held_out, **options)
        train, test = made.problems("train"), made.problems("test")
        hidden = {_instance(problem) for problem in test}
        clean = tuple(problem for problem in train if hidden.isdisjoint(_examples(problem)))
        if dropped := len(train) - len(clean):
            made = cls({"train": clean, "test": test}, **options)
            made.warnings += (f"{dropped} training prompts were left out: their worked example is held out",)
        return made

    def side(self, problem: Problem) -> str:
        return _instance(problem)

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        try:
            return _problem(row)
        except PddlError as error:
            raise DataError(f"{where}: {error}" if where else str(error)) from None

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [_verdict(problem, text) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        said = after_thinking(text)
        plans = (steps_in(said, language) for language in LANGUAGES.values())
        return next((_listed(plan) for plan in plans if plan), None)

    def gold(self, problem: Problem) -> str:
        language, _ = _world(problem)
        lines = [language.say_step(step) if language.actions else written(step) for step in _reference(problem)]
        return "\n".join(["[PLAN]", *lines, "[PLAN END]"])

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        """In the block worlds, each of these fails for every problem: an action undoes its own precondition, and the
        hand is empty at the start and holds one block at a time."""
        plan = _reference(problem)
        somewhere = int(rng.integers(len(plan)))
        kinds: dict[str, Sequence[Step]] = {
            "first step missing": plan[1:],
            "last step missing": plan[:-1],
            "a step done twice": [*plan[: somewhere + 1], *plan[somewhere:]],
            "backwards": plan[::-1],
            "objects exchanged": [(step[0], *reversed(step[1:])) for step in plan],
        }
        language, _ = _world(problem)
        say = language.say_step if language.actions else written
        answers = [WrongAnswer(kind, "\n".join(map(say, steps))) for kind, steps in kinds.items()]
        return [
            *answers,
            WrongAnswer("nothing", ""),
            WrongAnswer("no plan", "There is no plan that reaches this goal."),
            WrongAnswer("only a claim", "[PLAN]\nThe plan above is valid and reaches the goal.\n[PLAN END]"),
        ]

    def labels(self, problem: Problem) -> dict[str, str]:
        language, stated = _world(problem)
        return {"domain": language.label, "objects": str(len(stated.objects))}


def _problem(row: Mapping[str, Any]) -> Problem:
    query, pddl = row.get("query"), row.get("problem_pddl")
    own_domain = row.get("domain_pddl")
    if not isinstance(pddl, str):
        if not isinstance(query, str):
            raise PddlError(f"a row needs 'problem_pddl' or 'query' as text, found the columns {sorted(row)}")
        pddl = pddl_in_query(query, _language_of_query(query))
    language, stated = _read(own_domain, pddl)
    if not isinstance(query, str):
        if not language.facts:
            raise PddlError("a row with a domain of its own needs its prompt in 'query'")
        query = zero_shot_prompt(language, stated)
    number = row.get("instance_id")
    instance = digest(pddl) if number is None else str(number)
    columns: dict[str, Any] = {"problem_pddl": pddl, "instance_id": instance}
    if own_domain is not None:
        columns["domain_pddl"] = own_domain
    if row.get("example_instance_ids"):
        columns["example_instance_ids"] = [str(example) for example in row["example_instance_ids"]]
    return Problem(
        id=_id(row, language, instance), prompt=query, answer=_stated_plan(row, language, stated), columns=columns
    )


def _id(row: Mapping[str, Any], language: Language, instance: str) -> str:
    """Numbers restart in every folder of the benchmark, so the folder is part of the id."""
    if row.get("id") is not None:
        return str(row["id"])
    folder = PurePosixPath(str(row["path"])).parent.as_posix() if row.get("path") else language.label
    return f"{folder.rpartition('instances/')[2]}/{instance}"


def _stated_plan(row: Mapping[str, Any], language: Language, stated: PlanningProblem) -> list[str] | None:
    """The row's reference plan, as a list of steps in PDDL notation; None if it has none."""
    given = row.get("ground_truth_plan")
    if given is None:
        return None
    text = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
    steps = steps_in_pddl(text, language.names_of(stated.objects))
    complaint = flaw(language.domain, stated, steps)
    if complaint is not None:
        raise PddlError(f"the reference plan {shown(text)} is not valid: {complaint}")
    return [written(step) for step in steps]


def _language_of_query(query: str) -> Language:
    """The built-in domain whose nouns the prompt uses."""
    return LANGUAGES["mystery-4ops"] if "harmony" in query.lower() else BLOCKSWORLD


@lru_cache(maxsize=4096)
def _read(domain_pddl: str | None, problem_pddl: str) -> tuple[Language, PlanningProblem]:
    named = domain_named_in(problem_pddl)
    if domain_pddl is not None:
        domain = read_domain(domain_pddl)
        known = LANGUAGES.get(domain.name)
        if known is not None and known.actions.keys() == domain.actions.keys():
            language = replace(known, domain=domain)
        else:
            language = Language(domain.name, domain, {}, {}, {})
    elif named in LANGUAGES:
        language = LANGUAGES[named]
    else:
        raise PddlError(f"domain {named!r} is none of {sorted(LANGUAGES)}: give it as 'domain_pddl'")
    stated = read_problem(problem_pddl, language.domain)
    if stated.goal <= stated.initial:
        raise PddlError("the goal holds at the start: there is nothing to plan")
    nameless = [name for name in stated.objects if language.objects and name not in language.objects]
    if nameless:
        raise PddlError(f"object {nameless[0]!r} has no name in words: call objects by single letters")
    return language, stated


def _world(problem: Problem) -> tuple[Language, PlanningProblem]:
    return _read(problem.columns.get("domain_pddl"), problem.columns["problem_pddl"])


def _instance(problem: Problem) -> str:
    return str(problem.columns["instance_id"])


def _examples(problem: Problem) -> Sequence[str]:
    return problem.columns.get("example_instance_ids", ())


def _reference(problem: Problem) -> list[Step]:
    language, stated = _world(problem)
    if problem.answer is not None:
        return steps_in_pddl("\n".join(problem.answer), language.names_of(stated.objects))
    if not language.actions:
        raise UserError(f"problem {problem.id} has no reference plan, and we can plan for {sorted(LANGUAGES)} only")
    return tower_plan(language, stated)


def _verdict(problem: Problem, text: str) -> Verdict:
    language, stated = _world(problem)
    plan = steps_in(after_thinking(text), language, stated.objects)
    if not plan:
        return Verdict("unparsed", 0.0)
    if flaw(language.domain, stated, plan) is None:
        return Verdict("right", 1.0, _listed(plan))
    return Verdict("wrong", 0.0, _listed(plan))


def _listed(plan: Iterable[Step]) -> str:
    return "\n".join(map(written, plan))
