"""Checks a chat template once, before a run: it must not inject text, nor rewrite what it is given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from teamtr.calls import Schema
from teamtr.chat.codec import ChatCodec, ProtocolError

_PROBES = ("a", "two words", "line\nbreak", "  spaces  ", "1 + 2 = 3", "naïve Ünïcode ✓", "<b>{json: [1]}</b>")
_SYSTEM = "You are one of several."


@dataclass(frozen=True)
class TemplateReport:
    """The result of the check. ``verbatim``: text arrives unchanged. ``stable``: appending messages leaves earlier ones
    unchanged. ``injects``: text that the template adds to an empty system prompt."""

    verbatim: bool
    stable: bool | None  # None: not checked, no history goes through the template
    system_role: Literal["own", "folded into the user message"]
    injects: str


def check_template(
    codec: ChatCodec, style: Literal["transcript", "chat"], *, empty_system_prompt: bool = True
) -> TemplateReport:
    """Inspect the template; raises ProtocolError if this style cannot be used with it.

    ``empty_system_prompt``: whether some agent has none, so that text the template puts in its place would be used.
    """
    if "strftime_now" in str(codec.tokenizer.chat_template) and "date_string" not in codec.template_kwargs:
        raise ProtocolError(
            "the chat template writes today's date into every prompt, so that a run would change from day to day; "
            "fix it with template_kwargs: {date_string: ...}"
        )
    report = TemplateReport(
        verbatim=_verbatim(codec),
        stable=_stable(codec) if style == "chat" else None,
        system_role="folded into the user message" if codec.fold_system else "own",
        injects=_injected(codec),
    )
    if not report.verbatim:
        raise ProtocolError("the chat template changes the text of a user message; it cannot carry a shared context")
    if report.injects and empty_system_prompt:
        raise ProtocolError(
            f"the chat template adds words of its own to an empty system prompt ({report.injects!r}); "
            "give every agent an explicit system_prompt"
        )
    if style == "chat" and not report.stable:
        raise ProtocolError(
            "the chat template rewrites earlier messages when new ones are appended (as templates that strip "
            "reasoning from past turns do), so a context would not be a function of the shared text; "
            "use `history: transcript`, or `template_kwargs` that switch the rewriting off"
        )
    return report


def check_tools(codec: ChatCodec, style: Literal["transcript", "chat"], tools: Sequence[Schema]) -> None:
    """Raise ProtocolError if the template does not fit with these tools: text must still arrive unchanged, and in
    ``chat`` earlier messages must not change."""
    if not _verbatim(codec, tools):
        raise ProtocolError(
            "told of tools, the chat template changes the text of a user message: set tools.tell: false"
        )
    if style == "chat" and not _stable(codec, tools):
        raise ProtocolError(
            "told of tools, the chat template rewrites earlier messages when new ones are appended (as templates that "
            "put tools before the last message do); use `history: transcript`, or set tools.tell: false"
        )


def _verbatim(codec: ChatCodec, tools: Sequence[Schema] = ()) -> bool:
    """Whether text appears in the prompt unchanged, between a prefix and a suffix that do not depend on it."""
    around = set()
    for probe in _PROBES:
        marked = f"\u00a7{probe}\u00a7"  # unique, even if the template's own text contains the probe
        text = codec.text([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": marked}], tools=tools)
        if text.count(marked) != 1:
            return False
        around.add(tuple(text.split(marked)))
    return len(around) == 1


def _stable(codec: ChatCodec, tools: Sequence[Schema] = ()) -> bool:
    """Whether the rendering of the first k messages, reasoning included, is a prefix of that of the first k + 1."""
    talk = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer one"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "answer two"},
        {"role": "user", "content": "third"},
    ]
    rendered = [codec.text(talk[: k + 1], tools=tools, for_reply=False) for k in range(1, len(talk))]
    return all(later.startswith(earlier) and "hm" in later for earlier, later in itertools.pairwise(rendered[1:]))


def _injected(codec: ChatCodec) -> str:
    """The text that the template writes for an empty system prompt; empty if none."""
    empty = codec.text([{"role": "system", "content": ""}, {"role": "user", "content": "u"}])
    marked = codec.text([{"role": "system", "content": "\u00a7"}, {"role": "user", "content": "u"}])
    expected = marked.replace("\u00a7", "")
    if _letters(empty) == _letters(expected) or len(empty) <= len(expected):
        return ""
    return empty.strip()[:120]


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalnum())
