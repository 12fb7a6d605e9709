"""The markers of a chat template: finds them by rendering probes, and breaks them with a space in other text.

A marker signals to a model that a turn ends or begins. It is an added token of the tokenizer, declared special or not,
or plain text that the template writes around the messages:

    tag      in brackets, such as ``[INST]`` or ``<|user|>``
    label    up to five words with punctuation before or after them, such as ``### Human:`` or ``USER:``
    word     one or two words alone on a line, where the template has no other marker

Reasoning tags are not markers: they open no turn, and ``team.protocol.think`` governs them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.chat.lookalikes import LINE_BREAKS, Lookalikes
from teamtr.chat.thinking import thinks

Render = Callable[[list[dict[str, str]], bool], str]
"""Renders chat messages with the template; the flag adds the generation prompt. It may raise anything."""

_TALKS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)
_TOOL_ROLES = ("tool", "tool_response", "ipython", "observation", "function", "environment", "developer")
_CONTENT = re.compile("\u00a7[0-9]+\u00a7")
_TAG = re.compile(r"<<?/?[^<>\s]+>>?|\[/?[^\[\]\s]+\]")
_LINE_START = rf"(?:\A|(?<=[{LINE_BREAKS}]))[ \t]*"
_LONGEST_LABEL, _MOST_WORDS = 40, 5


@dataclass(frozen=True)
class Marker:
    """``alone``: counts only as a whole line. ``opens_line``: counts only at the start of a line."""

    text: str
    opens_line: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Markers:
    """``turns`` begin and end messages: no text may contain them. ``tools`` surround tool calls and results: an agent's
    own messages and the team file may contain them. ``token_ids`` are the tokens among ``turns``."""

    turns: tuple[Marker, ...]
    tools: tuple[Marker, ...]
    token_ids: frozenset[int]


def find_markers(tokenizer: Any, render: Render) -> Markers:
    """The markers of a tokenizer and its template, from what the template writes around messages and its source."""
    added = {int(i): str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    special_ids = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    special = {*map(str, tokenizer.all_special_tokens), *(added[i] for i in special_ids if i in added)}
    tokens = {text for text in (*added.values(), *special) if len(text) > 1 and text.strip()}
    # A token that is a plain word (ChatGLM3 has ``sop``) may occur in ordinary text.
    plain_tokens = {text for text in tokens - special if not text.isalnum() and not thinks(text)}
    talk = [*_pieces(render, _TALKS)]
    of_tools = [*_pieces(render, [("user", "assistant", role) for role in _TOOL_ROLES])]
    written = "".join(piece.text for piece in talk)
    source = str(tokenizer.chat_template) + "".join(piece.text for piece in of_tools)

    turn_tokens = (special & tokens) | {text for text in plain_tokens if text in written}
    tool_tokens = {text for text in plain_tokens - turn_tokens if text in source}
    turns = {*map(Marker, turn_tokens), *_text_markers(talk, tokens)}
    known = {marker.text for marker in turns}
    tools = {*map(Marker, tool_tokens), *_text_markers(of_tools, tokens)}
    return Markers(
        turns=_sorted(turns),
        tools=_sorted(marker for marker in tools if marker.text not in known),
        token_ids=frozenset(special_ids | {i for i, text in added.items() if text in turn_tokens}),
    )


class Disarm:
    """Breaks markers in a text with a space after the first character: ``<bot>`` becomes ``< bot>``. A text without
    markers is unchanged, and so is one that was disarmed before."""

    def __init__(self, markers: Iterable[Marker], lookalikes: Lookalikes) -> None:
        self._lookalikes = lookalikes
        known = list(markers)
        self._patterns = [
            re.compile(prefix + f"(?P<marker>{'|'.join(map(self._pattern, chosen))})" + suffix)
            for prefix, chosen, suffix in (
                ("", [m for m in known if not m.opens_line and not m.alone], ""),
                (_LINE_START, [m for m in known if m.opens_line and not m.alone], ""),
                (_LINE_START, [m for m in known if m.alone], rf"(?=[ \t]*(?:[{LINE_BREAKS}]|\Z))"),
            )
            if chosen
        ]

    def __call__(self, text: str) -> str:
        while cuts := self._cuts(text):  # a marker may contain a space: search again
            text = " ".join(text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)]))
        return text

    def _cuts(self, text: str) -> list[int]:
        """The positions at which a space breaks a marker, in ascending order."""
        plain = self._lookalikes.plain(text)
        spans = [span for pattern in self._patterns for span in _spans(pattern, plain)]
        if not spans:
            return []
        places = self._lookalikes.places(text)
        # One character that normalizes to a whole marker cannot be broken; no tokenizer we know reads it as a marker.
        return sorted({places[start] + 1 for start, end in spans if places[start] < places[end - 1]})

    def _pattern(self, marker: Marker) -> str:
        """The normalized marker as a pattern; in a marker with a space, a number matches any number."""
        text = self._lookalikes.plain(marker.text)
        return re.sub("[0-9]+", "[0-9]+", re.escape(text)) if " " in text else re.escape(text)


def _spans(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """The spans of all markers, overlapping ones included."""
    found = pattern.search(text)
    while found is not None:
        yield found.span("marker")
        found = pattern.search(text, found.start("marker") + 1)


def _sorted(markers: Iterable[Marker]) -> tuple[Marker, ...]:
    """The longest first, so that an alternation matches whole markers."""
    return tuple(sorted(set(markers), key=lambda m: (-len(m.text), m.text, m.opens_line)))


# -- plain text that a template writes ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Template text before, between or after messages. ``first``: before all of them, where there may be more text."""

    text: str
    first: bool


