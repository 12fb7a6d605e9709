"""Who plays a method: speakers with names of their own, each of them an agent of the team."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from teamtr.answers import AS_TRAINED, Decoding, Ended, Sample, Wanted
from teamtr.errors import UserError
from teamtr.ports import Follow, Heard, More, Sampler, unfollowed, unheard
from teamtr.randomness import seed_of
from teamtr.rollout import EpisodeState, Ledger, RolloutContext, converse
from teamtr.team import Agent, Router, Team, ToolTurns, Visibility
from teamtr.team.router import closers_of
from teamtr.team.visibility import EVERYTHING
from teamtr.types import Floats, Ids, Problem, Turn


@dataclass(frozen=True)
class Draws:
    """What samples are drawn with, and where they are booked. ``seed`` names all of them."""

    seed: int
    temperature: float | None
    ledger: Ledger

    def named(self, *names: str | int) -> Draws:
        """Others of the same kind."""
        return replace(self, seed=seed_of(self.seed, *names))


@dataclass(frozen=True)
class Speaker:
    """A role of a method: what it is called, which agent plays it, what that is told besides its own system prompt,
    and what it sees."""

    name: str
    agent: str
    told: str = ""
    sees: Visibility = EVERYTHING


@dataclass(frozen=True)
class Scene:
    """A conversation of some speakers. ``agents`` says who plays whom."""

    context: RolloutContext
    team: Team
    agents: Mapping[str, str]

    def begin(self, problem: Problem, turns: Sequence[Turn] = ()) -> EpisodeState:
        """An episode in which this was said. A speaker is shown what is private to the agent that plays it."""
        shown = {name: problem.private[agent] for name, agent in self.agents.items() if agent in problem.private}
        return EpisodeState(replace(problem, private={**problem.private, **shown}), turns=list(turns))

    def play(self, states: Sequence[EpisodeState], draws: Draws) -> None:
        """Say all that is still to be said."""
        converse(self.context, self.team, states, seed=draws.seed, temperature=draws.temperature, ledger=draws.ledger)


@dataclass(frozen=True)
class Cast:
    """The team that methods are played by, and where.

    ``agent``: the one that plays every role; without it, a method of a single model takes the one that answers, and
    the others share their roles out. ``max_tokens``: of a message of any role; without it, the agent's own.
    """

    context: RolloutContext
    team: Team
    agent: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.agent is not None:
            self.named(self.agent)

    @property
    def answering(self) -> str:
        """Who plays the role that answers: the agent that was asked for, else the one whose word is the team's answer,
        else the one that speaks last."""
        if self.agent is not None:
            return self.agent
        answer = self.context.answer
        return answer if answer in self.team.names else closers_of(self.context.router, self.team.names)[-1]

    def named(self, name: str) -> str:
        """The agent of this name; without a name, the one that answers."""
        if name and name not in self.team.names:
            raise UserError(f"there is no agent {name!r} in the team; it has {', '.join(self.team.names)}")
        return name or self.answering

    def share(self, roles: int) -> tuple[str, ...]:
        """Who plays each of so many roles: the agents of the team in turn."""
        return tuple(islice(cycle(self.team.names if self.agent is None else (self.agent,)), roles))

    def rounds(self, own: int = 1) -> int:
        """Of a method that has so many: in an interactive task, those of the team."""
        return own if self.context.task.environment is None else self.context.router.rounds

    def scene(self, speakers: Sequence[Speaker], router: Router, answer: str = "last") -> Scene:
        """These speakers, in the order of this router. An environment replies to what ``answer`` makes of a round."""
        agents = {speaker.name: speaker.agent for speaker in speakers}
        team = Team(tuple(map(self._member, speakers)))
        own = self.context.router
        if isinstance(own, ToolTurns):
            router = ToolTurns(router, own.steps, tuple(member.name for member in team if member.tools != ()))
        context = replace(
            self.context,
            sampler=_Playing(self.context.sampler, agents),
            codecs={name: self.context.codecs[agent] for name, agent in agents.items()},
            router=router,
            answer=answer,
        )
        return Scene(context, team, agents)

    def _member(self, speaker: Speaker) -> Agent:
        agent = self.team[speaker.agent]
        return replace(
            agent,
            name=speaker.name,
            system_prompt="\n".join(filter(None, (agent.system_prompt, speaker.told))),
            sees=speaker.sees,
            max_tokens=self.max_tokens or agent.max_tokens,
        )


@dataclass(frozen=True)
class _Playing:
    """A sampler that knows speakers by their names."""

    sampler: Sampler
    agents: Mapping[str, str]

    def version(self, agent: str) -> str:
        return self.sampler.version(self.agents[agent])

    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        *,
        decoding: Decoding = AS_TRAINED,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        return self.sampler.sample(self.agents[agent], prompts, noise_BT, decoding=decoding, heard=heard, follow=follow)

    def stream(self, more: More, *, heard: Heard = unheard, follow: Follow = unfollowed) -> None:
        def renamed(ended: Sequence[Ended]) -> list[Wanted]:
            return [replace(one, agent=self.agents[one.agent]) for one in more(ended)]

        self.sampler.stream(renamed, heard=heard, follow=follow)
