"""Locks on open files: the operating system releases them when their holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from weakref import WeakSet

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)
"""What file systems say that have no locks, or none of this kind."""


class FileLock:
    """A lock on a file or folder, until it is released, nobody refers to it any more, or the process dies."""

    def __init__(self, descriptor: int) -> None:
        """Of an open file, which is closed in the end."""
        self.descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path, *, shared: bool = False, wait: bool = False) -> FileLock | None:
        """Lock what is there under this name. None when others hold it and ``wait`` is not asked for, and when nothing
        that may be read is there, or no longer once the lock was had. Where the file system has no locks, nothing is
        protected."""
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
        """Of a lock that is held."""
        assert self.descriptor is not None, "released"
        return self.descriptor

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    __del__ = release


def _opened(path: Path, shared: bool) -> int:
    """For writing, if it may be, where the lock is to be exclusive: network file systems want that."""
    if not shared:
        try:
            return os.open(path, os.O_RDWR)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    return os.open(path, os.O_RDONLY)


_held: WeakSet[FileLock] = WeakSet()


def _close_inherited() -> None:
    """A lock belongs to the open file, which a forked child (a worker of a pool) shares. One that outlived its killed
    parent would keep the lock, so every child closes what it inherited; that does not release the parent's lock."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_inherited)