def _pieces(render: Render, talks: Sequence[Sequence[str]]) -> Iterator[_Piece]:
    for roles in talks:
        messages = [{"role": role, "content": f"\u00a7{k}\u00a7"} for k, role in enumerate(roles)]
        for for_reply in (False, True):
            try:
                parts = _CONTENT.split(render(messages, for_reply))
            except Exception:  # templates may raise anything: this one does not accept these roles
                continue
            yield from (_Piece(part, first=k == 0) for k, part in enumerate(parts))


def _text_markers(pieces: Sequence[_Piece], tokens: Iterable[str]) -> list[Marker]:
    """Tags, labels and words of all pieces; a label that always opens a line counts only there.

    Before the first message a template may write headings. They are not labels if the turn is opened by a token that
    also occurs between messages.
    """
    token = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"\Z\A")
    between = {text for piece in pieces if not piece.first for text in token.findall(piece.text)}
    tags: set[str] = set()
    labels: dict[str, bool] = {}
    words: set[str] = set()
    for piece in pieces:
        in_piece = {tag for part in token.split(piece.text) for tag in _TAG.findall(part)}
        tags |= {tag for tag in in_piece if not thinks(tag)}
        opened = piece.first and not between.isdisjoint(token.findall(piece.text))
        found = {} if opened else {label: opens for label, opens in _labels(piece, token) if not thinks(label)}
        for label, opens in found.items():
            labels[label] = labels.get(label, True) and opens
        if not in_piece and not found and token.search(piece.text) is None:
            words |= _words(piece)
    return [
        *map(Marker, tags),
        *(Marker(label, opens_line=opens and label[0].isalnum()) for label, opens in labels.items()),
        *(Marker(word, alone=True) for word in words),
    ]


def _labels(piece: _Piece, token: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """(label, whether it opens a line) for every label on a line, outside of tokens and tags."""
    end = 0
    parts = re.compile(f"{token.pattern}|{_TAG.pattern}|\n")
    gaps: list[tuple[int, int]] = []
    for found in parts.finditer(piece.text):
        gaps.append((end, found.start()))
        end = found.end()
    gaps.append((end, len(piece.text)))
    lines = [(start, stop) for start, stop in gaps if piece.text[start:stop].strip()]
    for start, stop in lines[-1:] if piece.first else lines:
        text = piece.text[start:stop]
        before = piece.text[:start]
        if _is_label(text.strip()):
            yield text.strip(), before.endswith("\n") or (not before and piece.first)


def _is_label(text: str) -> bool:
    if len(text) > _LONGEST_LABEL or len(text.split()) > _MOST_WORDS or not any(c.isalnum() for c in text):
        return False
    return not text[0].isalnum() or not (text[-1].isalnum() or text[-1] in ".!?,;")


def _words(piece: _Piece) -> set[str]:
    lines = [line.strip() for line in piece.text.split("\n") if line.strip()]
    chosen = lines[-1:] if piece.first else lines
    return {line for line in chosen if len(line) <= _LONGEST_LABEL and len(line.split()) <= 2}
