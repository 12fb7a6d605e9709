"""Work for other processes: functions that succeed, fail, die, or never end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from teamtr.errors import UserError


def doing(text: str) -> int:
    """Returns the length of the text; some texts make it raise or die."""
    if text == "ours":
        raise UserError("no such game")
    if text == "theirs":
        raise ZeroDivisionError(text)
    if text == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text)


def sleeping(path: str) -> None:
    """Writes its process id to a file, and sleeps."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def in_process(text: str) -> int:
    """Returns its process id."""
    return os.getpid()
