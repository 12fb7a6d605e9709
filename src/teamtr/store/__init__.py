"""The run folder, written so that killing a run at any moment loses at most the update in progress.

    run/
      team.yaml                               the resolved team file
      log.jsonl                               one JSON object per line, append-only
      checkpoints/agents/<agent>/<version>/   what an agent's learner saved, written once
      checkpoints/commits/000007/team.json    the versions of all agents after seven updates
      episodes/stage-0003-step-01.jsonl.gz    the conversations that an update was trained on
      .lock                                   held by the one process that may write

Everything is YAML, JSON, gzip or what a learner saves; nothing in this package executes code on reading.
"""

from teamtr.store.atomic import StoreError, TornRead, commit_folder, verify_folder, write_atomic
from teamtr.store.checkpoint import Checkpoints, Commit, NoSuchCommit
from teamtr.store.episodes import batch_name, probe_name, read_episodes, write_episodes
from teamtr.store.folder import NotARun, RunFolder, RunLocked, is_run, remedy_for, runs_in
from teamtr.store.log import Log, LogMark, RunLog

__all__ = [
    "Checkpoints",
    "Commit",
    "Log",
    "LogMark",
    "NoSuchCommit",
    "NotARun",
    "RunFolder",
    "RunLocked",
    "RunLog",
    "StoreError",
    "TornRead",
    "batch_name",
    "commit_folder",
    "is_run",
    "probe_name",
    "read_episodes",
    "remedy_for",
    "runs_in",
    "verify_folder",
    "write_atomic",
    "write_episodes",
]
