"""The Trust region section: the KL of each update against its radius, and the reliability of sampled KLs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from teamtr.analysis.diagnostics.kl_reliability import kl_reliability
from teamtr.analysis.diagnostics.subsampling import subsample_reliability
from teamtr.analysis.diagnostics.zeta import zeta_proxy
from teamtr.analysis.report.parts import (
    Axis,
    Chart,
    Facts,
    Grid,
    Multiples,
    Part,
    Series,
    Table,
    Toned,
    agent_color,
    dots,
    line,
)
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.analysis.report.words import NONE, num, percent, signed
from teamtr.text import counted

STAGES = Axis("stage", whole=True)
SAMPLED = {"kl_k1": "k1 (the paper's)", "kl_k3": "k3"}


def compute(run: Reading) -> Data:
    zeta = zeta_proxy(run.updates)
    return {
        "kl_reliability": [asdict(estimator) for estimator in kl_reliability(run.updates)],
        "kl_subsamples": [asdict(subsample) for subsample in subsample_reliability(run.updates)],
        "zeta": None if zeta is None else asdict(zeta),
    }


def answer(data: Data) -> Answer:
    question, updates = "Is each update inside its region?", data["updates"]
    kept = [u for u in updates if u["kept"]]
    if not kept:
        told = f"{counted(len(updates), 'update was', 'updates were')} made, none was kept.{_silent(updates)}"
        return Answer(question, "plain", "no update kept", told)
    outside, fullest = sum(u["outside"] for u in kept), _fullest(kept)
    backed = sum((u["backtracks"] or 0) > 0 for u in kept)
    restored = sum(u["outcome"] == "restored" for u in updates)
    used = f" The fullest used {percent(fullest)} of its radius." if fullest is not None else ""
    ungated = " This plan has no gate." if data["run"]["gated"] is False else ""
    text = (
        f"Judged by the upper bound of the exact KL.{used} {backed} stepped back to get inside, {restored} of "
        f"{len(updates)} were restored.{_silent(updates)}{ungated}"
    )
    return Answer(question, "bad" if outside else "good", f"{len(kept) - outside} of {len(kept)} inside", text)


def _silent(updates: Sequence[Data]) -> str:
    """A sentence on batches without a signal, in which all episodes of every group had equal returns for the agent."""
    silent = sum(u["outcome"] == "skipped_no_signal" for u in updates)
    return f" {silent} had no signal: in every group all episodes were worth the same to the agent." if silent else ""


def _fullest(kept: Sequence[Data]) -> float | None:
    """The largest upper KL bound, in radii."""
    return max((u["kl_upper"] / u["radius"] for u in kept if u["kl_upper"] is not None and u["radius"]), default=None)


def show(data: Data) -> list[Part]:
    updates, agents = data["updates"], data["run"]["agents"]
    parts: list[Part] = [
        _counts(updates),
        _by_agent(updates, agents),
        Grid(
            [
                _beta(updates, agents),
                _backoffs(updates, agents),
                _clipped(updates),
                _mismatch(updates, agents),
                _sampled(updates),
                _reliability(data["kl_reliability"], data["zeta"]),
            ]
        ),
    ]
    return [*parts, _subsamples(data["kl_subsamples"])] if data["kl_subsamples"] else parts


def _counts(updates: Sequence[Data]) -> Facts:
    outside, held = sum(u["outside"] for u in updates), sum(u["kept"] for u in updates)
    share = percent(outside / held if held else 0)
    return Facts(
        (
            Toned(f"{outside} of {held} kept updates outside ({share})", "bad" if outside else "good"),
            Toned(f"{sum((u['backtracks'] or 0) > 0 for u in updates)} backed off"),
            Toned(f"{sum(u['outcome'] == 'restored' for u in updates)} restored"),
            Toned(f"{sum(u['skipped'] for u in updates)} skipped"),
        )
    )


def _by_agent(updates: Sequence[Data], agents: Sequence[str]) -> Multiples:
    own = {agent: [u for u in updates if u["agent"] == agent] for agent in agents}
    header = ("agent", "updates", "kept", "outside", "restored", "no signal", "back-offs", "largest upper KL / radius")
    return Multiples(
        [_kl(agent, rows, agent_color(agents, agent)) for agent, rows in own.items() if rows],
        caption=(
            "Dot: the exact KL from the policy before to the one after, over the full vocabulary; whisker: its upper "
            "bound over problems, which the gate judges; dashed line: the radius. Faint cross: a first try that was "
            "outside and was shortened (drawn at the edge when beyond the plot). Red cross: nothing kept. Good: every "
            "whisker ends under the line, and not far under it."
        ),
        table=Table(header, [_counted(agent, rows) for agent, rows in own.items()]),
    )


def _counted(agent: str, own: Sequence[Data]) -> tuple[str, ...]:
    kept = [u for u in own if u["kept"]]
    counts = (
        len(own),
        len(kept),
        sum(u["outside"] for u in kept),
        sum(u["outcome"] == "restored" for u in own),
        sum(u["outcome"] == "skipped_no_signal" for u in own),
        sum(u["backtracks"] or 0 for u in own),
    )
    return (agent, *map(num, counts), num(_fullest(kept)))


def _kl(agent: str, own: Sequence[Data], color: str) -> Chart:
    top = max(max(1.35 * (u["radius"] or 0.0), (u["kl_upper"] or 0.0) if u["kept"] else 0.0) for u in own)
    unit = next((u["unit"] for u in own if u["unit"]), "message")
    measured = [u for u in own if u["kept"] and u["kl_full"] is not None]

    def exact(u: Data) -> float | None:
        """The exact KL; its upper bound if the radius is per token, since only the bound is in that unit."""
        value: float | None = u["kl_upper"] if u["unit"] == "token" else u["kl_full"]
        return value

    return Chart(
        agent,
        STAGES,
        Axis(f"nats per {unit}", low=0, high=top),
        [
            line(own, "stage", "radius", color="radius"),
            dots(
                [u for u in own if u["kl_rejected"] is not None],
                "stage",
                lambda u: min(u["kl_rejected"], top),
                tip=lambda u: f"first try outside: {num(u['kl_rejected'])}\n{_told(u)}",
                color="faint",
                size=2.5,
                crosses=True,
            ),
            dots(
                measured,
                "stage",
                exact,
                low=exact,
                high="kl_upper",
                tip=_told,
                keep="outside",
                color=color,
                size=2.6,
            ),
            dots(
                [u for u in own if not u["kept"]],
                "stage",
                lambda u: 0.0,
                tip=lambda u: f"{u['outcome']}: {u['reason']}\n{_told(u)}",
                color="bad",
                size=3.5,
                crosses=True,
            ),
        ],
        color=color,
        height=190,
    )


def _told(u: Data) -> str:
    return (
        f"update {u['update']}, stage {u['stage']}: {u['outcome']}\n"
        f"exact KL {num(u['kl_full'])}, upper {num(u['kl_upper'])} of {num(u['radius'])}\n"
        f"{num(u['backtracks'])} back-offs, beta {num(u['beta'])}"
    )


def _beta(updates: Sequence[Data], agents: Sequence[str]) -> Chart:
    return Chart(
        "Penalty weight beta",
        STAGES,
        Axis("beta (no unit)", log=True),
        [
            line(
                [u for u in updates if u["agent"] == agent and (u["beta"] or 0.0) > 0.0],
                "stage",
                "beta",
                color=agent_color(agents, agent),
                label=agent,
            )
            for agent in agents
        ],
        caption=(
            "Steered so that updates end near their radius. Good: settles. At its floor or ceiling the penalty has "
            "lost its grip, and the gate alone holds the region."
        ),
    )


def _dots_by_agent(updates: Sequence[Data], agents: Sequence[str], key: str, *, apart: float = 0.0) -> list[Series]:
    """Dots for each agent. ``apart``: the share of a stage's width over which agents are spread side by side."""

    def one(k: int, agent: str) -> Series:
        shift = apart * ((k + 0.5) / len(agents) - 0.5)
        return dots(
            [u for u in updates if u["agent"] == agent],
            lambda u: None if u["stage"] is None else u["stage"] + shift,
            key,
            tip=lambda u: f"{agent}, stage {u['stage']}: {num(u[key])}",
            color=agent_color(agents, agent),
            label=agent,
            size=2.4,
        )

    return [one(k, agent) for k, agent in enumerate(agents)]


