"""The speakers of a method: named roles, each played by an agent of the team."""

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
    """The sampling settings of a method, and the ledger of its costs. All samples derive from ``seed``."""

    seed: int
    temperature: float | None
    ledger: Ledger

    def named(self, *names: str | int) -> Draws:
        """The same settings with a seed derived from these names."""
        return replace(self, seed=seed_of(self.seed, *names))


@dataclass(frozen=True)
class Speaker:
    """A role of a method: its name, the agent that plays it, the instruction added to the agent's system prompt, and
    what it sees."""

    name: str
    agent: str
    told: str = ""
    sees: Visibility = EVERYTHING


@dataclass(frozen=True)
class Scene:
    """A conversation of some speakers. ``agents`` maps speakers to the agents that play them."""

    context: RolloutContext
    team: Team
    agents: Mapping[str, str]

    def begin(self, problem: Problem, turns: Sequence[Turn] = ()) -> EpisodeState:
        """An episode with these turns so far. A speaker sees the private prompt of the agent that plays it, and not
        that of an agent whose name it happens to have."""
        if self.agents:
            shown = {name: problem.private[agent] for name, agent in self.agents.items() if agent in problem.private}
            problem = replace(problem, private=shown)
        return EpisodeState(problem, turns=list(turns))

    def play(self, states: Sequence[EpisodeState], draws: Draws) -> None:
        """Play these episodes to their end."""
        converse(self.context, self.team, states, seed=draws.seed, temperature=draws.temperature, ledger=draws.ledger)


@dataclass(frozen=True)
class Cast:
    """The team that plays methods, and its rollout context.

    ``agent``: the agent that plays every role; without it, a method with a single model uses the agent that answers,
    and other methods distribute their roles. ``max_tokens``: limit for messages of every role; default: the agent's.
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
        """The agent that plays the answering role: ``agent`` if given, else the one whose message is the team's answer,
        else the one that speaks last."""
        if self.agent is not None:
            return self.agent
        answer = self.context.answer
        return answer if answer in self.team.names else closers_of(self.context.router, self.team.names)[-1]

    def named(self, name: str) -> str:
        """The name of this agent, validated; without a name, the answering agent."""
        if name and name not in self.team.names:
            raise UserError(f"there is no agent {name!r} in the team; it has {', '.join(self.team.names)}")
        return name or self.answering

    def share(self, roles: int) -> tuple[str, ...]:
        """The agents for ``roles`` roles: those of the team in turn."""
        return tuple(islice(cycle(self.team.names if self.agent is None else (self.agent,)), roles))

    def rounds(self, own: int = 1) -> int:
        """The number of rounds of a method: ``own``, but in an interactive task the team's."""
        return own if self.context.task.environment is None else self.context.router.rounds

    def scene(self, speakers: Sequence[Speaker], router: Router, answer: str = "last") -> Scene:
        """A conversation of these speakers in the order of this router. An environment replies to the answer of each
        round, which the rule ``answer`` selects."""
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
    """A sampler that maps the names of speakers to agents."""

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
