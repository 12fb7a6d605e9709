"""Parses plans in free prose: the last list of a reply in which every item begins with an action.

Chat models explain each step and repeat the plan at the end. The benchmark's own parser takes every line with an action
in it, so it counts steps twice or takes explanations for steps. Here a plan is a list: numbered from 1, or consecutive
bullets of one indent. Each item begins with one action, in words (``**Unstack** the red block from blue: ...``) or as a
call (``PutDown(red_block)``), with exactly the objects that the action takes, before any explanation. Text between
numbered items is ignored. Of several lists the last one counts, whether or not its plan is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from teamtr.tasks.benchmarks.planbench.strips import Domain, Step

_ITEM = re.compile(r"(?P<indent>[ \t]*)(?:\**(?P<number>\d{1,4})[.)]|(?P<bullet>[-•+]|\*(?=[ \t])))[ \t]*(?P<said>.*)")
_EMPHASIS_OR_CALL = re.compile(r"[*`]|\w\(")
_INLINE = re.compile(r"\s(\d{1,4})\.(?=\s)")
_ASIDE = re.compile(r"\s\([^()]{0,60}\)")
_FIRST_WORDS = re.compile(r"^(?:action|step)(?:\s+\d{1,4})?\s*:\s*")
_END_OF_CLAUSE = re.compile(r"[:;(.\n]|\s[-–—]\s|,\s|\b(?:because|since|so|then|and|which|to (?!p))\b")
_LONGEST_ITEM = 300
"""Characters of an item that are searched for an action."""


@dataclass(frozen=True)
class _Item:
    """``number`` is 0 for a bullet."""

    indent: int
    number: int
    said: str


@dataclass
class _List:
    """The items of a list so far; ``steps`` is None once an item was not an action."""

    indent: int
    numbered: bool
    steps: list[Step] | None
    last_number: int = 0
    plain: bool = True
    lines: int = 0
    closed: bool = False


def steps_in_last_list(text: str, domain: Domain, names: Mapping[str, str]) -> list[Step]:
    """The plan that a text in lower case states as a list. Takes time linear in the text.

    Empty if there is no such list, if there are actions on lines of their own as well, or if the text names actions
    only in one list without emphasis or calls: the benchmark's own parser handles these.

    An item with another number of objects than its action takes is still a step, which invalidates the plan. Otherwise
    an earlier list would count instead of the one that the reply ends with.
    ``names`` maps letters to the names of objects in words.
    """
    reader = _Reader(domain, names)
    found: list[_List] = []
    lines = 0
    for line in text.split("\n"):
        if not line:
            continue
        items = list(_items(line.rstrip()))
        named = reader.names_an_action(line)
        lines += named
        if not items and found and named and reader.step(line) is not None:
            return []  # an action on a line of its own: no list has the whole plan
        if not items and line.strip() and not line[0].isspace() and found and not found[-1].numbered:
            found[-1].closed = True
        holders = [_put(item, found, reader) for item in items]
        if holders and holders[0] is not None:
            holders[0].lines += 1
    plans = [made for made in found if made.steps]
    if not plans or (plans[-1].plain and lines == plans[-1].lines):
        return []
    return plans[-1].steps or []


def _items(line: str) -> Iterator[_Item]:
    """The item on a line; several, if it goes on with "2. ... 3. ..."."""
    found = _ITEM.fullmatch(line)
    if found is None:
        return
    indent, number, said, start = len(found["indent"]), int(found["number"] or 0), found["said"], 0
    for following in _INLINE.finditer(said) if number else ():
        if int(following[1]) == number + 1:
            yield _Item(indent, number, said[start : following.start()])
            number, start = number + 1, following.end()
    yield _Item(indent, number, said[start:])


def _put(item: _Item, lists: list[_List], reader: _Reader) -> _List | None:
    """Add the item to the list that it continues, or to a new one; returns None if it only explains the item above."""
    last = lists[-1] if lists and not lists[-1].closed else None
    if last is not None and item.indent > last.indent and not item.number:
        return None
    goes_on = last is not None and last.numbered == bool(item.number) and item.number in (0, last.last_number + 1)
    if last is None or not goes_on:
        last = _List(item.indent, bool(item.number), steps=[] if item.number in (0, 1) else None)
        lists.append(last)
    last.last_number = item.number
    last.plain = last.plain and _EMPHASIS_OR_CALL.search(item.said) is None
    step = reader.step(item.said)
    if step is None or last.steps is None:
        last.steps = None
    else:
        last.steps.append(step)
    return last


class _Reader:
    """Parses the action with which an item begins."""

    def __init__(self, domain: Domain, names: Mapping[str, str]) -> None:
        self._actions = {name: re.compile("[-_ ]?".join(map(re.escape, name.split("-")))) for name in domain.actions}
        self._action = re.compile("|".join(pattern.pattern for pattern in self._actions.values()))
        self._letters = dict(_called(names))
        words = sorted(map(re.escape, self._letters), key=len, reverse=True)
        self._object = re.compile(rf"(?<![\w])(?:{'|'.join(words)})(?![\w])") if words else None

    def names_an_action(self, line: str) -> bool:
        return self._action.search(line) is not None

    def step(self, said: str) -> Step | None:
        said = re.sub(r"\\[()]|[*`]", "", said[:_LONGEST_ITEM]).strip()
        said = _FIRST_WORDS.sub("", said)
        for name, pattern in self._actions.items():
            found = pattern.match(said)
            if found is not None and not said[found.end() : found.end() + 1].isalnum():
                return (name, *self._objects(said[found.end() :].lstrip()))
        return None

    def _objects(self, rest: str) -> list[str]:
        """The objects of the call or clause, each once, in order."""
        if rest.startswith("("):
            clause = rest[1:].partition(")")[0].replace(",", " ")
        else:
            clause = _END_OF_CLAUSE.split(_ASIDE.sub("", rest), maxsplit=1)[0]
        found = [] if self._object is None else self._object.findall(clause)
        return list(dict.fromkeys(self._letters[word] for word in found))


def _called(names: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Every way to name an object, with its letter: red block, red_block, red; object a, object_a, a."""
    for letter, name in names.items():
        for word in (name, name.replace(" ", "_"), name.removesuffix(" block"), name.removeprefix("object ")):
            yield word, letter