def _backoffs(updates: Sequence[Data], agents: Sequence[str]) -> Chart:
    return Chart(
        "Back-offs",
        STAGES,
        Axis("steps back along the line", low=0),
        _dots_by_agent(updates, agents, "backtracks", apart=0.5),
        caption=(
            "How often a try had to be shortened. Good: zero to two; more means that the step length is far too large."
        ),
    )


def _clipped(updates: Sequence[Data]) -> Chart:
    def one(key: str, what: str, color: str) -> Series:
        return dots(
            updates,
            "update",
            key,
            tip=lambda u: f"update {u['update']} ({u['agent']}): {percent(u[key], 1)} of {what}",
            color=color,
            label=what,
            size=2.4,
        )

    return Chart(
        "Clipped",
        Axis("update", whole=True),
        Axis("share clipped, %", percent=True, low=0),
        [one("ratio_clip_rate", "ratios", "agent-1"), one("advantage_clip_rate", "advantages", "agent-2")],
        caption=(
            "How often clipping held back a ratio during the steps (from the second on), and an advantage. Good: few; "
            "many clipped ratios mean steps that strain at the region, many clipped advantages mean rare rewards."
        ),
    )


def _mismatch(updates: Sequence[Data], agents: Sequence[str]) -> Chart:
    return Chart(
        "Sampler against learner",
        STAGES,
        Axis("|Δ log p| per token, nats", low=0),
        _dots_by_agent(updates, agents, "mismatch_sampler"),
        caption=(
            "How far the log-probabilities of the engine that sampled are from those of the engine that learns, on the "
            "same tokens. No ratio uses the sampler's, but with learner.score: sampler, which measures their error "
            "first and compares them with themselves here. Good: near rounding, and not growing."
        ),
        nothing="No update recorded it.",
    )


