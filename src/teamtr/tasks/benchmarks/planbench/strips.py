"""STRIPS planning: a small, strict parser of PDDL, and a checker of plans.

    domain = read_domain(text)
    problem = read_problem(text, domain)
    flaw(domain, problem, [("pick-up", "a"), ("stack", "a", "b")])     # None: the plan is valid

Supported are domains without types: predicates, constants, and actions whose precondition and effect are conjunctions
of atoms (effects may be negated). Anything else (typing, negative preconditions, quantifiers, numbers) is refused
rather than misread. The case of names is ignored. An action that both deletes and adds an atom leaves it true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.errors import UserError

Atom = tuple[str, ...]
"""A predicate and its arguments: ("on", "a", "b"); in an action the arguments may be variables, ("on", "?x", "?y")."""

Step = tuple[str, ...]
"""An action and its objects: ("stack", "a", "b")."""

_TOKEN = re.compile(r";[^\n]*|\(|\)|[^\s();]+")


class PddlError(UserError):
    """A domain or problem that is not PDDL, or not plain STRIPS."""


@dataclass(frozen=True)
class Action:
    """Preconditions, added atoms and deleted atoms, over the variables ``parameters``."""

    name: str
    parameters: tuple[str, ...]
    needs: frozenset[Atom]
    adds: frozenset[Atom]
    deletes: frozenset[Atom]


@dataclass(frozen=True)
class Domain:
    """``predicates`` maps each name to its number of arguments; ``actions`` keeps the order of the file."""

    name: str
    predicates: Mapping[str, int]
    actions: Mapping[str, Action]
    constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanningProblem:
    """``objects`` includes the domain's constants."""

    domain: str
    objects: tuple[str, ...]
    initial: frozenset[Atom]
    goal: frozenset[Atom]


def flaw(domain: Domain, problem: PlanningProblem, plan: Sequence[Step]) -> str | None:
    """The first flaw of a plan, in words; None if every step can be executed and the goal holds at the end."""
    state = set(problem.initial)
    for number, step in enumerate(plan, start=1):
        broken = _do(domain, problem, step, state)
        if broken is not None:
            return f"step {number}, {written(step)}: {broken}"
    missing = problem.goal - state
    return f"the goal {written(min(missing))} does not hold at the end" if missing else None


def written(atom: Atom | Step) -> str:
    """In PDDL notation: ``(on a b)``."""
    return f"({' '.join(atom)})"


def domain_named_in(problem_text: str) -> str:
    """The name of the domain that a problem says it belongs to."""
    return _name(_only(_opened(problem_text, "problem")[1], ":domain"), "the :domain of a problem")


def read_domain(text: str) -> Domain:
    name, sections = _opened(text, "domain")
    asked = [word for section in sections.get(":requirements", []) for word in section]
    unknown = [word for word in asked if word != ":strips"]
    if unknown:
        raise PddlError(f"domain {name}: requirement {unknown[0]!r} is beyond STRIPS")
    _refuse_others(sections, {":requirements", ":predicates", ":constants", ":action"}, f"domain {name}")
    predicates = _signatures(_only(sections, ":predicates"))
    constants = _plain_names(_only(sections, ":constants", default=[]), "constants")
    actions: dict[str, Action] = {}
    for section in sections.get(":action", []):
        action = _action(section, predicates, constants)
        if action.name in actions:
            raise PddlError(f"domain {name}: two actions are called {action.name!r}")
        actions[action.name] = action
    return Domain(name, predicates, actions, constants)


