"""The policy for empty system prompts: sent as empty, or left to each model's template (app:pnp-protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

SystemPolicy = Literal["explicit", "template"]


def with_system_policy(messages: Sequence[dict[str, str]], policy: SystemPolicy) -> list[dict[str, str]]:
    """``explicit``: an empty system prompt is sent as an empty one. ``template``: it is not sent at all, so a template
    with a default system prompt uses that; the models of one team may then read different system prompts."""
    if policy == "explicit":
        return list(messages)
    return [m for m in messages if m["role"] != "system" or m["content"]]
