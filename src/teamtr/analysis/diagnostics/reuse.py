"""Where the rollouts of updates came from, what they were still worth, and what the other choices would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr.analysis.diagnostics.accounting import sampled_by_update
from teamtr.records import Record, mapping, number, whole
from teamtr.theory.intervals import mean_interval

HALF = 0.5
"""Rollouts that are worth less than this share of new ones are worn out, where the plan sets no share of its own."""
UNHARMED = 0.95
"""Rollouts that are reused as they are did no harm in the map of staleness where their mean share was at least this
(four cells); below it (nine cells) success was 9 points lower than with new ones on average. Chosen after looking."""
FEW_REDRAWS = 5
"""Fewer say nothing of a bias: the rewards of a few episodes are often equal, and their spread nothing."""

ROUNDING = 1e-6


@dataclass(frozen=True)
class Bias:
    """How much more redrawn episodes earned than new ones of the same problems; of all ``redraws`` that measured it,
    or of one."""

    estimate: float
    lower: float
    upper: float
    redraws: int = 1

    @property
    def told(self) -> bool:
        """Whether the interval leaves zero out, over enough redraws to say so."""
        return self.redraws >= FEW_REDRAWS and not self.lower <= 0.0 <= self.upper


@dataclass(frozen=True)
class Decision:
    """One update's rollouts, as ``records.RolloutChoice`` has them.

    ``tokens`` were sampled for it, ``tokens_anew`` are what new rollouts would have taken: those of the newest batch of
    the stage that was sampled whole. None where the log does not tell.
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
        """Whether the rollouts that were there were worth less than the plan asks for, or than half where it does not
        ask."""
        return self.share is not None and self.share < (self.needed or HALF)


@dataclass(frozen=True)
class Tokens:
    """Sampled for the updates that are counted: in this run, with new rollouts before every update, and with new ones
    at the start of a stage only."""

    spent: int
    always: int
    never: int


def decisions(updates: Sequence[Record]) -> tuple[Decision, ...]:
    """Of the updates whose record tells where their rollouts came from, in order."""
    found: list[Decision] = []
    stage_of_batch: int | None = None
    batch = 0  # tokens of the newest whole batch
    for update, tokens in zip(updates, sampled_by_update(updates), strict=True):
        choice = mapping(update, "rollouts")
        counted, stage, step = (whole(update, key) for key in ("update", "stage", "step"))
        if not choice or counted is None or stage is None or step is None:
            continue
        action = str(choice.get("action"))
        if action == "sample":
            stage_of_batch, batch = stage, tokens
        known = batch > 0 and stage_of_batch == stage  # not where the log is thinned, or has lost lines
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
    """A share of one, which rounding may have taken a little beyond it."""
    value = number(logged, key)
    return None if value is None or not -ROUNDING <= value <= 1.0 + ROUNDING else min(max(value, 0.0), 1.0)


def _bias(logged: Record) -> Bias | None:
    estimate, lower, upper = (number(logged, key) for key in ("estimate", "lower", "upper"))
    return None if estimate is None or lower is None or upper is None else Bias(estimate, lower, upper)


def tokens_by_choice(found: Sequence[Decision]) -> Tokens | None:
    """None where no batch's tokens are known."""
    known = [(d.step, d.tokens, d.tokens_anew) for d in found if d.tokens is not None and d.tokens_anew is not None]
    if not known:
        return None
    return Tokens(
        spent=sum(tokens for _, tokens, _ in known),
        always=sum(anew for _, _, anew in known),
        never=sum(anew for step, _, anew in known if step == 0),
    )


def bias_of_redrawing(found: Sequence[Decision]) -> Bias | None:
    """The mean over the redraws that measured it, with a 95 % interval of Student's t over them.

    All count alike, because each plays equally many problems twice; their own intervals, of few problems, would make
    poor weights. Without a bias the redraws of one stage are uncorrelated, whatever they have in common.
    """
    measured = [decision.bias for decision in found if decision.bias is not None]
    if len(measured) < 2:
        return measured[0] if measured else None
    mean = mean_interval([bias.estimate for bias in measured])
    return Bias(mean.estimate, mean.lower, mean.upper, len(measured))
