"""The Engine port for models that are not loaded: estimates their memory and refuses what needs weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from teamtr.answers import AS_TRAINED, AgentInfo, Decoding, Sample
from teamtr.errors import UserError
from teamtr.planning.memory import memory_of, tightest
from teamtr.planning.setup import Setup
from teamtr.ports import Demand, Follow, Heard, Learner, MemoryPlan, More, Rehearsal, unfollowed, unheard
from teamtr.types import Floats, Ids

UNLOADED = "unloaded"


class UnloadedEngine:
    """``setup_of`` returns the setup to plan for, given the demand; ``trained``: number of parameters that each agent
    trains."""

    def __init__(self, agents: Sequence[str], trained: dict[str, int], setup_of: Callable[[Demand], Setup]) -> None:
        self.agents = tuple(agents)
        self._trained = trained
        self._setup_of = setup_of

    def version(self, agent: str) -> str:
        return UNLOADED

    def info(self, agent: str) -> AgentInfo:
        return AgentInfo(UNLOADED, (), UNLOADED, frozenset(), trained_parameters=self._trained[agent])

    def memory_plan(self, demand: Demand) -> MemoryPlan:
        """The memory plan of the busiest worker, in the group with the least memory to spare."""
        return tightest(map(memory_of, self._setup_of(demand).by_group)).plan

    def peak_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """No-op: nothing is held."""

    # -- methods that need weights ----------------------------------------------------------------------------

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        *,
        decoding: Decoding = AS_TRAINED,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        self._refuse()

    def stream(self, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        self._refuse()

    def learner(self, agent: str) -> Learner:
        self._refuse()

    def publish(self, agent: str, version: str) -> None:
        self._refuse()

    def keep_scores(self, agent: str | None) -> None:
        self._refuse()

    def set_precision(self, agent: str, precision: str) -> None:
        self._refuse()

    def rehearse(self, demand: Demand) -> Rehearsal:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError("this plan was made without loading the models, and this needs their weights")
