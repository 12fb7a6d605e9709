"""Stage-0 alignment: pull the new agent to the old one along the old one's messages, until it is inside the radius.

The loss is the full-vocabulary KL from old to new at every position of the old agent's messages (app:align), the same
number that gates every update. Where the two spell differently there is no such KL: the loss is then the
cross-entropy of the text that was said, which is the KL from a teacher that puts all mass on it, and no radius applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from teamtr.ports import Distiller
from teamtr.randomness import generator
from teamtr.store import Checkpoints, Commit
from teamtr.swap.probes import Probes
from teamtr.swap.steering import Alignment, ProbeCheck, Progress, decide, ended, next_look, rate_at, seen
from teamtr.theory.intervals import bootstrap_upper
from teamtr.theory.objective import Objective

# With advantages of zero the surrogate is zero whatever its form; this one's ratio cannot overflow.
_NO_REWARD = Objective(ratio="length_normalized")


@dataclass
class Student:
    """The new agent beside the old one: it learns to follow the teacher on probes, of which more can be had.
    ``probes_after(k)`` are the probes after k doublings."""

    learner: Distiller
    probes_after: Callable[[int], Probes]

    def use_probes(self, doubled: int) -> None:
        """Take up the probes after this many doublings."""
        self.probes = self.probes_after(doubled)
        self.learner.use_probes(self.probes.old, self.probes.new, exact=self.probes.exact)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def step(self, rows: NDArray[np.int64], learning_rate: float) -> None:
        self.learner.step(rows, np.zeros(len(rows)), _NO_REWARD, beta=1.0, learning_rate=learning_rate)

    def charged(self, rows: NDArray[np.int64], *, per_token: bool) -> NDArray[np.float64]:
        """KL per probe, in the unit of the radius."""
        kl_M = self.learner.measure(rows).full_M
        return kl_M / self.probes.new.lengths_M[rows] if per_token else kl_M

    def bound(self, rows: NDArray[np.int64], settings: Alignment) -> tuple[float, float]:
        """Mean KL of these probes, and a bootstrap bound over problems."""
        charged_M = self.charged(rows, per_token=settings.per_token)
        upper = bootstrap_upper(
            charged_M,
            self.probes.new.cluster_M[rows],
            confidence=settings.confidence,
            rng=generator(settings.seed, "swap", "bound"),  # the same draws at every look: looks are compared
        )
        return float(charged_M.mean()), upper


def look(student: Student, progress: Progress, settings: Alignment, step: int) -> ProbeCheck:
    """Held-out probes, and beside them as many that were trained on, of the same kind."""
    probes = student.probes
    kl, upper = student.bound(probes.held_out, settings)
    usual = probes.train[probes.train < probes.usual]
    count = min(len(probes.held_out), len(usual))
    some = generator(settings.seed, "swap", "train look").choice(usual, size=count, replace=False)
    train_kl = float(student.charged(some, per_token=settings.per_token).mean())
    return ProbeCheck(progress.trial, step, kl, upper, train_kl, progress.learning_rate, progress.doubled)


def align(student: Student, settings: Alignment, store: Checkpoints) -> Iterator[ProbeCheck]:
    """Align until the upper bound on held-out probes is within the radius, or nothing more is gained.

    Every look is committed, so that a killed alignment goes on from its last one and ends with the same bits. At the
    end the weights are those of the best look, and the probes those that it was taken with.
    """
    commit = store.latest()
    if commit is None:
        student.use_probes(0)
        fresh = Progress(settings.rates[0])
        progress = seen(fresh, look(student, fresh, settings, 0), settings)
        commit = _commit(student.learner, store, progress, {"start": student.learner.fingerprint()})
        yield progress.last
    else:
        progress = Progress.of(commit.progress)
        student.use_probes(progress.doubled)
        student.load(store.folder_of(commit, "now"))
    while not ended(progress, settings):
        before = progress.doubled
        progress, role = decide(progress, settings)
        if progress.doubled > before:
            student.use_probes(progress.doubled)
        if role is not None:
            student.load(store.folder_of(commit, role))
        end = next_look(progress, settings)
        for step in range(progress.step, end):
            student.step(_rows(student.probes, settings, step), rate_at(progress, step, settings))
        progress = seen(progress, look(student, progress, settings, end), settings)
        commit = _commit(student.learner, store, progress, commit.agents)
        yield progress.last
    best = progress.looks[progress.best]
    if best.doubled < progress.doubled:
        student.use_probes(best.doubled)
    student.load(store.folder_of(commit, "best"))


def _rows(probes: Probes, settings: Alignment, step: int) -> NDArray[np.int64]:
    """The same for every rate that is tried."""
    rng = generator(settings.seed, "swap", "rows", step)
    return rng.choice(probes.train, size=min(settings.batch, len(probes.train)), replace=False)


def _commit(student: Distiller, store: Checkpoints, progress: Progress, before: Mapping[str, str]) -> Commit:
    """The weights at hand, and under their roles those of earlier looks (``before``), which are stored already.

    The commit is handed on from look to look: to ask the store for its latest would read every weight of every role.
    """
    now, last = student.fingerprint(), len(progress.looks) - 1
    agents = {**before, "now": now}
    for role, place in (("best", progress.best), ("leader", progress.leader)):
        if place == last:
            agents[role] = now
    return store.commit(len(progress.looks), agents, lambda name, folder: student.save(folder), asdict(progress))
