"""A run on disk, before anything is built: its settings and progress, and whether it can be resumed."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from teamtr.config import ConfigError, TeamFile, changed_for_evaluation, dumps_stored, loads_stored
from teamtr.errors import Refused, UserError
from teamtr.evaluation.best import best_of
from teamtr.own_code import PREFIX
from teamtr.session.build import AS_WRITTEN, Parts, Session, build
from teamtr.session.history import History
from teamtr.session.inputs import Inputs, require_same_models
from teamtr.session.models import OBJECT
from teamtr.settings.paths import BUILT_IN_MODELS, SOMEWHERE
from teamtr.store import Commit, NotARun, RunFolder, StoreError, write_atomic
from teamtr.team import Team

ON_A_MACHINE = (
    "device",
    "store.keep_checkpoints",
    "learner.micro_batch",
    "learner.recompute",
    "learner.base",
    "sampling.compiled",
    "sampling.memory_gb",
    "sampling.vllm",
    "cluster.engine",
    "cluster.workers",
    "cluster.groups",
    "cluster.address",
    "cluster.max_restarts",
    "cluster.patience_s",
    "trackers",
    "tracking",
)
"""Settings that fit a run to a machine and do not change its results, except for rounding. A section or a list stands
for all that it holds."""
MAY_CHANGE = (
    *ON_A_MACHINE,
    "task.grade_early",
    "plan.stages",
    "eval.every",
    "eval.problems",
    "eval.samples",
    "eval.temperature",
    "eval.patience",
    "diagnostics.every",
)
"""Settings that a resumed run may change and still be the same run. Paths of data, code and models may change too, as
long as their hashes are the same."""


SWAP_REQUEST = Path("swap", "request.json")
"""Where a swap stores its request. ``team.yaml`` is written last; until then, there is no run to resume."""


class OtherRun(StoreError):
    """The folder holds a run of another team file."""

    exit_code = Refused.exit_code


@dataclass(frozen=True)
class StoredRun:
    """A run on disk: its settings and its last commit, before anything is built from them. As long as this object
    exists, the commit is kept, even if a concurrent run prunes checkpoints."""

    folder: RunFolder
    team_file: TeamFile
    commit: Commit

    @classmethod
    def read(cls, folder: Path | str, checkpoint: int | Literal["best"] | None = None) -> StoredRun:
        """Read a run without taking its lock: at the latest checkpoint, the best by held-out success, or the one after
        so many updates. Raises NotARun if there is nothing to resume from."""
        run = RunFolder.read(folder)
        if not run.team_file.is_file():
            raise NotARun(f"{folder} holds no whole run (no team.yaml in it): train or swap to its end first")
        team_file = stored_team_file(run)
        commit = run.checkpoints.latest()
        if commit is None:
            raise NotARun(f"{folder} holds no checkpoint yet; train first")
        for damaged in commit.skipped:
            warnings.warn(f"{damaged}. Read instead: the team after {commit.number} updates", stacklevel=2)
        if checkpoint is not None:
            commit = run.checkpoints.at(_best(run, commit) if checkpoint == "best" else checkpoint)
        return cls(run, team_file, commit)

    def changed(self, changes: Sequence[str]) -> StoredRun:
        """The same team on the task that the changes define, on another device, or with its models in other places."""
        return replace(self, team_file=changed_for_evaluation(self.team_file, changes, str(self.folder.team_file)))

    def build(self, parts: Parts = AS_WRITTEN) -> tuple[Session, Team]:
        """Build the team of the commit. Raises OtherInputs if its models are not those that were trained."""
        require_places(self.folder.path, self.team_file)
        session = build(self.team_file, taught=False, parts=parts)
        if (then := self.commit.progress.get("inputs")) is not None:
            require_same_models(Inputs.of_record(then), session, self.folder.path)
        return session, session.load(lambda name: self.folder.checkpoints.folder_of(self.commit, name))


def stored_team_file(run: RunFolder) -> TeamFile:
    """The settings of the run, with relative paths resolved from where the folder is now."""
    return loads_stored(run.team_text(), str(run.team_file), run.path)


def _best(run: RunFolder, latest: Commit) -> int:
    """The number of updates of the checkpoint with the highest held-out success."""
    history = History(run.log.records())
    if (state := latest.progress.get("history")) is not None:
        history.take_state(state, None)
    best = best_of(history.held_out)
    if best is None:
        raise UserError(
            f"the run in {run.path} was never evaluated while it trained (eval.every), so that none of its checkpoints "
            "is known to be the best: leave --checkpoint out for the latest"
        )
    return best.updates


def claim(run: RunFolder, team_file: TeamFile, commit: Commit | None) -> None:
    """Claim the folder for this team file. It must hold no run that has begun, or one of the same team file that has
    not done more than is requested and whose data, code and models exist. An existing run is not changed; ``keep``
    stores the file."""
    if (run.path / SWAP_REQUEST).exists() and not run.team_file.exists():
        raise OtherRun(
            f"{run.path} holds an unfinished swap: the same `teamtr swap` command resumes it; choose another "
            "folder to train in"
        )
    if commit is None and run.log.mark().records:
        raise StoreError(
            f"{run.path} has a log and no checkpoint: its commits are gone, and a new run would erase the log. Restore "
            f"{run.checkpoints.folder} from a copy, or choose another folder"
        )
    if run.team_file.exists() and commit is not None:  # a run without a checkpoint does not bind
        try:
            stored = stored_team_file(run)
        except ConfigError as error:
            raise OtherRun(f"the team file stored in {run.path} cannot be read:\n{error}") from error
        require_same(run.path, stored, team_file)
        _require_stages(run, team_file, commit)
        require_places(run.path, team_file)
    else:
        keep(run, team_file)


def keep(run: RunFolder, team_file: TeamFile) -> None:
    """Write the resolved team file into the run folder."""
    text = dumps_stored(team_file, run.path).encode()
    if not run.team_file.exists() or run.team_file.read_bytes() != text:
        write_atomic(run.team_file, text)


def require_places(folder: Path, team_file: TeamFile) -> None:
    """Raises a UserError that names every missing file and folder of a run, and how to give its new place."""
    gone = {key: named for key, named in places(team_file).items() if not _path_in(named).exists()}
    gone.pop("warmup.path", None)  # only used when a run begins
    if not team_file.plan.plan().objective.has_reference:  # the initial adapters are used only for a reference KL
        gone = {key: named for key, named in gone.items() if not key.endswith("lora.start")}
    if gone:
        missing = [f"{key} ({_path_in(named)})" for key, named in gone.items()]
        told = [shlex.quote(f"{key}={named.replace(str(_path_in(named)), 'PATH')}") for key, named in gone.items()]
        raise UserError(
            f"the run in {folder} needs what is not there: {', '.join(missing)}. Put it there, or say where it is now: "
            f"`teamtr train {shlex.quote(str(folder))} {' '.join(told)}`. If it is the same by its hash, the run goes "
            "on and remembers the place"
        )


def places(team_file: TeamFile) -> dict[str, str]:
    """The files and folders that a team file names, by dotted key; what several keys name, by the shortest of them.
    Paths of sampling servers are left out: they belong to the machine."""
    named = dict(_leaves(team_file.model_dump()))
    found: dict[str, str] = {}
    keys = _differences(team_file.model_dump(), team_file.without_places().model_dump())
    for key in sorted(keys, key=lambda key: (key.count("."), key)):
        if named[key] not in found.values() and not key.startswith("sampling."):
            found[key] = str(named[key])
    return found


def _path_in(named: str) -> Path:
    """The file of python:FILE:NAME; any other path unchanged."""
    return Path(named.removeprefix(PREFIX).rpartition(":")[0] if named.startswith(PREFIX) else named)


def differences(stored: TeamFile, team_file: TeamFile, free: Sequence[str]) -> list[str]:
    """The dotted keys in which the two differ, except for the settings that are free."""
    changed = _differences(stored.model_dump(), team_file.model_dump())
    if "int8" in (stored.learner.base, team_file.learner.base):  # an int8 base is a different model
        free = [key for key in free if key != "learner.base"]
    return [key for key in changed if not any(f"{key}.".startswith(f"{other}.") for other in free)]


def require_same(folder: Path, stored: TeamFile, team_file: TeamFile) -> None:
    """Refuse a team file that differs from the one stored in the folder, except in what may change. Paths of data, code
    and models may change too: they are compared by hash."""
    other = differences(stored.without_places(), team_file.without_places(), (*MAY_CHANGE, *_moved(stored, team_file)))
    if other:
        raise OtherRun(
            f"{folder} holds a run with other settings ({', '.join(other[:5])}"
            f"{', …' if len(other) > 5 else ''}). To train anew with yours, choose another folder: `--out FOLDER` on "
            "the command line, output_dir in Python. To resume that run with its own: `teamtr train "
            f"{shlex.quote(str(folder))}`"
        )


def _moved(stored: TeamFile, team_file: TeamFile) -> list[str]:
    """Keys that name something by a name, such as a hub id, in one of the two, and by a path in the other."""
    then, now = (dict(_leaves(each.without_places().model_dump())) for each in (stored, team_file))
    found = []
    for key in then.keys() & now.keys():
        values = [then[key], now[key]]
        if SOMEWHERE not in values or None in values:
            continue
        values.remove(SOMEWHERE)
        if values[0] not in BUILT_IN_MODELS and not str(values[0]).startswith(OBJECT):
            found += [key, f"{key.rpartition('.')[0]}.revision"] if key.endswith(".model") else [key]
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping or list, by the dotted key that ``_differences`` gives it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for k, item in enumerate(value):
            name = item["name"] if isinstance(item, Mapping) and "name" in item else k
            yield from _leaves(item, f"{path}.{name}")
    else:
        yield path, value


def _require_stages(run: RunFolder, team_file: TeamFile, commit: Commit) -> None:
    """A plan cannot end before what is done: its last evaluation would be of a later team."""
    stage, updated = int(commit.progress["stage"]), int(commit.progress["done"])
    begun = stage + (updated > 0)
    written, stages = team_file.plan.stages, team_file.sized_plan().stages
    if stages >= begun:
        return
    each = sum(not agent.frozen for agent in team_file.team.agents)
    whole = stage + (updated == each)
    told = f"{whole} {'stage' if whole == 1 else 'stages'}"
    if updated < each:
        told += f" and {updated} of {each} updates of the next"
    raise UserError(
        f"plan.stages is {stages}, but the run in {run.path} has done {told}: "
        f"set plan.stages to {-(-begun * written // stages)} or more to resume it, or choose a new folder"
    )


def _differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            named = isinstance(x, Mapping) and isinstance(y, Mapping) and "name" in x and x["name"] == y.get("name")
            yield from _differences(x, y, f"{path}.{x['name'] if named else k}")
    elif a != b:
        yield path
