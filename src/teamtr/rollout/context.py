"""Where a team plays: who computes, how text becomes tokens, who speaks when, what is asked, and what was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from teamtr.calls import TOOL, Schema, allowed
from teamtr.chat import render
from teamtr.chat.transcript import YOU, is_label
from teamtr.errors import UserError
from teamtr.ports import Codec, Environment, Sampler, Task, Tools
from teamtr.team import Agent, Router, Team, ToolTurns
from teamtr.types import Ids, Message, Problem


@dataclass
class Ledger:
    """What was spent, per agent and phase: tokens, messages or episodes, seconds."""

    sampled_tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    grading_seconds: float = 0.0
    environment_seconds: float = 0.0

    def add(self, agent: str, prompt: int, sampled: int, seconds: float) -> None:
        self.prompt_tokens[agent] = self.prompt_tokens.get(agent, 0) + prompt
        self.sampled_tokens[agent] = self.sampled_tokens.get(agent, 0) + sampled
        self.seconds[agent] = self.seconds.get(agent, 0.0) + seconds


@dataclass(frozen=True)
class RolloutContext:
    """Where a team plays: who computes, how text becomes tokens, who speaks when, what is asked, and what can be
    called. With ``tools`` the router is a ``ToolTurns``; ``tell``: prompts tell agents of them, as they should unless
    system prompts do."""

    sampler: Sampler
    codecs: Mapping[str, Codec]
    router: Router
    task: Task
    answer: str = "last"
    history: Literal["transcript", "chat"] = "transcript"
    tools: Tools | None = None
    tell: bool = True

    def __post_init__(self) -> None:
        if self.tools is not None and not isinstance(self.router, ToolTurns):
            raise ValueError("a team with tools needs a router of tool turns: wrap it in teamtr.team.ToolTurns")

    def speakers(self, team: Team, problem: Problem) -> tuple[str, ...]:
        """All who may speak in an episode of this problem: the agents, tools, and whoever the environment speaks as."""
        environment = self.task.environment
        others = () if environment is None else authors_of(environment, problem)
        return (*team.names, *others, *((TOOL,) if self.tools is not None else ()))

    def offered(self, agent: Agent, problem: Problem) -> tuple[Schema, ...]:
        """The tools that this agent may call in an episode of this problem."""
        if self.tools is None or agent.tools == ():
            return ()
        return allowed(self.tools.schemas(problem), agent.tools)

    def prompt(self, team: Team, agent: Agent, problem: Problem, history: Sequence[Message]) -> Ids:
        """What this agent reads when this was said before and it may see it."""
        chat = render(
            agent=agent.name,
            system_prompt=agent.system_prompt,
            problem=problem,
            history=[(message.author, message.text) for message in history],
            speakers=self.speakers(team, problem),
            style=self.history,
        )
        codec, tools = self.codecs[agent.name], self.offered(agent, problem) if self.tell else ()
        return codec.encode(chat, tools) if tools else codec.encode(chat)


def authors_of(environment: Environment, problem: Problem) -> Sequence[str]:
    if not hasattr(environment, "speakers"):  # written by somebody whom no type checker told
        raise UserError(
            f"{type(environment).__name__} does not say who speaks in it: give it `def speakers(self, problem)`, which "
            "returns the names of all authors that its replies may have (docs/tasks.md)"
        )
    return environment.speakers(problem)


def check_author(context: RolloutContext, team: Team, problem: Problem, author: str) -> None:
    """Every author must be known beforehand and read like nobody else, or a message could pass for one of its lines."""
    environment = context.task.environment
    assert environment is not None
    speaks = f"the environment of problem {problem.id!r} speaks as {author!r}"
    if author in team.names:
        raise UserError(
            f"{speaks}, which is also the name of an agent: call the agent otherwise, or it takes these words for "
            "its own"
        )
    if author == TOOL and context.tools is not None:
        raise UserError(f"{speaks}, as the results of tools do: call it otherwise")
    if author not in authors_of(environment, problem):
        raise UserError(f"{speaks}, whom its speakers() does not name: name there everyone it may speak as")
    if not is_label(author):
        raise UserError(f"{speaks}: a name must be one line without a colon, and not {YOU!r}")
