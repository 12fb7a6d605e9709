"""One policy for system prompts: said by the team file, or left to each model's template (app:pnp-protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

SystemPolicy = Literal["explicit", "template"]


def with_system_policy(messages: Sequence[dict[str, str]], policy: SystemPolicy) -> list[dict[str, str]]:
    """``explicit``: an empty system prompt is sent as an empty one. ``template``: it is not sent at all, so that a
    template which has words of its own for that case says them; models of one team then hear different things."""
    if policy == "explicit":
        return list(messages)
    return [m for m in messages if m["role"] != "system" or m["content"]]
