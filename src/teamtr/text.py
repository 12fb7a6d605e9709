"""Text from models and files, made safe to look at."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&])")


def visible(text: str) -> str:
    """Characters that hide or reorder text (bidi controls, zero-width, control codes), or that XML cannot hold, become
    their code."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def in_markdown(text: str) -> str:
    """The text on one line, with everything escaped that Markdown or HTML would read."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split())))
