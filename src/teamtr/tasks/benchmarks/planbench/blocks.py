"""Blocksworld in words: PlanBench's wording of states and actions, parsing of plans from text, and a planner.

Mystery Blocksworld is the same world under other names. Plans are parsed as by the benchmark's own parser:

1. The text after ``### plan:`` or ``[plan]``, if it has one, and before ``[plan end]`` is read; case is ignored.
2. Each line is one action: the first one *in the order of the domain* (pick up, put down, stack, unstack) whose name is
   a word of the line. Asterisks are ignored.
3. Its objects are the known names that occur anywhere in the line, each once, in the order of their first occurrence.
4. A line without an action, or with another number of objects than the action takes, is skipped.

If no line is an action in words, lines in the planner's form, ``(stack a b)`` or ``(stack red blue)``, are read
instead. Every such line is then a step as it stands, so a wrong one invalidates the plan.

Before all this, a text that explains its steps or repeats them is read by its last list (``prose.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from teamtr.tasks.benchmarks.planbench.prose import steps_in_last_list
from teamtr.tasks.benchmarks.planbench.strips import (
    Atom,
    Domain,
    PddlError,
    PlanningProblem,
    Step,
    flaw,
    read_domain,
    written,
)

_BLOCKSWORLD_PDDL = """
(define (domain blocksworld-4ops)
  (:requirements :strips)
  (:predicates (clear ?x) (ontable ?x) (handempty) (holding ?x) (on ?x ?y))
  (:action pick-up
    :parameters (?x)
    :precondition (and (handempty) (ontable ?x) (clear ?x))
    :effect (and (holding ?x) (not (handempty)) (not (ontable ?x)) (not (clear ?x))))
  (:action put-down
    :parameters (?x)
    :precondition (holding ?x)
    :effect (and (handempty) (ontable ?x) (clear ?x) (not (holding ?x))))
  (:action stack
    :parameters (?x ?y)
    :precondition (and (holding ?x) (clear ?y))
    :effect (and (handempty) (on ?x ?y) (clear ?x) (not (holding ?x)) (not (clear ?y))))
  (:action unstack
    :parameters (?x ?y)
    :precondition (and (handempty) (on ?x ?y) (clear ?x))
    :effect (and (holding ?x) (clear ?y) (not (handempty)) (not (on ?x ?y)) (not (clear ?x)))))
"""

_MYSTERY_NAMES = {
    "blocksworld-4ops": "mystery-4ops",
    "clear": "province",
    "ontable": "planet",
    "handempty": "harmony",
    "holding": "pain",
    "on": "craves",
    "pick-up": "attack",
    "put-down": "succumb",
    "stack": "overcome",
    "unstack": "feast",
}

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The benchmark names the first twelve; its hard problems have more blocks, for which it has no names.
_COLOURS = ["red", "blue", "orange", "yellow", "white", "magenta", "black", "cyan", "green", "violet", "silver", "gold"]
_MORE_COLOURS = [
    "brown",
    "pink",
    "purple",
    "grey",
    "beige",
    "teal",
    "maroon",
    "navy",
    "olive",
    "coral",
    "indigo",
    "lime",
    "bronze",
    "copper",
]

_PDDL_LINE = re.compile(r"\(\s*([\w-]+(?:\s+[\w-]+)*)\s*\)")
_LONGEST_CLAUSE = 200
_LIST_MARKS = " \t\r`*-.,;:0123456789"


@dataclass(frozen=True)
class Language:
    """A domain in words. ``actions`` and ``facts`` hold a template for each name, ``objects`` each object's name."""

    label: str
    domain: Domain
    actions: Mapping[str, str]
    facts: Mapping[str, str]
    objects: Mapping[str, str]

    def say_step(self, step: Step) -> str:
        return self.actions[step[0]].format(*(self.objects.get(name, name) for name in step[1:]))

    def say_fact(self, atom: Atom) -> str:
        return self.facts[atom[0]].format(*(self.objects.get(name, name) for name in atom[1:]))

    def names_of(self, objects: Iterable[str]) -> dict[str, str]:
        """The names that a parser looks for: the benchmark's own twelve, and those of these objects."""
        wanted = {*_LETTERS[: len(_COLOURS)], *objects}
        return {letter: name for letter, name in self.objects.items() if letter in wanted}


