"""Who plays the other roles of an interactive task: a referee, a suspect, a customer.

A player is text in, text out, in batches: all episodes of a tick ask at once. Whoever plays must stay the same during
a run, or the task changes under the team's feet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from teamtr.chat.render import ChatMessages
from teamtr.errors import Refused
from teamtr.ports import Codec, Sampler
from teamtr.randomness import uniforms


class Player(Protocol):
    """Answers chat prompts. The same prompts and seed give the same answers, as far as the player can promise it."""

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]: ...


@dataclass(frozen=True)
class ScriptedPlayer:
    """Says what a function of the prompt says: for tests, and for roles that a rule can play."""

    say: Callable[[ChatMessages], str]

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]:
        return [self.say(prompt) for prompt in prompts]


@dataclass(frozen=True)
class PolicyPlayer:
    """A model behind a ``Sampler``: one of its own, or a frozen agent of the team.

    Args:
        sampler: whoever samples.
        agent: the name under which the sampler knows the model.
        codec: the model's own template and tokenizer.
        max_tokens: of one answer.
        temperature: None is the model's training temperature, 0 is greedy.
    """

    sampler: Sampler
    agent: str
    codec: Codec
    max_tokens: int = 128
    temperature: float | None = None
    version: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.sampler.version(self.agent))

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]:
        if self.sampler.version(self.agent) != self.version:
            raise Refused(
                f"agent {self.agent!r} plays the other roles of this task, but its weights have changed since the run "
                "began, so that the task is no longer the same: freeze it (`frozen: true`)"
            )
        noise_BT = uniforms(seed, len(prompts), self.max_tokens)
        encoded = [self.codec.encode(prompt) for prompt in prompts]
        samples = self.sampler.sample(self.agent, encoded, noise_BT, temperature=self.temperature)
        return [self.codec.decode(sample.token_ids) for sample in samples]
