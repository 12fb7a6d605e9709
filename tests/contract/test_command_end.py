"""Python does not go through all that a command imports, neither meanwhile nor when the command has done its work."""

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


def test_no_cycle_is_looked_for_while_modules_are_imported_and_often_from_the_first_time_on() -> None:
    script = (
        "import gc, sys; older = gc.get_threshold()[1:]\n"
        "from teamtr.cli import main; sys.argv = ['teamtr', '--version']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "first = gc.get_threshold(); gc.collect(); then = gc.get_threshold(); gc.collect()\n"
        "print(first[0], then[0], len(gc.callbacks), first[1:] == then[1:] == older)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.split()[-4:]
    assert told == ["1000000", "20000", "0", "True"], "older objects are looked through as seldom as before"
