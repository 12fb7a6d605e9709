"""The identity of a run's inputs: hashes of what it learns from, and what has changed since it began.

Every commit holds the inputs of the run. On resumption, the current inputs are compared with them: a change in what is
learned is refused, any other is reported. ``accept`` resumes with a deliberate change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from teamtr.chat import ChatCodec
from teamtr.config import TeamFile, plan_keys
from teamtr.errors import Refused, UserError
from teamtr.own_code import PREFIX
from teamtr.session.build import Session
from teamtr.session.environment import environment, library_digest
from teamtr.session.models import OBJECT
from teamtr.session.own_sources import file_digest, object_digest, program_digest
from teamtr.settings.paths import BUILT_IN_MODELS
from teamtr.store import StoreError
from teamtr.tasks import Task
from teamtr.tasks.players import PolicyPlayer
from teamtr.team import ToolTurns
from teamtr.types import PLAYER, Problem

OF_PROBLEMS = ("task.path", "task.train", "task.test", "task.against")
"""Settings that name files of problems. The problems used from these files are compared one by one."""


OF_THE_TEAM_FILE = ("preset", "stages", "problems", "group_size", "radius_nats_per_message", "radius_nats_per_token")
"""Keys of a plan that are stored in the team file of a run, and compared there."""


class OtherInputs(Refused):
    """The run would learn from something else than it began with."""


@dataclass(frozen=True)
class RowsId:
    """The problems of a split: their number, and hashes of all of them, in order and regardless of order."""

    count: int
    in_order: str
    in_any_order: str


@dataclass(frozen=True)
class ModelId:
    """An agent apart from the weights that it trains. ``base`` is empty if nothing is frozen; ``start`` is the version
    of the weights with which a whole model from a folder or the hub began."""

    config: str
    tokenizer: str
    template: str
    base: str = ""
    start: str = ""


@dataclass(frozen=True)
class Inputs:
    """All inputs of a run, by hash.

    Attributes:
        rows: the problems, by split.
        code: the user's own code, by the setting that names it.
        files: other files, by the setting that names them; for files of problems, ``rows`` says what is used of them.
        models: by agent.
        environment: versions of libraries, revision of the project, threads.
        plan: the resolved plan, by key. A team file names a preset, whose values may change with a version of the
            library. None in runs that were begun before this was stored.
    """

    rows: Mapping[str, RowsId] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, ModelId] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Inputs:
        """Raises StoreError if this is not a record of inputs."""
        try:
            rows = {split: RowsId(**found) for split, found in record["rows"].items()}
            models = {name: ModelId(**found) for name, found in record["models"].items()}
            code, files, libraries = (dict(record[name]) for name in ("code", "files", "environment"))
            plan = dict(record["plan"]) if record.get("plan") is not None else None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"the newest commit does not say what the run learns from ({error!r:.200}): restore its folder from a "
                "copy, or remove it"
            ) from error
        return cls(rows, code, files, models, libraries, plan)


@dataclass(frozen=True)
class Change:
    """A difference from what was before. ``learns``: because of it, the run would learn something else."""

    text: str
    learns: bool


def inputs_of(session: Session) -> Inputs:
    """The current inputs of a run."""
    return Inputs(
        rows={split: rows_id(problems) for split, problems in _splits(session.task)},
        code=_code(session),
        files={key: file_digest(file) for key, file in _files(session.team_file)},
        models=models_of(session),
        environment=environment(),
        plan={key: value for key, value in plan_keys(session.plan).items() if key not in OF_THE_TEAM_FILE},
    )


def models_of(session: Session) -> dict[str, ModelId]:
    """Every model of the team, apart from the weights that it trains."""
    return {name: _model(session, name) for name in session.engine.agents}


def changes(then: Inputs, now: Inputs) -> list[Change]:
    """The differences, with what a run learns from first."""
    rows = list(_rows_changed(then, now))
    found = [*rows, *_code_changed(then, now), *_models_changed(then.models, now.models), *_plan_changed(then, now)]
    if not rows:  # otherwise the changes of rows are reported
        found += [_file_changed(key) for key in _other(then.files, now.files)]
    for name in _other(then.environment, now.environment):
        before, after = then.environment.get(name, "none"), now.environment.get(name, "none")
        found.append(Change(f"{name}: {after}, was {before}", learns=False))
    return sorted(found, key=lambda change: not change.learns)


def require_same_inputs(then: Inputs, now: Inputs, where: Path, *, accept: bool) -> tuple[str, ...]:
    """Raises OtherInputs if the run would learn from something else and this is not accepted; returns what to
    report."""
    found = changes(then, now)
    refused = [change.text for change in found if change.learns]
    if refused and not accept:
        raise OtherInputs(
            f"the run in {where} would learn from something else than it began with:\n"
            + "".join(f"  {text}\n" for text in refused)
            + "Put it back as it was, or begin another run. To go on with the change on purpose, add --accept-changes "
            "(in Python: accept_changes=True); it is written into the log"
        )
    return tuple(change.text for change in found)


def require_same_models(then: Inputs, session: Session, where: Path) -> None:
    """Raises OtherInputs if an agent of the run is not the one that was trained, apart from its weights."""
    now = {name: replace(model, start="") for name, model in models_of(session).items()}  # the commit has its weights
    before = {name: replace(model, start="") for name, model in then.models.items()}
    if found := [change.text for change in _models_changed(before, now)]:
        raise OtherInputs(
            f"the agents of the run in {where} are not those that were trained:\n"
            + "".join(f"  {text}\n" for text in found)
            + "Put their models back as they were"
        )


def grader_id(session: Session) -> str:
    """Hash of everything that determines a verdict besides the reply and the problem."""
    task = session.team_file.without_places().task.model_dump(mode="json")
    ours = library_digest("grading", "tasks")
    return _digest([task, _code(session), ours])[:8]


def rows_id(problems: Sequence[Problem]) -> RowsId:
    """The identity of these problems, with all fields of their rows."""
    every = [problem_digest(problem) for problem in problems]
    return RowsId(len(every), _digest(every), _digest(sorted(every)))


def problem_digest(problem: Problem) -> str:
    said = (problem.id, problem.prompt, problem.answer, dict(problem.private), dict(problem.columns))
    return _digest(said)[:16]


def _splits(task: Task) -> Iterator[tuple[str, Sequence[Problem]]]:
    for split in ("train", "test"):
        try:
            yield split, task.problems(split)
        except UserError:  # a task may have no held-out problems
            continue


def _code(session: Session) -> dict[str, str]:
    """Hashes of files that the team file names, and of objects from a Python program."""
    named = {key: program_digest(file) for key, file in _programs(session.team_file)}
    router = session.context.router
    own = router.inner if isinstance(router, ToolTurns) else router
    given = {"task": session.task.own_code, "router": own, "advantage": session.plan.advantage}
    objects = {name: object_digest(given[name]) for name in session.team_file.python if name in given}
    return named | objects


def _programs(team_file: TeamFile) -> Iterator[tuple[str, Path]]:
    for key, text in _texts(team_file.model_dump(mode="json")):
        if text.startswith(PREFIX):
            yield key, Path(text.removeprefix(PREFIX).rpartition(":")[0])
    for server in team_file.tools.mcp:
        for place, text in enumerate(server.args):
            if text.endswith(".py") and Path(text).is_absolute():
                yield f"tools.mcp.{server.name}.args.{place}", Path(text)


def _files(team_file: TeamFile) -> Iterator[tuple[str, Path]]:
    # ``sampling`` names no data, and the data of ``warmup`` are only used when a run begins.
    for key, text in _texts(team_file.model_dump(mode="json", exclude={"sampling", "warmup"})):
        if len(text) < 4096 and "\0" not in text and Path(text).is_absolute() and Path(text).is_file():
            yield key, Path(text)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a team file with its dotted key; items of lists by name, if they have one."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for k, item in enumerate(value):
            name = item.get("name", k) if isinstance(item, Mapping) else k
            yield from _texts(item, f"{key}.{name}")


def _model(session: Session, name: str) -> ModelId:
    info = session.engine.info(name)
    codec = session.context.codecs.get(name)
    if name == PLAYER and isinstance(session.task.player, PolicyPlayer):
        codec = session.task.player.codec
    base = session.engine.version(name) if name == PLAYER else info.base_version
    start = "" if base or _is_made(session, name) else session.team[name].version
    if not isinstance(codec, ChatCodec):
        return ModelId(info.config_version, "", "", base, start)
    return ModelId(info.config_version, *codec.identity, base, start)


def _is_made(session: Session, name: str) -> bool:
    """Whether a model comes from neither a folder nor the hub. A built-in model is only trained on the form of messages
    where its weights matter, and an object has its hash in its name."""
    model = next(agent.model for agent in session.team_file.team.agents if agent.name == name)
    return model in BUILT_IN_MODELS or model.startswith(OBJECT)


def _rows_changed(then: Inputs, now: Inputs) -> Iterator[Change]:
    for split in _other(then.rows, now.rows):
        before, after = then.rows.get(split, RowsId(0, "", "")), now.rows.get(split, RowsId(0, "", ""))
        if before.in_any_order == after.in_any_order:
            what = f"the {after.count} are the same in another order"
        elif before.count != after.count:
            what = f"there are {after.count}, there were {before.count}"
        else:
            what = f"some of the {after.count} have changed"
        yield Change(f"problems of {split}: {what}", learns=split == "train")


def _file_changed(key: str) -> Change:
    if key.startswith(OF_PROBLEMS):
        return Change(f"{key}: the file has changed, and the problems in it have not", learns=False)
    return Change(f"{key}: the file has changed", learns=True)


def _code_changed(then: Inputs, now: Inputs) -> Iterator[Change]:
    for key in _other(then.code, now.code):
        yield Change(f"{key}: the code has changed", learns=True)


def _plan_changed(then: Inputs, now: Inputs) -> Iterator[Change]:
    """The team file is the same, so differences are in what its preset says in this version."""
    if then.plan is not None and now.plan is not None:
        for key in _other(then.plan, now.plan):
            before, after = then.plan.get(key, "none"), now.plan.get(key, "none")
            yield Change(f"plan.{key}: its preset says {after} in this version, and said {before}", learns=True)


def _models_changed(then: Mapping[str, ModelId], now: Mapping[str, ModelId]) -> Iterator[Change]:
    said = {
        "config": "the configuration of its model has changed",
        "tokenizer": "its tokenizer has changed",
        "template": "its chat template has changed",
        "base": "the weights of its base model have changed",
        "start": "the weights that it began with are other ones",
    }
    for name in _other(then, now):
        before, after = then.get(name), now.get(name)
        if before is None or after is None:
            yield Change(f"agent {name}: {'new' if before is None else 'gone'}", learns=True)
            continue
        for part, what in said.items():
            unknown = part == "start" and not before.start  # a run of an earlier version
            if getattr(before, part) != getattr(after, part) and not unknown:
                yield Change(f"agent {name}: {what}", learns=True)


def _other(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Values that JSON does not have: sets in order, arrays as lists, anything else by its type."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__
