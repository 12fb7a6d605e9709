"""The worker's side of a call: a process that holds models executes the calls of the training loop."""

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
    """A method call on the engine, or on an agent's learner. ``keep``: store the result under this number instead of
    returning it. ``dropped``: numbers of stored results that are no longer referenced."""

    name: str
    agent: str | None = None
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: int | None = None
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: a result, or the exception that was raised."""

    result: Any = None
    error: Exception | None = None


class OtherWeights(RuntimeError):
    """A seat does not hold the version of the weights that it should sample with."""


class Seat:
    """Executes calls, one at a time."""

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
            return dict(found) if isinstance(found, dict) else found  # a copy: the counters of ``tokens`` keep changing
        return found(*(self.kept[a.number] if isinstance(a, Handle) else a for a in call.arguments), **call.options)

    def _sample_parts(
        self, agent: str, version: str, parts: Sequence[tuple[Sequence[Ids], Floats]], decoding: Decoding
    ) -> list[list[Sample]]:
        """Samples each part separately, with weights of this version only."""
        present = self.engine.version(agent)
        if present != version:
            raise OtherWeights(
                f"{self.name} holds weights {present[:8]} of agent {agent!r}, and not {version[:8]}: what it "
                "sampled would be another team's"
            )
        self.engine.take_up(agent)
        return [self.engine.sample(agent, prompts, noise_BT, decoding=decoding) for prompts, noise_BT in parts]
