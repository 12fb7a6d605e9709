"""Players of the other roles of an interactive task: a referee, a suspect, a customer.

A player maps text to text, in batches over episodes. It must not change during a run, or the task itself would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from teamtr.answers import Decoding
from teamtr.chat.render import ChatMessages
from teamtr.errors import Refused
from teamtr.ports import Codec, Sampler
from teamtr.randomness import uniforms
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import From0, NonEmpty, Positive


class Player(Protocol):
    """Answers chat prompts. The same prompts and seed give the same answers, as far as the player can guarantee it."""

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]: ...


@dataclass(frozen=True)
class ScriptedPlayer:
    """Answers with a function of the prompt: for tests, and for roles that a rule can play."""

    say: Callable[[ChatMessages], str]

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]:
        return [self.say(prompt) for prompt in prompts]


@dataclass(frozen=True)
class PolicyPlayer:
    """A model behind a ``Sampler``: a separate one, or a frozen agent of the team.

    Args:
        sampler: samples the answers.
        agent: the name of the model in the sampler.
        codec: the model's own template and tokenizer.
        max_tokens: maximum tokens of one answer.
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
        samples = self.sampler.sample(self.agent, encoded, noise_BT, decoding=Decoding(self.temperature))
        return [self.codec.decode(sample.token_ids) for sample in samples]


class PlayerConfig(Section):
    """Who plays the other roles of an interactive task: a frozen agent, a model, or a model at an endpoint."""

    agent: NonEmpty | None = unset("A frozen agent of the team.")
    model: NonEmpty | None = unset("A folder (relative to the team file) or hub id; with base_url, its name there.")
    revision: NonEmpty | None = unset("Of a hub id: the branch, tag or commit to take.")
    base_url: NonEmpty | None = unset("An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1.")
    key_variable: NonEmpty | None = unset("The environment variable that holds the endpoint's key.")
    max_tokens: Positive = key(128, "Most tokens in one answer.")
    temperature: From0 = key(0.0, "Sampling temperature of its answers; 0 is greedy.")

    @property
    def has_own_model(self) -> bool:
        """Whether the player needs a model of its own to be loaded, rather than an agent or an endpoint."""
        return self.base_url is None and self.agent is None

    def _refusals(self) -> Iterator[Refusal]:
        here = ("task", "player")
        if (self.agent is None) == (self.model is None):
            message = "task.player needs either an agent of the team, or a model (with base_url, one at an endpoint)"
            yield Refusal(here, message, ((*here, "agent"), (*here, "model")))
        if self.base_url is not None and self.model is None:
            yield _alone("base_url", "model")
        if self.key_variable is not None and self.base_url is None:
            yield _alone("key_variable", "base_url")
        if self.revision is not None and not self.has_own_model:
            other = "agent" if self.agent is not None else "base_url"
            message = f"task.player.revision is of a model loaded here, and the player is that of task.player.{other}"
            yield Refusal((*here, "revision"), f"{message}: leave it out", ((*here, other),), at_key=True, idle=True)


def _alone(name: str, needed: str) -> Refusal:
    message = f"task.player.{name} goes with task.player.{needed}, which is not given"
    return Refusal(("task", "player", name), message, (("task", "player", needed),))
