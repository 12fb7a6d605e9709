"""Self-consistency: a majority vote over several chains of thought (arXiv 2203.11171)."""

from __future__ import annotations

from dataclasses import dataclass

from teamtr.baselines.chain_of_thought import ChainOfThought
from teamtr.baselines.method import Method
from teamtr.baselines.registry import method
from teamtr.baselines.voting import Voted


@method("self_consistency")
@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Voted):
    """A vote of ``votes`` chains of thought on the answers that they state; ``weighted`` is the paper's normalized
    weighted sum."""

    @property
    def voter(self) -> Method:
        return ChainOfThought()
