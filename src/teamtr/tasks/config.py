"""The section ``task`` of a team file, from which every task's own ``Config`` derives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal, hint, show
from teamtr.settings.section import Section, unset
from teamtr.settings.values import NonEmpty, UpTo1
from teamtr.tasks.players import PlayerConfig


class AgentSection(Protocol):
    """The part of an agent's section that tasks may read."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def frozen(self) -> bool: ...


class TeamSection(Protocol):
    """The part of the section ``team`` that tasks may read."""

    @property
    def agents(self) -> Sequence[AgentSection]: ...
    @property
    def rounds(self) -> int | None: ...
    @property
    def answer(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def speaking_order(self) -> tuple[str, ...]: ...
    @property
    def closing(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from besides its own section."""

    seed: int
    agents: tuple[str, ...]
    rounds: int | None = None
    """Rounds of the team's router; None if only a user-defined router class determines them."""


class TaskConfig(Section):
    """The keys of a task: ``name``, which chooses it, and those that a subclass adds."""

    name: str

    def anchored(self, anchor: Anchor) -> Self:
        """A copy with absolute paths."""
        return self

    def refusals_of(self, team: TeamSection) -> Iterable[Refusal]:
        """The reasons why this team cannot be used for this task."""
        return ()

    def arguments(self, context: TaskContext) -> dict[str, Any]:
        """The arguments of the task's class: by default every key but ``name``."""
        return {key: value for key, value in self if key != "name"}

    @property
    def sources(self) -> tuple[str, ...]:
        """The files and hub ids that its problems come from."""
        return ()

    @property
    def wanted_player(self) -> PlayerConfig | None:
        """The player of the other roles of an interactive task."""
        return None


class BenchmarkConfig(TaskConfig):
    """A benchmark and where its rows are."""

    not_arguments: ClassVar[frozenset[str]] = frozenset({"name", "path", "train", "test"})

    path: NonEmpty | None = unset("A data file or folder (relative to the team file) or a hub id, split by held_out.")
    train: NonEmpty | None = unset("Instead of path: the file, folder or hub id to train on.")
    test: NonEmpty | None = unset("Instead of path: the file, folder or hub id to evaluate on.")
    held_out: UpTo1 | None = unset("Share of path that is held out for evaluation; default: the benchmark's own.")

    @property
    def data(self) -> str | dict[str, str]:
        """One source, or one per split."""
        splits = {"train": self.train, "test": self.test}
        return self.path or {split: source for split, source in splits.items() if source}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for source in (self.path, self.train, self.test) if source is not None)

    def arguments(self, context: TaskContext) -> dict[str, Any]:
        """The keys that have a value, except those that locate the rows."""
        return {key: value for key, value in self if key not in self.not_arguments and value is not None}

    def anchored(self, anchor: Anchor) -> Self:
        update = {"path": self.path, "train": self.train, "test": self.test}
        return self.model_copy(update={key: anchor.source(source) for key, source in update.items()})

    def _refusals(self) -> Iterator[Refusal]:
        three = (("task", "path"), ("task", "train"), ("task", "test"))
        apart = self.train is not None or self.test is not None
        if self.path is None and not apart:
            message = f"task {self.name} needs its data, which does not come along: give task.path, or task.train and"
            yield Refusal(("task",), f"{message} task.test", three)
        elif self.path is not None and apart:
            message = "task.path is shared out into train and test; give it, or task.train and task.test, not both"
            yield Refusal(("task", "path"), message, three)
        if self.held_out is not None and self.path is None:
            message = "task.held_out is a share of task.path, which is not given"
            yield Refusal(("task", "held_out"), message, three)


class PlayedConfig(BenchmarkConfig):
    """A benchmark in which somebody plays the other roles."""

    not_arguments: ClassVar[frozenset[str]] = BenchmarkConfig.not_arguments | {"player"}

    player: PlayerConfig | None = unset("Who plays the other roles.")

    @property
    def wanted_player(self) -> PlayerConfig | None:
        return self.player

    def anchored(self, anchor: Anchor) -> Self:
        player = self.player
        if player is not None and player.base_url is None:
            player = player.model_copy(update={"model": anchor.model(player.model)})
        return super().anchored(anchor).model_copy(update={"player": player})

    def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
        """An agent that plays other roles must exist and be frozen."""
        asked = self.player.agent if self.player else None
        if asked is None:
            return
        here = ("task", "player", "agent")
        if asked not in team.names:
            message = f"task.player.agent names no agent {show(asked)}{hint(asked, team.names, 'the agents are')}"
            yield Refusal(here, message)
        elif not next(agent for agent in team.agents if agent.name == asked).frozen:
            message = f'agent "{asked}" plays the other roles of the task and must stay as it is: set frozen: true'
            yield Refusal(here, message, (("team", "agents"),))
