"""The catalogue of figures by name, with the paper's labels and the required data. docs/figures.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teamtr.analysis.figures import cost, learning, region, staleness
from teamtr.analysis.figures.drawing import Drawing
from teamtr.analysis.figures.runs import Run


@dataclass(frozen=True)
class Figure:
    """``paper`` holds labels of the paper's source; ``needs`` describes what the log must contain."""

    name: str
    title: str
    paper: tuple[str, ...]
    needs: str
    draw: Callable[[Sequence[Run]], Drawing]


FIGURES = (
    Figure(
        "learning-curves",
        "Learning curves",
        ("fig:training-curves",),
        "evaluations (`eval.every`); several runs are overlaid, seeds of one team file become a band",
        learning.learning_curves,
    ),
    Figure("region", "KL per update against the radius", ("fig:tr-cert",), "updates", region.region),
    Figure(
        "certificate",
        "Certificate against measured gain",
        ("fig:tr-cert",),
        "a plan with fresh rollouts before every update, a task whose reward range is known",
        region.certificate,
    ),
    Figure(
        "stale-gap", "Stale gap", ("fig:occ-gap", "tab:scaling"), "probes (`diagnostics.every`)", staleness.stale_gap
    ),
    Figure("weights", "Trajectory weights", ("tab:is-degeneracy",), "probes (`diagnostics.every`)", staleness.weights),
    Figure(
        "drift",
        "Drift of conversations and contexts",
        ("tab:scaling",),
        "probes (`diagnostics.every`) or stored episodes (`store.episodes`)",
        staleness.drift,
    ),
    Figure(
        "token-shift", "Which tokens moved", ("fig:logit-vocab",), "probes (`diagnostics.every`)", region.token_shift
    ),
    Figure(
        "kl-reliability",
        "Sampled against exact KL",
        ("tab:kl-reliability",),
        "updates with a radius per message; probes for the subsamples",
        region.kl_reliability,
    ),
    Figure("zeta", "Zeta proxies", ("tab:zeta-proxy",), "kept updates", region.zeta),
    Figure(
        "coordination",
        "Coordination and stability",
        ("tab:ablation",),
        "evaluations (`eval.every`), two stages",
        learning.coordination,
    ),
    Figure(
        "order", "Order sensitivity", ("tab:ablation",), "runs with at least two values of `plan.order`", learning.order
    ),
    Figure(
        "scaling", "Growth with the team", ("tab:scaling",), "runs with teams of at least two sizes", learning.scaling
    ),
    Figure(
        "swap",
        "Swap and recovery",
        ("fig:plugin-upgrade", "tab:pnp-ablation"),
        "runs made by `teamtr swap` and then trained",
        learning.swap,
    ),
    Figure(
        "accounting", "Tokens and time", ("tab:compute-lite", "tab:scale_control_compute"), "updates", cost.accounting
    ),
)
NOT_FROM_LOGS = {
    "fig:overview": "a sketch of landscapes; its inset, penalties against n, is `teamtr lab scaling --figure F`",
    "tab:main-results": "benchmark results: `teamtr reproduce main-results`; of your own runs `teamtr eval`",
    "tab:app-exp-overview": "a list of experiments",
}
"""Figures and tables of the paper without a counterpart here, and why."""
