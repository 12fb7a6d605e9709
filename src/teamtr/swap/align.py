"""Stage-0 alignment: distills the old agent into the new one on the old one's messages, until within the radius.

The loss is the full-vocabulary KL from old to new at every position of the old agent's messages (app:align), the same
quantity that gates every update. If the two tokenize differently there is no such KL. The loss is then the
cross-entropy of the messages, which is the KL from a teacher that puts all mass on them, and no radius applies.
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

# With advantages of zero every surrogate is zero; the ratio of this one cannot overflow.
_NO_REWARD = Objective(ratio="length_normalized")


@dataclass
class Student:
    """The new agent, distilled from the old one (the teacher) on probes. ``probes_after(k)`` returns the probes after k
    doublings of their number."""

    learner: Distiller
    probes_after: Callable[[int], Probes]

    def use_probes(self, doubled: int) -> None:
        """Switch to the probes after this many doublings."""
        self.probes = self.probes_after(doubled)
        self.learner.use_probes(self.probes.old, self.probes.new, exact=self.probes.exact)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)

    def step(self, rows: NDArray[np.int64], learning_rate: float) -> None:
        self.learner.step(rows, np.zeros(len(rows)), _NO_REWARD, beta=1.0, learning_rate=learning_rate)

    def charged(self, rows: NDArray[np.int64], *, per_token: bool) -> NDArray[np.float64]:
        """KL of each probe, in the unit of the radius."""
        kl_M = self.learner.measure(rows).full_M
        return kl_M / self.probes.new.lengths_M[rows] if per_token else kl_M

    def bound(self, rows: NDArray[np.int64], settings: Alignment) -> tuple[float, float]:
        """Mean KL of these probes, and a bootstrap bound over problems."""
        charged_M = self.charged(rows, per_token=settings.per_token)
        upper = bootstrap_upper(
            charged_M,
            self.probes.new.cluster_M[rows],
            confidence=settings.confidence,
            rng=generator(settings.seed, "swap", "bound"),  # the same draws in all checks, to compare them
        )
        return float(charged_M.mean()), upper


def look(student: Student, progress: Progress, settings: Alignment, step: int) -> ProbeCheck:
    """Checks the student on the held-out probes, and on as many training probes of the same kind."""
    probes = student.probes
    kl, upper = student.bound(probes.held_out, settings)
    usual = probes.train[probes.train < probes.usual]
    count = min(len(probes.held_out), len(usual))
    some = generator(settings.seed, "swap", "train look").choice(usual, size=count, replace=False)
    train_kl = float(student.charged(some, per_token=settings.per_token).mean())
    return ProbeCheck(progress.trial, step, kl, upper, train_kl, progress.learning_rate, progress.doubled)


def align(student: Student, settings: Alignment, store: Checkpoints) -> Iterator[ProbeCheck]:
    """Align until the upper bound on held-out probes is within the radius, or there is no further improvement.

    Every check is committed, so that a killed alignment resumes from its last one and ends with the same bits. At the
    end the weights are those of the best check, and the probes those that it used.
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
    """The training rows of a step; the same for every learning rate that is tried."""
    rng = generator(settings.seed, "swap", "rows", step)
    return rng.choice(probes.train, size=min(settings.batch, len(probes.train)), replace=False)


def _commit(student: Distiller, store: Checkpoints, progress: Progress, before: Mapping[str, str]) -> Commit:
    """Commits the current weights, and under their roles those of earlier checks (``before``), already stored.

    The commit is passed from check to check, because reading the latest one from the store would read all weights.
    """
    now, last = student.fingerprint(), len(progress.looks) - 1
    agents = {**before, "now": now}
    for role, place in (("best", progress.best), ("leader", progress.leader)):
        if place == last:
            agents[role] = now
    return store.commit(len(progress.looks), agents, lambda name, folder: student.save(folder), asdict(progress))
