"""Reasoning tags in a shared context: kept, stripped, or forbidden (app:pnp-protocol).

The text between ``<think>`` and ``</think>`` is part of what a model sampled and is trained on in any case. The policy
decides whether the others see it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

ThinkPolicy = Literal["keep", "strip", "forbid"]

_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def thinks(text: str) -> bool:
    """Whether a text contains a reasoning tag, opening or closing."""
    return _TAG.search(text) is not None


def without_thinking(text: str, *, inside: bool = False) -> str:
    """The text outside of reasoning tags, in one pass over it. ``inside``: the template opened a tag before it.

    An unmatched closing tag ends reasoning that began earlier, so everything before it is removed; an unmatched opening
    tag was cut off, so everything after it is removed. White space at both ends is stripped as well. Unless
    ``inside``, a text without tags is returned unchanged.
    """
    said: list[str] = []
    end, tagged = 0, inside
    for tag in _TAG.finditer(text):
        tagged = True
        if not inside:
            said.append(text[end : tag.start()])
        if tag.group(1) and not inside:
            said.clear()
        inside, end = not tag.group(1), tag.end()
    if not inside:
        said.append(text[end:])
    return "".join(said).strip() if tagged else text


def template_opens_thinking(codec: Any) -> bool:
    """Whether the template begins a reply inside reasoning tags, so that every message begins with reasoning."""
    prompt = codec.text([{"role": "system", "content": ""}, {"role": "user", "content": "u"}])
    talk = codec.text([{"role": "system", "content": ""}, {"role": "user", "content": "u"}], for_reply=False)
    depth = 0
    for tag in _TAG.finditer(prompt[len(talk) :] if prompt.startswith(talk) else prompt):
        depth = max(0, depth + (-1 if tag.group(1) else 1))
    return depth > 0
