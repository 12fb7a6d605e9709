"""Trains a team file to its end: builds the session, resumes, and replaces engines that are lost.

``train`` is a generator of records in the form of the log (see ``records``); callers decide how to show them. A run
that is killed at any moment and started again ends with the same bits on a CPU, because

- every random number is named by (seed, purpose, stage, step), see ``randomness``;
- a commit holds weights, optimizer moments, controller state and position, and is atomic;
- the log is rewound to the last commit, and what was not committed is done again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from teamtr.config import TeamFile
from teamtr.errors import UserError
from teamtr.ports import EngineLost
from teamtr.session.build import AS_WRITTEN, Parts, build
from teamtr.session.driver import Driver, Lost, Record
from teamtr.session.resume import claim, keep
from teamtr.store import RunFolder
from teamtr.trackers import Filing, follow

log = logging.getLogger(__name__)


def train(
    team_file: TeamFile,
    folder: Path | str,
    *,
    stop: Callable[[], bool] = lambda: False,
    parts: Parts = AS_WRITTEN,
    accept_changes: bool = False,
) -> Iterator[Record]:
    """Train in this folder, or resume the run in it. Yields every record of the log as it is made, and problems with
    the team file's trackers (kind "tracker", not in the log).

    ``stop()`` is called after every update, and again when its record was consumed. If it returns True, everything is
    saved and the generator ends. A run that fails before it has begun leaves no folder behind if there was none.
    ``accept_changes``: resume with data, code or models that differ from those with which the run began; otherwise this
    is refused.
    """
    if team_file.seeds != 1:
        raise UserError(
            f"seeds: {team_file.seeds} asks for several runs, and this is one: `teamtr train` with a team file trains "
            "them all; set seeds: 1 for one"
        )
    if all(agent.frozen for agent in team_file.team.agents):
        raise UserError(
            "every agent of this team is frozen, so that there is nobody to train: set frozen: false for one"
        )
    there = Path(folder).exists()
    with RunFolder.open(folder, keep_commits=team_file.store.keep_checkpoints) as run:
        commit = run.checkpoints.latest()
        if commit is not None:
            run.log.require_known()
        claim(run, team_file, commit)
        try:
            records = _until_done(run, team_file, stop, parts, accept_changes)
            first = next(records)  # before trackers are started for a run that cannot begin
            keep(run, team_file)  # the hashes agree: from now on these settings are the run's
            yield from follow(
                chain([first], records),
                team_file.trackers,
                run.path,
                name=team_file.name,
                settings=team_file.model_dump(),
                filing=Filing(**team_file.tracking.model_dump()),
                history=run.log.read,
            )
        except Exception:  # every error is raised again; Ctrl-C keeps the folder, and the same command resumes
            if not there and run.in_place and run.checkpoints.latest() is None:
                shutil.rmtree(run.path)  # the lock is ours until the block ends
            raise


def _until_done(
    run: RunFolder, team_file: TeamFile, stop: Callable[[], bool], parts: Parts, accept_changes: bool
) -> Iterator[Record]:
    """Run from the last commit to the end. If an engine is lost on the way, another replaces it and the run resumes
    from the last commit, as the same command would."""
    lost: Lost | None = None
    for left in reversed(range(1 + team_file.cluster.max_restarts)):
        commit = run.checkpoints.latest()
        taught = commit is None or team_file.plan.plan().objective.has_reference  # otherwise the commit is enough
        session, driver, began = None, None, time.perf_counter()
        try:
            session = build(team_file, taught=taught, parts=parts if lost is None else parts.again())
            driver = Driver(run, session, stop, accept_changes, {"load": time.perf_counter() - began}, lost)
            yield from driver.go(commit)
            return
        except EngineLost as error:
            if not left:
                raise
            lost = Lost(str(error), time.perf_counter() - (began if driver is None else driver.committed))
            if run.checkpoints.latest() is None:  # otherwise the log says it
                log.warning("%s; from the beginning once more", error)
        finally:
            if session is not None:
                session.engine.close()
