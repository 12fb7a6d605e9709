"""A stream over the models of one process: agents that share a paged sampler join its running batch, the others are
sampled batch by batch.

A message with log-probabilities that are not finite is not reported. Rows that are running finish, no new ones join,
and then the row is sampled again in the fallback precision, as in ``Policy.sample``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from teamtr.answers import Decoding, Ended, Wanted
from teamtr.engines.paged.jobs import Job
from teamtr.engines.paged.place import Paged
from teamtr.engines.paged.sampler import Server
from teamtr.engines.policy import Policy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.attention import Unsupported
from teamtr.ports import Batches, Follow, Heard, More, unfollowed
from teamtr.progress import working
from teamtr.streams import Batch, sample_batch
from teamtr.types import Ids


class Models(Batches, Protocol):
    """A sampler of batches that also has the versions of its weights."""

    def version(self, agent: str) -> str: ...


class Streaming:
    """One stream of an engine over these policies, by agent."""

    def __init__(
        self, engine: Models, policies: Mapping[str, Policy], more: More, heard: Heard, follow: Follow
    ) -> None:
        self.engine, self.policies = engine, policies
        self.wants, self.heard, self.follow = more, heard, follow
        self._open: dict[int, Wanted] = {}
        self._rows = 0
        self._versions: dict[str, str] = {}
        self._paged: dict[tuple[str, Decoding], Paged | None] = {}

    def run(self) -> None:
        self._tell([])
        while self._open:
            places: dict[Hashable, list[int]] = {}
            for row, one in self._open.items():
                places.setdefault(self._place(one), []).append(row)
            rows = max(places.values(), key=lambda rows: (len(rows), -rows[0]))
            paged = self._paged_of(self._open[rows[0]])
            if paged is None:
                self._in_a_batch(rows)
            else:
                self._from_pages(paged.server, rows)

    def _tell(self, ended: Sequence[Ended]) -> list[int]:
        """Reports finished messages; returns the rows that are wanted next."""
        for one in ended:
            del self._open[one.row]
        given = self.wants(ended)
        rows = list(range(self._rows, self._rows + len(given)))
        self._open.update(zip(rows, given, strict=True))
        self._rows += len(given)
        return rows

    # -- where rows are sampled -------------------------------------------------------------------------------

    def _place(self, one: Wanted) -> Hashable:
        paged = self._paged_of(one)
        return Batch.of(one) if paged is None else id(paged.server)

    def _paged_of(self, one: Wanted) -> Paged | None:
        key = (one.agent, one.decoding)
        if key not in self._paged:
            policy = self.policies[one.agent]
            if one.agent not in self._versions:
                self._versions[one.agent] = self.engine.version(one.agent)
            drawing = TokenSampler.of(one.decoding, policy.temperature)
            self._paged[key] = policy.paged(self._versions[one.agent], drawing)
        return self._paged[key]

    def _job(self, row: int) -> Job:
        one = self._open[row]
        paged = self._paged_of(one)
        assert paged is not None
        self.policies[one.agent].require_room(len(one.prompt) + len(one.noise_T))
        return Job(paged.speaker, one.prompt, one.noise_T)

    # -- how rows are sampled ---------------------------------------------------------------------------------

    def _in_a_batch(self, rows: Sequence[int]) -> None:
        self._tell(sample_batch(self.engine, {row: self._open[row] for row in rows}, self.heard, self.follow))

    def _from_pages(self, server: Server, rows: Sequence[int]) -> None:
        next_rows, given, broken = list(rows), list[int](), list[int]()

        def more(ended: Sequence[Ended]) -> list[Job]:
            whole = []
            for one in ended:
                row = given[one.row]
                if np.isfinite(one.sample.logprobs).all():
                    version = self._versions[self._open[row].agent]
                    whole.append(Ended(row, replace(one.sample, version=version)))
                else:
                    broken.append(row)
            next_rows.extend(row for row in self._tell(whole) if self._place(self._open[row]) == id(server))
            if broken:
                return []
            given.extend(next_rows)
            jobs = [self._job(row) for row in next_rows]
            next_rows.clear()
            return jobs

        def told(row: int, before: int, token_ids: Ids) -> bool:
            return self.follow(given[row], before, token_ids)

        try:
            with working("sampling"):
                server.stream(more, follow=self.follow if self.follow is unfollowed else told)
        except Unsupported as reason:
            for paged in self._paged.values():
                if paged is not None and paged.server is server:
                    paged.leave(reason)
            self._paged.clear()
        if broken and (paged := self._paged_of(self._open[broken[0]])) is not None:  # None: it goes on plainly
            paged.otherwise()
            self._paged.clear()
