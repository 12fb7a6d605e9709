"""The state of an episode in progress, and the draft that it may reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from teamtr.types import Episode, Ids, Message, Problem, Reply, Turn, Verdict


@dataclass(frozen=True)
class Draft:
    """An episode of an older team, reused as far as the present team might have written it. ``kept`` and ``next`` hold
    one value per turn, as ``kept_U`` and ``next_U`` in ``Carried``."""

    episode: Episode
    kept: Sequence[int]
    next: Sequence[int]


@dataclass
class EpisodeState:
    """An episode in progress; ``acts`` and ``replies`` as in ``Situation``."""

    problem: Problem
    draft: Draft | None = None
    turns: list[Turn] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    @property
    def as_drafted(self) -> bool:
        """Whether all turns so far, tool results included, equal those of the draft."""
        if self.draft is None:
            return False
        drafted = self.draft.episode.turns
        return len(self.turns) <= len(drafted) and all(
            (ours.text, ours.results) == (theirs.text, theirs.results)
            for ours, theirs in zip(self.turns, drafted, strict=False)
        )

    def drafted_results(self, text: str) -> tuple[Message, ...] | None:
        """The draft's tool results for the next message, if that has this text; None if the episode differs from the
        draft here or before, so the tools must be called again."""
        if self.draft is None or not self.as_drafted or len(self.turns) >= len(self.draft.episode.turns):
            return None
        drafted = self.draft.episode.turns[len(self.turns)]
        return drafted.results if drafted.text == text else None

    def drafted_turn(self, agent: str, prompt: Ids) -> tuple[Turn, int, int] | None:
        """The draft's turn at this position, how many of its tokens are kept (-1: all) and which token follows them;
        None if the draft has another speaker or another context here. A message depends on its context alone, so it may
        be kept wherever the context is the same, whatever changed before."""
        if self.draft is None or len(self.turns) >= len(self.draft.episode.turns):
            return None
        place = len(self.turns)
        turn = self.draft.episode.turns[place]
        same = turn.agent == agent and np.array_equal(turn.context_ids, prompt)
        return (turn, self.draft.kept[place], self.draft.next[place]) if same else None

    @property
    def drafted_verdict(self) -> Verdict | None:
        """The draft's verdict, if the whole episode equals the draft; otherwise None."""
        if self.draft is None or not self.as_drafted or len(self.turns) != len(self.draft.episode.turns):
            return None
        return self.draft.episode.verdict

    @property
    def ended(self) -> bool:
        """Whether the environment has ended it."""
        return bool(self.replies) and self.replies[-1].ends
