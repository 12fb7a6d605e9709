"""The memory of vLLM servers that a run starts, from what they are started with, beside what trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from teamtr.ports import GB, MemoryItem, MemoryPlan

WHAT = "vLLM server"


@dataclass(frozen=True)
class ServerMemory:
    """One server, which serves ``agents``; sizes in bytes.

    ``weights`` and ``adapters`` in the server's ``precision``; of adapters, room for as many as it is started for, of
    the rank that it makes room for. ``cache``: keys and values, where it is told how much; else it takes ``share`` of
    its card in all, and keys and values get what is left. ``place``: where it is, in words; ``beside``: whether the
    learner computes there too. What it computes with in between, and captured graphs, are not counted.
    """

    agents: tuple[str, ...]
    weights: int
    adapters: int
    precision: str
    share: float
    cache: int | None = None
    place: str = "on the card that trains"
    beside: bool = True

    def taken(self, memory: int | None) -> int:
        """Of a card with so much memory; None: of a machine, whose memory nobody counts."""
        held = self.weights + self.adapters
        if self.cache is not None:
            return held + self.cache
        return held if memory is None else int(self.share * memory)

    def item(self, memory: int | None) -> MemoryItem:
        left = self.taken(memory) - self.weights - self.adapters
        cache = f"{max(0, left) / GB:.3g} GB"
        if self.cache is None and memory is None:
            cache = f"the rest of {self.share:.3g} of this machine's memory"
        adapters = f", adapters {self.adapters / GB:.3g} GB" if self.adapters else ""
        why = f"{self.precision} weights {self.weights / GB:.3g} GB{adapters}, keys and values {cache}"
        return MemoryItem(WHAT, self.taken(memory), f"{', '.join(self.agents)}: {why}; {self.place}")

    def lacks(self, memory: int | None) -> str:
        """Why it cannot start, in words; empty where it can, and where nobody counts."""
        if memory is None:
            return ""
        held, taken = self.weights + self.adapters, self.taken(memory)
        who = f"the vLLM server of {', '.join(self.agents)}"
        if self.cache is None and held >= taken:
            return (
                f"{who} may take {taken / GB:.3g} GB ({self.share:.3g} of its card), and its weights and adapters "
                f"alone need {held / GB:.3g} GB"
            )
        return f"{who} needs {taken / GB:.3g} GB, and its card has {memory / GB:.3g} GB" if taken > memory else ""


@dataclass(frozen=True)
class Servers:
    """Those that a run starts, or the addresses of those that it was told of."""

    started: tuple[ServerMemory, ...] = ()
    urls: tuple[str, ...] = ()

    def taken(self, memory: int | None) -> int:
        """Bytes of the card that trains."""
        return sum(server.taken(memory) for server in self.started if server.beside)

    def beside(
        self, plan: MemoryPlan, memory: int | None, sharing: int = 1, running: Collection[str] = ()
    ) -> MemoryPlan:
        """The plan of a worker, with these servers beside it on a card of so much memory, of which that worker has one
        of ``sharing`` parts. ``running``: agents whose servers have taken their memory already, so that it is not
        among what is available."""
        told = [MemoryItem(WHAT, 0, f"at {url}: its memory is not counted") for url in self.urls]
        own = [server.item(memory) for server in self.started]
        taken, waiting = self.taken(memory), Servers(tuple(s for s in self.started if s.agents[0] not in running))
        left = None if plan.available is None else plan.available - waiting.taken(memory) // sharing
        lacking = tuple(filter(None, (*(server.lacks(memory) for server in self.started), self._too_many(memory))))
        return replace(plan, available=left, servers=(*own, *told), taken=taken, lacking=lacking)

    def _too_many(self, memory: int | None) -> str:
        """Servers on cards of their own that do not fit beside each other; those beside the learner are its plan's."""
        apart = [server for server in self.started if not server.beside]
        taken = sum(server.taken(memory) for server in apart)
        if memory is None or taken <= memory or any(server.lacks(memory) for server in apart):
            return ""
        return f"{len(apart)} vLLM servers need {taken / GB:.3g} GB together, and their card has {memory / GB:.3g} GB"


@dataclass(frozen=True)
class ModelSize:
    """Parameters of an agent's model, and how many of the agent's own are trained (its adapter, where it has one)."""

    parameters: int
    trained: int


def slots(adapters: Sequence[tuple[ModelSize, int]], rank: int) -> int:
    """Parameters of as many adapters, each given with its own rank, at the rank that all of them get room for: that of
    the largest, as often."""
    return max((size.trained * rank // own for size, own in adapters), default=0) * len(adapters)
