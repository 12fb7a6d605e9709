"""The swaps in a log (``kind: swap``), with the evaluations after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from teamtr.records import Record, mapping, mappings, number, whole

WHEN = ("before", "at_swap", "after")
_ALIGNED = ("kl", "kl_upper", "train_kl", "radius", "surrogate", "learning_rate")
_COUNTS = ("probes", "held_out", "steps", "steps_in_all")


def swap_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every swap, with the evaluations from it to the next one."""
    rows: list[dict[str, Any]] = []
    for record in records:
        if record.get("kind") == "swap":
            rows.append(_swap(record))
        elif record.get("kind") == "eval" and rows and number(record, "avg_at_k") is not None:
            rows[-1]["recovery"].append({"stage": whole(record, "stage"), **_measured(record, "avg_at_k")})
    return rows


def _swap(record: Record) -> dict[str, Any]:
    success, intervals = mapping(record, "success"), mapping(record, "intervals")
    aligned, old = mapping(record, "alignment"), mapping(record, "from")
    protocol = mapping(record, "protocol")
    return {
        "stage": whole(record, "stage"),
        "updates": whole(record, "updates"),
        "agent": str(record.get("agent") or ""),
        "mode": str(record.get("mode") or ""),
        "certified": record.get("certified") is True,
        "run": PurePath(str(old.get("run") or "")).name,
        "models": [PurePath(str(side.get("model") or "")).name for side in (old, mapping(record, "to"))],
        "checklist": [
            {"point": str(item.get("point")), "ok": item.get("ok") is True, "note": str(item.get("note") or "")}
            for item in mappings(protocol, "items")
        ],
        "exact_kl": protocol.get("exact_kl") is True,
        "success": {
            when: _measured({"value": success[when], "avg_interval": intervals.get(when)}, "value")
            for when in WHEN
            if when in success
        },
        "shock": number(record, "shock"),
        "direct_shock": number(record, "direct_shock"),
        "alignment": _alignment(aligned) if aligned else None,
        "recovery": [],
    }


def _alignment(logged: Mapping[str, Any]) -> dict[str, Any]:
    gap, unseen = mapping(logged, "text_gap"), mapping(logged, "unseen")
    return {
        "loss": str(logged.get("loss") or ""),
        "unit": str(logged.get("unit") or "message"),
        **{key: whole(logged, key) for key in _COUNTS},
        **{key: number(logged, key) for key in _ALIGNED},
        "within_radius": logged.get("within_radius") if isinstance(logged.get("within_radius"), bool) else None,
        "curve": [
            {key: number(look, key) for key in ("step", "kl", "upper", "train_kl")}
            for look in mappings(logged, "curve")
        ],
        "unseen": {key: number(unseen, key) for key in ("messages", "kl", "kl_upper")} if unseen else None,
        "text_gap": {key: number(gap, key) for key in gap} or None,
        "note": str(logged.get("note") or ""),
    }


def _measured(record: Record, key: str) -> dict[str, float | None]:
    ends = record.get("avg_interval")
    low, high = ends if isinstance(ends, list | tuple) and len(ends) == 2 else (None, None)
    return {"success": number(record, key), "low": number({"x": low}, "x"), "high": number({"x": high}, "x")}
