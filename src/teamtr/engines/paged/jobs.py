"""Rows that the paged sampler is asked to write: their speaker, the request, and the state while they are written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from teamtr.answers import Ended
from teamtr.engines.kept import Keep
from teamtr.engines.paged.buffers import NOBODY, Seated
from teamtr.engines.sampling import TokenSampler
from teamtr.types import Floats, Ids


def _as_it_is() -> None:
    """The copy already holds the weights."""


@dataclass(frozen=True, eq=False)
class Speaker:
    """The agent of a row: which weights write it, how tokens are drawn, and what ends a message.

    Args:
        version: names the weights; if empty, later calls reuse nothing that was computed with them.
        lane: rows of equal lanes may decode together, and have the same ``drawing``.
        adapter: index of the agent's adapter, if the copy applies adapters row by row.
        take_up: loads the weights into the copy.
        keep: called with the features that each message's tokens were drawn from.
    """

    version: str
    drawing: TokenSampler
    end_ids: frozenset[int]
    lane: Hashable = ""
    adapter: int = NOBODY
    take_up: Callable[[], None] = _as_it_is
    keep: Keep | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A requested row."""

    speaker: Speaker
    prompt: Ids
    noise_T: Floats


MoreJobs = Callable[[Sequence[Ended]], Sequence[Job]]
"""As ``ports.More``, for jobs."""


@dataclass(eq=False)
class OpenRow:
    """A row that is being written: its number in the stream, its pages, and the slot of its output. ``told`` counts the
    tokens that were already reported, ``drawn`` those that are drawn unless the message ends before."""

    row: int
    job: Job
    version: str
    pages: list[int]
    slot: int
    told: int = 0
    drawn: int = 1

    @property
    def left(self) -> int:
        """The most tokens that are still to be drawn."""
        return len(self.job.noise_T) - self.drawn

    @property
    def prompt(self) -> Ids:
        return self.job.prompt

    @property
    def seated(self) -> Seated:
        speaker = self.job.speaker
        return Seated(self.slot, self.prompt, self.pages, self.job.noise_T, speaker.end_ids, speaker.adapter)
