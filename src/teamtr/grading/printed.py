"""What graders print, kept until somebody shows it."""

from __future__ import annotations

LONGEST = 4_000
"""Characters that are kept between two looks: enough to see what a reward does, and no log of its own."""


class Printed:
    """The beginning of what was printed since the last look."""

    def __init__(self) -> None:
        self._text = ""
        self._dropped = 0

    def add(self, text: str) -> None:
        room = LONGEST - len(self._text)
        self._text += text[:room]
        self._dropped += len(text[room:])

    def take(self) -> str:
        """What was printed since the last time; empty where nothing was."""
        text, dropped = self._text, self._dropped
        self._text, self._dropped = "", 0
        return f"{text}\n... and {dropped} characters more" if dropped else text.rstrip("\n")