def _sampled(updates: Sequence[Data]) -> Chart:
    moved = [u for u in updates if (u["kl_full"] or 0.0) > 0.0 and u["radius"] and u["unit"] == "message"]
    ratios = sorted(u[key] / u["radius"] for u in moved for key in SAMPLED if u[key] is not None)
    top = ratios[min(len(ratios) - 1, math.floor(0.98 * len(ratios)))] if ratios else 1.0

    def one(key: str, color: str) -> Series:
        return dots(
            [u for u in moved if u[key] is not None],
            lambda u: u["kl_full"] / u["radius"],
            lambda u: u[key] / u["radius"],
            tip=lambda u: (
                f"update {u['update']} ({u['agent']}): exact {num(u['kl_full'])}, "
                f"{key.removeprefix('kl_')} {num(u[key])}"
            ),
            color=color,
            label=SAMPLED[key],
            size=2.4,
        )

    return Chart(
        "Would a sampled KL have held the region?",
        Axis("exact KL / radius", low=0),
        Axis("sampled KL / radius", high=1.1 * top),
        [one("kl_k1", "agent-1"), one("kl_k3", "agent-2")],
        caption=(
            "Good: dots on the diagonal. Dots across the horizontal line from where the exact KL lies would have been "
            "judged wrongly. The farthest two per cent are drawn at the edge."
        ),
        levels=[(1.0, "radius")],
        diagonal=True,
    )


def _reliability(estimators: Sequence[Data], zeta: Data | None) -> Table:
    return Table(
        ("estimate", "bias, radii", "error, radii", "flips", "flips near the edge"),
        [
            (
                e["name"].removeprefix("kl_"),
                signed(e["bias_in_radii"], 2),
                num(e["rmse_in_radii"], 2),
                percent(e["flip_rate"]),
                _near(e),
            )
            for e in estimators
        ],
        title="Sampled against exact KL",
        caption=(
            "Bias and root-mean-square error in radii. A flip: the estimate and the exact KL lie on different sides of "
            "the radius; near the edge: the exact KL within half a radius of it. Good: zero."
        )
        + ("" if zeta is None else _zeta(zeta)),
    )


def _zeta(zeta: Data) -> str:
    proxy, penalty = zeta["proxy"], zeta["penalty_share"]
    part = percent(penalty["mean"]) if penalty else "an unknown part"
    return (
        f" Estimation term zeta: mean {num(proxy['mean'])}, median {num(proxy['p50'])}, P90 {num(proxy['p90'])} per "
        f"update; {part} of the paper's penalty of a stage."
    )


def _subsamples(subsamples: Sequence[Data]) -> Table:
    most = max(s["updates"] for s in subsamples)
    return Table(
        ("positions", "median, radii", "P90, radii", "flips near the edge", "against exact"),
        [
            (
                percent(s["share"]),
                num(s["median_in_radii"], 2),
                num(s["p90_in_radii"], 2),
                _near(s),
                percent(s["exact_flip_rate"]),
            )
            for s in subsamples
        ],
        title="The sampled KL from some of the positions",
        caption=(
            f"Of {num(most)} probed updates: the paper's estimate from a random share of token positions, its distance "
            "from that of all positions in radii. Flips: draws judged otherwise than all positions are, near the edge "
            "(within a fifth of the radius of it); or otherwise than by the exact KL. Good: zero. Steady is not yet "
            "right: compare with the exact KL."
        ),
    )


def _near(row: Data) -> str:
    return f"{percent(row['near_flip_rate'])} of {row['near_updates']}" if row["near_updates"] else NONE


register(
    Section(
        key="region",
        title="Trust region",
        place=20,
        lead="How far each update moved its agent, against the radius it was allowed.",
        compute=compute,
        show=show,
        answer=answer,
    )
)
