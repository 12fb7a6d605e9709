"""A command that has done its work ends at once: Python does not go through all that was imported first."""

from __future__ import annotations

import os
import subprocess
import sys

LOOKS = """
import atexit, gc, sys

atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "collected"))  # asked after what main registers
from teamtr.cli import main

sys.argv = ["teamtr", {word!r}]
main()
"""


def last_word_after(word: str) -> tuple[int, str]:
    script = LOOKS.format(word=word)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    return ended.returncode, ended.stdout.split()[-1]


def test_no_cycle_is_looked_for_when_a_command_ends() -> None:
    assert last_word_after("--version") == (0, "frozen")


def test_nor_where_it_ends_with_an_error() -> None:
    assert last_word_after("no-such-command") == (2, "frozen")
