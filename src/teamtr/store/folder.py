"""The run folder: one process writes to it, any number can read it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from teamtr.batches import RolloutBatch
from teamtr.errors import Refused, UserError
from teamtr.store.atomic import TEMPORARY, StoreError, explained, make_folder, read_whole, remove_leftovers
from teamtr.store.checkpoint import Checkpoints
from teamtr.store.episodes import write_episodes
from teamtr.store.lease import Lease, held_elsewhere, holder_of, seems_held
from teamtr.store.locks import FileLock
from teamtr.store.log import RunLog
from teamtr.store.removals import Removals

LOCK = ".lock"

PARTS = ("checkpoints", "episodes", "evals", "models", "swap")
"""Folders in a run folder that TeamTR writes to."""


class RunLocked(StoreError):
    """Another process is writing to this run folder."""

    exit_code = Refused.exit_code


class NotARun(StoreError):
    """The given path holds no run, or something else than a run."""

    exit_code = UserError.exit_code


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Use ``open`` to write and ``read`` to only read.

    ``keep_commits`` is the ``keep`` of its ``Checkpoints``.
    """

    path: Path
    keep_commits: int = 2
    lock: FileLock | None = None
    """Held by the writing process; None for readers."""
    removals: Removals | None = None
    """Removes in the background what the writing process prunes; None for readers."""

    @classmethod
    @contextmanager
    def open(cls, path: Path | str, *, create: bool = True, keep_commits: int = 2) -> Iterator[RunFolder]:
        """Lock the folder for writing until the block ends or the process dies, however it dies.

        Raises NotARun if the path is neither an empty folder nor a run folder. Raises RunLocked, with the holder, if
        another process (or an open block of this one) holds it. Removes leftovers of interrupted writes.
        """
        path = Path(path)
        if not create and not path.is_dir():
            raise NotARun(f"there is no run folder {path}: check the path, or start a run there with `teamtr train`")
        _require_ours(path)
        _make(path)
        lock = _lock(path / LOCK, path)
        with explained(path / LOCK):
            lease = Lease(lock.opened)
        removals = Removals()
        try:
            run = cls(path, keep_commits, lock, removals)
            make_folder(run.checkpoints.folder)
            make_folder(run.episodes)
            remove_leftovers(path, recursive=False)
            for part in PARTS:
                remove_leftovers(path / part, recursive=True)
            yield run
            if lock.descriptor is not None:  # a forked child has no such thread, and would wait forever
                removals.finish()
        finally:
            if lock.descriptor is not None:  # not in a forked child that leaves the block: its parent has the lock
                try:
                    removals.end()
                finally:  # also after a KeyboardInterrupt during the wait
                    lease.end()
                    lock.release()

    @classmethod
    def read(cls, path: Path | str) -> RunFolder:
        """Open a folder for reading only, also while a run writes to it."""
        run = cls(Path(path))
        if not (run.team_file.is_file() or run.checkpoints.folder.is_dir()):
            raise NotARun(f"{path} is not a run folder (no team.yaml and no checkpoints in it): {remedy_for(run.path)}")
        return run

    @property
    def team_file(self) -> Path:
        return self.path / "team.yaml"

    def team_text(self) -> str:
        """The text of the stored team file. Raises NotARun if it is not UTF-8."""
        try:
            return read_whole(self.team_file).decode()
        except UnicodeDecodeError as error:
            raise NotARun(f"{self.team_file} is not UTF-8 text ({error.reason} at byte {error.start})") from error

    def holds(self, path: Path) -> bool:
        """Whether this file or folder, with links resolved, is in the run folder."""
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path))

    @property
    def episodes(self) -> Path:
        """The folder of episode files, which are named by ``batch_name`` and ``probe_name``."""
        return self.path / "episodes"

    @cached_property
    def log(self) -> RunLog:
        return RunLog(self.path / "log.jsonl", writable=self.writable, guard=self.require_in_place)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        folder = self.path / "checkpoints"
        return Checkpoints(
            folder,
            keep=self.keep_commits,
            writable=self.writable,
            guard=self.require_in_place,
            removals=self.removals,
        )

    @property
    def writable(self) -> bool:
        return self.lock is not None

    @property
    def is_in_use(self) -> bool:
        """Whether a process seems to be writing here. For readers: takes no lock."""
        return seems_held(self.path / LOCK)

    @property
    def in_place(self) -> bool:
        """Whether the folder that was locked is still the one at ``path``."""
        if self.lock is None:
            return True
        if self.lock.descriptor is None:  # in a forked child, which has closed it
            return False
        try:
            return os.path.samestat(os.fstat(self.lock.descriptor), os.stat(self.path / LOCK))
        except OSError:
            return False

    def require_in_place(self) -> None:
        """Raise StoreError if the folder was moved, removed or replaced, which would split the run over two folders."""
        if not self.in_place:
            raise StoreError(
                f"the run folder {self.path} was moved, removed or replaced while this run was writing to it, so the "
                "run stops. Every update that was saved is where that folder is now: go on with `teamtr train FOLDER`"
            )

    def write_episodes(self, name: str, batch: RolloutBatch) -> None:
        """Write a batch to the episodes folder under this name."""
        self.require_in_place()
        write_episodes(self.episodes / name, batch)


