"""Recipes for the paper's tables that need training, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from teamtr.randomness import generator
from teamtr.reproduce.recipe import Line, Recipe, Replacement, Runs, Variant
from teamtr.sweep import measures as of
from teamtr.sweep.measures import Measure
from teamtr.text import slug
from teamtr.theory.power_law import fit_power_law

Row = tuple[str, str, tuple[str, ...] | float, tuple[str, ...]]
"""Name, part of the table, settings or a factor on the radius, and the paper's number in each column ("" if it has
none)."""


def table(
    name: str, title: str, label: str, columns: Mapping[str, Measure], rows: Sequence[Row], **more: object
) -> Recipe:
    """A recipe for a table with a trained team in every row."""
    variants = tuple(
        Variant(slug(row), radius=given) if isinstance(given, float) else Variant(slug(row), given)
        for row, _, given, _ in rows
    )
    lines = tuple(
        Line(row, slug(row), columns, {c: said for c, said in zip(columns, printed, strict=True) if said}, part)
        for row, part, _, printed in rows
    )
    return Recipe(name, title, label, variants, tuple(columns), lines, **more)  # type: ignore[arg-type]


def _preset(name: str) -> tuple[str, ...]:
    return (f"plan.preset={name}",)


# -- main results ----------------------------------------------------------------------------------------------------

MAIN: dict[str, Measure] = {
    of.ACCURACY: of.success,
    of.TOKENS: of.tokens_per_answer,
    of.SECONDS: of.seconds_per_answer,
    "sampled to train, M": of.millions_sampled,
    "seconds to train": of.seconds_to_train,
}
_ALONE = "One model, not trained"
_TRAINED = "One model, trained"
_TOGETHER = "A team, not trained"
_TEAMS = "A team, trained"
_REUSED = "A team, trained on fewer rollouts by as many updates (not in the paper)"
_MATCHED = ("plan.match=rollouts",)
_RESULTS: tuple[tuple[str, str, Variant, str], ...] = (
    ("chain of thought", _ALONE, Variant("", method="chain_of_thought", agents=1), ""),
    ("self-consistency", _ALONE, Variant("", method="self_consistency", agents=1), ""),
    ("tree of thoughts", _ALONE, Variant("", method="tree_of_thoughts", agents=1), ""),
    ("best of N", _ALONE, Variant("", method="best_of_n", agents=1), ""),
    ("PPO", _TRAINED, Variant("", (*_preset("ppo"), *_MATCHED, "plan.match_agents=3"), agents=1), ""),
    (
        "PPO, lambda 0.95",
        _TRAINED,
        Variant("", (*_preset("ppo"), *_MATCHED, "plan.match_agents=3", "plan.gae_lambda=0.95"), agents=1),
        "",
    ),
    ("GRPO", _TRAINED, Variant("", (*_preset("grpo"), *_MATCHED, "plan.match_agents=3"), agents=1), "39.1"),
    ("DAPO", _TRAINED, Variant("", _preset("dapo"), agents=1), "41.3"),
    ("the team as written", _TOGETHER, Variant("", method="team"), ""),
    ("debate", _TOGETHER, Variant("", method="debate", agents=1), "68.7"),
    ("debate and a judge", _TOGETHER, Variant("", method="judged_debate", agents=1), "71.1"),
    ("role-play", _TOGETHER, Variant("", method="role_play", agents=1), "69.9"),
    ("naive sequential", _TEAMS, Variant("", (*_preset("naive_sequential"), *_MATCHED)), "71.1"),
    ("joint", _TEAMS, Variant("", (*_preset("joint"), *_MATCHED)), ""),
    ("sequential PPO", _TEAMS, Variant("", (*_preset("sequential_ppo"), *_MATCHED)), ""),
    ("TeamTR", _TEAMS, Variant("", _preset("teamtr")), "88.1"),
    ("naive, once a stage", _REUSED, Variant("", _preset("naive_sequential")), ""),
    ("reweighted", _REUSED, Variant("", _preset("reweighted")), ""),
    ("auto", _REUSED, Variant("", _preset("auto")), ""),
    ("partial", _REUSED, Variant("", _preset("partial")), ""),
)
MAIN_RESULTS = Recipe(
    "main-results",
    "Methods side by side",
    "tab:main-results",
    tuple(replace(variant, name=slug(name)) for name, _, variant, _ in _RESULTS),
    tuple(MAIN),
    tuple(
        Line(name, slug(name), MAIN, {of.ACCURACY: paper} if paper else {}, part) for name, part, _, paper in _RESULTS
    ),
    reference="the team as written",
    notes=(
        lambda runs: (
            "the paper's numbers are those of AIME 2024; it fine-tunes the teams of its debates and role-plays, which "
            "are not trained here, and says of naive sequential training what tab:ablation does"
        ),
    ),
)

# -- ablations -------------------------------------------------------------------------------------------------------

SCORES: dict[str, Measure] = {
    "accuracy, %": of.success,
    "stale gap": of.stale_gap,
    "stability": of.stability,
    "coordination, %": of.coordination,
}
RESAMPLING, REGION, ORDER, ADVANTAGE = "Resampling strategy", "Trust region", "Update order", "Advantage estimation"

_FULL: Row = ("TeamTR (full)", "", _preset("teamtr"), ("88.1 ± 1.2", "0.08", "1.9", "89.1"))
_NAIVE: Row = (
    "no resampling (naive sequential)",
    RESAMPLING,
    _preset("naive_sequential"),
    ("71.1 ± 2.8", "0.31", "4.2", "71.5"),
)
_EVERY_2: Row = (
    "resample every 2 updates",
    RESAMPLING,
    _preset("resample_every_2"),
    ("79.3 ± 1.8", "0.18", "2.8", "79.2"),
)
_NO_REGION: Row = ("no trust region", REGION, _preset("no_trust_region"), ("68.3 ± 3.5", "0.42", "6.1", "62.3"))

ABLATION = table(
    "ablation",
    "Ablations",
    "tab:ablation",
    SCORES,
    [
        _FULL,
        _NAIVE,
        _EVERY_2,
        (
            "importance weighting, no resampling",
            RESAMPLING,
            _preset("reweighted"),
            ("74.5 ± 2.3", "0.25", "3.5", "74.8"),
        ),
        ("auto (not in the paper)", RESAMPLING, _preset("auto"), ("", "", "", "")),
        _NO_REGION,
        ("radius a tenth", REGION, 0.1, ("82.5 ± 1.5", "0.05", "1.5", "85.2")),
        ("radius ten times", REGION, 10.0, ("75.1 ± 2.5", "0.28", "4.8", "70.1")),
        ("adaptive radius", REGION, _preset("adaptive_radius"), ("87.8 ± 1.3", "0.09", "2.0", "88.5")),
        ("fixed order", ORDER, _preset("fixed_order"), ("87.2 ± 1.4", "0.09", "2.1", "87.8")),
        ("reverse order", ORDER, _preset("reverse_order"), ("86.9 ± 1.5", "0.10", "2.2", "87.1")),
        ("random order", ORDER, _preset("random_order"), ("87.5 ± 1.3", "0.08", "1.9", "88.3")),
        ("no group normalization", ADVANTAGE, _preset("no_normalization"), ("83.1 ± 2.1", "0.12", "3.1", "81.5")),
        ("no hard clipping", ADVANTAGE, _preset("no_clipping"), ("84.5 ± 1.9", "0.11", "2.7", "83.2")),
    ],
    stages=30,
    probes=True,
    figures=("coordination", "order"),
)

CONTROL = table(
    "control",
    "Resampling and trust region",
    "tab:scale_control_compute",
    SCORES,
    [
        _FULL,
        _EVERY_2,
        _NAIVE,
        (
            "KL penalty only, adaptive",
            REGION,
            _preset("kl_penalty_adaptive"),
            ("84.9 ± 1.6", "0.14", "2.7", "83.1"),
        ),
        ("KL penalty only, fixed", REGION, _preset("kl_penalty_fixed"), ("80.7 ± 2.0", "0.20", "3.5", "77.2")),
        _NO_REGION,
    ],
    stages=30,
    probes=True,
)

RADII = table(
    "delta",
    "Sensitivity to the radius",
    "sec:exp:trcert",
    {**SCORES, "KL outside its radius, %": of.outside},
    [(f"radius x {factor:g}", "", factor, ("", "", "", "", "")) for factor in (0.1, 0.5, 1.0, 2.0, 10.0)],
    probes=True,
)

# -- growth with team size -------------------------------------------------------------------------------------------

SIZES = (2, 3, 4, 5, 6, 8)
GROWTH: dict[str, Measure] = {
    "stale gap": of.stale_gap,
    "drift": of.drift,
    "accuracy, %": of.success,
    "stability": of.stability,
    "coordination, %": of.coordination,
}
_GROWTH_PAPER = {
    ("naive", 2): ("0.08 ± 0.01", "0.05 ± 0.01", "82.1 ± 0.9", "1.8 ± 0.3", "76.3"),
    ("teamtr", 2): ("0.03 ± 0.01", "0.02 ± 0.00", "83.5 ± 0.7", "1.1 ± 0.2", "78.9"),
    ("naive", 3): ("0.21 ± 0.02", "0.14 ± 0.02", "79.5 ± 1.2", "3.2 ± 0.5", "71.5"),
    ("teamtr", 3): ("0.05 ± 0.01", "0.04 ± 0.01", "85.2 ± 0.8", "1.4 ± 0.2", "81.3"),
    ("naive", 4): ("0.41 ± 0.04", "0.28 ± 0.03", "75.8 ± 1.5", "5.1 ± 0.7", "65.2"),
    ("teamtr", 4): ("0.07 ± 0.01", "0.05 ± 0.01", "86.1 ± 0.9", "1.6 ± 0.3", "82.7"),
    ("naive", 5): ("0.68 ± 0.06", "0.47 ± 0.05", "71.2 ± 1.8", "7.5 ± 0.9", "58.1"),
    ("teamtr", 5): ("0.09 ± 0.01", "0.07 ± 0.01", "86.8 ± 1.0", "1.9 ± 0.3", "83.5"),
    ("naive", 6): ("1.02 ± 0.09", "0.71 ± 0.07", "66.3 ± 2.1", "10.3 ± 1.2", "51.7"),
    ("teamtr", 6): ("0.11 ± 0.02", "0.08 ± 0.01", "87.2 ± 1.1", "2.1 ± 0.3", "84.1"),
    ("naive", 8): ("1.89 ± 0.15", "1.31 ± 0.12", "58.7 ± 2.8", "15.8 ± 1.8", "42.3"),
    ("teamtr", 8): ("0.15 ± 0.02", "0.11 ± 0.02", "87.9 ± 1.2", "2.5 ± 0.4", "84.8"),
}
_PLANS = {"naive": "naive_sequential", "teamtr": "teamtr"}


def _exponent(plan: str, what: str, measure: Measure, paper: str) -> Callable[[Runs], str | None]:
    """A note on the power of n with which a measure grows, fitted as in the paper."""

    def note(runs: Runs) -> str | None:
        means = {n: of.over_seeds(runs.get(f"{plan}-n{n}", ()), measure) for n in SIZES}
        sizes = [n for n in SIZES if means[n] and np.mean(means[n]) > 0.0]
        if len(sizes) < 3:
            return None
        values = np.array([[np.mean(means[n])] for n in sizes])
        fit = fit_power_law(sizes, values, generator(0, "reproduce", plan, what))
        return None if fit is None else f"{plan}: {what} grows as n^{fit.exponent:.2f} (the paper: {paper})"

    return note


SCALING = Recipe(
    "scaling",
    "Growth with the team",
    "tab:scaling",
    tuple(Variant(f"{key}-n{n}", _preset(plan), agents=n) for n in SIZES for key, plan in _PLANS.items()),
    tuple(GROWTH),
    tuple(
        Line(key, f"{key}-n{n}", GROWTH, dict(zip(GROWTH, _GROWTH_PAPER[key, n], strict=True)), f"n = {n}")
        for n in SIZES
        for key in _PLANS
    ),
    notes=(
        _exponent("naive", "stale gap", of.stale_gap, "1.94"),
        _exponent("teamtr", "stale gap", of.stale_gap, "1.07"),
        _exponent("naive", "drift", of.drift, "1.91"),
        _exponent("teamtr", "drift", of.drift, "1.05"),
        _exponent("naive", "stability", of.stability, "1.89"),
        _exponent("teamtr", "stability", of.stability, "0.93"),
    ),
    task="math500",
    stages=30,
    probes=True,
)

MODEL_SCALE = table(
    "model-scale",
    "Larger models",
    "tab:scale_control_compute",
    {"accuracy, %": of.success, "stale gap": of.stale_gap},
    [
        ("naive sequential", "", _preset("naive_sequential"), ("71.1", "0.31")),
        ("TeamTR", "", _preset("teamtr"), ("88.1", "0.08")),
    ],
    probes=True,
)

# -- cost ------------------------------------------------------------------------------------------------------------

COMPUTE = table(
    "compute",
    "Tokens and rollouts",
    "tab:compute-lite",
    {
        "tokens, M": of.millions_of_tokens,
        "rollouts, K": of.thousands_of_rollouts,
        "seconds per update": of.seconds_of_an_update,
        "accuracy, %": of.success,
    },
    [
        ("naive sequential", "", _preset("naive_sequential"), ("142.5", "44.3", "172.0", "")),
        ("joint update", "", _preset("joint"), ("145.1", "45.1", "", "")),
        ("TeamTR", "", _preset("teamtr"), ("158.3", "49.2", "192.8", "")),
        ("auto (not in the paper)", "", _preset("auto"), ("", "", "", "")),
    ],
    figures=("accounting",),
)

# -- statistics of one run -------------------------------------------------------------------------------------------

_ONE = (Variant("teamtr", _preset("teamtr")),)
_ZETA = (
    ("clipping, per update", "zeta_clip", ("0.003", "0.001", "0.010")),
    ("ratio, per update", "zeta_ratio", ("0.012", "0.008", "0.035")),
    ("normalization, per update", "zeta_norm", ("0.028", "0.022", "0.070")),
    ("all, per update", "proxy", ("0.043", "0.034", "0.110")),
    ("all, per stage", "per_stage", ("0.13", "0.10", "0.30")),
    ("share of the stage's penalty", "penalty_share", ("0.18", "0.14", "0.45")),
)
_STATISTICS = ("mean", "p50", "p90")

ZETA = Recipe(
    "zeta",
    "Proxies of the estimation error",
    "tab:zeta-proxy",
    _ONE,
    _STATISTICS,
    tuple(
        Line(
            what,
            "teamtr",
            {statistic: of.zeta(key, statistic) for statistic in _STATISTICS},
            dict(zip(_STATISTICS, paper, strict=True)),
        )
        for what, key, paper in _ZETA
    ),
    figures=("zeta",),
)

_DEVIATIONS = {
    "median deviation, radii": "median_in_radii",
    "P90, radii": "p90_in_radii",
    "flips near the radius, %": of.FLIPS,
}

KL_RELIABILITY = Recipe(
    "kl-reliability",
    "The sampled KL under subsampling of positions",
    "tab:kl-reliability",
    _ONE,
    tuple(_DEVIATIONS),
    tuple(
        Line(
            f"{share:.0%} of the positions",
            "teamtr",
            {column: of.subsample(share, key) for column, key in _DEVIATIONS.items()},
            dict(zip(_DEVIATIONS, paper, strict=True)),
        )
        for share, paper in ((0.25, ("0.06", "0.18", "5.7")), (0.5, ("0.03", "0.11", "2.4")))
    ),
    probes=True,
    figures=("kl-reliability",),
)

_TAILS: dict[str, tuple[str, float]] = {
    "ESS / B": ("effective_share", 1.0),
    "P95": ("p95", 1.0),
    "P99": ("p99", 1.0),
    "largest": ("largest", 1.0),
    "above 10, %": ("above_ten", 100.0),
}
_DEGENERACY = {
    (3, 2): ("0.42 ± 0.03", "3.2", "12.8", "87", "2.1"),
    (3, 3): ("0.18 ± 0.02", "6.1", "38.5", "312", "5.8"),
    (5, 2): ("0.41 ± 0.03", "3.3", "13.1", "92", "2.2"),
    (5, 3): ("0.17 ± 0.02", "6.2", "41.2", "338", "6.1"),
    (5, 4): ("0.08 ± 0.01", "11.5", "127.3", "1,247", "10.3"),
    (5, 5): ("0.04 ± 0.01", "21.8", "385.1", "4,582", "15.2"),
}

DEGENERACY = Recipe(
    "degeneracy",
    "Importance weights of stage-start rollouts",
    "tab:is-degeneracy",
    tuple(Variant(f"n{n}", _preset("teamtr"), agents=n) for n in (3, 5)),
    tuple(_TAILS),
    tuple(
        Line(
            f"step {step}",
            f"n{n}",
            {column: of.weights(step, key, scale) for column, (key, scale) in _TAILS.items()},
            dict(zip(_TAILS, paper, strict=True)),
            f"n = {n}",
        )
        for (n, step), paper in _DEGENERACY.items()
    ),
    probes=True,
    figures=("weights",),
)

# -- swaps -----------------------------------------------------------------------------------------------------------

SWAPPED: dict[str, Measure] = {"before, %": of.before_swap, "shock": of.shock, "final accuracy, %": of.success}
_NOTHING = Replacement("direct", think="keep", tools="off", system="template")
_UNIFIED = (
    ("no unification (direct swap)", _NOTHING, ("18.3", "58.2")),
    ("+ fixed system prompt", replace(_NOTHING, system="explicit"), ("12.1", "67.5")),
    ("+ reasoning tags stripped", replace(_NOTHING, system="explicit", think="strip"), ("8.7", "73.1")),
    ("+ tool-call adapter", Replacement("direct", "strip", "canonical", "explicit"), ("6.2", "76.8")),
    ("+ alignment (full)", Replacement("aligned", "strip", "canonical", "explicit"), ("2.9", "85.3")),
)


def _swaps(rows: Sequence[tuple[str, Replacement, tuple[str, str]]]) -> tuple[tuple[Variant, ...], tuple[Line, ...]]:
    variants = tuple(Variant(slug(name), replacement=given) for name, given, _ in rows)
    lines = tuple(
        Line(name, slug(name), SWAPPED, {c: said for c, said in zip(tuple(SWAPPED)[1:], paper, strict=True) if said})
        for name, _, paper in rows
    )
    return variants, lines


PROTOCOL = Recipe(
    "protocol",
    "Protocol unification in a swap",
    "tab:pnp-ablation",
    _swaps(_UNIFIED)[0],
    tuple(SWAPPED),
    _swaps(_UNIFIED)[1],
    notes=(
        lambda runs: "a tiny newcomer has no habits that the switches could unify; experiments/ablation.py makes one",
    ),
    stages=20,
)
_MODES = (
    ("aligned swap", Replacement("aligned"), ("", "")),
    ("direct swap", Replacement("direct"), ("18", "")),
    ("from scratch", Replacement("reset"), ("", "")),
)
PLUGIN_UPGRADE = Recipe(
    "plugin-upgrade",
    "Replacing an agent",
    "fig:plugin-upgrade",
    _swaps(_MODES)[0],
    tuple(SWAPPED),
    _swaps(_MODES)[1],
    stages=20,
    figures=("swap",),
)

TABLES = (
    MAIN_RESULTS,
    ABLATION,
    CONTROL,
    RADII,
    SCALING,
    MODEL_SCALE,
    COMPUTE,
    ZETA,
    KL_RELIABILITY,
    DEGENERACY,
    PROTOCOL,
    PLUGIN_UPGRADE,
)
