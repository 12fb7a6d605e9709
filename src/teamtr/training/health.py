"""Health figures of a batch and of the update trained on it, computed from recorded data without a model pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.reports import Health, MessageHealth, UpdateReport, was_skipped
from teamtr.rollout.collect import has_signal_P
from teamtr.types import Episode, Turn


def health_of(batch: RolloutBatch, limits: Mapping[str, int], report: UpdateReport | None = None) -> Health:
    """Health of the episodes of the current stage. ``limits``: maximum tokens of a message, by agent. ``report``: that
    of the update trained on them, if there was one."""
    episodes = batch.present
    kinds = [episode.verdict.kind for episode in episodes]
    signal_P = has_signal_P(batch)[: len(batch.problems) - batch.past]
    rewards = _finite(episode.reward for episode in episodes)
    spoke = dict.fromkeys(turn.agent for episode in episodes for turn in episode.turns)
    names = [name for name in limits if name in spoke]
    return Health(
        messages=_messages(episodes, names, limits),
        agents={name: found for name in names if (found := _messages(episodes, [name], limits)) is not None},
        groups=len(signal_P),
        without_signal=_share(~signal_P),
        unparsed=_share([kind == "unparsed" for kind in kinds]),
        ungraded=_share([kind in ("timeout", "crash") for kind in kinds]),
        success=_share([kind == "right" for kind in kinds]),
        reward_deviation=float(np.std(rewards)) if len(rewards) else None,
        kl_share=None if report is None else _kl_share(report),
    )


class LastHealth:
    """Computes ``health_of`` for successive updates; updates on the same episodes share the batch's figures."""

    def __init__(self) -> None:
        self._batch: RolloutBatch | None = None
        self._found: Health | None = None

    def after(self, batch: RolloutBatch, limits: Mapping[str, int], report: UpdateReport) -> Health:
        known = self._batch
        if known is None or known.episodes is not batch.episodes or known.past != batch.past or self._found is None:
            self._batch, self._found = batch, health_of(batch, limits)
        return replace(self._found, kl_share=_kl_share(report))


def _messages(episodes: Sequence[Episode], names: Sequence[str], limits: Mapping[str, int]) -> MessageHealth | None:
    """Health of these agents' messages; None if there are none."""
    spoken = [[turn for turn in episode.turns if turn.agent in names] for episode in episodes]
    turns: list[Turn] = [turn for own in spoken for turn in own]
    if not turns:
        return None
    lengths = np.array([len(turn.token_ids) for turn in turns])
    cut = np.array([turn.finish == "length" for turn in turns])
    logprobs = np.concatenate([turn.sampler_logprobs for turn in turns]).astype(np.float64)
    known = logprobs[np.isfinite(logprobs)]  # tokens inserted by redrawing have none
    rewards = _finite(episode.reward for episode, own in zip(episodes, spoken, strict=True) if own)
    allowed = {limits[name] for name in names}
    return MessageHealth(
        messages=len(turns),
        limit=allowed.pop() if len(allowed) == 1 else None,
        mean=float(lengths.mean()),
        p95=float(np.percentile(lengths, 95, method="inverted_cdf")),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        cut=_share(cut),
        ended_mean=None if cut.all() else float(lengths[~cut].mean()),
        entropy=float(-known.mean()) if len(known) else None,
        reward=float(rewards.mean()) if len(rewards) else None,
    )


def _kl_share(report: UpdateReport) -> float | None:
    if was_skipped(report.outcome) or not report.radius > 0.0 or not np.isfinite(report.radius):
        return None
    return float(report.kl_upper / report.radius) if np.isfinite(report.kl_upper) else None


def _finite(values: Iterable[float]) -> np.ndarray:
    found = np.array(list(values), dtype=np.float64)
    return found[np.isfinite(found)]


def _share(marks: Sequence[bool] | np.ndarray) -> float:
    return float(np.mean(marks)) if len(marks) else 0.0
