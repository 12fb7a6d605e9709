"""Work for processes of their own: what ends well, what fails, what dies, and what never ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from teamtr.errors import UserError


def doing(text: str) -> int:
    """Ends well, but for some words."""
    if text == "ours":
        raise UserError("no such game")
    if text == "theirs":
        raise ZeroDivisionError(text)
    if text == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return len(text)


def sleeping(path: str) -> None:
    """Says in a file who it is, and sleeps."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def in_process(text: str) -> int:
    """Says which process it is in."""
    return os.getpid()
