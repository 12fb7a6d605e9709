"""The data of a domain as an immutable value: the loaded tables, and the records that a dialogue changed.

A state is never modified. A change makes a new state that shares everything else, so a dialogue costs only what it
touches, and can be replayed from its acts at any time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Tables = Mapping[str, Mapping[str, Any]]
"""Table -> key -> record, plain JSON throughout."""


class Place(NamedTuple):
    """The location of a record."""

    table: str
    key: str

    def __str__(self) -> str:
        return f"{self.table}/{self.key}"


@dataclass(frozen=True)
class State:
    """``tables`` are shared by all dialogues; ``changed`` holds the records that this one wrote."""

    tables: Tables
    changed: Mapping[Place, Any] = field(default_factory=dict)

    def find(self, table: str, key: str) -> Any:
        """The record, which must not be modified; None if there is none."""
        place = Place(table, key)
        return self.changed[place] if place in self.changed else self.tables[table].get(key)

    def copy_of(self, table: str, key: str) -> Any:
        """A copy of the record, to be changed and passed to ``put``."""
        return copy.deepcopy(self.find(table, key))

    def put(self, table: str, key: str, record: Any) -> State:
        """The state with this record in place. The record must not be modified afterwards."""
        return State(self.tables, {**self.changed, Place(table, key): record})

    def records(self, table: str) -> Iterator[tuple[str, Any]]:
        """Every record in the order of the table, then new ones."""
        for key in self.tables[table]:
            yield key, self.find(table, key)
        for place, record in self.changed.items():
            if place.table == table and place.key not in self.tables[table]:
                yield place.key, record

    def changes(self) -> dict[Place, str]:
        """The records that differ from the loaded ones, as canonical text.

        Two states of the same tables are equal if and only if their changes are. Numbers are compared as they are
        written (55 is not 55.0) and lists in their order, because the benchmark compares hashes of such text.
        """
        found = {}
        for place, record in sorted(self.changed.items()):
            text = canonical(record)
            if text != canonical(self.tables[place.table].get(place.key)):
                found[place] = text
        return found


def canonical(value: Any) -> str:
    """JSON with sorted keys: equal texts are equal values."""
    return json.dumps(value, sort_keys=True)
