"""Buffers what graders print until it is shown."""

from __future__ import annotations

LONGEST = 4_000
"""Maximum number of characters kept between two reads: enough to see what a reward does, but not a log."""


class Printed:
    """The beginning of what was printed since the last read."""

    def __init__(self) -> None:
        self._text = ""
        self._dropped = 0

    def add(self, text: str) -> None:
        room = LONGEST - len(self._text)
        self._text += text[:room]
        self._dropped += len(text[room:])

    def take(self) -> str:
        """Return and clear what was printed since the last call; empty if nothing was."""
        text, dropped = self._text, self._dropped
        self._text, self._dropped = "", 0
        return f"{text}\n... and {dropped} characters more" if dropped else text.rstrip("\n")
