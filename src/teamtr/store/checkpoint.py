"""Checkpoints: a folder per agent and version, written once, and numbered commits that list the versions of a team.

    agents/<agent>/<version>/       what the learner saved, with manifest.json
    commits/000007/team.json        the team after seven updates, with manifest.json

A commit is valid once its folder is renamed, which happens after every agent folder that it names was renamed. So
whenever the process dies, the newest commit is either the one before or the one after the update in progress.

Old commits are pruned, together with agent folders that only they name. Exceptions are commits that a reader holds
(``Checkpoints.latest``) and the one in ``Checkpoints.kept``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr.errors import UserError
from teamtr.store.atomic import (
    MANIFEST,
    StoreError,
    commit_folder,
    discard_folder,
    explained,
    make_folder,
    read_whole,
    set_aside,
    temporary_beside,
    verify_folder,
)
from teamtr.store.locks import FileLock
from teamtr.store.log import decode, encode
from teamtr.store.removals import Removals

TEAM = "team.json"
FORMAT = 1

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[0-9a-f]{1,128}")
_NUMBER = re.compile(r"[0-9]{6,}")


class NoSuchCommit(StoreError):
    """The requested checkpoint is not stored."""

    exit_code = UserError.exit_code


@dataclass(frozen=True)
class Commit:
    """The team after ``number`` updates.

    ``agents`` maps names to versions, ``progress`` is what the run needs to resume, ``record`` the log record of the
    update that was committed. ``manifests`` maps each agent to the sha256 of its folder's manifest. ``skipped``
    says which newer commits were damaged and skipped; show it to the user.
    """

    number: int
    agents: Mapping[str, str]
    progress: Mapping[str, Any]
    record: Mapping[str, Any] | None
    manifests: Mapping[str, str]
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run. Only the process that holds the run folder's lock may write."""

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        writable: bool = True,
        guard: Callable[[], None] = lambda: None,
        removals: Removals | None = None,
    ) -> None:
        """``keep``: how many commits are kept; older ones are pruned after each commit. 0 keeps all.

        ``guard`` is called before anything is written, and raises if nothing may be written. With ``removals``, pruned
        folders are removed in the background; their errors are raised by the next commit.
        """
        if keep < 0:
            raise ValueError(f"keep must be 0 (all) or the number of commits to keep, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._writable = writable
        self._guard = guard
        self._removals = removals
        # Manifest hashes of the agent folders that this process wrote or verified, so that gigabytes are hashed once.
        self._whole: dict[Path, str] = {}
        # Agent folders named by each commit that this process wrote, by number.
        self._named: dict[int, set[Path]] = {}
        self._hold: FileLock | None = None
        self.kept: int | None = None
        """The number of a commit that is never pruned while it is set here."""

    def commit(
        self,
        number: int,
        agents: Mapping[str, str],
        save: Callable[[str, Path], None],
        progress: Mapping[str, Any],
        record: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Store the team after ``number`` updates durably.

        ``save(agent, folder)`` is called for each agent whose version is not stored yet, and writes its files into the
        given empty folder. A version must therefore change whenever anything that ``save`` writes changes, optimizer
        state included, not only the weights. Committing the same content under the same number again is a no-op. Other
        content under a stored number, or a number below a stored one, is an error, unless what is stored is damaged:
        then it is replaced.
        """
        if not self._writable:
            raise StoreError(f"{self.folder} was opened for reading; open the run folder with RunFolder.open to write")
        self._guard()
        if self._removals is not None:
            self._removals.finish()
        if number < 0:
            raise StoreError(f"a commit's number counts updates, got {number}")
        for name, version in agents.items():
            _check_agent(name, version)
        content = {"number": number, "agents": agents, "progress": progress, "record": record}
        wanted = encode(content, f"commit {number}", sort_keys=True)
        stored = self._make_way(number, wanted)
        if stored is None:
            manifests = {name: self._store_agent(name, version, save) for name, version in agents.items()}
            whole = {**content, "format": FORMAT, "manifests": manifests}
            body = encode(whole, f"commit {number}", sort_keys=True)
            _commit(self._commit_folder(number), lambda folder: (folder / TEAM).write_bytes(body))
            stored = self._read(number)
        self._named[number] = {self.folder_of(stored, name) for name in stored.agents}
        self._prune()
        return stored

    def latest(self) -> Commit | None:
        """The newest commit of which every file of every agent is intact; None if there is no commit.

        A reader holds the commit until its next call or until this object is gone; the writer does not prune a commit
        that is held. A damaged newer commit is skipped and named in ``Commit.skipped``. Raises StoreError if there are
        commits but none is intact: starting again would silently lose the run.
        """
        while True:
            numbers = self.numbers()
            skipped: list[str] = []
            commit = None
            for number in reversed(numbers):
                try:
                    self._hold = None if self._writable else self._held(number)
                    commit = self._verified(number)
                    break
                except (StoreError, OSError) as error:
                    skipped.append(f"commit {number} was passed over: {error}")
            # Without the lock, a commit may be pruned before it is held. It was not damaged, so look again.
            if skipped and self.numbers() != numbers:
                continue
            if commit is not None and not self._writable and self._hold is None:
                continue
            if not numbers:
                return None
            if commit is None:
                raise StoreError(
                    f"none of the {len(numbers)} commits in {self.folder} is whole: restore the folder from a copy, or "
                    "start a run in another folder.\n" + "\n".join(skipped)
                )
            return replace(commit, skipped=tuple(skipped))

    def at(self, number: int) -> Commit:
        """The commit of this number, verified; a reader holds it as in ``latest``. Raises NoSuchCommit if it is not
        stored, or no longer."""
        hold = None if self._writable else self._held(number)
        if number not in self.numbers() or (hold is None and not self._writable):
            there = ", ".join(map(str, self.numbers())) or "none"
            raise NoSuchCommit(f"{self.folder} holds no checkpoint {number}; it holds {there}")
        self._hold = hold
        return self._verified(number)

    def numbers(self) -> list[int]:
        """The numbers of the stored commits, ascending, damaged ones included."""
        try:
            names = [path.name for path in (self.folder / "commits").iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def folder_of(self, commit: Commit, agent: str) -> Path:
        """The folder of an agent of this commit."""
        if agent not in commit.agents:
            raise StoreError(
                f"commit {commit.number} has no agent {agent!r}; it has {', '.join(sorted(commit.agents))}"
            )
        return self._agent_folder(agent, commit.agents[agent])

    def _make_way(self, number: int, wanted: bytes) -> Commit | None:
        """Remove damaged commits at or above ``number``; returns the one at ``number`` if it has the wanted content.

        Damaged ones above are removed as well: the run resumed from before them, and they could become valid again
        when an agent folder that they share is rewritten.
        """
        same = None
        for other in [other for other in self.numbers() if other >= number]:
            try:
                stored = self._verified(other)
            except StoreError:
                discard_folder(self._commit_folder(other))
                continue
            if other > number or _content(stored) != wanted:
                raise StoreError(
                    f"cannot commit {number}: {self._commit_folder(other)} is intact and holds "
                    f"{'a later update' if other > number else 'other content'}. Resume from the newest commit, or "
                    "remove that folder to resume from an earlier one"
                )
            same = stored
        return same

    def _store_agent(self, name: str, version: str, save: Callable[[str, Path], None]) -> str:
        """The manifest hash of the agent's folder, which is written first if it is missing or damaged."""
        final = self._agent_folder(name, version)
        if final in self._whole:
            return self._whole[final]
        if final.exists():
            try:
                self._whole[final] = verify_folder(final)
                return self._whole[final]
            except StoreError:
                self._discard_agent(final)

        def fill(folder: Path) -> None:
            save(name, folder)
            if not any(folder.iterdir()):
                raise StoreError(f"agent {name!r} saved no file, so it could not be restored: save must write some")

        self._whole[final] = _commit(final, fill)
        return self._whole[final]

    def _verified(self, number: int) -> Commit:
        """The commit, after verifying every byte that it depends on."""
        verify_folder(self._commit_folder(number))
        commit = self._read(number)
        for name in commit.agents:
            folder = self.folder_of(commit, name)
            if verify_folder(folder) != commit.manifests.get(name):
                raise StoreError(f"{folder / MANIFEST} is not the one that commit {number} was made with")
            self._whole[folder] = commit.manifests[name]
        return commit

    def _read(self, number: int) -> Commit:
        path = self._commit_folder(number) / TEAM
        try:
            body = decode(read_whole(path))
            if body["format"] != FORMAT:
                raise StoreError(f"{path} has format {body['format']}, this version reads {FORMAT}: update teamtr")
            if body["number"] != number:
                raise StoreError(f"{path} says that it is commit {body['number']}: give its folder that number back")
            for name, version in body["agents"].items():
                _check_agent(name, version)
            return Commit(number, body["agents"], body["progress"], body["record"], body["manifests"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} cannot be read ({error}): restore it from a copy, or remove its folder"
            ) from error

    def _held(self, number: int) -> FileLock | None:
        """A shared lock of readers, which the writer needs exclusively to prune; None if the commit is gone. It is on
        the commit's own file, so that a read-only folder can be read."""
        return FileLock.take(self._commit_folder(number) / TEAM, shared=True, wait=True)

    def _prune(self) -> None:
        if self.keep == 0:
            return
        numbers = self.numbers()
        staying = numbers[-self.keep :]
        for number in numbers[: -self.keep]:
            if number == self.kept or not self._discard_commit(number):
                staying.append(number)
        needed: set[Path] = set()
        for number in staying:
            if number in self._named:
                needed |= self._named[number]
                continue
            try:
                commit = self._read(number)
            except StoreError:  # too damaged to name its agents: it cannot be resumed from anyway
                continue
            needed |= {self.folder_of(commit, name) for name in commit.agents}
        self._named = {number: folders for number, folders in self._named.items() if number in staying}
        for folder in (self.folder / "agents").glob("*/*"):
            if folder not in needed and folder.is_dir() and _VERSION.fullmatch(folder.name):
                self._discard_agent(folder)

    def _discard_commit(self, number: int) -> bool:
        """False if a reader holds it; it is pruned after a later commit."""
        folder = self._commit_folder(number)
        lock = FileLock.take(folder / TEAM)
        if lock is None and (folder / TEAM).exists():
            return False
        self._discard(folder)
        if lock is not None:
            lock.release()
        return True

    def _discard_agent(self, folder: Path) -> None:
        self._whole.pop(folder, None)
        self._discard(folder)

    def _discard(self, folder: Path) -> None:
        if self._removals is None:
            discard_folder(folder)
        else:
            self._removals.begin(set_aside(folder))

    def _agent_folder(self, name: str, version: str) -> Path:
        return self.folder / "agents" / name / version

    def _commit_folder(self, number: int) -> Path:
        return self.folder / "commits" / f"{number:06d}"


def _commit(final: Path, fill: Callable[[Path], object]) -> str:
    """Fill a temporary folder next to ``final`` and rename it to that; returns its manifest's sha256."""
    make_folder(final.parent)
    tmp = temporary_beside(final)
    try:
        make_folder(tmp)
        with explained(final):
            fill(tmp)
        return commit_folder(tmp, final)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def _content(commit: Commit) -> bytes:
    content = {
        "number": commit.number,
        "agents": commit.agents,
        "progress": commit.progress,
        "record": commit.record,
    }
    return encode(content, f"commit {commit.number}", sort_keys=True)


def _check_agent(name: str, version: str) -> None:
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"agent name {name!r} cannot name a folder: use at most 100 letters, digits, dots, dashes and underscores, "
            "not beginning with a dot"
        )
    if not _VERSION.fullmatch(version):
        raise StoreError(f"version {version!r} of agent {name!r} is not a hash: use lower-case hexadecimal digits")
