"""Memory that the vLLM servers of a run take, estimated from their launch settings, next to the training memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from teamtr.ports import GB, MemoryItem, MemoryPlan

WHAT = "vLLM server"


@dataclass(frozen=True)
class ServerMemory:
    """One server, which serves ``agents``; sizes in bytes.

    ``weights`` and ``adapters`` are in the server's ``precision``; ``adapters`` counts all adapter slots that the
    server is started with, at the rank that it reserves. ``cache``: memory for keys and values, if it is set; otherwise
    the server takes ``share`` of its card in total, and keys and values get what remains. ``place``: where the server
    runs, as text. ``beside``: whether the learner computes on the same device. Activations and captured graphs are not
    counted.
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
        """Bytes taken of a card with this much memory; None: of main memory, which is not counted."""
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
        """Why the server cannot start, as text; empty if it can, and if memory is not counted."""
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
    """The servers that a run starts, or the addresses of servers that it was given."""

    started: tuple[ServerMemory, ...] = ()
    urls: tuple[str, ...] = ()

    def taken(self, memory: int | None) -> int:
        """Bytes taken of the card that trains."""
        return sum(server.taken(memory) for server in self.started if server.beside)

    def beside(
        self, plan: MemoryPlan, memory: int | None, sharing: int = 1, running: Collection[str] = ()
    ) -> MemoryPlan:
        """The plan of a worker with these servers next to it, on a card with this much memory, of which the worker has
        one of ``sharing`` parts. ``running``: agents whose servers already hold their memory, so that
        ``plan.available`` excludes it."""
        told = [MemoryItem(WHAT, 0, f"at {url}: its memory is not counted") for url in self.urls]
        own = [server.item(memory) for server in self.started]
        taken, waiting = self.taken(memory), Servers(tuple(s for s in self.started if s.agents[0] not in running))
        left = None if plan.available is None else plan.available - waiting.taken(memory) // sharing
        lacking = tuple(filter(None, (*(server.lacks(memory) for server in self.started), self._too_many(memory))))
        return replace(plan, available=left, servers=(*own, *told), taken=taken, lacking=lacking)

    def _too_many(self, memory: int | None) -> str:
        """Why servers on cards of their own do not fit together, as text; empty if they do. Servers on the learner's
        card are part of its plan."""
        apart = [server for server in self.started if not server.beside]
        taken = sum(server.taken(memory) for server in apart)
        if memory is None or taken <= memory or any(server.lacks(memory) for server in apart):
            return ""
        return f"{len(apart)} vLLM servers need {taken / GB:.3g} GB together, and their card has {memory / GB:.3g} GB"


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of an agent's model, and of those that the agent trains (its adapter's, if it has one)."""

    parameters: int
    trained: int


def slots(adapters: Sequence[tuple[ModelSize, int]], rank: int) -> int:
    """Parameters of all adapter slots: one per adapter, each as large as the largest adapter at ``rank``. ``adapters``
    has each adapter's size and its own rank."""
    return max((size.trained * rank // own for size, own in adapters), default=0) * len(adapters)
