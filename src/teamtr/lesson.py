"""What one update is given: the agent's messages with their advantages, and how to climb."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teamtr.presets import Radii
from teamtr.theory.advantages import Advantages
from teamtr.types import AgentBatch, Floats


@dataclass(frozen=True)
class Optimisation:
    """How an update climbs. The radius sets the step's size; ``learning_rate`` only its starting guess.

    ``gate_share`` is the share of every problem's episodes that the gate looks at first; 1 is all of them at once.
    """

    learning_rate: float = 1e-3
    epochs: int = 2
    minibatches: int = 4
    confidence: float = 0.95
    max_backtracks: int = 6
    gate_share: float = 0.25


@dataclass(frozen=True)
class Lesson:
    """What one agent learns from: its messages, and the advantages and weights of the episodes they stand in."""

    batch: AgentBatch
    advantages: Advantages
    returns_PG: Floats
    weights_E: Floats | None = None

    @property
    def advantages_M(self) -> Floats:
        values_E = self.advantages.values_PG.reshape(-1)
        if self.weights_E is not None:
            values_E = values_E * self.weights_E
        return np.asarray(values_E[self.batch.episode_M])

    def charged_M(self, kl_M: Floats, radii: Radii, rows: np.ndarray | None = None) -> Floats:
        """Messages' KLs in the unit of the radius: per message, or divided by each one's tokens (lem:avgvssum)."""
        if not radii.per_token:
            return kl_M
        lengths_M = self.batch.lengths_M
        return np.asarray(kl_M / (lengths_M if rows is None else lengths_M[rows]))

    @property
    def informative_M(self) -> np.ndarray:
        return np.asarray(self.advantages.informative_P[self.batch.problem_M])
