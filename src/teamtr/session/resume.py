"""A run on disk: what it was asked and how far it is, before anything is built of it; and whether it may go on."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from teamtr.config import ConfigError, TeamFile, dump, loads_stored, on_another_task
from teamtr.errors import Refused, UserError
from teamtr.evaluation.best import best_of
from teamtr.session.build import AS_WRITTEN, Parts, Session, build
from teamtr.session.history import History
from teamtr.session.inputs import Inputs, require_same_models
from teamtr.store import Commit, NotARun, RunFolder, StoreError, write_atomic
from teamtr.team import Team

ON_A_MACHINE = (
    "store.keep_checkpoints",
    "learner.micro_batch",
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
"""Settings that fit a run to a machine and change nothing that it finds, but for rounding; of a list, all it holds."""
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
"""Settings that a resumed run may change without becoming another run."""


SWAP_REQUEST = Path("swap", "request.json")
"""Where a swap writes down what was asked; ``team.yaml`` comes last, and until then no run is there to go on with."""


class OtherRun(StoreError):
    """The folder holds a run of another team file."""

    exit_code = Refused.exit_code


@dataclass(frozen=True)
class StoredRun:
    """A run on disk: its settings and its last commit, before anything is built of them. As long as it is there, the
    commit stays, whatever a run that goes on beside it prunes."""

    folder: RunFolder
    team_file: TeamFile
    commit: Commit

    @classmethod
    def read(cls, folder: Path | str, checkpoint: int | Literal["best"] | None = None) -> StoredRun:
        """Without taking the run's lock: the latest checkpoint, the best by held-out success, or that after so many
        updates. Raises NotARun where there is nothing to go on from."""
        run = RunFolder.read(folder)
        if not run.team_file.is_file():
            raise NotARun(f"{folder} holds no whole run (no team.yaml in it): train or swap to its end first")
        team_file = loads_stored(run.team_text(), name=str(run.team_file))
        commit = run.checkpoints.latest()
        if commit is None:
            raise NotARun(f"{folder} holds no checkpoint yet; train first")
        for damaged in commit.skipped:
            warnings.warn(f"{damaged}. Read instead: the team after {commit.number} updates", stacklevel=2)
        if checkpoint is not None:
            commit = run.checkpoints.at(_best(run, commit) if checkpoint == "best" else checkpoint)
        return cls(run, team_file, commit)

    def on_another_task(self, changes: Sequence[str]) -> StoredRun:
        """The same team with the task that the changes write."""
        return replace(self, team_file=on_another_task(self.team_file, changes, str(self.folder.team_file)))

    def build(self, parts: Parts = AS_WRITTEN) -> tuple[Session, Team]:
        """The team of the commit. Raises OtherInputs when its models are not those that were trained."""
        session = build(self.team_file, taught=False, parts=parts)
        if (then := self.commit.progress.get("inputs")) is not None:
            require_same_models(Inputs.of_record(then), session, self.folder.path)
        return session, session.load(lambda name: self.folder.checkpoints.folder_of(self.commit, name))


def _best(run: RunFolder, latest: Commit) -> int:
    """How many updates the checkpoint with the highest held-out success has."""
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
    """Write the resolved team file, or make sure that the one there is the same and asks for no less than was done."""
    text = dump(team_file)
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
    if run.team_file.exists() and commit is not None:  # a run that never began binds nobody
        try:
            stored = loads_stored(run.team_text(), name=str(run.team_file))
        except ConfigError as error:
            raise OtherRun(f"the team file stored in {run.path} cannot be read:\n{error}") from error
        require_same(run.path, stored, team_file)
        _require_stages(run, team_file, commit)
    write_atomic(run.team_file, text.encode())


def differences(stored: TeamFile, team_file: TeamFile, free: Sequence[str]) -> list[str]:
    """Where the two differ, as dotted keys, but for the settings that are free."""
    changed = _differences(stored.model_dump(), team_file.model_dump())
    return [key for key in changed if not any(f"{key}.".startswith(f"{other}.") for other in free)]


def require_same(folder: Path, stored: TeamFile, team_file: TeamFile) -> None:
    """Refuse a team file that is another than the one stored in the folder, but for what may change."""
    other = differences(stored, team_file, MAY_CHANGE)
    if other:
        raise OtherRun(
            f"{folder} holds a run with other settings ({', '.join(other[:5])}"
            f"{', …' if len(other) > 5 else ''}). To train anew with yours, choose another folder: `--out FOLDER` on "
            "the command line, output_dir in Python. To resume that run with its own: `teamtr train "
            f"{shlex.quote(str(folder))}`"
        )


def _require_stages(run: RunFolder, team_file: TeamFile, commit: Commit) -> None:
    """A plan cannot end before what is done: its last evaluation would be of a team that is further on."""
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
