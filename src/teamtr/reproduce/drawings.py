"""Recipes for the paper's figures that need training: the teams in each figure, and a table of what it shows."""

from __future__ import annotations

from teamtr.reproduce.recipe import Line, Recipe, Variant
from teamtr.sweep import measures as of

SEQUENTIAL = (
    Variant("TeamTR", ("plan.preset=teamtr",)),
    Variant("naive sequential", ("plan.preset=naive_sequential",)),
    Variant("sequential PPO", ("plan.preset=sequential_ppo",)),
    Variant("sequential GRPO", ("plan.preset=sequential_grpo",)),
    Variant("sequential DAPO", ("plan.preset=sequential_dapo",)),
)

_CURVES = {"before, %": of.success_before, "after, %": of.success, "evaluations that fell, %": of.regressions}
TRAINING_CURVES = Recipe(
    "training-curves",
    "Held-out success over training",
    "fig:training-curves",
    SEQUENTIAL,
    tuple(_CURVES),
    tuple(Line(variant.name, variant.name, _CURVES) for variant in SEQUENTIAL),
    figures=("learning-curves",),
)

_GAPS = {"second update": of.gap_at(2), "third update": of.gap_at(3)}
OCCUPANCY_GAP = Recipe(
    "occupancy-gap",
    "Surrogates on stale and on fresh rollouts",
    "fig:occ-gap",
    SEQUENTIAL[:2],
    tuple(_GAPS),
    tuple(Line(variant.name, variant.name, _GAPS) for variant in SEQUENTIAL[:2]),
    probes=True,
    figures=("stale-gap", "drift"),
)

_CERTIFICATE = {
    "rank correlation": of.certificate("rank_correlation"),
    "violations, %": of.certificate("violation_rate", 100.0),
    "positive": of.certificate("positive"),
    "measured": of.certificate("count"),
}
CERTIFICATES = Recipe(
    "certificates",
    "Certificates beside measured gains",
    "fig:tr-cert",
    SEQUENTIAL[:1],
    tuple(_CERTIFICATE),
    (Line("TeamTR", "TeamTR", _CERTIFICATE),),
    figures=("certificate",),
)

_KL = {
    "outside the radius, %": of.outside,
    "median KL, radii": of.kl_quantile(0.5),
    "P90, radii": of.kl_quantile(0.9),
    "largest, radii": of.kl_quantile(1.0),
}
KL_OVER_TRAINING = Recipe(
    "kl-over-training",
    "KL of every update beside the radius",
    "fig:tr-cert",
    SEQUENTIAL,
    tuple(_KL),
    tuple(Line(variant.name, variant.name, _KL) for variant in SEQUENTIAL),
    figures=("region",),
)

_MOVED = {
    "top token": of.moved(slice(0, 1)),
    "ranks 2 to 5": of.moved(slice(1, 5)),
    "ranks 6 to 20": of.moved(slice(5, 20)),
    "flipped, %": of.flipped,
}
_REGIONS = (
    Variant("inside", ("plan.preset=teamtr",)),
    Variant("without a region", ("plan.preset=no_trust_region",)),
)
TOKEN_SHIFT = Recipe(
    "token-shift",
    "Which tokens an update moves",
    "fig:logit-vocab",
    _REGIONS,
    tuple(_MOVED),
    tuple(Line(variant.name, variant.name, _MOVED) for variant in _REGIONS),
    probes=True,
    figures=("token-shift",),
)

DRAWINGS = (TRAINING_CURVES, OCCUPANCY_GAP, CERTIFICATES, KL_OVER_TRAINING, TOKEN_SHIFT)
