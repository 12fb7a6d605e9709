"""The Token shift section: the tokens that an update moved, inside its trust region and beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.analysis.report.parts import Axis, Chart, Grid, Part, Series, Table, agent_color, dots, line
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import NONE, finite, num, percent

TAIL = "Large changes among unlikely tokens move the policy's tail, which samples rarely show."


@dataclass(frozen=True)
class Shift:
    """One probed update: how far it moved tokens, by their rank before it (the last entry: all other tokens)."""

    agent: str
    how: str
    moved_R: Sequence[float]
    flipped: float | None
    kl: float | None
    radius: float | None
    probabilities: tuple[Sequence[float], Sequence[float]] | None
    """Probabilities by rank, before and after the update."""


def show(data: Data) -> list[Part]:
    probed = [p for p in (data["probes"] or {"updates": ()})["updates"] if p["shift"]]
    if not probed:
        return []
    agents, updates = data["run"]["agents"], {u["update"]: u for u in data["updates"]}
    inside, outside = (_latest(probed, agents, updates, outside) for outside in (False, True))
    within = [_as_made(p, updates) for p in inside]
    beyond = [_as_made(p, updates) for p in outside] or [
        _stretched(p, updates) for p in inside if p["shift"]["stretched"]
    ]
    top = max((m for s in (*within, *beyond) for m in s.moved_R[:-1]), default=0.0) or 1e-12
    kept_outside = "The last probed update of each agent that was kept outside its region."
    made_longer = "What leaving the region would have done: the same steps, made longer. Nothing of this was kept."
    return [
        Grid(
            [
                _chart(
                    "Inside the region",
                    within,
                    agents,
                    top,
                    "The last probed update of each agent that was kept inside. Good: small everywhere; the same scale "
                    "as beside.",
                ),
                _chart("Beyond the region", beyond, agents, top, f"{kept_outside if outside else made_longer} {TAIL}"),
            ]
        ),
        _table([*within, *beyond]),
    ]


def _latest(probed: Sequence[Data], agents: Sequence[str], updates: Data, outside: bool) -> list[Data]:
    """The last probed update of each agent with its KL on this side of the radius."""
    side = [p for p in probed if updates[p["update"]]["outside"] == outside]
    return [own[-1] for agent in agents if (own := [p for p in side if p["agent"] == agent])]


def _per_message(update: Data) -> float | None:
    """The radius, if it is per message as the KL is."""
    return update["radius"] if update["unit"] == "message" else None


def _as_made(probe: Data, updates: Data) -> Shift:
    update, shift = updates[probe["update"]], probe["shift"]
    return Shift(
        agent=probe["agent"],
        how=f"stage {probe['stage']}",
        moved_R=shift["moved_R"],
        flipped=shift["flipped"],
        kl=update["kl_full"],
        radius=_per_message(update),
        probabilities=(shift["before_R"], shift["after_R"]),
    )


def _stretched(probe: Data, updates: Data) -> Shift:
    """The stretched step that the probe tried."""
    longer = probe["shift"]["stretched"]
    return Shift(
        agent=probe["agent"],
        how=f"{num(longer['times'])} × stage {probe['stage']}",
        moved_R=longer["moved_R"],
        flipped=longer["flipped"],
        kl=longer["kl"],
        radius=_per_message(updates[probe["update"]]),
        probabilities=None,
    )


def _chart(title: str, shifts: Sequence[Shift], agents: Sequence[str], top: float, caption: str) -> Chart:
    return Chart(
        title,
        Axis("rank before the update", log=True),
        Axis("mean |Δ log-probability|, nats", low=0, high=1.05 * top),
        [series for shift in shifts for series in _series(shift, agent_color(agents, shift.agent))],
        caption=caption,
        nothing="No probed update of this kind is in the log.",
    )


def _series(shift: Shift, color: str) -> tuple[Series, Series]:
    ranks, name = list(enumerate(shift.moved_R[:-1], start=1)), f"{shift.agent}, {shift.how}"
    return (
        line(ranks, lambda r: r[0], lambda r: r[1], color=color, label=name),
        dots(
            ranks,
            lambda r: r[0],
            lambda r: r[1],
            tip=lambda r: f"{name}: rank {r[0]}, {num(r[1])}",
            color=color,
            size=2.2,
        ),
    )


def _table(shifts: Sequence[Shift]) -> Table:
    return Table(
        ("agent", "update", "exact KL", "top token", "beyond the ranks", "top changed"),
        [(s.agent, s.how, _in_radii(s), _mass(s, 0, 1), _mass(s, -1, 2), percent(s.flipped, 1)) for s in shifts],
        title="Mass and flips",
        caption=(
            "Exact KL per message in radii (where the radius is per message). Mean probability over positions, before "
            "and after the update, of the most likely token and of all tokens beyond the ranks drawn; and the share of "
            "positions whose most likely token changed. Good inside a region: few."
        ),
    )


def _in_radii(shift: Shift) -> str:
    return f"{num(shift.kl / shift.radius, 2)} radii" if finite(shift.kl) and shift.kl and shift.radius else NONE


def _mass(shift: Shift, rank: int, digits: int) -> str:
    if shift.probabilities is None:
        return ""
    before_R, after_R = shift.probabilities
    return f"{percent(before_R[rank], digits)} → {percent(after_R[rank], digits)}"


register(
    Section(
        key="shift",
        title="Token shift",
        place=50,
        lead="Which tokens an update moved, by their rank before it.",
        show=show,
    )
)