BLOCKSWORLD = Language(
    label="blocksworld",
    domain=read_domain(_BLOCKSWORLD_PDDL),
    actions={
        "pick-up": "pick up the {}",
        "put-down": "put down the {}",
        "stack": "stack the {} on top of the {}",
        "unstack": "unstack the {} from on top of the {}",
    },
    facts={
        "clear": "the {} is clear",
        "ontable": "the {} is on the table",
        "handempty": "the hand is empty",
        "holding": "the hand is currently holding {}",
        "on": "the {} is on top of the {}",
    },
    objects={letter: f"{colour} block" for letter, colour in zip(_LETTERS, _COLOURS + _MORE_COLOURS, strict=True)},
)

MYSTERY = Language(
    label="mystery_blocksworld",
    domain=read_domain(
        re.sub(r"(?<!:)[a-z][\w-]*", lambda word: _MYSTERY_NAMES.get(word[0], word[0]), _BLOCKSWORLD_PDDL)
    ),
    actions={
        "attack": "attack {}",
        "succumb": "succumb {}",
        "overcome": "overcome {} from {}",
        "feast": "feast {} from {}",
    },
    facts={
        "province": "province {}",
        "planet": "planet {}",
        "harmony": "harmony",
        "pain": "pain {}",
        "craves": "{} craves {}",
    },
    objects={letter: f"object {letter}" for letter in _LETTERS},
)

LANGUAGES = {language.domain.name: language for language in (BLOCKSWORLD, MYSTERY)}


# Plans in text


def steps_in(text: str, language: Language, objects: Iterable[str] = ()) -> list[Step]:
    """The plan that a text states; empty if it states none. Takes time linear in the text."""
    said = _part_with_the_plan(text.lower())
    names = language.names_of(objects)
    if names and (listed := steps_in_last_list(said, language.domain, names)):
        return listed
    return (_steps_in_words(said, language.domain, names) if names else []) or steps_in_pddl(said, names)


def steps_in_pddl(text: str, names: Mapping[str, str]) -> list[Step]:
    """One step for each line that is just ``(action object ...)``, list marks aside. Objects are given by their letter
    or by their name as one word: red, red_block, object_a."""
    letters = {
        word: letter for letter, name in names.items() for word in (name.removesuffix(" block"), name.replace(" ", "_"))
    }
    matches = (_PDDL_LINE.fullmatch(line.strip(_LIST_MARKS)) for line in text.lower().split("\n") if "(" in line)
    steps = (match[1].split() for match in matches if match)
    return [(action, *(letters.get(word, word) for word in words)) for action, *words in steps]


def _part_with_the_plan(text: str) -> str:
    for marker in ("### plan:", "[plan]"):
        if marker in text:
            text = text.split(marker)[1]
    return text.partition("[plan end]")[0]


def _steps_in_words(text: str, domain: Domain, names: Mapping[str, str]) -> list[Step]:
    for action in domain.actions:
        text = text.replace(action.replace("-", " "), action)
    steps: list[Step] = []
    for raw_line in text.split("\n"):
        line = raw_line.replace("*", "")
        words = line.split()
        action = next((name for name in domain.actions if name in words), "") if words else ""
        if not action:
            continue
        found = sorted((line.find(name), letter) for letter, name in names.items() if name in line)
        if len(found) == len(domain.actions[action].parameters):
            steps.append((action, *(letter for _, letter in found)))
    return steps


# Problems in text


def pddl_in_query(query: str, language: Language) -> str:
    """The last problem that one of the benchmark's prompts states in words, as PDDL."""
    opening, goal_opening = "initial conditions i have that,", "my goal is to have that"
    _, found, stated = query.lower().rpartition(opening)
    initial, found_goal, rest = stated.partition(goal_opening)
    if not found or not found_goal:
        raise PddlError(f"the prompt states no problem: it must say {opening!r} and {goal_opening!r}")
    start = [_fact_in(clause, language) for clause in _clauses(initial)]
    goal = [_fact_in(clause, language) for clause in _clauses(rest.partition(".")[0])]
    return problem_pddl(language.domain, start, goal)


