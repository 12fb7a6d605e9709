"""A JSON reader for untrusted text, with bounds on length, nesting depth and the digits of integers.

Python's own reader raises RecursionError on a thousand brackets and ValueError on five thousand digits. Here every text
gives a value or a ``NotJson`` with the reason and, if known, the line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from teamtr.text import MOST_DIGITS, has_half_character

DEEPEST = 100
"""Maximum nesting depth of brackets."""

# A string runs to its closing quote or to the end of the text, so that an unclosed one is not searched repeatedly.
_BRACKET_OR_STRING = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_MAY_BE_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class NotJson(ValueError):
    """Invalid JSON, or JSON beyond the bounds; the latter has no ``line`` and no ``column``."""

    def __init__(self, why: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(why if column is None else f"not JSON: {why} at line {line}, column {column}")
        self.why = why
        self.line = line
        self.column = column


def read_json(
    source: str | bytes,
    *,
    longest: int | None = None,
    deepest: int = DEEPEST,
    strict: bool = False,
    half_characters: bool = True,
) -> Any:
    """The value of a JSON text.

    Args:
        longest: maximum length in characters or bytes.
        strict: reject values that JSON does not have (NaN, numbers without a finite value) and duplicate keys.
        half_characters: accept strings with lone surrogates.
    """
    if longest is not None and len(source) > longest:
        raise NotJson(f"longer than {longest} {'characters' if isinstance(source, str) else 'bytes'}")
    text = source if isinstance(source, str) else _decoded(source)
    if _is_deeper(text, deepest):
        raise NotJson(f"nested deeper than {deepest}")
    try:
        value = (_STRICT if strict else _DECODER).decode(text)
    except NotJson:
        raise
    except json.JSONDecodeError as error:
        raise NotJson(error.msg, error.lineno, error.colno) from None
    if strict or not half_characters:
        _check_values(value, infinite=not strict, half=half_characters or _MAY_BE_HALF.search(text) is None)
    return value


def is_deeper(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether the lists and dicts of this value are nested deeper than ``deepest``."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(deepest):
        if not level:
            return False
        level = [item for holder in level for item in _items(holder) if isinstance(item, list | dict)]
    return bool(level)


def _decoded(source: bytes) -> str:
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 ({error.reason} at byte {error.start})") from None


def _is_deeper(text: str, deepest: int) -> bool:
    if text.count("[") + text.count("{") <= deepest:
        return False
    depth = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        sign = found.group()
        if sign in ("[", "{"):
            depth += 1
            if depth > deepest:
                return True
        elif sign in ("]", "}"):
            depth -= 1
    return False


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise NotJson(f"a whole number of more than {MOST_DIGITS} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotJson("a key stands there twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise NotJson(f"{word} is not JSON")


def _items(holder: Any) -> Any:
    return holder.values() if isinstance(holder, dict) else holder


def _check_values(value: Any, *, infinite: bool, half: bool) -> None:
    """Raise NotJson for infinite numbers and lone surrogates, unless they are allowed."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, float) and not infinite and item in (float("inf"), float("-inf")):
            raise NotJson("a number is too large")
        elif isinstance(item, str) and not half and has_half_character(item):
            raise NotJson("half of a surrogate pair stands alone")


_DECODER = json.JSONDecoder(parse_int=_whole_number)
_STRICT = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=_object, parse_constant=_no_constant)
