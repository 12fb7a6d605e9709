"""The end of a call: one process of a cluster, with the models that it holds, answers what the loop asks."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from teamtr.answers import Decoding, Sample
from teamtr.engines.local import LocalEngine
from teamtr.errors import TeamTRError
from teamtr.types import Floats, Ids


class Handle:
    """A snapshot, which every seat holds under this number."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Call:
    """A method of the engine, or of an agent's learner. ``keep``: hold the result under this number, and do not send
    it. ``dropped``: what nobody holds any more."""

    name: str
    agent: str | None = None
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: int | None = None
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What came of a call: a result, or what was raised."""

    result: Any = None
    error: Exception | None = None


class OtherWeights(RuntimeError):
    """A seat does not hold the weights that it is to speak with."""


class Seat:
    """Answers calls, one after the other."""

    def __init__(self, engine: LocalEngine, name: str = "worker 0") -> None:
        self.engine = engine
        self.name = name
        self.kept: dict[int, Any] = {}

    def answer(self, call: Call) -> Answer:
        for number in call.dropped:
            self.kept.pop(number, None)
        try:
            result = self._result(call)
        except TeamTRError as error:
            return Answer(error=error)
        except Exception as error:
            error.add_note(f"in {self.name}:\n{traceback.format_exc()}")
            return Answer(error=error)
        if call.keep is None:
            return Answer(result)
        self.kept[call.keep] = result
        return Answer()

    def _result(self, call: Call) -> Any:
        if call.name == "sample_parts":
            return self._sample_parts(*call.arguments)
        target = self.engine if call.agent is None else self.engine.learner(call.agent)
        found = getattr(target, call.name)
        if not callable(found):
            return dict(found) if isinstance(found, dict) else found  # tokens go on counting
        return found(*(self.kept[a.number] if isinstance(a, Handle) else a for a in call.arguments), **call.options)

    def _sample_parts(
        self, agent: str, version: str, parts: Sequence[tuple[Sequence[Ids], Floats]], decoding: Decoding
    ) -> list[list[Sample]]:
        """Each part by itself, with these weights and no others."""
        present = self.engine.version(agent)
        if present != version:
            raise OtherWeights(
                f"{self.name} holds weights {present[:8]} of agent {agent!r}, and not {version[:8]}: what it "
                "sampled would be another team's"
            )
        self.engine.take_up(agent)
        return [self.engine.sample(agent, prompts, noise_BT, decoding=decoding) for prompts, noise_BT in parts]