def read_problem(text: str, domain: Domain) -> PlanningProblem:
    name, sections = _opened(text, "problem")
    _refuse_others(sections, {":domain", ":requirements", ":objects", ":init", ":goal"}, f"problem {name}")
    owner = _name(_only(sections, ":domain"), "the :domain of a problem")
    if owner != domain.name:
        raise PddlError(f"problem {name} belongs to domain {owner!r}, not to {domain.name!r}")
    objects = domain.constants + _plain_names(_only(sections, ":objects", default=[]), "objects")
    initial = frozenset(_atom(atom, domain.predicates, objects) for atom in _only(sections, ":init"))
    goal = _only(sections, ":goal")
    if len(goal) != 1:
        raise PddlError(f"problem {name}: the goal must be one atom or one (and ...)")
    wanted = frozenset(_atom(atom, domain.predicates, objects) for atom in _conjuncts(goal[0]))
    return PlanningProblem(owner, objects, initial, wanted)


def _do(domain: Domain, problem: PlanningProblem, step: Step, state: set[Atom]) -> str | None:
    """Apply this step to the state in place, or return why it cannot be executed."""
    action = domain.actions.get(step[0]) if step else None
    if action is None:
        return "there is no such action"
    if len(step) - 1 != len(action.parameters):
        return f"it takes {len(action.parameters)} objects, not {len(step) - 1}"
    unfused = [name for name in step[1:] if name not in problem.objects]
    if unfused:
        return f"there is no object {unfused[0]!r}"
    meaning = dict(zip(action.parameters, step[1:], strict=True))
    lacking = _ground(action.needs, meaning) - state
    if lacking:
        return f"{written(min(lacking))} does not hold"
    state -= _ground(action.deletes, meaning)
    state |= _ground(action.adds, meaning)
    return None


def _ground(atoms: frozenset[Atom], meaning: Mapping[str, str]) -> set[Atom]:
    return {(atom[0], *(meaning.get(term, term) for term in atom[1:])) for atom in atoms}


# Parsing. An expression is a name or a list of expressions.


def _opened(text: str, kind: str) -> tuple[str, dict[str, list[list[Any]]]]:
    """The name after ``(define (kind name)``, and the sections that follow by their keyword."""
    expression = _expression(text, kind)
    if len(expression) < 2 or expression[0] != "define" or not isinstance(expression[1], list):
        raise PddlError(f"a {kind} must begin with (define ({kind} NAME)")
    if len(expression[1]) != 2 or expression[1][0] != kind:
        raise PddlError(f"a {kind} must begin with (define ({kind} NAME)")
    sections: dict[str, list[list[Any]]] = {}
    for section in expression[2:]:
        if not isinstance(section, list) or not section or not isinstance(section[0], str):
            raise PddlError(f"in a {kind}, {_shown(section)} is not a section like (:init ...)")
        sections.setdefault(section[0], []).append(section[1:])
    return _name(expression[1][1:], f"the name of a {kind}"), sections


def _expression(text: str, kind: str) -> list[Any]:
    """The one bracketed expression of the text. Not recursive, so the text may be nested to any depth."""
    holder: list[Any] = []
    open_lists = [holder]
    for token in _TOKEN.findall(text.lower()):
        if token[0] == ";":
            continue
        if token == "(":
            open_lists[-1].append([])
            open_lists.append(open_lists[-1][-1])
        elif token == ")":
            open_lists.pop()
            if not open_lists:
                raise PddlError(f"this {kind} closes a bracket that it never opened")
        else:
            open_lists[-1].append(token)
    if len(open_lists) != 1:
        raise PddlError(f"this {kind} leaves {len(open_lists) - 1} brackets open")
    if len(holder) != 1 or not isinstance(holder[0], list):
        raise PddlError(f"a {kind} must be one expression, (define ({kind} NAME) ...)")
    return holder[0]


def _only(sections: Mapping[str, list[list[Any]]], keyword: str, default: list[Any] | None = None) -> list[Any]:
    found = sections.get(keyword, [] if default is None else [default])
    if len(found) != 1:
        raise PddlError(f"there must be one section {keyword}, found {len(found)}")
    return found[0]


def _refuse_others(sections: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(sections) - known)
    if unknown:
        raise PddlError(f"{where}: section {unknown[0]} is beyond STRIPS; known are {sorted(known)}")


