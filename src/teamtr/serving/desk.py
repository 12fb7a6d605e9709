"""Admission control for requests: which are served, queued or rejected.

Every choice of a request is played in a thread of its own, at most ``at_once`` of them. Up to ``waiting`` more are
queued, first come, first served. Beyond that, a request is rejected at once, with the seconds after which to retry. A
request that no client waits for any more is cancelled: its queued choices and messages are removed, and messages that
are being sampled end with their next token.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from teamtr.serving.metrics import Counts
from teamtr.serving.request import BadRequest, ChatRequest
from teamtr.serving.schedule import Cancelled, Scheduler
from teamtr.serving.team import Ask, Choice, ServedTeam, Teller


class Busy(Exception):
    """The queue is full; ``retry_after`` is in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server has as many requests as it takes")
        self.retry_after = retry_after


class Draining(Exception):
    """The server is shutting down."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Args:
        at_once: choices that are played concurrently.
        waiting: further choices that may be queued.
        body_bytes: size of one request's body.
        depth: nesting depth of brackets in a body.
        request_seconds: timeout from the moment a request was read to the last byte of its answer.
    """

    at_once: int = 64
    waiting: int = 256
    body_bytes: int = 1 << 20
    depth: int = 32
    request_seconds: float = 600.0


@dataclass(eq=False)
class Ticket:
    """An accepted request: its seed and the futures of its choices."""

    request: ChatRequest
    seed: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    choices: Sequence[Future[Choice]] = ()


class Desk:
    """Accepts requests for one team until it is closed."""

    def __init__(self, served: ServedTeam, scheduler: Scheduler, limits: Limits) -> None:
        self.served, self.scheduler, self.limits = served, scheduler, limits
        self.counts = Counts()
        self._pool = ThreadPoolExecutor(limits.at_once, thread_name_prefix="teamtr choice")
        self._lock = threading.Lock()
        self._pending = 0
        self._seconds = 0.0
        self.is_draining = False

    def take(self, request: ChatRequest, teller: Teller) -> Ticket:
        """Start to answer a request. If it raises BadRequest, Busy or Draining, nothing was started."""
        self.served.require(request)
        count, most = request.n or 1, self.limits.at_once + self.limits.waiting
        if count > most:
            raise BadRequest(f"n is {count}, and this server takes at most {most} answers", "n", "invalid_value")
        with self._lock:
            if self.is_draining:
                raise Draining
            if self._pending + count > most:
                self.counts.refused += 1
                raise Busy(self._retry_after())
            self._pending += count
        # 53 bits, which every client's JSON can represent; a client may send larger seeds, and negative ones.
        seed = secrets.randbits(53) if request.seed is None else request.seed % 2**63
        ticket = Ticket(request, seed)
        ticket.choices = [
            self._pool.submit(self._play, Ask.of(request, choice, seed, teller, ticket.cancelled))
            for choice in range(count)
        ]
        for future in ticket.choices:
            future.add_done_callback(self._done)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request that no client waits for; choices that are done are left alone."""
        ticket.cancelled.set()
        for future in ticket.choices:
            future.cancel()
        self.scheduler.notice()

    @property
    def pending(self) -> int:
        """Number of choices that are being played or queued."""
        return self._pending

    def drain(self) -> None:
        """Accept no more requests; accepted ones are still answered."""
        with self._lock:
            self.is_draining = True

    def close(self) -> None:
        """Stop; whatever is still pending ends with Cancelled or CancelledError."""
        self.drain()
        self.scheduler.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _play(self, ask: Ask) -> Choice:
        if ask.cancelled.is_set():
            raise Cancelled("nobody waits for it")
        started = time.monotonic()
        choice = self.served.play(ask)
        took = time.monotonic() - started
        with self._lock:
            self._seconds = took if not self._seconds else 0.9 * self._seconds + 0.1 * took
            self.counts.add(choice)
        return choice

    def _done(self, future: Future[Choice]) -> None:
        with self._lock:
            self._pending -= 1
            self.counts.cancelled += future.cancelled() or isinstance(future.exception(), Cancelled)

    def _retry_after(self) -> int:
        """Seconds until about half of the pending choices are done, estimated from recent durations; 1 to 60."""
        rounds = self._pending / self.limits.at_once / 2
        return min(60, max(1, math.ceil(rounds * self._seconds)))
