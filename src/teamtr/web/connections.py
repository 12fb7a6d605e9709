"""Timeouts of connections: a client that sends no request, or does not read its response, is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True)
class Patience:
    """Timeouts for the head of a request and for a client that reads nothing of its response, and the maximum number of
    open connections."""

    head_seconds: float = 10.0
    stalled_seconds: float = 30.0
    connections: int = 4096


def guarded(patience: Patience) -> type[H11Protocol]:
    """The uvicorn protocol class with these timeouts and limits."""

    class Guarded(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > patience.connections:
                transport.abort()
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            _stop(self._head)
            _stop(self._reading)
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                _stop(self._head)

        def on_response_complete(self) -> None:
            self._expect_head()  # of the next request, which may have been pipelined
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            _stop(self._reading)
            self._reading = self._let_go_after(patience.stalled_seconds, self._set_reading)

        def resume_writing(self) -> None:
            _stop(self._reading)
            super().resume_writing()

        def _expect_head(self) -> None:
            _stop(self._head)
            self._head = self._let_go_after(patience.head_seconds, self._set_head)

        def _let_go_after(self, seconds: float, again: Callable[[asyncio.TimerHandle], None]) -> asyncio.TimerHandle:
            """Disconnect after ``seconds``, unless the client has read some of the buffered data but not all: then wait
            again."""
            held = self.transport.get_write_buffer_size()

            def look() -> None:
                left = self.transport.get_write_buffer_size()
                if 0 < left < held:
                    again(self._let_go_after(seconds, again))
                else:
                    self.transport.abort()

            return self.loop.call_later(seconds, look)

        def _set_head(self, timer: asyncio.TimerHandle) -> None:
            self._head = timer

        def _set_reading(self, timer: asyncio.TimerHandle) -> None:
            self._reading = timer

    return Guarded


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
