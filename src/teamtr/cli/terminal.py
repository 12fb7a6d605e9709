"""The one place where the commands write: nothing that models, data, endpoints or a person's own code said can steer
a terminal."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any, TextIO

from teamtr.text import on_terminal


def write(text: str, stream: TextIO) -> None:
    """The text with a newline, without control codes."""
    stream.write(f"{on_terminal(text)}\n")
    stream.flush()


def say(text: str) -> None:
    """For a person, on stderr: stdout belongs to --json."""
    write(text, sys.stderr)


def json_line(value: Any) -> str:
    """One line of JSON, in ASCII, in which every control code is escaped."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")


def write_traceback() -> None:
    """Of the error that is being handled, as Python writes it."""
    write(traceback.format_exc().rstrip("\n"), sys.stderr)
