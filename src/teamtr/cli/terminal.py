"""The only module through which commands write: text from models, data, endpoints or user code cannot send control
codes to a terminal."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any, TextIO

from rich.cells import cell_len

from teamtr.text import on_terminal


def write(text: str, stream: TextIO) -> None:
    """Write the text and a newline, without control codes."""
    stream.write(f"{on_terminal(text)}\n")
    stream.flush()


def say(text: str) -> None:
    """Print a message to the user on stderr, since stdout is for results."""
    write(text, sys.stderr)


def json_line(value: Any) -> str:
    """One line of JSON in ASCII; every control code is escaped."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def write_traceback() -> None:
    """Write the traceback of the current exception in Python's format."""
    write(traceback.format_exc().rstrip("\n"), sys.stderr)


class Indented:
    """Text that arrives in pieces, with every line indented, also where the terminal would wrap it. Only ``heading``
    writes at the left edge, so that no text can imitate another speaker's line."""

    def __init__(self, stream: TextIO, width: int, indent: str = "  ") -> None:
        self._stream, self._indent = stream, indent
        self._width = max(width - 1, len(indent) + 8)
        self._column = 0

    def heading(self, text: str) -> None:
        """Write a line at the left edge, after ending any text before it."""
        self.end()
        write(" ".join(text.split()), self._stream)

    def add(self, text: str) -> None:
        """Append to the text."""
        out = []
        for sign in on_terminal(text).replace("\t", "    "):
            if sign == "\n":
                out.append("\n" if self._column else f"{self._indent}\n")
                self._column = 0
                continue
            size = cell_len(sign)
            if self._column + size > self._width:
                out.append("\n")
                self._column = 0
            if self._column == 0:
                out.append(self._indent)
                self._column = len(self._indent)
            out.append(sign)
            self._column += size
        self._stream.write("".join(out))
        self._stream.flush()

    def end(self) -> None:
        """End the text: the next line begins at the left edge."""
        if self._column:
            self._stream.write("\n")
            self._stream.flush()
        self._column = 0