def remedy_for(path: Path) -> str:
    """What to do about a path that is no run: a folder of runs, as ``--seeds`` writes, names them."""
    runs = runs_in(path)
    if not runs:
        return "check the path"
    there = ", ".join(map(str, runs[:3])) + (", …" if len(runs) > 3 else "")
    return f"it holds {there}; give one of them"


def is_run(folder: Path) -> bool:
    """Whether a run has begun to write here."""
    return (folder / "team.yaml").is_file() or (folder / "log.jsonl").is_file()


def runs_in(folder: Path) -> list[Path]:
    """The runs directly in the folder. Symbolic links are not followed, because their targets are not trusted."""
    if not folder.is_dir():
        return []
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    return [path for path in below if is_run(path)]


def open_own(path: Path) -> BinaryIO:
    """Open a regular file of a run folder for reading. Raises OSError for a link or a special file: an untrusted run
    folder must not make us show other files, or wait forever (a FIFO)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return os.fdopen(descriptor, "rb")


def _require_ours(path: Path) -> None:
    """Raise NotARun unless the path is missing, an empty folder, or a folder with a run's checkpoints; a lock file and
    temporary files do not count. In any other folder a run would overwrite team.yaml and mix its files with others."""
    if path.is_dir():
        with explained(path):
            found = sorted(entry.name for entry in path.iterdir())
        foreign = [name for name in found if name != LOCK and not name.startswith(TEMPORARY)]
        if foreign and not _has_checkpoints(path):
            there = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise NotARun(
                f"{path} is neither empty nor a run folder (there are {there}, and no checkpoints of a run): choose a "
                "new or an empty folder"
            )
    elif path.exists():
        raise NotARun(f"{path} is a file, not a folder: choose a new or an empty folder")


def _make(path: Path) -> None:
    """Create the folder if it does not exist. Raises NotARun if that fails, since then no run was there before."""
    in_the_way = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if in_the_way is not None:
        raise NotARun(f"there can be no run folder {path}: {in_the_way} is a file; choose another folder")
    try:
        make_folder(path)
    except StoreError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise NotARun(f"the run folder {path} cannot be made ({why}): choose a folder that you may write to") from error


def _has_checkpoints(path: Path) -> bool:
    """Whether there is a ``checkpoints`` folder of ours, possibly empty. The name is common, so one that holds anything
    but ``agents``, ``commits`` and hidden files is not ours."""
    folder = path / "checkpoints"
    return folder.is_dir() and all(e.name in ("agents", "commits") or e.name.startswith(".") for e in folder.iterdir())


def _lock(file: Path, run: Path) -> FileLock:
    """Lock the file. Raises RunLocked, with the holder, if another process holds it."""
    with explained(file):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    lock = FileLock(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = not held_elsewhere(descriptor, run)
    except BlockingIOError:
        ours = False
    except OSError as error:
        lock.release()
        raise StoreError(f"cannot lock {file} ({error.strerror}): put the run on a file system with locks") from error
    if ours:
        return lock
    holder = holder_of(descriptor) or "another process"  # it has the lock but has not written its name yet
    lock.release()
    raise RunLocked(
        f"run folder {run} is in use by {holder}: wait until it ends, stop it (Ctrl-C saves its update), or choose "
        "another folder. Looking at the run (eval, report) needs no lock"
    )
