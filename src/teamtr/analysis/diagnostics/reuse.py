"""Reuse of rollouts: their source and effective share for each update, and the token cost of the alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.analysis.diagnostics.accounting import sampled_by_update
from teamtr.records import Record, mapping, number, whole
from teamtr.theory.intervals import mean_interval

HALF = 0.5
"""Rollouts with a smaller effective share than this count as worn, if the plan sets no threshold of its own."""
UNHARMED = 0.95
"""Rollouts reused without reweighting did no harm in the map of staleness if their mean share was at least this (four
cells); below it (nine cells) success was 9 points lower than with new ones on average. Chosen after seeing the data."""
FEW_REDRAWS = 5
"""Minimum redraws to report a bias: with fewer, the rewards are often equal and their spread is zero."""

ROUNDING = 1e-6


@dataclass(frozen=True)
class Bias:
    """The mean reward of redrawn episodes minus that of new ones of the same problems, over ``redraws`` redraws."""

    estimate: float
    lower: float
    upper: float
    redraws: int = 1

    @property
    def told(self) -> bool:
        """Whether the bias is significant: the interval excludes zero, and there were enough redraws."""
        return self.redraws >= FEW_REDRAWS and not self.lower <= 0.0 <= self.upper


@dataclass(frozen=True)
class Decision:
    """One update's rollouts, from ``records.RolloutChoice``.

    ``tokens`` were sampled for it; ``tokens_anew`` is the cost of new rollouts, estimated by the newest completely
    sampled batch of the stage. None if the log does not have them.
    """

    update: int
    stage: int
    step: int
    agent: str
    action: str
    reason: str
    share: float | None
    needed: float | None
    cut: float
    kept: float | None
    bias: Bias | None
    tokens: int | None
    tokens_anew: int | None

    @property
    def worn(self) -> bool:
        """Whether the effective share of the existing rollouts was below the plan's threshold, or below ``HALF`` if it
        has none."""
        return self.share is not None and self.share < (self.needed or HALF)


@dataclass(frozen=True)
class Tokens:
    """Tokens sampled for the counted updates: in this run, with new rollouts before every update, and with new ones
    only at the start of a stage."""

    spent: int
    always: int
    never: int


def decisions(updates: Sequence[Record]) -> tuple[Decision, ...]:
    """The rollout decisions of all updates whose records have them, in order."""
    found: list[Decision] = []
    stage_of_batch: int | None = None
    batch = 0  # tokens of the newest completely sampled batch
    for update, tokens in zip(updates, sampled_by_update(updates), strict=True):
        choice = mapping(update, "rollouts")
        counted, stage, step = (whole(update, key) for key in ("update", "stage", "step"))
        if not choice or counted is None or stage is None or step is None:
            continue
        action = str(choice.get("action"))
        if action == "sample":
            stage_of_batch, batch = stage, tokens
        known = batch > 0 and stage_of_batch == stage  # False if the log is thinned or has lost lines
        partly = mapping(choice, "partly")
        found.append(
            Decision(
                update=counted,
                stage=stage,
                step=step,
                agent=str(update.get("agent")),
                action=action,
                reason=str(choice.get("reason")),
                share=_part(choice, "share"),
                needed=_part(choice, "needed"),
                cut=_part(choice, "cut") or 0.0,
                kept=_part(partly, "kept"),
                bias=_bias(mapping(partly, "bias")),
                tokens=tokens if known else None,
                tokens_anew=batch if known else None,
            )
        )
    return tuple(found)


def _part(logged: Record, key: str) -> float | None:
    """A share, clamped to [0, 1] against rounding; None if it is further outside."""
    value = number(logged, key)
    return None if value is None or not -ROUNDING <= value <= 1.0 + ROUNDING else min(max(value, 0.0), 1.0)


def _bias(logged: Record) -> Bias | None:
    estimate, lower, upper = (number(logged, key) for key in ("estimate", "lower", "upper"))
    return None if estimate is None or lower is None or upper is None else Bias(estimate, lower, upper)


def tokens_by_choice(found: Sequence[Decision]) -> Tokens | None:
    """The tokens of this run and of both alternatives; None if no batch's tokens are known."""
    known = [(d.step, d.tokens, d.tokens_anew) for d in found if d.tokens is not None and d.tokens_anew is not None]
    if not known:
        return None
    return Tokens(
        spent=sum(tokens for _, tokens, _ in known),
        always=sum(anew for _, _, anew in known),
        never=sum(anew for step, _, anew in known if step == 0),
    )


def bias_of_redrawing(found: Sequence[Decision]) -> Bias | None:
    """The mean bias over the redraws that measured it, with a 95 % interval of Student's t over them.

    All have equal weight, because each plays equally many problems twice; their own intervals, over few problems, would
    make poor weights. Without a bias the redraws of one stage are uncorrelated, whatever they have in common.
    """
    measured = [decision.bias for decision in found if decision.bias is not None]
    if len(measured) < 2:
        return measured[0] if measured else None
    mean = mean_interval([bias.estimate for bias in measured])
    return Bias(mean.estimate, mean.lower, mean.upper, len(measured))
