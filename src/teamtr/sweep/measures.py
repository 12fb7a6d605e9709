"""Measures of a finished run, as the paper defines them, from the summary that its report shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from teamtr.analysis.figures import Run

Measure = Callable[[Run], float | None]
"""A number of a finished run; None if its log does not have it."""

FLIPS = "near_flip_rate"
ACCURACY, TOKENS, SECONDS = "accuracy, %", "tokens per answer", "seconds per answer"
ANSWERED: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    ACCURACY: lambda answers: 100.0 * float(answers["avg_at_k"]),
    TOKENS: lambda answers: float(answers["tokens_per_answer"]),
    SECONDS: lambda answers: None if (found := answers["seconds_per_answer"]) is None else float(found),
}
"""Columns of teams that are not trained, from the recorded results of a method; None if it did not record it."""


def success(run: Run) -> float | None:
    """Held-out success at the end, in percent; without evaluations, the exact success if the task has it."""
    if run.data["evals"]:
        return 100.0 * float(run.data["evals"][-1]["success"])
    exact = [row["exact_success"] for row in run.updates if row["exact_success"] is not None]
    return 100.0 * float(exact[-1]) if exact else None


def success_before(run: Run) -> float | None:
    return 100.0 * float(run.data["evals"][0]["success"]) if run.data["evals"] else None


def best(run: Run) -> float | None:
    """Held-out success of the best checkpoint, in percent; optimistic, since the same problems selected it."""
    found = run.data["run"]["best"]
    return None if found is None else 100.0 * float(found["success"])


def tokens_per_answer(run: Run) -> float | None:
    """Tokens per answer in evaluations, sampled by all agents together."""
    answers = sum(row["problems"] * row["samples"] for row in run.data["evals"])
    return float(run.data["cost"]["eval_tokens"]) / answers if answers else None


def seconds_per_answer(run: Run) -> float | None:
    """Wall-clock seconds per answer in evaluations, affected by whatever else ran at the same time."""
    answers = sum(row["problems"] * row["samples"] for row in run.data["evals"])
    return float(run.data["cost"]["eval_seconds"]) / answers if answers else None


def millions_sampled(run: Run) -> float | None:
    """Millions of tokens of all messages of training rollouts."""
    return float(run.data["cost"]["sampled_tokens"]) / 1e6 if run.data["cost"]["sampled_tokens"] else None


def seconds_to_train(run: Run) -> float | None:
    """Wall-clock seconds of the training commands, from the first record of each to its last, without evaluations;
    affected by whatever else ran at the same time."""
    total = run.data["run"]["seconds"]
    return None if total is None else float(total) - float(run.data["cost"]["eval_seconds"] or 0.0)


def before_swap(run: Run) -> float | None:
    return _at_swap(run, "before")


def shock(run: Run) -> float | None:
    """Success lost by replacing an agent, in points."""
    found = run.data["swaps"][0]["shock"] if run.data["swaps"] else None
    return None if found is None else 100.0 * float(found)


def _at_swap(run: Run, when: str) -> float | None:
    row = run.data["swaps"][0]["success"].get(when) if run.data["swaps"] else None
    return None if not row or row["success"] is None else 100.0 * float(row["success"])


def stale_gap(run: Run) -> float | None:
    """Delta_stale at the last probed stage."""
    by_stage = (run.data["probes"] or {"by_stage": {}})["by_stage"]
    return float(by_stage[max(by_stage)]["total"]) if by_stage else None


def stability(run: Run) -> float | None:
    """Standard deviation of the gains in success from stage to stage, in points."""
    deviation = run.data["stability"]["deviation"]
    return None if deviation is None else 100.0 * float(deviation)


def coordination(run: Run) -> float | None:
    """Share of episodes in which every agent that states an answer states the right one, in percent, at the end."""
    return 100.0 * float(run.data["coordination"][-1]["consensus"]) if run.data["coordination"] else None


def drift(run: Run) -> float | None:
    """D_occ at the last probed stage: the total variation of conversations, summed over the stage's updates."""
    probes = [probe for probe in run.probes if "total_variation" in probe["weights"]]
    last = max((probe["stage"] for probe in probes), default=None)
    found = [probe["weights"]["total_variation"] for probe in probes if probe["stage"] == last]
    return float(sum(found)) if found else None


