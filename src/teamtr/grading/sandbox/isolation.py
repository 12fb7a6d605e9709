"""Isolation of untrusted code by the kernel. Each kind may be missing on some machine, with a recorded reason.

Set up once, by the server (``enter``):

    user namespace      no privileges outside; root becomes nobody
    network namespace   not even a loopback device
    process namespace   no process outside can be seen or signaled; when the server ends, all processes inside end
    empty root          a file system without a single file (without namespaces: a removed folder, for root only)

Set up for each job (``restrict``):

    plain user          root becomes nobody
    limits              on any POSIX system, always: no new process or thread, no new descriptor (so that no file,
                        socket or pipe can be opened), nothing written to a file, bounded memory and CPU time
    call filter         on Linux: ``syscalls.py``
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import syscalls

NOBODY = 65534

NAMESPACES = ("user namespace", "network namespace", "process namespace")
EMPTY_ROOT = "empty root"
PLAIN_USER = "plain user"
CALL_FILTER = "call filter"

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64

_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class NoNamespacesError(OSError):
    """The system offers no namespaces, or unusable ones; this process cannot go back and must be replaced."""


@dataclass(frozen=True)
class Isolation:
    """The isolation that is in effect. ``missing[name]`` says why a kind is missing; ``init`` is true in process 1 of
    its own namespace, ``nobody`` if each job still has to give up root."""

    missing: dict[str, str]
    init: bool
    nobody: bool


def enter(without: dict[str, str]) -> Isolation:
    """Isolate this process as far as the system allows; returns in the process that is to serve.

    ``without`` names kinds of isolation to leave out, and why. With namespaces, the calling process stays outside and
    never returns: it waits for the child in which this function returns, and ends with it. Raises NoNamespacesError.
    """
    missing = dict(without)
    if _LINUX:
        _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    inside = not any(name in missing for name in NAMESPACES)
    if inside:
        _enter_namespaces()
    _try(missing, EMPTY_ROOT, _mount_empty_root if inside else _chroot_to_nothing)
    if inside:
        _drop_capabilities()
    if _LINUX:
        _call(_libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the same user may read our memory
    is_root = os.geteuid() == 0
    if is_root:
        _try(missing, PLAIN_USER, _check_nobody)
    _try(missing, CALL_FILTER, _check_call_filter)
    return Isolation(missing, init=inside, nobody=is_root and PLAIN_USER not in missing)


def restrict(isolation: Isolation, keep_fd: int, seconds: float, memory_bytes: int) -> None:
    """Restrict one job, in its own process: afterwards it can only compute and write to ``keep_fd``."""
    os.setsid()
    os.closerange(3, keep_fd)
    os.closerange(keep_fd + 1, 1024)
    if isolation.nobody:
        _become_nobody()
    if _LINUX:
        _call(_libc.prctl, _PR_SET_DUMPABLE, 0, 0, 0, 0)
        _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: a change of user clears it
    _limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 0)
    if _LINUX:  # elsewhere the system does not enforce it
        _limit(resource.RLIMIT_AS, memory_bytes)
    if CALL_FILTER not in isolation.missing:
        syscalls.install(_libc)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _enter_namespaces() -> None:
    if not _LINUX:
        raise NoNamespacesError(f"{sys.platform} has no namespaces")
    try:
        _unshare()
        server = os.fork()  # the first process of the new namespace
    except OSError as error:
        raise NoNamespacesError(f"{error}") from None
    if server:
        os.closerange(0, 1024)  # the channel must not outlive the server
        os.waitpid(server, 0)
        os._exit(0)
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _unshare() -> None:
    """Enter new namespaces, in which we are nobody. Outside, root is mapped to nobody too if possible, and any other
    user to itself."""
    us = os.getpid()
    outside = [(os.geteuid(), os.getegid())]
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # in a user namespace already, where groups may not be dropped
            os.setgroups([])
        outside.insert(0, (NOBODY, NOBODY))
    ready_read, ready_write = os.pipe()
    helper = os.fork()
    if helper == 0:  # stays outside: a process inside may not map itself to another user
        os.close(ready_write)
        os._exit(0 if os.read(ready_read, 1) and any(_map_user(us, *ids) for ids in outside) else 1)
    os.close(ready_read)
    try:
        namespaces = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        _call(_libc.unshare, namespaces)
        os.write(ready_write, b"!")
    finally:
        os.close(ready_write)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError("the user namespace takes no user")
    _become_nobody(groups=False)


def _map_user(process: int, uid: int, gid: int) -> bool:
    folder = f"/proc/{process}"
    try:
        for name, line in (
            ("setgroups", "deny"),
            ("gid_map", f"{NOBODY} {gid} 1"),
            ("uid_map", f"{NOBODY} {uid} 1"),
        ):
            with open(f"{folder}/{name}", "w") as file:
                file.write(line)
    except OSError:
        return False
    return True


def _become_nobody(*, groups: bool = True) -> None:
    if groups:
        os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _mount_empty_root() -> None:
    """In a mount namespace: replace the root with an empty, read-only file system."""
    anywhere = b"/proc"
    _call(_libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _call(_libc.mount, b"none", anywhere, b"tmpfs", flags, b"size=4k,mode=555")
    os.chdir(anywhere)
    _call(_libc.pivot_root, b".", b".")  # the old root is now mounted on top of the new one
    _call(_libc.umount2, b".", _MNT_DETACH)
    os.chdir("/")


def _chroot_to_nothing() -> None:
    """Without namespaces, for root: change the root to a removed directory, in which nothing can be created."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    try:
        os.chroot(".")
    finally:
        os.chdir("/")


def _drop_capabilities() -> None:
    for capability in range(_MOST_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers beyond the last capability
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call(_libc.capset, header, (ctypes.c_uint32 * 6)())


def _check_call_filter() -> None:
    """Check that the filter refuses a call that never fails otherwise."""
    syscalls.instructions()

    def filtered() -> bool:
        syscalls.install(_libc)
        return bool(_libc.getsid(0) == -1)

    if not _in_child(filtered):
        raise OSError("the kernel takes no filter of system calls")


def _check_nobody() -> None:
    """Check that root can become another user: in some containers it is the only one."""

    def changed() -> bool:
        _become_nobody()
        return os.geteuid() == NOBODY

    if not _in_child(changed):
        raise OSError("root cannot become another user here")


def _in_child(test: Callable[[], bool]) -> bool:
    """Run a test in a child process, since its effects cannot be undone."""
    child = os.fork()
    if child == 0:
        passed = False
        with contextlib.suppress(OSError):
            passed = test()
        os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] == 0


def _try(missing: dict[str, str], name: str, build: Callable[[], None]) -> None:
    if name in missing:
        return
    try:
        build()
    except OSError as error:
        missing[name] = str(error)


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        name = getattr(function, "__name__", "a call")
        raise OSError(number, f"{name}: {os.strerror(number)}")
