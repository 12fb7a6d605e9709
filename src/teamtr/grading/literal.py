"""Python literals in a model's text: read without running anything, and within bounds.

``ast.literal_eval`` runs no code, but a text of a few thousand brackets or signs can exhaust the parser's stack. So the
text is first looked through token by token, flatly: only what a literal is made of, no deeper than ``DEEPEST``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 50_000
"""Characters."""
DEEPEST = 50
"""Brackets inside each other."""

_TOKEN = re.compile(
    r"""
      (?P<blank>  \s+ | \#[^\n]* | \\\n )
    | (?P<string> (?:[uUbB]|[rR]|[bB][rR]|[rR][bB])?
                  (?: '''(?:[^\\]|\\.)*?''' | \"\"\"(?:[^\\]|\\.)*?\"\"\"
                  | '(?:[^'\\\n]|\\.)*' | "(?:[^"\\\n]|\\.)*" ) )
    | (?P<value>  (?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)? (?!\w) | 0[xXoObB][\da-fA-F]+ (?!\w)
                  | (?:True|False|None)\b | set\s*\(\s*\) )
    | (?P<sign>   [+-] )
    | (?P<open>   [(\[{] )
    | (?P<close>  [)\]}] )
    | (?P<next>   [,:] )
    """,
    re.VERBOSE | re.DOTALL,
)


def read_literal(text: str) -> Any:
    """The value that ``ast.literal_eval`` gives; raises ValueError for everything that is no literal.

    Neither are complex numbers, ``...`` and numbers beyond all bounds.
    """
    _look_through(text)
    try:
        value = ast.literal_eval(text)
        write_literal(value)
    except (SyntaxError, TypeError, MemoryError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a literal: {error}") from None
    return value


def write_literal(value: Any, *, sort_keys: bool = False) -> str:
    """The value as a literal, always the same for the same value; a dictionary's order is kept unless told otherwise.

    Raises ValueError for what has no literal, such as an infinity.
    """

    def written(items: Iterable[Any]) -> list[str]:
        return [write_literal(item, sort_keys=sort_keys) for item in items]

    kind = type(value)
    if value is None or kind in (bool, int, str, bytes) or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is list:
        return f"[{', '.join(written(value))}]"
    if kind is tuple:
        return f"({', '.join(written(value))}{',' if len(value) == 1 else ''})"
    if kind is set:
        return f"{{{', '.join(sorted(written(value)))}}}" if value else "set()"
    if kind is dict:
        pairs = list(zip(written(value), written(value.values()), strict=True))
        return f"{{{', '.join(f'{key}: {item}' for key, item in (sorted(pairs) if sort_keys else pairs))}}}"
    raise ValueError(f"no literal for a {kind.__name__}: {value!r:.80}")


def _look_through(text: str) -> None:
    """Raise ValueError unless the text is made of a literal's tokens in an order that keeps the parser's stack low."""
    if len(text) > LONGEST:
        raise ValueError(f"a literal of more than {LONGEST} characters")
    position, depth = 0, 0
    last = "next"  # as if after a comma: a value may come
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"not a literal: {text[position : position + 20]!r}")
        position, kind = match.end(), str(match.lastgroup)
        if kind == "blank":
            continue
        may_begin = last in ("next", "open")
        allowed = {
            "string": may_begin or last == "string",
            "value": may_begin or last == "sign",
            "sign": may_begin,
            "open": may_begin,
        }
        if not allowed.get(kind, True):
            raise ValueError(f"not a literal: {match.group()!r:.20} after a {last}")
        depth += (kind == "open") - (kind == "close")
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets inside each other")
        last = kind
