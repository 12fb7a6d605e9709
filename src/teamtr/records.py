"""Reading log records without trusting them: a field may be missing, null, not finite, or of a newer kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from teamtr.types import Floats

Record = Mapping[str, Any]


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def number(record: Any, key: str) -> float | None:
    """The finite number under this key; None when there is none."""
    # Asked tens of thousands of times for one page: a dictionary, which a record is, is known at once.
    value = record.get(key) if isinstance(record, (dict, Mapping)) else None
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def whole(record: Any, key: str) -> int | None:
    value = number(record, key)
    return None if value is None else int(value)


def numbers(values: object) -> Floats:
    """A list of finite numbers; empty unless all of it is."""
    found = [number({"x": value}, "x") for value in values] if isinstance(values, list | tuple) else []
    return np.zeros(0) if None in found else np.array(found, dtype=np.float64)


def mapping(record: Any, key: str) -> Mapping[str, Any]:
    """The mapping under this key, empty when there is none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def mappings(record: Any, key: str) -> list[Mapping[str, Any]]:
    """The mappings in the list under this key."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def accepted(update: Record) -> bool:
    return str(update.get("outcome", "")).startswith("accepted")
