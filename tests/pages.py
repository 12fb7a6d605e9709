"""Follows pages of the documentation: writes the files that they show, and runs their commands.

A ``python`` or ``yaml`` block that begins with ``# NAME`` is the file NAME; the lines of a ``sh`` block are commands.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from teamtr.cli import app

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.M | re.S)
_FILE = re.compile(r"# ([\w.-]+)\n(.*)", flags=re.S)


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command. ``typed``: its standard input, from an ``echo`` before a pipe."""

    words: tuple[str, ...]
    typed: str | None = None

    @property
    def what(self) -> str:
        return " ".join(self.words[:2])

    def with_settings(self, *settings: str) -> Command:
        return Command((*self.words, *settings), self.typed)


def steps(text: str) -> list[File | Command]:
    """The files and commands of a page, in order."""
    found: list[File | Command] = []
    for language, block in _BLOCK.findall(text):
        if language == "sh":
            found += [_command(line) for line in block.splitlines()]
        elif named := _FILE.fullmatch(block):
            found.append(File(named[1], named[2]))
    return found


def section(page: str, title: str) -> str:
    """The text below a second-level heading."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S)
    return found


def titles(page: str) -> list[str]:
    return re.findall(r"^## (.+)$", page, flags=re.M)


def _command(line: str) -> Command:
    before, piped, after = line.partition(" | ")
    if not piped:
        return Command(tuple(shlex.split(line)))
    echo, *said = shlex.split(before)
    assert echo == "echo", f"only the words of an echo are piped: {line}"
    return Command(tuple(shlex.split(after)), " ".join(said) + "\n")


class Reader:
    """Carries out the steps of a page in the current folder. ``said``: the output of each command, by its words."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self._left_behind = ExitStack()

    def do(self, step: File | Command) -> None:
        if isinstance(step, File):
            Path(step.name).write_text(step.text)
            return
        program, *words = step.words
        if program == "export":
            name, _, value = words[0].partition("=")
            os.environ[name] = value
        elif words[-1:] == ["&"]:
            self._left_behind.enter_context(_in_the_background(words[:-1]))
        else:
            self.said[" ".join(step.words)] = _python(words) if program == "python" else _teamtr(words, step.typed)

    def leave(self) -> None:
        self._left_behind.close()


def _python(words: list[str]) -> str:
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _teamtr(words: list[str], typed: str | None) -> str:
    """Runs the command in this process, which has the libraries loaded."""
    result = CliRunner().invoke(app, words, input=typed)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, f"teamtr {shlex.join(words)}: {result.output}"
    return result.output


@contextmanager
def _in_the_background(words: list[str]) -> Iterator[None]:
    """Run a server in its own process: ready when it has printed its address, ended with SIGTERM."""
    command = [sys.executable, "-c", "from teamtr.cli import main; main()", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("http"), f"teamtr {shlex.join(words)} did not start"
        yield
    finally:
        running.terminate()
        assert running.wait(300) == 0
