"""tau-bench: an agent serves a user by calling tools under a policy, and is graded by the resulting data.

A dialogue is graded by its acts: the agent's calls are repeated on the data, and the records that they change are
compared with those that the task's own actions change. A played dialogue is graded like a stored one: its outcome is
the same list of chat messages.

The data is a folder per domain: ``db_TABLE.json`` for each of its tables, ``policy_wiki.md``, and tasks in
``tasks_test.jsonl`` and, if there are any to train on, ``tasks_train.jsonl``; playing also needs ``tool_schemas.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from teamtr.bounded_json import NotJson, read_json
from teamtr.calls import ToolCall
from teamtr.errors import UserError
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import unset
from teamtr.tasks.base import Benchmark, Data, Source, StoredReply, Task, WrongAnswer, called, sources
from teamtr.tasks.benchmarks.taubench import airline, retail
from teamtr.tasks.benchmarks.taubench.dialogue import Customer, DomainTools, calling, check_schemas, trajectory
from teamtr.tasks.benchmarks.taubench.replay import (
    STOP,
    NotATrajectory,
    Replay,
    Turn,
    after_all,
    earns_reward,
    replay,
    turns_in,
)
from teamtr.tasks.benchmarks.taubench.state import State, Tables
from teamtr.tasks.config import PlayedConfig, TaskConfig, TaskContext, TeamSection
from teamtr.tasks.data.rows import DataError, NoSuchData, Row, read_json_file, read_rows
from teamtr.tasks.data.split import digest, hold_out
from teamtr.tasks.players import PlayerConfig
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.tools.toolbox import Toolbox, ToolboxTools
from teamtr.types import Event, Problem, Verdict

POLICY, SCHEMAS = "policy_wiki.md", "tool_schemas.json"
ROUNDS = 26
"""The most messages to the user in a labeled dialogue, plus one, as the last gets no reply. Most take three to ten."""
FEW = 10
"""With fewer rounds many dialogues are cut off."""


@dataclass(frozen=True)
class World:
    """What every dialogue of a domain begins with: its data, and the policy that the agent gets."""

    tables: Tables
    policy: str
    schemas: Any = None
    """The benchmark's descriptions of the tools, as in its file; None if there is no such file."""

    @classmethod
    def read(cls, folder: Path, tables: Mapping[str, Sequence[str]]) -> World:
        """Read a domain's folder; the records of these tables must have these fields."""
        found = {table: _table(folder / f"db_{table}.json", fields) for table, fields in tables.items()}
        file = folder / POLICY
        if not file.is_file():
            raise NoSuchData(file)
        told = folder / SCHEMAS
        schemas = read_json_file(told) if told.is_file() else None
        try:
            return cls(found, file.read_text(encoding="utf-8"), schemas)
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None


def _table(file: Path, fields: Sequence[str]) -> Mapping[str, Any]:
    if not file.is_file():
        raise NoSuchData(file)
    table = read_json_file(file)
    if not isinstance(table, dict) or not all(isinstance(record, dict) for record in table.values()):
        raise DataError(f"{file}: a table must be an object of records by their key, found {shown(table)}")
    for key, record in table.items():
        missing = [field for field in fields if field not in record]
        if missing:
            raise DataError(f"{file}: record {shown(key)} has no {missing[0]!r}: is it a table of this domain?")
    return table


