"""Rows that the sampler of a GPU is asked for: who writes them, and what is known of one that is being written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from teamtr.answers import Ended
from teamtr.engines.kept import Keep
from teamtr.engines.paged.buffers import NOBODY, Seated
from teamtr.engines.sampling import TokenSampler
from teamtr.types import Floats, Ids


def _as_it_is() -> None:
    """The copy holds the weights already."""


@dataclass(frozen=True, eq=False)
class Speaker:
    """Whose rows they are: which weights write them, and how tokens are drawn and messages end.

    Args:
        version: names the weights; without a name nothing computed with them is found again.
        lane: rows of equal lanes may decode together, and have the same ``drawing``.
        adapter: the place of the agent's adapter where the copy applies adapters row by row.
        take_up: have the weights where they are computed with.
        keep: told of each message what its tokens were drawn from.
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
    """A row that is asked for."""

    speaker: Speaker
    prompt: Ids
    noise_T: Floats


MoreJobs = Callable[[Sequence[Ended]], Sequence[Job]]
"""As ``ports.More``."""


@dataclass(eq=False)
class OpenRow:
    """A row that is being written: its number in the stream, its pages, and the slot of what it says."""

    row: int
    job: Job
    version: str
    pages: list[int]
    slot: int
    told: int = 0

    @property
    def prompt(self) -> Ids:
        return self.job.prompt

    @property
    def seated(self) -> Seated:
        speaker = self.job.speaker
        return Seated(self.slot, self.prompt, self.pages, self.job.noise_T, speaker.end_ids, speaker.adapter)
