"""File locks (``flock``), which the operating system releases when their holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from weakref import WeakSet

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)
"""Errors of file systems that do not support locks, or not this kind."""


class FileLock:
    """A lock on a file or folder, held until ``release``, garbage collection, or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` is of an open file; ``release`` closes it."""
        self.descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path, *, shared: bool = False, wait: bool = False) -> FileLock | None:
        """Lock the file or folder at ``path``. Returns None if others hold it and ``wait`` is false, if nothing
        readable is there, or if it was removed or replaced before it was locked. If the file system has no locks, the
        returned lock protects nothing."""
        try:
            descriptor = _opened(path, shared)
        except (FileNotFoundError, PermissionError):
            return None
        lock = cls(descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock.release()
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        try:
            found, named = os.fstat(descriptor), os.stat(path)
        except FileNotFoundError:
            lock.release()
            return None
        if (found.st_dev, found.st_ino) != (named.st_dev, named.st_ino):
            lock.release()
            return None
        return lock

    @property
    def opened(self) -> int:
        """The descriptor of a lock that is held."""
        assert self.descriptor is not None, "released"
        return self.descriptor

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    __del__ = release


def _opened(path: Path, shared: bool) -> int:
    """Open for writing, if permitted, for an exclusive lock: network file systems require that."""
    if not shared:
        try:
            return os.open(path, os.O_RDWR)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    return os.open(path, os.O_RDONLY)


_held: WeakSet[FileLock] = WeakSet()


def _close_inherited() -> None:
    """Close inherited locks in a forked child. A lock belongs to the open file, which a forked child (a pool worker)
    shares, so a child that outlives its killed parent would keep the lock. Closing does not release the parent's."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_inherited)
