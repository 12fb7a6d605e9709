"""Progress of long operations: what is running, how far it is and how long it will take, shown after two seconds.

A live line in a terminal, plain lines every few seconds elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from teamtr.cli.terminal import say
from teamtr.cli.words import clock
from teamtr.progress import Work
from teamtr.text import on_terminal

SHOWN_AFTER = 2.0
"""Seconds that an operation runs before it is shown."""
LINE_EVERY = 5.0
"""Seconds between plain lines."""
LOOK_EVERY = 0.25


@dataclass
class _Begun:
    work: Work
    at: float
    told: bool = False


class Works:
    """Shows the innermost operation that has run for longer than two seconds. A thread polls the counts, because
    operations that count nothing must be shown too; without a terminal, it calls ``tick``."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic, tell: Callable[[str], None] = say) -> None:
        self._now = now
        self._tell = tell
        self._begun: list[_Begun] = []
        self._lock = threading.Lock()
        self._last_line = -LINE_EVERY
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Any = None
        self.is_hosted = False
        """Whether another live screen shows this one."""

    # -- progress listener ------------------------------------------------------------------------------------

    def begin(self, work: Work) -> None:
        with self._lock:
            self._begun.append(_Begun(work, self._now()))

    def end(self, work: Work) -> None:
        """End an operation. If a plain line was printed about it, print that it is done."""
        with self._lock:
            place = next((k for k, begun in enumerate(self._begun) if begun.work is work), None)
            if place is None:
                return  # its parent ended before it: an abandoned generator
            chain, begun = self._chain(place), self._begun[place]
            del self._begun[place:]
        if begun.told and not work.broken_off:
            self._tell(f"{chain}: done in {clock(self._now() - begun.at)}")

    # -- display ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Works:
        self._thread = threading.Thread(target=self._look, name="teamtr progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._leave_screen()

    def line(self) -> str | None:
        """The line for the current operation; None if nothing has taken long."""
        with self._lock:
            found = self._long()
            return None if found is None else self._text(found)

    def tick(self) -> None:
        """Without a terminal: print a line if one is due."""
        now = self._now()
        with self._lock:
            found = self._long()
            if found is None or now - self._last_line < LINE_EVERY:
                return
            self._last_line, self._begun[found].told = now, True
            text = self._text(found)
        self._tell(text)

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(on_terminal(self.line() or ""), style="dim", no_wrap=True, overflow="ellipsis")

    def _long(self) -> int | None:
        """The innermost operation that began at least two seconds ago."""
        now = self._now()
        return next((k for k in reversed(range(len(self._begun))) if now - self._begun[k].at >= SHOWN_AFTER), None)

    def _chain(self, place: int) -> str:
        return ", ".join(dict.fromkeys(begun.work.what for begun in self._begun[: place + 1]))

    def _text(self, place: int) -> str:
        begun = self._begun[place]
        return f"{self._chain(place)}: {described(begun.work, self._now() - begun.at)}"

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            if self.line() is None or self.is_hosted:
                self._leave_screen()
                continue
            from rich.console import Console  # imported late: most commands never need it

            console = Console(stderr=True, highlight=False)
            if console.is_terminal:
                self._take_screen(console)
            else:
                self.tick()

    def _take_screen(self, console: Any) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(self, console=console, refresh_per_second=4, transient=True, redirect_stdout=False)
            self._live.start()

    def _leave_screen(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def described(work: Work, seconds: float) -> str:
    """Progress after so many seconds: the count, the rate, and the time left."""
    if not work.unit:
        return f"{clock(seconds)} so far"
    of = "" if work.total is None else f" of {work.total:,}"
    counted = f"{work.done:,}{of} {work.unit}"
    if not work.done or seconds <= 0.0:
        return f"{counted}, {clock(seconds)} so far"
    rate = work.done / seconds
    left = "" if work.total is None else f", {clock(max(work.total - work.done, 0) / rate)} left at most"
    return f"{counted}, {rate:,.3g}/s{left}" if rate < 100 else f"{counted}, {rate:,.0f}/s{left}"
