"""One thread that samples for everybody: rows of all requests that the same agent speaks next decode as one batch.

A request plays its conversation in a thread of its own, with the loop that also trains and evaluates, and asks for one
message at a time. Here these rows wait, and:

1. the agent whose row waits longest is next; all rows that it is asked for, at the same decoding, go together;
2. every token is told to whoever waits for it, who may want no more: then the row ends there;
3. when other rows come meanwhile, those that decode are put back after a few tokens, and go on in one batch with what
   has come: nobody waits for the end of a long message of somebody else.

A row's tokens depend on its prompt and its noise alone (``ports.Sampler``), so company changes nothing that is said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from teamtr.ports import EngineLost, Sampler
from teamtr.types import Decoding, Finish, Floats, Ids, Sample

TOKENS_BETWEEN = 32
"""Tokens that rows decode at least before they are put together with others anew: on a CPU each of them then reads its
prompt once more."""


class Cancelled(Exception):
    """Nobody waits for this any more."""


Listener = Callable[[Ids], bool]
"""Told of the tokens of a message as they come; whether more are wanted. Called in the scheduler's thread."""


@dataclass(eq=False)
class Row:
    """One message that is asked for. ``limit``: the most tokens of it, at most as many as there are numbers in
    ``noise_T``."""

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

    @property
    def so_far(self) -> Ids:
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int32)])

    def tell(self, before: int, token_ids: Ids) -> bool:
        """Tell of what is new in tokens of which ``before`` came earlier; whether the row should go on."""
        new = token_ids[max(0, self.told - before) :][: self.limit - self.told]
        if len(new):
            self.told += len(new)
            self.wanted = self.wanted and self.listen(new)
        return self.wanted and self.told < self.limit and not self.cancelled.is_set()

    def take(self, sample: Sample) -> None:
        """Add what was sampled; the message is whole when it stopped, reached its limit, or is wanted no longer."""
        room = self.limit - len(self.token_ids)
        if not self.wanted:  # an engine may have gone on after the last token that was wanted
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
    """What the scheduler did so far."""

    batches: int = 0
    rows: int = 0
    put_back: int = 0
    most_rows: int = 0


class Scheduler:
    """Samples for all who ask, in one thread, until it is closed."""

    def __init__(self, sampler: Sampler, *, tokens_between: int = TOKENS_BETWEEN) -> None:
        self.sampler = sampler
        self.tokens_between = tokens_between
        self.work = Work()
        self._waiting: list[Row] = []
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="teamtr sampling", daemon=True)
        self._thread.start()

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        """These messages, when all are there. Raises Cancelled, or what the engine raised of one of them."""
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
        """Look at once at who is cancelled."""
        with self._news:
            self._news.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Whoever still waits is told that nothing comes."""
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
        """1. Who is next; empty when all is over."""
        with self._news:
            while True:
                for row in [row for row in self._waiting if row.cancelled.is_set()]:
                    self._waiting.remove(row)
                    row.end(Cancelled("nobody waits for it"))
                if self._closed:
                    return []
                if self._waiting:
                    first = min(self._waiting, key=lambda row: row.waits_since)
                    batch = [r for r in self._waiting if (r.agent, r.decoding) == (first.agent, first.decoding)]
                    self._waiting = [row for row in self._waiting if row not in batch]
                    return batch
                self._news.wait()

    def _sample(self, batch: Sequence[Row]) -> None:
        """Sample these rows; where it fails, each by itself, so that one row fails for nobody else. An engine that is
        lost is asked for nothing more."""
        try:
            self._decode(batch)
        except EngineLost as error:
            self._closed = True
            for row in batch:
                row.end(error)
        except Exception as error:
            if len(batch) == 1:
                batch[0].end(error)
                return
            for row in batch:
                self._sample([row])

    def _decode(self, batch: Sequence[Row]) -> None:
        first = batch[0]
        done = [len(row.token_ids) for row in batch]
        width = max(len(row.noise_T) - already for row, already in zip(batch, done, strict=True))
        noise_BT = np.zeros((len(batch), width))
        for b, (row, already) in enumerate(zip(batch, done, strict=True)):
            noise_BT[b, : len(row.noise_T) - already] = row.noise_T[already:]

        def follow(b: int, before: int, token_ids: Ids) -> bool:
            # 2. and 3.
            wanted = batch[b].tell(done[b] + before, token_ids)
            others_wait = bool(self._waiting) and before + len(token_ids) >= self.tokens_between
            return wanted and not others_wait

        samples = self.sampler.sample(
            first.agent, [row.so_far for row in batch], noise_BT, decoding=first.decoding, follow=follow
        )
        self.work.batches += 1
        self.work.rows += len(batch)
        self.work.most_rows = max(self.work.most_rows, len(batch))
        unfinished = []
        for row, sample in zip(batch, samples, strict=True):
            row.take(sample)
            if row.cancelled.is_set():
                row.end(Cancelled("nobody waits for it"))
            elif row.finish is not None:
                row.end()
            else:
                unfinished.append(row)
        if unfinished:
            self.work.put_back += len(unfinished)
            with self._news:
                for row in unfinished:
                    row.waits_since = time.monotonic()
                self._waiting += unfinished
