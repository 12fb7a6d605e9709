"""Majority votes on the answers of several independent tries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from teamtr.baselines.cast import Cast, Draws
from teamtr.baselines.method import Method, joined, parted, setting
from teamtr.rollout import EpisodeState
from teamtr.types import Problem, Turn


def vote(answers: Sequence[str], weights: Sequence[float], extract: Callable[[str], str | None]) -> str:
    """The first text that states the answer with the greatest weight; with a tie, the answer that was given first.

    ``extract`` finds the answer in a text. Texts without an answer do not vote; if there are no votes, the first text
    is returned.
    """
    totals: dict[str, float] = {}
    first: dict[str, str] = {}
    for text, weight in zip(answers, weights, strict=True):
        stated = extract(text)
        if stated is not None:
            totals[stated] = totals.get(stated, 0.0) + weight
            first.setdefault(stated, text)
    return first[max(totals, key=totals.__getitem__)] if totals else answers[0]


def likelihood(turns: Sequence[Turn]) -> float:
    """The weight of a try: the geometric mean of the probabilities of all its sampled tokens."""
    logprobs = np.concatenate([turn.sampler_logprobs for turn in turns])
    return float(np.exp(logprobs.mean())) if logprobs.size else 1.0


@dataclass(frozen=True, kw_only=True)
class Voted(Method):
    """The most frequent answer over several tries of another method."""

    votes: int = setting(8, "Answers that vote.", tries=True)
    weighted: bool = setting(False, "Weight votes by the likelihood of their texts, per token.")

    @property
    @abstractmethod
    def voter(self) -> Method:
        """The method that is tried."""

    @property
    def width(self) -> int:
        return self.votes * self.voter.width

    def require(self, cast: Cast, temperature: float | None) -> None:
        super().require(cast, temperature)
        self.voter.require(cast, temperature)

    def span(self, cast: Cast) -> int:
        return self.votes * self.voter.span(cast)

    def attempts(self, cast: Cast, problems: Sequence[Problem], draws: Draws) -> list[EpisodeState]:
        tries = self.voter.attempts(cast, [problem for problem in problems for _ in range(self.votes)], draws)
        span = self.voter.span(cast)
        return [joined(tries[k : k + self.votes], span) for k in range(0, len(tries), self.votes)]

    def answer(self, cast: Cast, turns: Sequence[Turn]) -> str:
        tries = parted(turns, self.voter.span(cast))
        weights = [likelihood(each) if self.weighted else 1.0 for each in tries]
        return vote([self.voter.answer(cast, each) for each in tries], weights, cast.context.task.extract)


@dataclass(frozen=True, kw_only=True)
class Repeated(Voted):
    """Any method repeated ``votes`` times, with a vote on the answers."""

    of: Method

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.of.name

    @property
    def voter(self) -> Method:
        return self.of


def repeated(method: Method, times: int) -> Method:
    """The method with ``times`` tries: through its own setting if it has one, otherwise by repeating it with a vote."""
    own = next((each.name for each in fields(method) if each.metadata.get("tries")), None)
    if own is not None:
        return replace(method, **{own: times})
    return method if times == 1 else Repeated(of=method, votes=times)
