"""Atomic writes, and folders with a manifest of checksums.

The order is always the same: write next to the final path under a name that starts with ``.tmp-``, sync what was
written, rename, sync the parent. A process killed in between leaves only a ``.tmp-`` name, which every reader
ignores and the next owner of the folder removes. A running process holds a lock on the one that it is writing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import orjson

from teamtr.errors import TeamTRError
from teamtr.store.locks import FileLock

TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"


class StoreError(TeamTRError):
    """Something in a run folder is missing, damaged or in use. The message says what, where, and what to do."""


class TornRead(TeamTRError):
    """A read returned fewer bytes than the file has. The file need not be damaged, so this is not a StoreError, which
    makes a commit be skipped or discarded."""


def read_whole(path: Path) -> bytes:
    """All bytes of a file that others may append to or replace. Raises TornRead if the file system returns fewer."""
    for _ in range(3):  # in between, the file may have been replaced by a shorter one
        size = path.stat().st_size
        data = path.read_bytes()
        if len(data) >= size:
            return data
    raise TornRead(f"of {path} only {len(data)} of {size} bytes could be read: try again, or check the file system")


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: a reader sees the old content or the new, never a part, also after a crash."""
    make_folder(path.parent)
    with explained(path):
        temporary, lock = _new_temporary(path)
        try:
            _write_synced(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            lock.release()
        sync_folder(path.parent)


@contextmanager
def whole_file(final: Path) -> Iterator[TextIO]:
    """A file to write line by line. It is renamed to ``final`` when the block ends, and removed if the block fails.

    A leftover of a killed process is overwritten. Raises StoreError if a running process is writing the same file.
    """
    with _claimed(final, Path.touch) as temporary, explained(final):
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
        sync_folder(final.parent)


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Like ``whole_file``, for a folder; ``final`` must be missing or empty."""
    final = Path(os.path.abspath(final))
    with _claimed(final, make_folder) as temporary, explained(final):
        for left in temporary.iterdir():
            _remove(left)
        yield temporary
        os.rename(temporary, final)
        sync_folder(final.parent)


@contextmanager
def _claimed(final: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A locked temporary named after ``final``, so that the next process that writes ``final`` finds it."""
    temporary = final.with_name(f"{TEMPORARY}{final.name}")
    make_folder(final.parent)
    with explained(final):
        make(temporary)
        lock = FileLock.take(temporary)
    if lock is None:
        raise StoreError(f"{final} is being written by another process: wait until it ends, or choose another name")
    try:
        yield temporary
    except BaseException:
        _remove(temporary)
        raise
    finally:
        lock.release()


def commit_folder(tmp: Path, final: Path) -> str:
    """Rename the finished folder ``tmp`` to ``final``; returns the sha256 of the manifest written into it.

    ``manifest.json`` holds {relative name: {"sha256": ..., "bytes": ...}} of every file, so that the folder can be
    verified later. Both paths must be on one file system; ``final`` must not exist.
    """
    if final.exists():
        raise StoreError(f"{final} exists already; a committed folder is written once. Remove it to write it again")
    files = _files_in(tmp)
    if MANIFEST in files:
        raise StoreError(f"{tmp / MANIFEST} is a name this store needs for itself; save under another name")
    with explained(final):
        manifest = {name: {"sha256": _sha256(file), "bytes": file.stat().st_size} for name, file in files.items()}
        body = orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        _write_synced(tmp / MANIFEST, body)
        for file in files.values():
            _sync(file, os.O_RDONLY)
        # Deepest first: a folder's entries are on disk before the entry that names the folder.
        for folder, _, _ in os.walk(tmp, topdown=False):
            sync_folder(Path(folder))
        os.rename(tmp, final)
        sync_folder(final.parent)
    return hashlib.sha256(body).hexdigest()


def verify_folder(folder: Path) -> str:
    """Check every file of a committed folder against its manifest; returns the sha256 of the manifest.

    Raises StoreError with the name of the first file that is missing, changed or not listed. Unlisted hidden files are
    allowed: file managers and network file systems create them, and no loader reads them.
    """
    advice = "restore it from a copy"
    if not folder.is_dir():
        raise StoreError(f"{folder} is missing: {advice}")
    try:
        body = read_whole(folder / MANIFEST)
    except OSError as error:
        raise StoreError(f"{folder / MANIFEST} is missing or unreadable ({error.strerror}): {advice}") from error
    try:
        listed = {str(name): (str(entry["sha256"]), int(entry["bytes"])) for name, entry in orjson.loads(body).items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise StoreError(f"{folder / MANIFEST} is damaged ({error}): {advice}") from error
    found = _files_in(folder)
    for name, (sha256, size_bytes) in listed.items():
        if name not in found:
            raise StoreError(f"{folder / name} is missing: {advice}")
        try:
            found_bytes = found[name].stat().st_size
            if found_bytes != size_bytes:
                raise StoreError(f"{found[name]} has {found_bytes} bytes instead of {size_bytes}: {advice}")
            if _sha256(found[name]) != sha256:
                raise StoreError(f"{found[name]} has changed since it was written (sha256 differs): {advice}")
        except OSError as error:
            raise StoreError(f"{found[name]} cannot be read ({error.strerror}): {advice}") from error
    for name in found.keys() - listed.keys() - {MANIFEST}:
        if not any(part.startswith(".") for part in Path(name).parts):
            raise StoreError(f"{folder / name} was not there when {folder} was written: remove that file")
    return hashlib.sha256(body).hexdigest()


def discard_folder(folder: Path) -> None:
    """Remove a committed folder; a crash halfway leaves a ``.tmp-`` leftover, not a damaged folder."""
    aside = set_aside(folder)
    with explained(folder):
        shutil.rmtree(aside)


def set_aside(folder: Path) -> Path:
    """Rename a committed folder to a temporary name, which readers ignore; returns the new path."""
    with explained(folder):
        aside = temporary_beside(folder)
        os.rename(folder, aside)
        sync_folder(folder.parent)
    return aside


def remove_leftovers(folder: Path, *, recursive: bool) -> None:
    """Remove leftovers of interrupted writes, except those that a running process has locked. Call this only as the
    owner of ``folder``: not every temporary folder is locked."""
    for here, folders, files in os.walk(folder):
        for name in (*files, *folders):
            if name.startswith(TEMPORARY) and (lock := FileLock.take(Path(here, name))) is not None:
                _remove(Path(here, name))
                lock.release()
        folders[:] = [name for name in folders if recursive and not name.startswith(TEMPORARY)]


def temporary_beside(path: Path) -> Path:
    """A new name in the same folder, and so on the same file system, which makes the rename atomic."""
    return path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, each synced into its own parent."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with explained(folder):
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the directory entries of a folder durable; syncing only the files does not."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_temporary(path: Path) -> tuple[Path, FileLock]:
    """An empty file next to ``path``, and the lock that marks it as being written."""
    while True:
        temporary = temporary_beside(path)
        # Not tempfile: its files are readable only by their owner, and the rename would keep that.
        temporary.touch(exist_ok=False)
        lock = FileLock.take(temporary, wait=True)
        if lock is not None:  # else it was removed as a leftover before it was locked
            return temporary, lock


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files_in(folder: Path) -> dict[str, Path]:
    """Relative name -> path of every file below ``folder``, in sorted order."""
    found: dict[str, Path] = {}
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise StoreError(
                    f"{path} is a link or a special file, which cannot be verified: put a copy in its place"
                )
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    return dict(sorted(found.items()))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that says what is intact and what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. What was saved before is intact: make room or mend the "
            "permissions, then run the same command again"
        ) from error