def _name(words: Sequence[Any], what: str) -> str:
    if len(words) != 1 or not isinstance(words[0], str):
        raise PddlError(f"{what} must be one name, found {_shown(list(words))}")
    return words[0]


def _plain_names(words: Sequence[Any], what: str) -> tuple[str, ...]:
    for word in words:
        if not isinstance(word, str) or word == "-" or word[0] in "?:":
            raise PddlError(f"{what} must be names without types, found {_shown(word)}")
    return tuple(words)


def _variables(words: Any, what: str) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) and word[0] == "?" for word in words):
        raise PddlError(f"{what} must be variables without types, like (?x ?y), found {_shown(words)}")
    if len(set(words)) != len(words):
        raise PddlError(f"{what} name a variable twice: {_shown(words)}")
    return tuple(words)


def _signatures(section: Sequence[Any]) -> dict[str, int]:
    predicates: dict[str, int] = {}
    for signature in section:
        if not isinstance(signature, list) or not signature or not isinstance(signature[0], str):
            raise PddlError(f"a predicate must be like (on ?x ?y), found {_shown(signature)}")
        predicates[signature[0]] = len(_variables(signature[1:], f"the arguments of {signature[0]}"))
    return predicates


def _action(section: list[Any], predicates: Mapping[str, int], constants: Sequence[str]) -> Action:
    name = _name(section[:1], "the name of an action")
    fields = dict(zip(section[1::2], section[2::2], strict=False)) if all(map(_is_word, section[1::2])) else {}
    known = {":parameters", ":precondition", ":effect"}
    if len(section) % 2 == 0 or len(fields) != len(section) // 2 or not set(fields) <= known:
        raise PddlError(f"action {name}: expected :parameters, :precondition and :effect, each with what belongs to it")
    parameters = _variables(fields.get(":parameters", []), f"the parameters of action {name}")
    terms = (*parameters, *constants)
    adds, deletes = set(), set()
    for effect in _conjuncts(fields.get(":effect", [])):
        if isinstance(effect, list) and len(effect) == 2 and effect[0] == "not":
            deletes.add(_atom(effect[1], predicates, terms))
        else:
            adds.add(_atom(effect, predicates, terms))
    needs = frozenset(_atom(atom, predicates, terms) for atom in _conjuncts(fields.get(":precondition", [])))
    return Action(name, parameters, needs, frozenset(adds), frozenset(deletes))


def _is_word(expression: Any) -> bool:
    return isinstance(expression, str)


def _conjuncts(expression: Any) -> Iterator[Any]:
    """The parts of an (and ...), however nested; of anything else, itself; of (), nothing."""
    pending = [expression]
    while pending:
        part = pending.pop()
        if isinstance(part, list) and part[:1] == ["and"]:
            pending += reversed(part[1:])
        elif part != []:
            yield part


def _atom(expression: Any, predicates: Mapping[str, int], terms: Sequence[str]) -> Atom:
    if not isinstance(expression, list) or not expression or not all(map(_is_word, expression)):
        raise PddlError(f"{_shown(expression)} is not an atom like (on a b): only conjunctions of atoms are STRIPS")
    predicate, *arguments = expression
    if predicates.get(predicate) != len(arguments):
        raise PddlError(
            f"{_shown(expression)}: the domain has no predicate {predicate!r} of {len(arguments)} arguments"
        )
    unfused = [term for term in arguments if term not in terms]
    if unfused:
        raise PddlError(f"{_shown(expression)}: {unfused[0]!r} is not among {list(terms)}")
    return (predicate, *arguments)


def _shown(expression: Any) -> str:
    """In brackets, at most 80 characters; nested expressions are abbreviated."""
    if isinstance(expression, str):
        return repr(expression[:80])
    words = [word if isinstance(word, str) else "(...)" for word in expression[:20]]
    return f"({' '.join(words)})"[:80]
