"""An episode while it is played, and the draft that it may be kept from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from teamtr.types import Episode, Ids, Message, Problem, Reply, Turn, Verdict


@dataclass(frozen=True)
class Draft:
    """An episode of an older team, to be kept as far as the present one might have said it: ``kept`` and ``next`` of
    each turn as in ``Carried``."""

    episode: Episode
    kept: Sequence[int]
    next: Sequence[int]


@dataclass
class EpisodeState:
    """An episode while it is played; ``acts`` and ``replies`` as in ``Situation``."""

    problem: Problem
    draft: Draft | None = None
    turns: list[Turn] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    @property
    def as_drafted(self) -> bool:
        """Whether all that was said so far, by agents and tools, is what the draft says."""
        if self.draft is None:
            return False
        drafted = self.draft.episode.turns
        return len(self.turns) <= len(drafted) and all(
            (ours.text, ours.results) == (theirs.text, theirs.results)
            for ours, theirs in zip(self.turns, drafted, strict=False)
        )

    def drafted_results(self, text: str) -> tuple[Message, ...] | None:
        """What tools replied to the next message, of this text, in the draft; None where something else was said in it,
        here or before, so that the tools must be asked again."""
        if self.draft is None or not self.as_drafted or len(self.turns) >= len(self.draft.episode.turns):
            return None
        drafted = self.draft.episode.turns[len(self.turns)]
        return drafted.results if drafted.text == text else None

    def drafted_turn(self, agent: str, prompt: Ids) -> tuple[Turn, int, int] | None:
        """What the draft says here, how many of its tokens stay (-1: all) and which one follows them; None where
        somebody else speaks in it, or reads something else. A message is drawn in its context alone, so that it may
        stay where that is the same, whatever was changed before."""
        if self.draft is None or len(self.turns) >= len(self.draft.episode.turns):
            return None
        place = len(self.turns)
        turn = self.draft.episode.turns[place]
        same = turn.agent == agent and np.array_equal(turn.context_ids, prompt)
        return (turn, self.draft.kept[place], self.draft.next[place]) if same else None

    @property
    def drafted_verdict(self) -> Verdict | None:
        """The draft's, where the whole episode is word for word what the draft was."""
        if self.draft is None or not self.as_drafted or len(self.turns) != len(self.draft.episode.turns):
            return None
        return self.draft.episode.verdict

    @property
    def ended(self) -> bool:
        """Whether the environment has ended it."""
        return bool(self.replies) and self.replies[-1].ends
