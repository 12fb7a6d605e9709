"""What a run has spent, by agent and phase. It is part of every commit, so a resumed run goes on counting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.rollout import Ledger


def price_of_sampling(cost: float | None, batch: RolloutBatch, own: AgentBatch, epochs: int) -> float | None:
    """The cost of sampling such a batch again, in units of one update of the agent on these messages.

    ``cost`` is the cost of one sampled token relative to one trained token; None if it is not known.
    """
    read = sum(len(prompt) + len(message) for prompt, message in zip(own.prompts, own.messages, strict=True))
    if cost is None or read == 0:
        return None
    said = sum(len(turn.token_ids) for episode in batch.present for turn in episode.turns)
    return cost * said / (epochs * read)


@dataclass
class Account:
    """Totals by agent and phase since the run began; part of every commit."""

    episodes: int = 0
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def sampled(self, ledger: Ledger) -> None:
        self.episodes += ledger.episodes
        for agent in ledger.sampled_tokens:
            self._add(self.tokens, agent, "sampled", ledger.sampled_tokens[agent])
            self._add(self.tokens, agent, "prompt", ledger.prompt_tokens[agent])
            self._add(self.seconds, agent, "sample", ledger.seconds[agent])
        self._add(self.seconds, "team", "grade", ledger.grading_seconds)
        if ledger.environment_seconds:
            self._add(self.seconds, "team", "environment", ledger.environment_seconds)

    def probed(self, ledger: Ledger) -> None:
        """Add rollouts that no update uses; they do not count as sampled for training."""
        for agent in ledger.sampled_tokens:
            self._add(self.tokens, agent, "probe", ledger.sampled_tokens[agent])
            self._add(self.seconds, agent, "probe", ledger.seconds[agent])

    def updated(self, agent: str, tokens: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        for phase, count in tokens.items():
            self._add(self.tokens, agent, phase, count)
        for phase, spent in seconds.items():
            self._add(self.seconds, agent, phase, spent)

    @property
    def sampled_tokens(self) -> int:
        return sum(phases.get("sampled", 0) for phases in self.tokens.values())

    def sampling_cost(self) -> float | None:
        """Sampling seconds per sampled token divided by update seconds per trained token, rounded to a power of two;
        None before both have happened."""
        updating = ("score", "train", "gate")
        sampling = [(p.get("sample", 0.0), self.tokens.get(name, {})) for name, p in self.seconds.items()]
        sampled = sum(tokens.get("sampled", 0) for _, tokens in sampling)
        trained = sum(tokens.get("trained", 0) for _, tokens in sampling)
        seconds = sum(spent for spent, _ in sampling)
        learning = sum(phases.get(phase, 0.0) for phases in self.seconds.values() for phase in updating)
        if not sampled or not trained or not seconds > 0.0 or not learning > 0.0:
            return None
        return 2.0 ** round(math.log2(seconds / sampled / (learning / trained)))

    @staticmethod
    def _add(table: dict[str, dict[str, Any]], agent: str, phase: str, amount: float) -> None:
        phases = table.setdefault(agent, {})
        phases[phase] = phases.get(phase, 0) + amount
