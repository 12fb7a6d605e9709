"""The message filter: which part of a message enters the shared context, by separate switches (tab:pnp-ablation)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from teamtr.chat.codec import ProtocolError
from teamtr.chat.thinking import ThinkPolicy, template_opens_thinking, thinks, without_thinking
from teamtr.chat.tools import normalise_calls

ToolPolicy = Literal["off", "canonical"]
THINKS_ALOUD = "reasoning tags where they are forbidden"


@dataclass
class MessageFilter:
    """Maps a sampled message's text to the text that the others see; what was sampled is trained on in any case.

    ``think``: keep shows reasoning, strip removes it, forbid removes it and counts a breach. ``tools``: canonical
    rewrites tool calls to one JSON form and rejects malformed ones. ``inside``: the template opens a reasoning tag.
    ``breaches`` counts violations of the protocol by reason, of different messages.
    """

    think: ThinkPolicy = "keep"
    tools: ToolPolicy = "off"
    names: Collection[str] | None = None
    inside: bool = False
    breaches: Counter[str] = field(default_factory=Counter)

    @property
    def shares_all(self) -> bool:
        """Whether the filter leaves every text unchanged."""
        return self.think == "keep" and self.tools == "off"

    def __call__(self, text: str) -> str:
        if self.think != "keep":
            if self.think == "forbid" and thinks(text):
                self.breaches[THINKS_ALOUD] += 1
            text = without_thinking(text, inside=self.inside)
        if self.tools == "canonical":
            found = normalise_calls(text, self.names)
            self.breaches.update(rejection.reason for rejection in found.rejected)
            text = found.text
        return text


def check_thinking(codec: Any, policy: ThinkPolicy) -> bool:
    """Whether the template begins replies inside reasoning tags. Raises ProtocolError if it does and ``policy`` is
    forbid."""
    opened = template_opens_thinking(codec)
    if opened and policy == "forbid":
        raise ProtocolError(
            "the chat template opens a reasoning tag before every reply, but team.protocol.think is forbid; switch it "
            "off with template_kwargs (such as enable_thinking: false), or use strip"
        )
    return opened
