"""A filter on system calls (seccomp): those that a pure computation needs are allowed, all others fail with EPERM.

The list has no call that opens a file or socket, starts a process, signals another one, traces, or changes a limit. Any
user may install the filter, also where namespaces are forbidden, and nothing can remove it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys

# name: (number on x86_64, number on aarch64), None where the architecture has no such call
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "close": (3, 57),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

# platform.machine(): (column of ALLOWED, what the kernel calls the architecture in a filter)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "AMD64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_OFFSET_OF_NUMBER, _OFFSET_OF_ARCHITECTURE = 0, 4
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: the call fails with errno 1, EPERM

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@functools.cache
def instructions() -> bytes:
    """The filter in the kernel's format; raises OSError if the numbers of the system calls are not known."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        raise OSError(f"no list of system calls for {sys.platform} on {machine}")
    column, architecture = _ARCHITECTURES[machine]
    numbers = [pair[column] for pair in ALLOWED.values()]
    known = [number for number in numbers if number is not None]
    steps = [
        (_LOAD_WORD, 0, 0, _OFFSET_OF_ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _OFFSET_OF_NUMBER),
        # On a match, jump over the rest of the list and the refusal after it.
        *((_JUMP_IF_EQUAL, len(known) - i, 0, number) for i, number in enumerate(known)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install(libc: ctypes.CDLL) -> None:
    """Install the filter, irrevocably; raises OSError if the kernel refuses. Needs no_new_privs (``isolation.py``)."""
    code = instructions()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel took no filter of system calls")
