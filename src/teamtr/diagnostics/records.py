"""Reading log records without trusting them: a field may be missing, null, not finite, or of a newer kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def number(record: Any, key: str) -> float | None:
    """The finite number under this key; None when there is none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def whole(record: Any, key: str) -> int | None:
    value = number(record, key)
    return None if value is None else int(value)


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
