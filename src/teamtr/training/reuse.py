"""Decides before an update whether to reuse the existing episodes, redraw parts of them, or sample new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.presets import Resample
from teamtr.theory.weights import share_of, share_worth_keeping, truncated_weights
from teamtr.types import Floats

Action = Literal["sample", "reuse", "redraw"]


@dataclass(frozen=True)
class Choice:
    """Where the episodes of an update come from, and why.

    ``sample``: all are new. ``reuse``: the existing ones. ``redraw``: the parts of the existing ones that the current
    team might have written are kept, and the rest is sampled. ``share`` is the effective share of the existing
    episodes, among those with a signal, and ``needed`` its threshold; None where the plan does not check it.
    """

    action: Action
    reason: str
    share: float | None = None
    needed: float | None = None


def choose(
    resample: Resample, batch: RolloutBatch | None, step: int, returns_PG: Floats | None, price: float | None
) -> Choice:
    """The plan's choice before this step of a stage.

    Args:
        batch: the existing episodes.
        returns_PG: their returns.
        price: the cost of sampling a new batch, relative to the update; None if it does not matter or is not known yet.
    """
    if step == 0:
        return Choice("sample", "a stage begins")
    if resample.every and step % resample.every == 0:
        return Choice("sample", "before every update" if resample.every == 1 else f"one update in {resample.every}")
    assert batch is not None, "a stage that goes on in the middle needs the batch it held"
    assert returns_PG is not None, "and its returns"
    share = effective_share(batch, returns_PG)
    if not resample.reweight:
        return Choice("reuse", "the plan samples at the start of a stage", share)
    needed, why = resample.min_effective_share, "the least that the plan allows"
    if price is not None and share_worth_keeping(price) > needed:
        needed, why = share_worth_keeping(price), f"sampling costs {price:.2g} of an update"
    if share >= needed:
        return Choice("reuse", f"worth {share:.1%} of new ones", share, needed)
    action: Action = "redraw" if resample.partial else "sample"
    return Choice(action, f"worth {share:.1%} of new ones, needed {needed:.1%} ({why})", share, needed)


def effective_share(batch: RolloutBatch, returns_PG: Floats) -> float:
    """The effective sample size of the batch as a share of a newly sampled one, from the truncated weights. Counts only
    groups with different, finite returns: the others have no signal, whatever their weights."""
    log_weights_E = batch.log_weights_E
    if log_weights_E is None:
        return 1.0
    signal_P = np.isfinite(returns_PG).all(axis=1) & (np.ptp(returns_PG, axis=1) > 0.0)
    weights_E = truncated_weights(log_weights_E).values_E
    share = share_of(weights_E[np.repeat(signal_P, batch.group_size)])
    if not batch.past:
        return share
    # Episodes of an earlier stage are added to as many as the plan samples.
    present = int(signal_P[: len(signal_P) - batch.past].sum())
    return min(1.0, share * int(signal_P.sum()) / present) if present else share


def still_worth(batch: RolloutBatch, drawn_again: Sequence[int], needed: float) -> RolloutBatch | None:
    """The episodes of the last stage that a new stage may train on again: those of problems that are drawn again,
    except episodes that the last stage itself reused. None if their effective share is below ``needed``."""
    own = [p for p in drawn_again if p < len(batch.problems) - batch.past]
    if not own or batch.carried is None:
        return None
    part = batch.of_problems(own)
    assert part.log_weights_E is not None
    return part if share_of(truncated_weights(part.log_weights_E).values_E) >= needed else None
