"""What leaves the server of a message: its text as it comes, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from teamtr.chat.stream import TextStream
from teamtr.types import Ids

Told = Callable[[str], None]


class Outgoing:
    """One message on its way out. ``tell`` gets its text in pieces, none of which is taken back: whatever may be the
    beginning of a stop string waits until it is known. With ``even_empty``, a message without text is told too."""

    def __init__(self, stream: TextStream, stops: Sequence[str], tell: Told, *, even_empty: bool = False) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._tell = tell
        self._untold = even_empty
        self._held = ""
        self.is_cut = False

    def listen(self, token_ids: Ids) -> bool:
        """Take tokens; whether more are wanted."""
        if not self.is_cut:
            self._pass_on(self._stream.add(token_ids.tolist()))
        return not self.is_cut

    def end(self, whole: str) -> None:
        """The message is over, and this is its text."""
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
    """Where the first stop string begins; None where there is none."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def _may_begin_a_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
