"""The run folder: what a run writes, so that killing it at any moment loses at most the update in progress.

    run/
      team.yaml                               the resolved team file
      log.jsonl                               one JSON object per line, append-only
      checkpoints/agents/<agent>/<version>/   what an agent's learner saved, written once
      checkpoints/commits/000007/team.json    which versions make the team after seven updates
      episodes/stage-0003-step-01.jsonl.gz    the conversations an update learnt from
      .lock                                   held by the one process that may write

Everything is JSON, gzip or whatever a learner saves; nothing here can execute on reading.
"""

from teamtr.store.atomic import StoreError, TornRead, commit_folder, verify_folder, write_atomic
from teamtr.store.checkpoint import Checkpoints, Commit, NoSuchCommit
from teamtr.store.episodes import batch_name, probe_name, read_episodes, write_episodes
from teamtr.store.folder import NotARun, RunFolder, RunLocked
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
    "probe_name",
    "read_episodes",
    "verify_folder",
    "write_atomic",
    "write_episodes",
]
