"""Streams the text of a message while it is sampled, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from teamtr.chat.stream import TextStream
from teamtr.types import Ids

Told = Callable[[str], None]


class Outgoing:
    """Streams one message. ``tell`` gets its text in pieces, none of which is revoked later: text that may be the
    beginning of a stop string is held back until that is decided. With ``even_empty``, ``tell`` is also called for a
    message without text."""

    def __init__(self, stream: TextStream, stops: Sequence[str], tell: Told, *, even_empty: bool = False) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._tell = tell
        self._untold = even_empty
        self._held = ""
        self.is_cut = False

    def listen(self, token_ids: Ids) -> bool:
        """Add tokens; returns whether more are wanted."""
        if not self.is_cut:
            self._pass_on(self._stream.add(token_ids.tolist()))
        return not self.is_cut

    def end(self, whole: str) -> None:
        """End the message; ``whole`` is all of its text."""
        if not self.is_cut:
            self._pass_on(self._stream.end(whole))
        if not self.is_cut and (self._held or self._untold):
            self._say(self._held)
            self._held = ""

    def _say(self, text: str) -> None:
        self._untold = False
        self._tell(text)

    def _pass_on(self, text: str) -> None:
        text = self._held + text
        found = first_stop(text, self._stops)
        if found is not None:
            self.is_cut, self._held = True, ""
            certain = text[:found]
        else:
            kept = _may_begin_a_stop(text, self._stops)
            certain, self._held = text[: len(text) - kept], text[len(text) - kept :]
        if certain:
            self._say(certain)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins; None if there is none."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def _may_begin_a_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
