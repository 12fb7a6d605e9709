"""The cost of a run, and the overhead of its sampling over naive sequential training (tab:compute-lite)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from teamtr.records import Record, mapping, number, whole


@dataclass(frozen=True)
class Overhead:
    """Costs compared with naive sequential training, which samples once per stage: ``naive_tokens`` is what this run
    sampled for the first steps of its stages.

    ``naive_seconds`` scales the run's sampling time by the same share and keeps the rest; None if the sampling time is
    not known.
    """

    sampled_tokens: int
    naive_tokens: int
    seconds: float | None
    naive_seconds: float | None

    @property
    def token_ratio(self) -> float | None:
        return self.sampled_tokens / self.naive_tokens if self.naive_tokens else None

    @property
    def seconds_ratio(self) -> float | None:
        return self.seconds / self.naive_seconds if self.seconds and self.naive_seconds else None


def sampled_by_update(updates: Sequence[Record]) -> list[int]:
    """Tokens sampled between each update and the previous one; 0 if the previous one is not in the log."""
    totals = [whole(update, "sampled_tokens_total") or 0 for update in updates]
    numbers = [whole(update, "update") for update in updates]
    increments = [max(now - before, 0) for before, now in zip([0, *totals], totals, strict=False)]
    follows = [
        before is None or now is None or now == before + 1 for before, now in zip([0, *numbers], numbers, strict=False)
    ]
    return [tokens if adjacent else 0 for tokens, adjacent in zip(increments, follows, strict=True)]


def overhead(updates: Sequence[Record], seconds: Mapping[str, Mapping[str, float]] | None = None) -> Overhead:
    """The overhead of a run. ``seconds``: by agent and phase, including "sample", from a commit's account."""
    increments = sampled_by_update(updates)
    first = sum(n for update, n in zip(updates, increments, strict=True) if whole(update, "step") == 0)
    total = sum(increments)
    if not seconds or not total:
        return Overhead(total, first, None, None)
    sampling = sum(number(phases, "sample") or 0.0 for phases in seconds.values())
    everything = sum(number(phases, phase) or 0.0 for phases in seconds.values() for phase in phases)
    return Overhead(total, first, everything, everything - sampling * (1.0 - first / total))


def spent_by_agent(updates: Sequence[Record], field: str) -> dict[str, dict[str, float]]:
    """The sum of ``tokens`` or ``seconds`` of all updates, by agent and phase, from the log alone."""
    spent: dict[str, dict[str, float]] = {}
    for update in updates:
        phases = spent.setdefault(str(update.get("agent")), {})
        for phase in mapping(update, field):
            phases[phase] = phases.get(phase, 0.0) + (number(update[field], phase) or 0.0)
    return spent
