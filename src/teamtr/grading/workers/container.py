"""A bubblewrap container around the workers, which any user may start.

It has no network, no processes from outside, and no files but Python, its installed packages, the system's libraries
and the given folders, all read-only. ``/tmp`` is empty and private, and only environment variables that Python needs
are passed on (no keys, no tokens). The workers are the same as without it.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "bwrap"
NOBODY = "65534"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Folders of programs and libraries; on most systems all but the first are links into it."""
SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
PASSED_ON = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SECONDS_TO_TRY = 60.0

WITHOUT = "or go without (container: none): the grader then runs with your rights, in a process that can be killed"


@dataclass(frozen=True)
class Container:
    """A container. ``readable``: the folders that can be read besides Python and its packages."""

    readable: tuple[Path, ...]

    def command(self, program: Sequence[str]) -> list[str]:
        """The command that starts the program in the container."""
        return [shutil.which(PROGRAM) or PROGRAM, *self._walls(), "--", *program]

    def environment(self, outside: Mapping[str, str]) -> dict[str, str]:
        kept = {name: outside[name] for name in PASSED_ON if name in outside}
        return {**kept, "PATH": "/usr/bin:/bin", "HOME": "/tmp"}

    def module_path(self) -> list[str]:
        """The entries of our ``sys.path`` that exist in the container."""
        within = [folder.resolve() for folder in _python()]
        return [entry for entry in sys.path if entry and any(Path(entry).resolve().is_relative_to(f) for f in within)]

    def refusal(self) -> str | None:
        """Why no container can be made here, and what to do; None if it can."""
        if shutil.which(PROGRAM) is None:
            return (
                f"container: bubblewrap needs the program {PROGRAM}, which is not on PATH: install it (Debian, Ubuntu: "
                f"apt install bubblewrap; Fedora: dnf install bubblewrap; Arch: pacman -S bubblewrap), {WITHOUT}"
            )
        try:
            tried = subprocess.run(
                self.command([sys.executable, "-c", ""]),
                env=self.environment(os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS_TO_TRY,
            )
        except subprocess.TimeoutExpired:
            said = f"it did not start within {SECONDS_TO_TRY:g} s"
        else:
            if tried.returncode == 0:
                return None
            said = tried.stderr.decode(errors="replace").strip()[-300:] or f"status {tried.returncode}"
        return (
            f"container: bubblewrap cannot make a container here ({said}): let the system allow user namespaces to "
            f"ordinary users (Docker often forbids them; Ubuntu wants an AppArmor profile for {PROGRAM}), {WITHOUT}"
        )

    def _walls(self) -> Iterator[str]:
        yield from ("--unshare-all", "--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL")
        yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
        for path in SYSTEM:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            else:
                yield from ("--ro-bind-try", path, path)
        for path in SETTINGS:
            yield from ("--ro-bind-try", path, path)
        for folder in sorted({folder.resolve() for folder in (*_python(), *self.readable)}):  # the outer one first
            yield from ("--ro-bind", str(folder), str(folder))
        yield from ("--chdir", str(self.readable[0].resolve()) if self.readable else "/")


def _python() -> list[Path]:
    """The folders of this Python, its packages and ours."""
    folders = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[3]]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getusersitepackages()))
    return [folder for folder in folders if folder.is_dir()]