def millions_of_tokens(run: Run) -> float | None:
    """Millions of tokens of prompts and messages of all training rollouts, as the paper counts them."""
    by_agent = run.data["cost"]["tokens"].values()
    total = sum(tokens.get("prompt", 0.0) + tokens.get("sampled", 0.0) for tokens in by_agent)
    return total / 1e6 if total else None


def thousands_of_rollouts(run: Run) -> float | None:
    return float(run.data["cost"]["episodes"]) / 1e3 if run.data["cost"]["episodes"] else None


def seconds_of_an_update(run: Run) -> float | None:
    total = run.data["cost"]["overhead"]["seconds"]
    return float(total) / len(run.updates) if total and run.updates else None


def kept(run: Run) -> float | None:
    """Share of updates that were kept, in percent."""
    return 100.0 * len(run.kept) / len(run.updates) if run.updates else None


def outside(run: Run) -> float | None:
    """Share of the kept updates whose exact KL exceeds the radius, in percent."""
    pairs = [(kl, row["radius"]) for row in run.kept if (kl := _kl(row)) is not None and row["radius"] is not None]
    return 100.0 * float(np.mean([kl > radius for kl, radius in pairs])) if pairs else None


def kl_quantile(share: float) -> Measure:
    """A quantile of the KL of kept updates, in radii."""

    def measure(run: Run) -> float | None:
        kept = [kl / row["radius"] for row in run.kept if (kl := _kl(row)) is not None and row["radius"]]
        return float(np.quantile(kept, share)) if kept else None

    return measure


def _kl(row: Mapping[str, Any]) -> float | None:
    """The exact KL of an update; its upper bound if the radius is per token, since only the bound is in that unit."""
    value: float | None = row["kl_upper"] if row.get("unit") == "token" else row["kl_full"]
    return value


def regressions(run: Run) -> float | None:
    """Share of evaluations with less success than the one before, in percent."""
    found = [row["success"] for row in run.data["evals"]]
    return 100.0 * float(np.mean(np.diff(found) < 0.0)) if len(found) > 1 else None


def certificate(key: str, scale: float = 1.0) -> Measure:
    def measure(run: Run) -> float | None:
        found = ((run.data["certificates"] or {}).get("turn_aware") or {}).get(key)
        return None if found is None else scale * float(found)

    return measure


def zeta(name: str, statistic: str) -> Measure:
    def measure(run: Run) -> float | None:
        found = ((run.data["zeta"] or {}).get(name) or {}).get(statistic)
        return None if found is None else float(found)

    return measure


def subsample(share: float, key: str) -> Measure:
    """A statistic of the KL monitor with this share of the positions."""

    def measure(run: Run) -> float | None:
        rows = [row for row in run.data["kl_subsamples"] or () if abs(row["share"] - share) < 1e-9]
        value = rows[0][key] if rows else None
        return None if value is None else (100.0 if key == FLIPS else 1.0) * float(value)

    return measure


def weights(step: int, key: str, scale: float = 1.0) -> Measure:
    """A statistic of the trajectory weights before the ``step``-th update of a stage (from 1), averaged over the probed
    stages."""

    def measure(run: Run) -> float | None:
        found = [p["weights"][key] for p in run.probes if p["step"] == step - 1 and key in p["weights"]]
        return scale * float(np.mean(found)) if found else None

    return measure


def gap_at(step: int) -> Measure:
    """|surrogate on stale rollouts - that on fresh ones| of the ``step``-th update of a stage, averaged over stages."""

    def measure(run: Run) -> float | None:
        found = [abs(p["gap"]["estimate"]) for p in run.probes if p["step"] == step - 1 and p["gap"] is not None]
        return float(np.mean(found)) if found else None

    return measure


def moved(ranks: slice) -> Measure:
    """Mean change of log-probability of the tokens of these ranks, over the probed updates that were kept."""

    def measure(run: Run) -> float | None:
        found = [np.mean(shift["moved_R"][ranks]) for p in run.probes if (shift := p["shift"])]
        return float(np.mean(found)) if found else None

    return measure


def flipped(run: Run) -> float | None:
    """Share of positions whose most likely token changed, in percent."""
    found = [p["shift"]["flipped"] for p in run.probes if p["shift"]]
    return 100.0 * float(np.mean(found)) if found else None


def over_seeds(runs: Sequence[Run], measure: Callable[[Run], float | None]) -> list[float]:
    return [value for run in runs if (value := measure(run)) is not None]
