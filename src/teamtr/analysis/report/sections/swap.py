"""The Swap section: replaced agents, the protocol checklist, the result of alignment, and the team's recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr.analysis.diagnostics.swaps import swap_rows
from teamtr.analysis.report.parts import (
    Axis,
    Chart,
    Facts,
    Grid,
    Group,
    Part,
    Table,
    Text,
    Toned,
    agent_color,
    dots,
    line,
)
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import finite, num, percent, points, signed

MOMENTS = {"before": "before", "at_swap": "as it came", "after": "after alignment"}


def compute(run: Reading) -> Data:
    return {"swaps": swap_rows(run.records)}


def show(data: Data) -> list[Part]:
    return [_swap(swap, data["evals"], agent_color(data["run"]["agents"], swap["agent"])) for swap in data["swaps"]]


def _swap(swap: Data, evals: Sequence[Data], color: str) -> Group:
    aligned = swap["alignment"]
    charts = [_recovery(swap, evals, color), *([_alignment(aligned, color)] if aligned else [])]
    uncertified = (
        "No bound says that the team is as good as before a swap; the updates after it carry certificates again."
    )
    return Group(
        name=swap["agent"],
        title=f"before stage {num(swap['stage'])}: {' → '.join(swap['models'])} ({swap['mode']})",
        color=color,
        parts=[
            _facts(swap),
            *([] if swap["certified"] else [Text(uncertified)]),
            Grid([*charts, _success(swap), _checklist(swap["checklist"])]),
        ],
    )


def _facts(swap: Data) -> Facts:
    aligned, direct = swap["alignment"], swap["direct_shock"]
    facts = [
        Toned("certified") if swap["certified"] else Toned("uncertified", "bad"),
        Toned(f"shock {_points(swap['shock'])}"),
    ]
    if finite(direct):
        facts.append(Toned(f"{_points(direct)} as it came"))
    if aligned and aligned["within_radius"] is not None:
        reached = bool(aligned["within_radius"])
        told = "alignment reached the radius" if reached else "alignment did not reach the radius"
        facts.append(Toned(told, "good" if reached else "bad"))
    exact = Toned("exact KL") if swap["exact_kl"] else Toned("no exact KL: the two spell differently", "bad")
    return Facts((*facts, exact))


def _recovery(swap: Data, evals: Sequence[Data], color: str) -> Chart:
    start, success = swap["stage"] or 0, swap["success"]
    earlier = [e for e in evals if e["stage"] is not None and e["stage"] < start]
    moments = [{"stage": start, "when": told, **success[when]} for when, told in MOMENTS.items() if when in success]
    before = success.get("before", {}).get("success")
    return Chart(
        "Recovery",
        Axis("stage", whole=True),
        Axis("success, %", percent=True, low=0, high=1),
        [
            line(earlier, "stage", "success", color="faint"),
            dots(
                earlier,
                "stage",
                "success",
                low="low",
                high="high",
                tip=lambda e: f"stage {e['stage']}: {percent(e['success'], 1)}",
                color="faint",
                label="before the swap",
            ),
            dots(
                moments,
                "stage",
                "success",
                low="low",
                high="high",
                tip=lambda m: f"{m['when']}: {percent(m['success'], 1)}{_range(m)}",
                color=color,
                size=4,
                crosses=True,
            ),
            line([*moments[-1:], *swap["recovery"]], "stage", "success", color=color),
            dots(
                swap["recovery"],
                "stage",
                "success",
                low="low",
                high="high",
                tip=lambda e: (
                    f"stage {e['stage']}, {e['stage'] - start} after the swap: {percent(e['success'], 1)}{_range(e)}"
                ),
                color=color,
                label="after it",
            ),
        ],
        caption=(
            "Held-out success. Crosses: before, as the new agent came, and after its alignment, on the same problems. "
            "Good: a small drop, and back above the dashed line within a few stages. The shock is what was lost: "
            "before less as installed."
        ),
        levels=[(before, "before")] if before is not None else [],
    )


def _alignment(aligned: Data, color: str) -> Chart:
    exact, unit, curve = aligned["loss"] != "cross_entropy", aligned["unit"], aligned["curve"]
    trained = line(curve, "step", "train_kl", color="faint", label="on probes trained on")
    drawn = [value for look in curve for value in (look["kl"], look["train_kl"]) if value is not None]
    return Chart(
        "Alignment: held-out probes",
        Axis("alignment steps", low=0),
        Axis(f"nats per {unit}", log=all(value > 0.0 for value in drawn)),
        [
            *([trained] if trained.x else []),
            line(curve, "step", "kl", color=color),
            dots(
                curve,
                "step",
                "kl",
                low="kl",
                high="upper",
                tip=lambda look: (
                    f"step {num(look['step'])}: {num(look['kl'])}, upper {num(look['upper'])} nats per {unit}"
                ),
                color=color,
                label="KL from old to new" if exact else "cross-entropy",
                size=2.8,
            ),
        ],
        caption=(
            "Over the full vocabulary, on probes that were not aligned on; whisker: its upper bound. Good: ends under "
            "the dashed line, which is where alignment stops."
            if exact
            else "The two spell differently, so no KL and no radius apply: the new agent learnt from the old one's "
            "texts. Good: falls and settles."
        ),
        levels=[(aligned["radius"], "radius")] if aligned["radius"] is not None else [],
        nothing="The log holds no curve of the alignment.",
    )


def _success(swap: Data) -> Table:
    found = [(told, swap["success"][when]) for when, told in MOMENTS.items() if when in swap["success"]]
    return Table(
        ("", "success", "from", "to"),
        [(told, *(percent(measured[key], 1) for key in ("success", "low", "high"))) for told, measured in found],
        title="Success around the swap",
        caption=_feasibility(swap["alignment"]) if swap["alignment"] else "Put in as it was, without alignment.",
    )


def _checklist(items: Sequence[Data]) -> Table:
    return Table(
        ("point", "", "note"),
        [
            (item["point"], Toned("ok", "good") if item["ok"] else Toned("differs", "bad"), item["note"])
            for item in items
        ],
        title="Protocol checklist",
        caption="Good: ok everywhere. What differs did not forbid the swap: the alignment had to bridge it.",
        numeric=False,
    )


def _feasibility(a: Data) -> str:
    unit, steps, tried = a["unit"], a["steps"], a["steps_in_all"]
    more = f" ({num(tried)} tried)" if tried is not None and steps is not None and tried > steps else ""
    told = [
        f"Plug-in feasibility: {num(steps)} steps{more} on {num(a['probes'])} probes, {num(a['held_out'])} of them "
        "held out."
    ]
    if a["radius"] is not None:
        told.append(
            f"Held-out KL {num(a['kl'])}, upper bound {num(a['kl_upper'])} of a radius of {num(a['radius'])} nats per "
            f"{unit}."
        )
    if a["unseen"]:
        told.append(_unseen(a["unseen"]))
    if a["surrogate"] is not None:
        told.append(f"Surrogate by the old team's advantages: {signed(a['surrogate'])} (good: not far below zero).")
    if a["text_gap"]:
        gap: dict[str, Any] = a["text_gap"]
        told.append(
            f"Text gap {num(gap.get('nats_per_message'))} nats per message, {num(gap.get('nats_per_character'))} per "
            "character."
        )
    return " ".join([*told, *([f"{a['note']}."] if a["note"] else [])])


def _unseen(unseen: Data) -> str:
    return (
        f"On {num(unseen['messages'])} messages that steered nothing: {num(unseen['kl'])}, upper bound "
        f"{num(unseen['kl_upper'])}."
    )


def _points(share: float | None) -> str:
    return f"{num(100 * share)} points" if share is not None else "unknown"


def _range(row: Data) -> str:
    return "" if None in (row["low"], row["high"]) else f" ({points(row['low'])} to {points(row['high'])} %)"


register(
    Section(
        key="swap",
        title="Swap",
        place=90,
        lead="Agents that were replaced in the middle of the run.",
        compute=compute,
        show=show,
    )
)
