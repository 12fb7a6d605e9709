"""Stage-0 alignment: pull the new agent to the old one along the old one's messages, until it is inside the radius.

The loss is the full-vocabulary KL from old to new at every position of the old agent's messages (app:align), the same
number that gates every update. Where the two spell differently there is no such KL: the loss is then the
cross-entropy of the text that was said, which is the KL from a teacher that puts all mass on it, and no radius applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teamtr.engines.learner import PolicyLearner, _Reference
from teamtr.engines.policy import Head
from teamtr.presets import Objective
from teamtr.randomness import generator
from teamtr.store import Checkpoints
from teamtr.swap.probes import Probes
from teamtr.theory.kl import bootstrap_upper
from teamtr.types import Divergence, Floats

_NEVER = -1e4
"""A logit whose probability is exactly 0. Not minus infinity: the fused kernel reads logits block by block, and a whole
block of minus infinity has no largest."""

# With advantages of zero the surrogate is zero whatever its form; this one's ratio cannot overflow.
_NO_REWARD = Objective(ratio="length_normalised")


@dataclass(frozen=True)
class Alignment:
    """How to align. ``radius`` is in nats per message, or per token with ``per_token``; None where no KL exists.

    Probes held out are looked at every ``check_every`` steps. After ``patience`` looks without a new best the learning
    rate is halved; after ``halvings`` of those, alignment ends.
    """

    learning_rate: float
    radius: float | None
    per_token: bool = False
    confidence: float = 0.95
    batch: int = 64
    check_every: int = 25
    max_steps: int = 2000
    patience: int = 8
    halvings: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Look:
    """One look at the held-out probes: mean KL (or cross-entropy) from old to new, and its upper bound."""

    step: int
    kl: float
    upper: float
    learning_rate: float


@dataclass(frozen=True)
class Progress:
    """Where an alignment stands; part of every commit. ``best`` is the place of the best look in ``looks``."""

    looks: tuple[Look, ...]
    best: int
    learning_rate: float
    halved: int = 0

    @property
    def step(self) -> int:
        return self.looks[-1].step

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Progress:
        return cls(**{**record, "looks": tuple(Look(**look) for look in record["looks"])})


class Aligner(PolicyLearner):
    """A learner whose frozen reference is another agent: ``step`` and ``measure`` then go from old to new.

    It shares the policy of the team's own learner and keeps its optimizer to itself, so that training starts afresh.
    """

    def follow(self, teacher: PolicyLearner, probes: Probes) -> None:
        """From now on all measures are from the teacher's policy, or from what it said, to this one's."""
        vocabulary = self._vocabulary(probes)
        if probes.exact:
            frozen = teacher._fitting(lambda: teacher._freeze(probes.old))
            self._reference = replace(frozen, batch=probes.new, head=_fit(frozen.head, vocabulary))
        else:
            self._reference = _said(probes, vocabulary, self.policy.device)

    @torch.no_grad()
    def _vocabulary(self, probes: Probes) -> int:
        part = probes.new.rows([0])
        with self.policy.computing():
            return int(self.policy.head()(self.policy.features(part.prompts, part.messages)[:1]).shape[-1])

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._moments = {name: moment.to(self.policy.device) for name, moment in self._moments.items()}


def _fit(head: Head, vocabulary: int) -> Head:
    """The teacher's logits over the student's ids: models pad their output layers to different sizes.

    What the teacher lacks it never says; what the student lacks no tokenizer writes, and its mass is left out.
    """

    def fitted(features_NH: Tensor) -> Tensor:
        logits_NV = head(features_NH)
        missing = vocabulary - logits_NV.shape[-1]
        if missing <= 0:
            return logits_NV[:, :vocabulary]
        return torch.nn.functional.pad(logits_NV, (0, missing), value=_NEVER)

    return fitted


def _said(probes: Probes, vocabulary: int, device: torch.device) -> _Reference:
    """A teacher that says each message for certain: the KL from it is the cross-entropy."""

    def certain(ids_N1: Tensor) -> Tensor:
        logits_NV = torch.full((len(ids_N1), vocabulary), _NEVER, device=ids_N1.device)
        return logits_NV.scatter_(-1, ids_N1.long(), 0.0)

    ids = [torch.as_tensor(m, dtype=torch.int64, device=device)[:, None] for m in probes.new.messages]
    return _Reference(probes.new, ids, certain, [torch.zeros(len(i), device=device) for i in ids])


def look(aligner: Aligner, probes: Probes, settings: Alignment, step: int, learning_rate: float) -> Look:
    """Held-out probes, in the unit of the radius, with a bootstrap bound over problems."""
    rows = probes.held_out
    kl_M = aligner.measure(rows).full_M
    charged_M = kl_M / probes.new.lengths_M[rows] if settings.per_token else kl_M
    upper = bootstrap_upper(
        charged_M,
        probes.new.cluster_M[rows],
        confidence=settings.confidence,
        rng=generator(settings.seed, "swap", "bound"),  # the same draws at every look: looks are compared
    )
    return Look(step, float(charged_M.mean()), upper, learning_rate)


def align(aligner: Aligner, probes: Probes, settings: Alignment, store: Checkpoints) -> Iterator[Look]:
    """Align until the upper bound on held-out probes is within the radius, or nothing more is gained.

    Every look is committed, so that a killed alignment goes on from its last one and ends with the same bits. At the
    end the weights are those of the best look.
    """
    progress = _resume(aligner, store)
    if progress is None:
        progress = Progress((look(aligner, probes, settings, 0, settings.learning_rate),), 0, settings.learning_rate)
        _commit(aligner, store, progress, {})
        yield progress.looks[-1]
    while not _done(progress, settings):
        for step in range(progress.step, progress.step + settings.check_every):
            rng = generator(settings.seed, "swap", "rows", step)
            size = min(settings.batch, len(probes.train))
            rows = rng.choice(probes.train, size=size, replace=False)
            aligner.step(rows, np.zeros(size), _NO_REWARD, beta=1.0, learning_rate=progress.learning_rate)
        seen = look(aligner, probes, settings, progress.step + settings.check_every, progress.learning_rate)
        progress = _after(progress, seen, settings)
        _commit(aligner, store, progress, _latest_agents(store))
        yield seen
    _load(aligner, store, "best")


def within(found: Look, settings: Alignment) -> bool:
    return settings.radius is not None and found.upper <= settings.radius


def _done(progress: Progress, settings: Alignment) -> bool:
    return (
        within(progress.looks[-1], settings)
        or progress.step >= settings.max_steps
        or progress.halved > settings.halvings
    )


def _after(progress: Progress, seen: Look, settings: Alignment) -> Progress:
    """Steer: a new best is remembered; too long without one and the steps get smaller."""
    looks = (*progress.looks, seen)
    if seen.upper < progress.looks[progress.best].upper:
        return replace(progress, looks=looks, best=len(looks) - 1)
    since = len(looks) - 1 - progress.best
    if since % settings.patience:
        return replace(progress, looks=looks)
    return replace(progress, looks=looks, learning_rate=progress.learning_rate / 2, halved=progress.halved + 1)


# -- commits --------------------------------------------------------------------------------------------------


def _commit(aligner: Aligner, store: Checkpoints, progress: Progress, before: Mapping[str, str]) -> None:
    now = aligner.fingerprint()
    best = now if progress.best == len(progress.looks) - 1 else before["best"]
    # "best" is written only when it is what the learner holds now: an older one is stored already.
    save: Callable[[str, Path], None] = lambda name, folder: aligner.save(folder)  # noqa: E731
    store.commit(len(progress.looks), {"now": now, "best": best}, save, asdict(progress))


def _latest_agents(store: Checkpoints) -> Mapping[str, str]:
    commit = store.latest()
    return {} if commit is None else commit.agents


def _resume(aligner: Aligner, store: Checkpoints) -> Progress | None:
    commit = store.latest()
    if commit is None:
        return None
    aligner.load(store.folder_of(commit, "now"))
    return Progress.of(commit.progress)


def _load(aligner: Aligner, store: Checkpoints, which: str) -> None:
    commit = store.latest()
    assert commit is not None
    aligner.load(store.folder_of(commit, which))


# -- what the alignment achieved ------------------------------------------------------------------------------


def surrogate(divergence: Divergence, advantages_M: Floats) -> float:
    """What the old team's advantages say of the new agent: mean of (new / old) * advantage (app:diagnostics)."""
    return float(np.mean(np.exp(divergence.log_ratio_M) * advantages_M))


@dataclass(frozen=True)
class TextGap:
    """How much less likely the new agent finds the old one's texts, on held-out probes: a diagnostic, no trust region.

    The mean of log old(m) - log new(m) bounds the KL between the two laws of texts from above, up to the entropy of
    the old agent's choice among spellings of one text. It is sampled, so it is noisy, and no certificate uses it.
    """

    nats_per_message: float
    nats_per_character: float


def text_gap(teacher: PolicyLearner, aligner: Aligner, probes: Probes) -> TextGap:
    rows = probes.held_out
    old_M = teacher.begin(probes.old.rows(rows))
    teacher.end()
    gap_M = old_M - aligner.measure(rows).log_ratio_M  # its reference is certain, so the ratio is log new(m)
    return TextGap(float(gap_M.mean()), float(gap_M.sum() / probes.characters_M[rows].sum()))
