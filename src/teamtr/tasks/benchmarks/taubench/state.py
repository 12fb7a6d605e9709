"""The data of a domain as a value: tables as they were loaded, and the records that a dialogue changed.

A state is never written to. A change makes a new state that shares everything else, so that a dialogue costs what it
touches and can be replayed from its acts at any time.
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
    """Where a record stands."""

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
        """The record, to be read only; None where there is none."""
        place = Place(table, key)
        return self.changed[place] if place in self.changed else self.tables[table].get(key)

    def copy_of(self, table: str, key: str) -> Any:
        """The record as the caller's own, to be changed and handed to ``put``."""
        return copy.deepcopy(self.find(table, key))

    def put(self, table: str, key: str, record: Any) -> State:
        """The state in which this record stands there. The record belongs to the state from now on."""
        return State(self.tables, {**self.changed, Place(table, key): record})

    def records(self, table: str) -> Iterator[tuple[str, Any]]:
        """Every record in the order of the table, then those that are new."""
        for key in self.tables[table]:
            yield key, self.find(table, key)
        for place, record in self.changed.items():
            if place.table == table and place.key not in self.tables[table]:
                yield place.key, record

    def changes(self) -> dict[Place, str]:
        """The records that differ from the loaded ones, as canonical text.

        Two states of the same tables are equal if and only if their changes are. Numbers are compared as they are
        written (55 is not 55.0) and lists in their order, because the benchmark compares hashes of such a text.
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
