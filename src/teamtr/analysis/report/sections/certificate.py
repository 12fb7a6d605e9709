"""The Certificate section: the certified lower bound of each update's gain against its measured gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr.analysis.diagnostics.tracking import Tracking, certificate_tracking
from teamtr.analysis.report.parts import Axis, Chart, Facts, Grid, Part, Series, Table, Text, Toned, dots, line
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import NONE, finite, num, percent, signed

OURS, PAPERS = "turn_aware", "single_step"
WORDS = {
    OURS: "ours (turn-aware), units of reward",
    PAPERS: "the paper's (single step), units of normalized advantage",
}
NEITHER = "No update has both a certificate and a measured gain."
UPDATES, ZERO = Axis("update", whole=True), [(0.0, "")]


def compute(run: Reading) -> Data:
    return {"certificates": {kind: _counted(found) for kind, found in certificate_tracking(run.updates).items()}}


def _counted(found: Tracking) -> dict[str, Any]:
    return {
        "count": len(found.updates),
        "exact": bool(found.gains) and all(gain.exact for gain in found.gains),
        "rank_correlation": found.rank_correlation,
        "violations": found.violations,
        "violation_rate": found.violation_rate,
        "positive": found.positive,
        "not_applicable": found.not_applicable,
    }


def show(data: Data) -> list[Part]:
    held = [u for u in data["updates"] if u["kept"]]
    stale = sum(u["stale"] for u in held)
    issued = [u for u in data["updates"] if not u["stale"]]
    parts: list[Part] = []
    if held and not any(u["bounds"] for u in data["updates"]):
        parts += [
            Facts((Toned(f"none of {len(held)} kept updates has a certificate", "bad"),)),
            Text(
                "A certificate needs a task whose range of rewards is known, a batch that was written by the team that "
                "the update changed, and groups that were not chosen by their rewards (dynamic sampling)."
            ),
        ]
    elif stale:
        told = f"{stale} of {len(held)} kept updates without a certificate: batch was stale"
        parts += [
            Facts((Toned(told, "bad"),)),
            Text(
                "Those updates learnt from rollouts of an earlier team, or from such that were redrawn in part. A "
                "certificate bounds a step from the team that wrote its batch, so that none applies to theirs; those "
                "that an older log holds are neither drawn nor judged."
            ),
        ]
    parts.append(Grid(_charts(issued, [u for u in issued if u["gain"] is not None])))
    if data["certificates"]:
        parts.append(_table(data["certificates"]))
    return [*parts, Text(_violations(data["updates"]))]


def _charts(issued: Sequence[Data], judged: Sequence[Data]) -> list[Chart]:
    gained = dots(judged, "update", lambda u: u["gain"]["estimate"], color="faint", label="gained", size=2)
    return [
        Chart(
            "Promised and gained",
            Axis("certified gain (ours), reward"),
            Axis("gain, reward"),
            [_against_gain(judged, OURS, "agent-0")],
            caption=(
                "Gain measured on the next batch of the same problems (whisker: 95 % interval) or exact where known. "
                "Good: dots on or above the diagonal, and to the right of zero."
            ),
            levels=ZERO,
            diagonal=True,
            nothing=NEITHER,
        ),
        Chart(
            "Our bound over the run",
            UPDATES,
            Axis("reward"),
            [gained, line(issued, "update", lambda u: u["bounds"].get(OURS), color="agent-0", label="certified")],
            caption=(
                "Good: above zero, which promises an improvement before it is measured; and the gains above the line. "
                "Late in training little is left to gain, and the bound sinks below zero."
            ),
            levels=ZERO,
        ),
        Chart(
            "The paper's bound and the gain",
            Axis("certified, normalized advantage"),
            Axis("gain, reward"),
            [_against_gain(judged, PAPERS, "agent-1")],
            caption=(
                "The paper's single-step bound charges for shifts of contexts that cannot happen when an agent speaks "
                "once, so it is far below zero. Its units are not those of the gain: compare order and sign only."
            ),
            levels=ZERO,
            nothing=NEITHER,
        ),
        Chart(
            "The paper's bound over the run",
            UPDATES,
            Axis("normalized advantage"),
            [line(issued, "update", lambda u: u["bounds"].get(PAPERS), color="agent-1")],
            caption="Good: above zero; nearer zero is tighter.",
            levels=ZERO,
        ),
    ]


def _against_gain(judged: Sequence[Data], kind: str, color: str) -> Series:
    def tip(u: Data) -> str:
        gain = u["gain"]
        how = "exact" if gain["exact"] else "measured"
        interval = "" if gain["exact"] else f" ({signed(gain['lower'])} to {signed(gain['upper'])})"
        return (
            f"update {u['update']} ({u['agent']})\ncertified at least {signed(u['bounds'][kind])}\n"
            f"{how} {signed(gain['estimate'])}{interval}"
        )

    return dots(
        judged,
        lambda u: u["bounds"].get(kind),
        lambda u: u["gain"]["estimate"],
        low=lambda u: None if u["gain"]["exact"] else u["gain"]["lower"],
        high=lambda u: None if u["gain"]["exact"] else u["gain"]["upper"],
        tip=tip,
        color=color,
        size=2.8,
    )


def _table(certificates: Data) -> Table:
    header = (
        "certificate",
        "updates judged",
        "positive",
        "rank correlation with the gain",
        "violations",
        "not applicable",
    )
    rows = [
        (
            WORDS.get(kind, kind),
            num(c["count"]) + (" (exact)" if c["exact"] else ""),
            f"{c['positive']} of {c['count']}",
            num(c["rank_correlation"], 2) if finite(c["rank_correlation"]) else NONE,
            f"{c['violations']} ({percent(c['violation_rate'])})" if c["count"] else NONE,
            f"{c['not_applicable']}: batch was stale" if c["not_applicable"] else "0",
        )
        for kind, c in certificates.items()
    ]
    return Table(header, rows)


def _violations(updates: Sequence[Data]) -> str:
    fair = any(u["groups_aside"] for u in updates)
    how = (
        "Bounds are read on problems that were set aside (learner.certify_share): nothing was learnt from them."
        if fair
        else "A bound is read on the batch that was climbed, so it is optimistic, and wide intervals of the gain hide "
        "it: few violations do not prove it. learner.certify_share sets problems aside for fair ones."
    )
    return (
        "A violation: the gain, interval and all, lies below the bound. Good: no more than the confidence allows (with "
        "95 % intervals on both sides, about one in forty by chance), and a rank correlation above zero. " + how
    )


register(
    Section(
        key="certificate",
        title="Certificate",
        place=30,
        lead="What each update was promised to gain at least, against what it gained.",
        compute=compute,
        show=show,
    )
)