def problem_pddl(domain: Domain, initial: Sequence[Atom], goal: Sequence[Atom]) -> str:
    """A problem about the objects that its atoms name."""
    objects = sorted({name for atom in (*initial, *goal) for name in atom[1:]})
    return (
        f"(define (problem stated) (:domain {domain.name})\n(:objects {' '.join(objects)})\n"
        f"(:init {' '.join(map(written, initial))})\n(:goal (and {' '.join(map(written, goal))})))"
    )


def _clauses(text: str) -> list[str]:
    return re.split(r", | and ", text.strip().rstrip("."))


def _fact_in(clause: str, language: Language) -> Atom:
    if len(clause) > _LONGEST_CLAUSE:  # a template with two names backtracks over every split
        raise PddlError(f"the prompt says {clause[:80]!r} and goes on, which is no fact of {language.label}")
    letters = {name: letter for letter, name in language.objects.items()}
    for predicate, template in language.facts.items():
        match = re.fullmatch(re.escape(template).replace(r"\{\}", "(.+)"), clause.strip())
        if match and all(name in letters for name in match.groups()):
            return (predicate, *(letters[name] for name in match.groups()))
    raise PddlError(f"the prompt says {clause[:80]!r}, which is no fact of {language.label}")


def zero_shot_prompt(language: Language, problem: PlanningProblem) -> str:
    """The problem in words, for rows that come without a prompt: the rules, the state, the goal, the form of a plan."""
    order = {predicate: place for place, predicate in enumerate(language.facts)}

    def listed(atoms: Iterable[Atom]) -> str:
        return ", ".join(language.say_fact(atom) for atom in sorted(atoms, key=lambda a: (order[a[0]], a))) + "."

    rules = []
    for action in language.domain.actions.values():
        letters = dict(zip(action.parameters, "XYZ", strict=False))
        said = {"needs": action.needs, "makes true": action.adds, "makes false": action.deletes}
        rules.append(f"To {language.say_step((action.name, *(letters[v] for v in action.parameters)))}")
        rules += [
            f"  {what}: {listed((a[0], *(letters[v] for v in a[1:])) for a in atoms)}" for what, atoms in said.items()
        ]
    return (
        "These are the actions you can take, one at a time.\n\n"
        + "\n".join(rules)
        + f"\n\nAt the start: {listed(problem.initial)}\nAt the end it must be that: {listed(problem.goal)}\n\n"
        "Give a plan: the actions in order, in the words above, one on each line, between [PLAN] and [PLAN END]."
    )


# A planner


def tower_plan(language: Language, problem: PlanningProblem) -> list[Step]:
    """Put everything on the table, then build the goal's towers from the bottom up: valid, but rarely the shortest.

    Raises:
        PddlError: if that does not reach the goal, for example because the goal cannot be reached at all.
    """
    pick_up, put_down, stack, unstack = language.domain.actions
    clear, _, _, holding, on = language.domain.predicates
    below = {atom[1]: atom[2] for atom in problem.initial if atom[0] == on}
    wanted = {atom[1]: atom[2] for atom in problem.goal if atom[0] == on}
    plan: list[Step] = [(put_down, atom[1]) for atom in sorted(problem.initial) if atom[0] == holding]
    for _, top in sorted(atom for atom in problem.initial if atom[0] == clear):
        block = top
        while block in below:
            plan += [(unstack, block, below[block]), (put_down, block)]
            block = below.pop(block)
    standing = {name for name in problem.objects if name not in wanted}
    while ready := sorted(name for name, base in wanted.items() if name not in standing and base in standing):
        for name in ready:
            plan += [(pick_up, name), (stack, name, wanted[name])]
            standing.add(name)
    complaint = flaw(language.domain, problem, plan)
    if complaint is not None:
        raise PddlError(f"no plan found for a problem of {language.label}: {complaint}")
    return plan
