"""All agents of a team in this process: the Sampler port over their policies, and a learner for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teamtr.engines.learner import PolicyLearner
from teamtr.types import Ids, Sample


class LocalEngine:
    """Sampling and training read the same weights, so publishing an update costs nothing."""

    def __init__(self, learners: Mapping[str, PolicyLearner]) -> None:
        self.learners = dict(learners)

    def learner(self, agent: str) -> PolicyLearner:
        return self.learners[agent]

    def version(self, agent: str) -> str:
        return self.learners[agent].version()

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        *,
        max_tokens: int,
        seed: int,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> list[Sample]:
        if not prompts:
            return []
        learner = self.learners[agent]
        policy = learner.policy
        return policy.sample(
            prompts,
            max_tokens=max_tokens,
            seed=seed,
            temperature=policy.temperature if temperature is None else temperature,
            top_p=top_p,
            top_k=top_k,
            version=learner.version(),
        )
