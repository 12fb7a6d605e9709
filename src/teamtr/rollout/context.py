"""The context of rollouts (sampler, codecs, router, task, tools) and the ledger of what they cost."""

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
    """What rollouts cost: tokens and sampling seconds by agent; episodes, and seconds of grading and of environments
    and tools, in total."""

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
    """What playing episodes needs besides the team: sampler, codecs by agent, router, task and tools. With ``tools``
    the router must be a ``ToolTurns``. ``tell``: prompts describe the tools; False if the system prompts do."""

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
        """All names that may author a message in an episode of this problem: agents, the environment's, and tools."""
        environment = self.task.environment
        others = () if environment is None else authors_of(environment, problem)
        return (*team.names, *others, *((TOOL,) if self.tools is not None else ()))

    def offered(self, agent: Agent, problem: Problem) -> tuple[Schema, ...]:
        """The tools that this agent may call in an episode of this problem."""
        if self.tools is None or agent.tools == ():
            return ()
        return allowed(self.tools.schemas(problem), agent.tools)

    def prompt(self, team: Team, agent: Agent, problem: Problem, history: Sequence[Message]) -> Ids:
        """The agent's prompt, given the messages that it sees."""
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
    if not hasattr(environment, "speakers"):  # a user's class, written without a type checker
        raise UserError(
            f"{type(environment).__name__} does not say who speaks in it: give it `def speakers(self, problem)`, which "
            "returns the names of all authors that its replies may have (docs/tasks.md)"
        )
    return environment.speakers(problem)


def check_author(context: RolloutContext, team: Team, problem: Problem, author: str) -> None:
    """Raise UserError unless the environment declares this author beforehand and the name is distinct from all other
    speakers'. Otherwise a message could imitate a line of this author."""
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
