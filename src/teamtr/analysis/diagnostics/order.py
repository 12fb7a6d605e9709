"""Sensitivity to the order of updates: runs grouped by the order in which they update their agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from teamtr.records import Record, whole


@dataclass(frozen=True)
class OrderSensitivity:
    """``spread`` is the largest minus the smallest mean over orders; ``within`` the pooled standard deviation of runs
    of one order (None if no order was run twice). A spread that is not well above it is not significant."""

    means: Mapping[str, float]
    spread: float
    within: float | None


def order_sensitivity(finals: Mapping[str, Sequence[float]]) -> OrderSensitivity:
    """From the final success of each run, by order."""
    if not finals or not all(len(values) for values in finals.values()):
        raise ValueError("order_sensitivity needs at least one run of each order")
    means = {order: float(np.mean(values)) for order, values in finals.items()}
    freedom = sum(len(values) - 1 for values in finals.values())
    squares = sum(float(np.square(np.asarray(v) - means[order]).sum()) for order, v in finals.items())
    within = float(np.sqrt(squares / freedom)) if freedom else None
    return OrderSensitivity(means, max(means.values()) - min(means.values()), within)


def order_of(updates: Sequence[Record]) -> str:
    """The order of updates in a run's stages, "left > right > speaker"; "varies" if stages differ."""
    stages: dict[int, list[tuple[int, str]]] = {}
    for update in updates:
        stage, step = whole(update, "stage"), whole(update, "step")
        if stage is not None and step is not None:
            stages.setdefault(stage, []).append((step, str(update.get("agent"))))
    orders = [tuple(agent for _, agent in sorted(steps)) for steps in stages.values()]
    longest = max((len(order) for order in orders), default=0)
    whole_stages = {order for order in orders if len(order) == longest}
    if not longest:
        return "unknown"
    return " > ".join(whole_stages.pop()) if len(whole_stages) == 1 else "varies"