class TauBench(Benchmark):
    """The base class of the domains. Rows have ``user_id``, ``instruction``, ``actions`` and ``outputs``.

    A reply is a whole dialogue: a JSON list of chat messages.

    Args:
        splits: the problems of each split.
        world: the data and the policy.
    """

    class Config(PlayedConfig):
        """Dialogues with a user, who is played by a model, under a policy and with tools."""

        player: PlayerConfig | None = unset("Who plays the user.")

        def _refusals(self) -> Iterator[Refusal]:
            yield from super()._refusals()
            if self.player is None:
                message = f"task {self.name} is a dialogue with a user, whom somebody must play: give task.player"
                yield Refusal(("task",), message, (("task", "player"), ("task", "name")))

        def refusals_of(self, team: TeamSection) -> Iterator[Refusal]:
            """At least two rounds, so that the user can reply."""
            if team.rounds is not None and team.rounds < 2:
                message = (
                    f"task {self.name} is a dialogue: the user must be able to reply, or it cannot end. Set "
                    f"team.router.rounds to {ROUNDS}, which the longest labeled dialogue takes, got {team.rounds}"
                )
                yield Refusal(("team", "router", "rounds"), message)
            yield from super().refusals_of(team)

    toolbox: ClassVar[Toolbox[State]]
    tables: ClassVar[Mapping[str, Sequence[str]]]
    held_out = 1.0
    needs_data_to_grade = True

    def __init__(self, splits: Mapping[str, Sequence[Problem]] | None = None, *, world: World) -> None:
        super().__init__(splits)
        self._world = world
        self._start = State(world.tables)

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        made = super().from_config(config, context)
        if context.rounds is not None and context.rounds < FEW:
            made.warnings += (
                f"{config.name}: team.router.rounds is {context.rounds}, and a dialogue that the user has not ended by "
                f"then earns nothing: most labeled ones take three to ten, the longest {ROUNDS}",
            )
        return made

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Self:
        """The benchmark on a folder, one of its task files, or a task file per split; all files are in one folder."""
        if data is None:
            files = ", ".join((*(f"db_{table}.json" for table in cls.tables), POLICY, "tasks_test.jsonl"))
            raise UserError(f"{name} needs its data even to grade: give the folder that holds {files}")
        made: Self = called(name, cls.from_folder, _tasks_files(name, data), **options)
        return made

    @classmethod
    def from_folder(cls, files: Mapping[str, Path], *, held_out: float | None = None) -> Self:
        """The benchmark on a task file per split, all in the folder of the tables and the policy."""
        folders = sorted({str(file.parent) for file in files.values()})
        if len(folders) > 1:
            raise UserError(f"{cls.name}: all splits must share one folder of data, got {' and '.join(folders)}")
        world = World.read(Path(folders[0]), cls.tables)
        reader = cls(world=world)
        splits = {split: tuple(reader.problems_of(cls.rows(file))) for split, file in files.items()}
        if held_out is not None:
            if len(splits) > 1:
                raise UserError(f"{cls.name}: held_out is a share of one file, but train and test are given apart")
            splits = hold_out(next(iter(splits.values())), held_out, reader.side)
        return cls({"train": (), "test": (), **splits}, world=world)

    @classmethod
    def rows(cls, source: Source) -> Iterator[Row]:
        """Tasks are named by their position: the fifth of tasks_test.jsonl is 4, that of tasks_train.jsonl is
        train-4."""
        split = Path(source).stem.removeprefix("tasks_")
        prefix = f"{split}-" if Path(source).stem.startswith("tasks_") and split != "test" else ""
        for place, row in enumerate(read_rows(source)):
            yield Row(row.where, {"id": f"{prefix}{place}", **row.cells})

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """The prompt is the policy; the instruction is for the user's player, and no agent sees it."""
        for key in ("user_id", "instruction"):
            if not isinstance(row.get(key), str):
                raise _unusable(where, f"{key!r} must be text, found {shown(row.get(key))}")
        if self._start.find("users", row["user_id"]) is None:
            raise _unusable(where, f"there is no user {shown(row['user_id'])} in the data of {self.name}")
        actions, outputs = row.get("actions"), row.get("outputs")
        if not isinstance(actions, list) or not all(_is_action(action) for action in actions):
            wanted = '[{"name": TEXT, "kwargs": {...}}, ...]'
            raise _unusable(where, f"'actions' must be {wanted}, found {shown(actions)}")
        unknown = next((action["name"] for action in actions if action["name"] not in self.toolbox), None)
        if unknown is not None:
            raise _unusable(where, f"there is no tool {shown(unknown)} in {self.name}")
        if not isinstance(outputs, list) or not all(isinstance(output, str) for output in outputs):
            raise _unusable(where, f"'outputs' must be a list of texts, found {shown(outputs)}")
        return Problem(
            id=str(row.get("id", digest(row["instruction"]))),
            prompt=self._world.policy,
            answer={"actions": actions, "outputs": outputs},
            columns={"user_id": row["user_id"], "instruction": row["instruction"]},
        )

    # -- playing ----------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Customer:
        if self.player is None:
            raise UserError(f"{self.name} can be graded but not played: nobody plays the user; give it a player")
        return Customer(self.player, self.toolbox)

    @cached_property
    def tools(self) -> DomainTools:
        if self._world.schemas is None:
            raise DataError(f"{self.name} can be graded but not played: there is no {SCHEMAS} in its folder")
        told = check_schemas(SCHEMAS, self._world.schemas, self.toolbox)
        return DomainTools(ToolboxTools(self.toolbox, lambda problem: self._start), told)

    def outcome(self, problem: Problem, events: Sequence[Event]) -> str:
        """The dialogue as the benchmark stores it."""
        return trajectory(events, self.toolbox)

    # -- grading ----------------------------------------------------------------------------------------------

    def stored(self, row: Row) -> StoredReply:
        """A row as the benchmark stores it: ``task_id``, and the messages as ``traj``."""
        name = row.cells.get("task_id")
        if not isinstance(name, int | str) or isinstance(name, bool):
            raise DataError(f"{row.where}: 'task_id' must be the number of a task, found {shown(name)}")
        try:
            turns_in(row.cells.get("traj"))
        except NotATrajectory as error:
            raise DataError(f"{row.where}: 'traj': {error}") from None
        user = self._users.get(str(name))
        meant = _user_of(row.cells)
        if meant is not None and user is not None and meant != user:
            raise DataError(
                f"{row.where}: task {name} of the data is about {user}, but this row is about {shown(meant)}: give the "
                "data of the same domain and split"
            )
        return StoredReply(str(name), json.dumps(row.cells["traj"]))

    @cached_property
    def _users(self) -> dict[str, str]:
        """The user of each problem, by its id."""
        return {problem.id: problem.columns["user_id"] for split in self._splits.values() for problem in split}

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [self._verdict(problem, text) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        played = self._replayed(text)
        return None if played is None or not played.over else _told(played)

    def _verdict(self, problem: Problem, text: str) -> Verdict:
        played = self._replayed(text)
        if played is None or not played.over:
            return Verdict("unparsed", 0.0)
        told = _told(played)
        if played.differing:
            told += f"; {len(played.differing)} of {len(played.results)} results differ from those recorded"
        if earns_reward(played.state, self.wanted(problem), played.said, problem.answer["outputs"]):
            return Verdict("right", 1.0, told)
        return Verdict("wrong", 0.0, told)

    def _replayed(self, text: str) -> Replay | None:
        try:
            return self.replayed(turns_in(read_json(text)))
        except (NotJson, NotATrajectory):
            return None

    def replayed(self, turns: Sequence[Turn]) -> Replay:
        """Replay a dialogue on the data that every dialogue begins with."""
        return replay(self.toolbox, self._start, turns)

    def wanted(self, problem: Problem) -> State:
        """The data that the task requires at the end."""
        return after_all(self.toolbox, self._start, _actions(problem))

    # -- known answers ----------------------------------------------------------------------------------------

    def gold(self, problem: Problem) -> str:
        return _dialogue(_acts(self, problem), problem.answer["outputs"])

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        acts, outputs = _acts(self, problem), problem.answer["outputs"]
        gold = _dialogue(acts, outputs)
        stray = self.stray_call(problem.columns["user_id"], int(rng.integers(1, 1000)))
        found = [
            WrongAnswer("something else changed", _dialogue([*acts, stray], outputs)),
            WrongAnswer("broken off", _dialogue(acts, outputs, end="Wait a moment.")),
            WrongAnswer("cut off", gold[:-1]),
            WrongAnswer("no message", "[]"),
            WrongAnswer("no dialogue", "I have done what the user asked for."),
        ]
        if outputs:
            found.append(WrongAnswer("an output not told", _dialogue(acts, outputs[1:])))
        if self.wanted(problem).changes():
            found.append(WrongAnswer("nothing done", _dialogue([], outputs)))
            found.append(WrongAnswer("no such tools", _dialogue([ToolCall(f"x_{a.name}", {}) for a in acts], outputs)))
        return found

    @classmethod
    def stray_call(cls, user_id: str, number: int) -> ToolCall:
        """A call that changes this user's record and that no task asks for."""
        raise NotImplementedError


@task("taubench:airline")
class Airline(TauBench):
    """``taubench:airline``: flights are booked, changed and cancelled."""

    toolbox = airline.TOOLS
    tables = airline.TABLES

    @classmethod
    def stray_call(cls, user_id: str, number: int) -> ToolCall:
        return ToolCall("send_certificate", {"user_id": user_id, "amount": 10_000 + number})


@task("taubench:retail")
class Retail(TauBench):
    """``taubench:retail``: orders are changed, cancelled, returned and exchanged."""

    toolbox = retail.TOOLS
    tables = retail.TABLES

    @classmethod
    def stray_call(cls, user_id: str, number: int) -> ToolCall:
        return ToolCall("modify_user_address", {"user_id": user_id, **dict.fromkeys(retail.ADDRESS, f"none {number}")})


def _tasks_files(name: str, data: Source | Mapping[str, Source]) -> dict[str, Path]:
    """The file of each split."""
    given = sources(name, data) if isinstance(data, Mapping) else {"test": data}
    files = {split: _tasks_file(Path(source), split) for split, source in given.items()}
    if not isinstance(data, Mapping) and Path(data).is_dir():
        training = Path(data) / "tasks_train.jsonl"
        files |= {"train": training} if training.is_file() else {}
    return files


def _tasks_file(source: Path, split: str) -> Path:
    file = source / f"tasks_{split}.jsonl" if source.is_dir() else source
    if not file.is_file():
        raise NoSuchData(file)
    return file


def _unusable(where: str, complaint: str) -> DataError:
    return DataError(f"{where}: {complaint}" if where else complaint)


def _user_of(cells: Mapping[str, Any]) -> Any:
    """The user of a stored dialogue, if the row names it."""
    info = cells.get("info")
    of = info.get("task") if isinstance(info, dict) else None
    return of.get("user_id") if isinstance(of, dict) else None


def _is_action(action: Any) -> bool:
    return isinstance(action, dict) and isinstance(action.get("name"), str) and isinstance(action.get("kwargs"), dict)


def _actions(problem: Problem) -> list[ToolCall]:
    return [ToolCall(action["name"], action["kwargs"]) for action in problem.answer["actions"]]


def _acts(task: TauBench, problem: Problem) -> list[ToolCall]:
    """The task's own actions, except those that end the dialogue, after which nothing counts."""
    return [action for action in _actions(problem) if not task.toolbox.ends(action)]


def _dialogue(calls: Sequence[ToolCall], outputs: Sequence[str], end: str = STOP) -> str:
    """A reply in which the agent makes these calls and states these outputs."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}, *map(calling, calls)]
    messages += [{"role": "assistant", "content": " ".join(outputs)}, {"role": "user", "content": end}]
    return json.dumps(messages)


def _told(played: Replay) -> str:
    """The records that a dialogue changed, and a digest of their new content."""
    changes = played.state.changes()
    if not changes:
        return "nothing changed"
    names = ", ".join(map(str, changes))
    return f"{names} ({digest(json.dumps([[str(place), text] for place, text in changes.items()]))})"
