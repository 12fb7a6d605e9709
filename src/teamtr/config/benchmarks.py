"""Benchmarks: what a team file may say of them. Their rows and graders are in ``teamtr.tasks``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from teamtr.config.errors import Refusal, hint, show
from teamtr.config.paths import Anchor
from teamtr.config.section import Section, key, unset
from teamtr.config.tasks import Task
from teamtr.config.team import TeamConfig
from teamtr.config.texts import GymName
from teamtr.config.values import Above0, Flag, From0, NonEmpty, Positive, UpTo1

AR_BENCH_ROUNDS = 25
"""Of AR-Bench itself; the router needs one more, for the final answer."""


class BenchmarkTask(Task):
    """A benchmark and where its rows are."""

    option_names: ClassVar[tuple[str, ...]] = ("held_out",)
    """The keys that are options of ``teamtr.tasks.base``."""

    name: str
    path: NonEmpty | None = unset("A data file (relative to the team file) or a hub id, shared out by held_out.")
    train: NonEmpty | None = unset("Instead of path: the file or hub id to train on.")
    test: NonEmpty | None = unset("Instead of path: the file or hub id to evaluate on.")
    held_out: UpTo1 | None = unset("Share of path that is evaluated on; without it, as the benchmark means it.")

    @property
    def data(self) -> str | dict[str, str] | None:
        """One source, or one for each split."""
        splits = {"train": self.train, "test": self.test}
        return self.path or {split: source for split, source in splits.items() if source}

    @property
    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.option_names}
        return {name: value for name, value in given.items() if value is not None}

    def anchored(self, anchor: Anchor) -> Self:
        return self.model_copy(update={name: anchor.source(getattr(self, name)) for name in ("path", "train", "test")})

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


class MathTask(BenchmarkTask):
    """Problems of mathematics with one answer."""

    option_names: ClassVar[tuple[str, ...]] = ("held_out", "grader", "against", "seconds_per_item", "workers")

    name: Literal["math", "aime24", "aime25", "math500", "gsm8k", "deepscaler", "dapo"]
    grader: Literal["default", "deepscaler", "dapo", "last_number", "official"] = key(
        "default", "How answers are read and compared, see docs/graders.md; official is gsm8k's own."
    )
    against: tuple[NonEmpty, ...] = key((), "Evaluation files or hub ids whose problems must not be trained on.")
    seconds_per_item: Above0 = key(2.0, "Time limit for comparing one answer.")
    workers: Positive = key(2, "Processes that compare answers.")

    def anchored(self, anchor: Anchor) -> Self:
        against = tuple(str(anchor.source(source)) for source in self.against)
        return super().anchored(anchor).model_copy(update={"against": against})

    def _refusals(self) -> Iterator[Refusal]:
        yield from super()._refusals()
        own = ("default", "official") if self.name == "gsm8k" else ("default", "deepscaler", "dapo", "last_number")
        if self.grader not in own:
            message = f"task {self.name} is graded by one of {', '.join(own)}, got {show(self.grader)}"
            yield Refusal(("task", "grader"), message, (("task", "name"), ("task", "grader")))


class ZebraLogicTask(BenchmarkTask):
    """Grid puzzles, answered by a table."""

    option_names: ClassVar[tuple[str, ...]] = ("held_out", "partial", "template")

    name: Literal["zebralogic"]
    partial: Flag = key(False, "Reward the share of right cells, not only the whole table.")
    template: NonEmpty | None = unset("A file with the prompt, relative to the team file; without it, ours.")

    def anchored(self, anchor: Anchor) -> Self:
        template = None if self.template is None else anchor.path(self.template)
        return super().anchored(anchor).model_copy(update={"template": template})


class AutoLogiTask(BenchmarkTask):
    """Logic puzzles, verified by their own code in a sandbox."""

    option_names: ClassVar[tuple[str, ...]] = ("held_out", "seconds", "workers")

    name: Literal["autologi"]
    seconds: Above0 = key(5.0, "Time limit of one verification.")
    workers: Positive = key(1, "Verifications at a time.")


class PlanBenchTask(BenchmarkTask):
    """Plans for block worlds, judged by doing them."""

    name: Literal["planbench"]


class PlayerConfig(Section):
    """Who plays the other roles of an interactive task: a frozen agent, a model, or a model at an endpoint."""

    agent: NonEmpty | None = unset("An agent of the team that is frozen.")
    model: NonEmpty | None = unset("A folder (relative to the team file) or hub id; with base_url, its name there.")
    base_url: NonEmpty | None = unset("An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1.")
    key_variable: NonEmpty | None = unset("The environment variable that holds the endpoint's key.")
    max_tokens: Positive = key(128, "Most tokens in one answer.")
    temperature: From0 = key(0.0, "Of the answers; 0 is greedy.")

    def _refusals(self) -> Iterator[Refusal]:
        here = ("task", "player")
        if (self.agent is None) == (self.model is None):
            message = "task.player needs either an agent of the team, or a model (with base_url, one at an endpoint)"
            yield Refusal(here, message, ((*here, "agent"), (*here, "model")))
        for name in ("base_url", "key_variable"):
            needed = "model" if name == "base_url" else "base_url"
            if getattr(self, name) is not None and getattr(self, needed) is None:
                message = f"task.player.{name} goes with task.player.{needed}, which is not given"
                yield Refusal((*here, name), message, ((*here, needed),))


class ArBenchTask(BenchmarkTask):
    """Interactive games: what is missing must be asked for, round by round."""

    option_names: ClassVar[tuple[str, ...]] = ("held_out", "prompts")

    name: Literal["arbench:gn", "arbench:sp", "arbench:dc"]
    player: PlayerConfig | None = unset("Who plays the referee (arbench:sp) or the suspects (arbench:dc).")
    prompts: NonEmpty | None = unset("The benchmark's prompts.json, relative to the team file; without it, our texts.")

    def anchored(self, anchor: Anchor) -> Self:
        prompts = None if self.prompts is None else anchor.path(self.prompts)
        player = self.player
        if player is not None and player.base_url is None:
            player = player.model_copy(update={"model": anchor.model(player.model)})
        return super().anchored(anchor).model_copy(update={"prompts": prompts, "player": player})

    def _refusals(self) -> Iterator[Refusal]:
        yield from super()._refusals()
        if self.player is None and self.name != "arbench:gn":
            message = f"task {self.name} needs somebody who plays the other roles: give task.player"
            yield Refusal(("task",), message, (("task", "player"), ("task", "name")))
        if self.player is not None and self.name == "arbench:gn":
            message = "task arbench:gn answers guesses by a rule and needs no task.player"
            yield Refusal(("task", "player"), message, (("task", "name"),), at_key=True)

    def refusals_of(self, team: TeamConfig) -> Iterator[Refusal]:
        """Rounds to ask in, and a player who stays as it is."""
        if team.rounds is not None and team.rounds < 2:
            message = (
                f"task {self.name} is played in rounds, the last of which is the final answer: set "
                f"team.router.rounds to {AR_BENCH_ROUNDS + 1} for the {AR_BENCH_ROUNDS} rounds of the benchmark, "
                f"got {team.rounds}"
            )
            yield Refusal(("team", "router", "rounds"), message)
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


class GymTask(Task):
    """A family of reasoning-gym."""

    name: GymName
    parameters: dict[str, Any] = key({}, "Of the family, such as max_terms: 3.")
    train_problems: Positive = key(1000, "Questions to draw for training.")
    test_problems: Positive = key(100, "Questions to draw for evaluation.")
    seconds_per_item: Above0 = key(5.0, "Time limit for scoring one answer.")
    workers: Positive = key(1, "Processes that score.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return ("gym:NAME",)

    @classmethod
    def is_called(cls, name: str) -> bool:
        return name.startswith("gym:")

    @property
    def data(self) -> None:
        return None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "sizes": {"train": self.train_problems, "test": self.test_problems},
            "seconds_per_item": self.seconds_per_item,
            "workers": self.workers,
        }
