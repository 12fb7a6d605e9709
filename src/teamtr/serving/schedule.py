"""Continuous batching: one thread samples for all requests, and rows that can be computed together form one batch.

A request plays its conversation in a thread of its own, with the same loop as training and evaluation, and requests
one message at a time. These messages are the rows of a queue:

1. The row that has waited longest is next, with all rows that can decode together with it: those with the same decoding
   settings of its agent, or of all agents whose adapters the sampler applies by row. They go into one stream
   (``ports.Sampler``).
2. Every token is passed to the row's listener, which may end the row.
3. New rows of the same kind join the stream. If rows of another kind wait, or the stream has not taken new rows for a
   while, running rows go back to the queue after a few tokens and continue in another batch, so that no row waits for
   the end of another's long message.

A row's tokens depend only on its prompt and its noise (``ports.Sampler``), so batching does not change the output.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from teamtr.answers import Decoding, Ended, Sample, Wanted
from teamtr.ports import Engine, EngineLost, Sampler
from teamtr.types import Finish, Floats, Ids

TOKENS_BETWEEN = 32
"""Minimum number of tokens that rows decode before they are batched again with others: on a CPU, each of them then
prefills its prompt again."""


class Cancelled(Exception):
    """The request was cancelled, or the server was closed."""


Listener = Callable[[Ids], bool]
"""Receives the tokens of a message as they are sampled; returns whether more are wanted. Called in the scheduler's
thread."""


@dataclass(eq=False)
class Row:
    """One requested message. ``limit`` is its maximum number of tokens, at most the length of ``noise_T``."""

    agent: str
    prompt: Ids
    noise_T: Floats
    decoding: Decoding
    limit: int
    listen: Listener
    cancelled: threading.Event
    waits_since: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0
    wanted: bool = True
    finish: Finish | None = None
    version: str = ""
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def rest(self) -> Wanted:
        """The rest of the message, still to be sampled."""
        said = np.array(self.token_ids, dtype=np.int32)
        return Wanted(
            self.agent, np.concatenate([self.prompt, said]), self.noise_T[len(said) : self.limit], self.decoding
        )

    def tell(self, before: int, token_ids: Ids) -> bool:
        """Pass the new ones of these tokens to the listener; ``before`` tokens of the message precede them. Returns
        whether the row should continue."""
        new = token_ids[max(0, self.told - before) :][: self.limit - self.told]
        if len(new):
            self.told += len(new)
            self.wanted = self.wanted and self.listen(new)
        return self.wanted and self.told < self.limit and not self.cancelled.is_set()

    def take(self, sample: Sample) -> None:
        """Append a sample; the message is complete if it stopped, reached its limit, or is no longer wanted."""
        room = self.limit - len(self.token_ids)
        if not self.wanted:  # an engine may have sampled beyond the last wanted token
            room = min(room, self.told - len(self.token_ids))
        cut = len(sample.token_ids) > room
        self.token_ids += sample.token_ids[:room].tolist()
        self.logprobs += sample.logprobs[:room].tolist()
        self.version = sample.version
        if sample.finish == "stop" and not cut:
            self.finish = "stop"
        elif not self.wanted or len(self.token_ids) >= self.limit:
            self.finish = "length"

    def result(self) -> Sample:
        assert self.finish is not None
        return Sample(
            np.array(self.token_ids, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            self.finish,
            self.version,
        )

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done.set()


@dataclass
class Work:
    """Counts of what the scheduler did so far."""

    batches: int = 0
    rows: int = 0
    put_back: int = 0
    most_rows: int = 0


@dataclass(eq=False)
class _Open:
    """A row in a stream: its tokens before it joined, and its tokens when the stream last took new rows."""

    row: Row
    before: int
    joinable_at: int


class Scheduler:
    """Samples for all requests in one thread, until it is closed. ``together`` returns equal keys for agents whose rows
    the sampler can compute in one batch."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        together: Callable[[str], Hashable] = lambda agent: agent,
        tokens_between: int = TOKENS_BETWEEN,
    ) -> None:
        self.sampler = sampler
        self.together = together
        self.tokens_between = tokens_between
        self.work = Work()
        self._waiting: list[Row] = []
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="teamtr sampling", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """A scheduler that batches agents as the engine's ``AgentInfo.batch`` says."""
        together = {agent: engine.info(agent).batch or agent for agent in engine.agents}
        return cls(engine, together=together.__getitem__)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        """Sample these messages; returns when all are complete. Raises Cancelled, or the engine's exception for one."""
        with self._news:
            if self._closed:
                raise Cancelled("the server is closed")
            self._waiting += rows
            self._news.notify()
        for row in rows:
            row.done.wait()
        for row in rows:
            if row.error is not None:
                raise row.error
        return [row.result() for row in rows]

    def notice(self) -> None:
        """Wake the thread, so that it drops cancelled rows."""
        with self._news:
            self._news.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop; rows that are not complete end with Cancelled."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    # -- in its own thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[Row] = []
        try:
            while batch := self._next_batch():
                self._sample(batch)
        finally:
            with self._news:
                self._closed = True
                left, self._waiting = [*batch, *self._waiting], []
            for row in left:
                row.end(Cancelled("the server is closed"))

    def _next_batch(self) -> list[Row]:
        """Step 1: the rows to sample next; empty when closed."""
        with self._news:
            while True:
                self._leave_cancelled()
                if self._closed:
                    return []
                if self._waiting:
                    return self._taken(self._kind(min(self._waiting, key=lambda row: row.waits_since)))
                self._news.wait()

    def _kind(self, row: Row) -> Hashable:
        return self.together(row.agent), row.decoding

    def _leave_cancelled(self) -> None:
        for row in [row for row in self._waiting if row.cancelled.is_set()]:
            self._waiting.remove(row)
            row.end(Cancelled("nobody waits for it"))

    def _taken(self, kind: Hashable) -> list[Row]:
        """Remove all rows of this kind from the queue and return them."""
        taken = [row for row in self._waiting if self._kind(row) == kind]
        self._waiting = [row for row in self._waiting if row not in taken]
        return taken

    def _sample(self, batch: Sequence[Row], alone: bool = False) -> None:
        """Sample these rows and those that join. If that fails, sample each alone, so that one row's failure does not
        affect the others. After EngineLost nothing more is sampled."""
        opened: dict[int, _Open] = {}
        try:
            self._stream(batch, opened, alone)
        except EngineLost as error:
            self._closed = True
            for one in opened.values():
                one.row.end(error)
        except Exception as error:
            if alone:
                for one in opened.values():
                    one.row.end(error)
                return
            for one in opened.values():
                self._sample([one.row], alone=True)

    def _stream(self, batch: Sequence[Row], opened: dict[int, _Open], alone: bool) -> None:
        kind, rows = self._kind(batch[0]), 0
        wanted: list[Wanted] = []

        def take_in(new: Sequence[Row]) -> None:
            nonlocal rows
            for row in new:
                opened[rows] = _Open(row, len(row.token_ids), row.told)
                rows += 1
                wanted.append(row.rest())

        def more(ended: Sequence[Ended]) -> list[Wanted]:
            for one in ended:
                self._take(opened.pop(one.row).row, one.sample)
            if not alone:
                take_in(self._joining(kind))
            for running in opened.values():
                running.joinable_at = running.row.told
            if wanted:
                self.work.batches += 1
                self.work.rows += len(wanted)
                self.work.most_rows = max(self.work.most_rows, len(opened))
            given = wanted.copy()
            wanted.clear()
            return given

        take_in(batch)  # before the stream starts: if it fails, these rows are handled too

        def follow(number: int, before: int, token_ids: Ids) -> bool:
            # steps 2 and 3
            one = opened[number]
            goes_on = one.row.tell(one.before + before, token_ids)
            return goes_on and not (before + len(token_ids) >= self.tokens_between and self._must_make_room(one, kind))

        self.sampler.stream(more, follow=follow)

    def _joining(self, kind: Hashable) -> list[Row]:
        """Queued rows of this kind; none while rows of another kind wait, which would otherwise wait forever."""
        with self._news:
            self._leave_cancelled()
            if self._closed or any(self._kind(row) != kind for row in self._waiting):
                return []
            return self._taken(kind)

    def _must_make_room(self, one: _Open, kind: Hashable) -> bool:
        """Whether rows wait that cannot join: they are of another kind, or the stream took no rows for a while."""
        waiting = list(self._waiting)
        if any(self._kind(row) != kind for row in waiting):
            return True
        return bool(waiting) and one.row.told - one.joinable_at >= self.tokens_between

    def _take(self, row: Row, sample: Sample) -> None:
        """Take a stream's sample of a row; the row is queued again if it is not complete."""
        row.take(sample)
        if row.cancelled.is_set():
            row.end(Cancelled("nobody waits for it"))
        elif row.finish is not None:
            row.end()
        else:
            self.work.put_back += 1
            with self._news:
                row.waits_since = time.monotonic()
                self._waiting.append(row)
