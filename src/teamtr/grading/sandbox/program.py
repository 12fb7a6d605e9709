"""Runs untrusted code in a process that is already isolated, and writes what it returned.

Nothing here is secret and nothing is decided here: the code shares this interpreter and may rewrite all of it. All that
it can gain is to report other values than it computed, which it could just as well have returned.
"""

from __future__ import annotations

import ast
import json
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_LONGEST_ERROR = 500


def run(job_text: bytes, reply_fd: int) -> None:
    """Run the job and write one line of JSON: ``{"value": ...}`` or ``{"error": "..."}``."""
    try:
        job = json.loads(job_text)
        answer = {"value": _KINDS[job["kind"]](job)}
        line = json.dumps(answer, allow_nan=False)
    except BaseException as error:  # the code may also raise SystemExit, KeyboardInterrupt and MemoryError
        line = json.dumps({"error": _described(error)})
    unwritten = memoryview(line.encode())
    while unwritten:
        unwritten = unwritten[os.write(reply_fd, unwritten) :]


def _verify(job: dict[str, Any]) -> dict[str, Any]:
    """Call every check with the one argument until one fails; ``failed`` is "" if all hold.

    A check is a function of the code, or each function of a list. It holds if it returns a true value of a plain
    built-in type: other objects may redefine equality and truth.
    """
    argument = ast.literal_eval(job["argument"])
    names = _loaded(job["code"])
    for name in job["checks"]:
        found = names[name]
        for function in [found] if callable(found) else found:
            called = getattr(function, "__name__", name)
            try:
                returned = function(argument)
            except Exception as error:
                return {"failed": f"{called} raised {_described(error)}"}
            if not (_is_any(type(returned), _PLAIN) and returned):
                return {"failed": f"{called} returned {_shown(returned)}"}
    return {"failed": ""}


def _call(job: dict[str, Any]) -> list[Any]:
    """The function's return values for each list of arguments, in JSON's types."""
    function = _loaded(job["code"])[job["function"]]
    return [_plain(function(*arguments)) for arguments in job["inputs"]]


_KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {"verify": _verify, "call": _call}


def _loaded(code: str) -> dict[str, Any]:
    """The names that the code defines when run as a script."""
    random.seed(0)  # a verdict must not change from one run to the next
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "<code>", "exec"), module.__dict__)
    return module.__dict__


def _plain(value: Any) -> Any:
    """The value in JSON's types; a tuple becomes a list. Raises TypeError for anything else, including subclasses."""
    kind = type(value)
    if value is None or _is_any(kind, (bool, int, float, str)):
        return value
    if _is_any(kind, (list, tuple)):
        return [_plain(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise TypeError(f"a {kind.__name__} cannot be told in JSON")


def _is_any(kind: type, kinds: tuple[type, ...]) -> bool:
    """Whether a type is one of ``kinds``, by identity: a metaclass may make a class equal to any other."""
    return any(kind is each for each in kinds)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _shown(value: Any) -> str:
    plain = value is None or _is_any(type(value), _PLAIN)
    return repr(value)[:_LONGEST_ERROR] if plain else f"a {type(value).__name__}"
