"""Runs a command until it exits or the parent process is gone.

If the parent is gone, all processes of the command are ended too, and its working folder is removed. This is a
standalone program for the Python of another environment: it imports nothing of teamtr. Standard input is a pipe from
the parent, which is closed when that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0
"""Time for a server to exit by itself after SIGTERM."""


def main(folder: str, command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True)
    alone = threading.Event()
    threading.Thread(target=_until_alone, args=(child, alone), daemon=True).start()
    code = child.wait()
    _tell(child, signal.SIGKILL)  # processes that it left behind
    if alone.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _until_alone(child: subprocess.Popen[bytes], alone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    alone.set()
    _tell(child, signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    _tell(child, signal.SIGKILL)


def _tell(child: subprocess.Popen[bytes], what: signal.Signals) -> None:
    """Signal all processes of the child's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, what)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
