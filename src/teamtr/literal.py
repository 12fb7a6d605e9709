"""A bounded one-pass reader of literals in untrusted text, in Python's notation or that of tool calls.

``ast.literal_eval`` runs no code, but a text of a few thousand brackets or signs can exhaust its parser's stack. This
reader goes from left to right without backtracking, and no deeper than ``DEEPEST``: its cost is linear in the text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from teamtr.text import MOST_DIGITS

LONGEST = 50_000
"""Maximum length in characters."""
DEEPEST = 50
"""Maximum nesting depth of brackets."""


class NotALiteral(ValueError):
    """A text that is not a literal, or is beyond the bounds. The message gives the position and quotes no text."""


@dataclass(frozen=True)
class Notation:
    """The syntax of literals. ``python``: everything that ``ast.literal_eval`` accepts except complex numbers, ``...``
    and numbers beyond the bounds. Otherwise only values of JSON, with multi-line strings and without duplicate keys."""

    words: Mapping[str, Any]
    python: bool
    deepest: int


PYTHON = Notation({"True": True, "False": False, "None": None}, python=True, deepest=DEEPEST)
CALLS = Notation({**PYTHON.words, "true": True, "false": False, "null": None}, python=False, deepest=32)

_IN_LINE = re.compile(r"(?:[ \t\f]++|\#[^\n]*+|\\\n)*+")
_BLANK = re.compile(r"(?:[ \t\f\n]++|\#[^\n]*+|\\\n)*+")
_FIRST_LINES = re.compile(r"[ \t]*+(?:[ \t\f]*+(?:\#[^\n]*+)?\n)*+")
_LAST_LINES = re.compile(r"(?:[ \t\f]*+(?:\#[^\n]*+)?\n)*+(?:[ \t\f]*+\#[^\n]*+)?")  # the last is not indented
_WORD = re.compile(r"[^\W\d]\w*+")
_QUOTE = re.compile(r"['\"]")
_OPENING = re.compile(r"([uUbBrR]|[bB][rR]|[rR][bB])?('''|\"\"\"|['\"])")
_STOPS = {quote: re.compile(rf"\\|\n|{quote}") for quote in ("'", '"', "'''", '"""')}
_DIGITS = r"[0-9]++(?:_[0-9]++)*+"
_NUMBER = re.compile(
    rf"(?:0[xX](?P<hex>[0-9a-fA-F]++(?:_[0-9a-fA-F]++)*+)|0[oO](?P<octal>[0-7]++(?:_[0-7]++)*+)"
    rf"|0[bB](?P<binary>[01]++(?:_[01]++)*+)"
    rf"|(?P<float>(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?[0-9]++)?|{_DIGITS}[eE][+-]?[0-9]++)"
    rf"|(?P<whole>{_DIGITS}))(?!\w)"
)
_BASES = {"hex": 16, "octal": 8, "binary": 2, "whole": 10}
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_ESCAPES_OF_PYTHON = {**_PLAIN_ESCAPES, "\n": "", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPES_OF_JSON = {**_PLAIN_ESCAPES, "/": "/", "b": "\b", "f": "\f"}
_CODES = {"x": re.compile("[0-9a-fA-F]{2}"), "u": re.compile("[0-9a-fA-F]{4}"), "U": re.compile("[0-9a-fA-F]{8}")}
_OCTAL = re.compile("[0-7]{1,3}")
_NAMED = re.compile(r"\{([^{}\n]{1,100})\}")


def read_literal(text: str) -> Any:
    """The value that ``ast.literal_eval`` gives; raises NotALiteral for anything else, or beyond the bounds."""
    if len(text) > LONGEST:
        raise NotALiteral(f"a literal of more than {LONGEST} characters")
    if "\0" in text or (not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)):
        raise NotALiteral("a character that no Python source may hold")
    return Reader(text.replace("\r\n", "\n").replace("\r", "\n"), PYTHON).whole()


def write_literal(value: Any, *, sort_keys: bool = False) -> str:
    """The value as a literal, deterministic; the order of dictionaries is kept unless ``sort_keys``.

    Raises ValueError for values without a literal, such as infinity.
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


class Reader:
    """Reads literals from left to right without backtracking; ``at`` is the current position."""

    def __init__(self, text: str, notation: Notation) -> None:
        self.text = text
        self.at = 0
        self._notation = notation
        self._open = 0  # brackets

    def whole(self) -> Any:
        """Reads the whole text as one value; in Python's notation also a tuple without brackets, on one line."""
        first = _FIRST_LINES.match(self.text)
        assert first is not None
        self.at = first.end()
        if self.text[self.at : self.at + 1] in (" ", "\t") and "\n" in first.group():
            self._fail("indented")
        found = self.value()
        if self.taken(","):
            items = [found]
            while self.peek() not in ("", "\n"):
                items.append(self.value())
                if not self.taken(","):
                    break
            found = tuple(items)
        self.peek()
        if not _LAST_LINES.fullmatch(self.text, self.at) or self.text.endswith("\\\n"):
            self._fail("more than one literal")
        return found

    def peek(self) -> str:
        """The next non-blank character, or "". In Python's notation, newlines are blank only within brackets."""
        blank = _BLANK if self._open or not self._notation.python else _IN_LINE
        found = blank.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def taken(self, sign: str) -> bool:
        """Whether this character comes next; if so, it is consumed."""
        if self.peek() != sign:
            return False
        self.at += 1
        return True

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """The text that the pattern matches here, which is consumed; None without a match."""
        self.peek()
        return self._match(pattern)

    def value(self) -> Any:
        """Reads the next literal."""
        sign = self.peek()
        if (_OPENING if self._notation.python else _QUOTE).match(self.text, self.at):
            return self._strings()
        match sign:
            case "[":
                return self._list()
            case "{":
                return self._braces()
            case "(" if self._notation.python:
                return self._brackets()
            case "+" | "-":
                self.at += 1
                number = self._number()
                return -number if sign == "-" else number
        if "0" <= sign <= "9" or sign == ".":
            return self._number()
        return self._word()

    # Collections

    def _list(self) -> list[Any]:
        self._enter()
        items: list[Any] = []
        while not self.taken("]"):
            items.append(self.value())
            self._next("]")
        self._open -= 1
        return items

    def _brackets(self) -> Any:
        """A tuple, or a single value in parentheses."""
        self._enter()
        items: list[Any] = []
        comma = True
        while not self.taken(")"):
            items.append(self.value())
            comma = self._next(")")
        self._open -= 1
        return tuple(items) if comma or len(items) > 1 else items[0]

    def _braces(self) -> dict[Any, Any] | set[Any]:
        self._enter()
        pairs: dict[Any, Any] = {}
        members: set[Any] = set()
        kind = "" if self._notation.python else ":"
        while not self.taken("}"):
            key = self.value()
            sign = ":" if self.taken(":") else ","
            if sign != (kind or sign):
                self._fail("expected :" if kind == ":" else "expected ,")
            kind = sign
            if not self._notation.python:
                self._check_key(key, pairs)
            try:
                if kind == ":":
                    hash(key)
                    pairs[key] = self.value()
                else:
                    members.add(key)
            except TypeError:
                self._fail(f"a {type(key).__name__} is no key")
            self._next("}")
        self._open -= 1
        return members if kind == "," else pairs

    def _check_key(self, key: Any, pairs: Mapping[Any, Any]) -> None:
        if not isinstance(key, str):
            self._fail("a key must be text")
        if key in pairs:
            raise NotALiteral("a key stands there twice")

    def _enter(self) -> None:
        self.at += 1
        self._open += 1
        if self._open > self._notation.deepest:
            raise NotALiteral(f"nested deeper than {self._notation.deepest}")

    def _next(self, end: str) -> bool:
        """Consumes a comma; returns False if the closing bracket comes instead."""
        if self.taken(","):
            return True
        if self.peek() != end:
            self._fail(f"expected , or {end}")
        return False

    # Words and numbers

    def _word(self) -> Any:
        word = self._match(_WORD) or ""
        is_empty_set = word == "set" and self._notation.python and self.taken("(") and self.taken(")")
        if word not in self._notation.words and not is_empty_set:
            self._fail("no literal")
        return set() if is_empty_set else self._notation.words[word]

    def _number(self) -> int | float:
        self.peek()
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            self._fail("no literal")
        self.at = found.end()
        kind, written = str(found.lastgroup), found[str(found.lastgroup)].replace("_", "")
        if kind == "float":
            number = float(written)
            if not math.isfinite(number):
                self._fail("a number is too large")
            return number
        if len(written) > MOST_DIGITS:
            self._fail(f"a number of more than {MOST_DIGITS} digits")
        if kind == "whole" and written[0] == "0" and written.strip("0"):
            self._fail("a number that begins with 0")
        return int(written, _BASES[kind])

    # Texts

    def _strings(self) -> str | bytes:
        """One string, or several adjacent ones, which Python joins."""
        if not self._notation.python:
            text = self._string("", self._match(_QUOTE) or "")
            # As in JSON, two escapes may form a surrogate pair.
            return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        pieces: list[str] = []
        kinds: set[bool] = set()
        while True:
            self.peek()
            opening = _OPENING.match(self.text, self.at)
            if opening is None:
                break
            self.at = opening.end()
            prefix = (opening[1] or "").lower()
            pieces.append(self._string(prefix, opening[2]))
            kinds.add("b" in prefix)
        if len(kinds) > 1:
            self._fail("text beside bytes")
        text = "".join(pieces)
        return text.encode("latin-1") if True in kinds else text

    def _string(self, prefix: str, quote: str) -> str:
        """The rest of a string after its opening quote; for bytes, one character per byte."""
        pieces: list[str] = []
        start = first = self.at
        runs_over_lines = len(quote) == 3 or not self._notation.python
        while True:
            stop = _STOPS[quote].search(self.text, self.at)
            if stop is None or (stop.group() == "\n" and not runs_over_lines):
                raise NotALiteral("a string is not closed")
            self.at = stop.end()
            if stop.group() == quote:
                pieces.append(self.text[start : stop.start()])
                break
            if stop.group() == "\\":
                if "r" in prefix:
                    self.at += 1  # in a raw string the next character is literal, even a quote
                else:
                    pieces.append(self.text[start : stop.start()])
                    pieces.append(self._escaped("b" in prefix))
                    start = self.at
        if "b" in prefix and not self.text[first : self.at].isascii():
            self._fail("bytes beyond ASCII")
        return "".join(pieces)

    def _escaped(self, is_bytes: bool) -> str:
        """The character for the escape sequence after a backslash."""
        plain = _ESCAPES_OF_PYTHON if self._notation.python else _ESCAPES_OF_JSON
        letter = self.text[self.at : self.at + 1]
        if letter in plain and letter:
            self.at += 1
            return plain[letter]
        if not self._notation.python:
            if letter == "u":
                self.at += 1
                return chr(self._code("u"))
            self._fail("an escape that is not known")
        if octal := self._match(_OCTAL):
            return chr(int(octal, 8) % 256 if is_bytes else int(octal, 8))
        self.at += 1
        if letter == "x" or (letter in ("u", "U") and not is_bytes):
            code = self._code(letter)
            if code > 0x10FFFF:
                self._fail("an escape of no character")
            return chr(code)
        if letter == "N" and not is_bytes:
            named = _NAMED.match(self.text, self.at)
            try:
                character = unicodedata.lookup(named[1] if named else "")
            except KeyError:
                self._fail("an escape of no character")
            assert named is not None
            self.at = named.end()
            return character
        return "\\" + letter

    def _code(self, letter: str) -> int:
        digits = self._match(_CODES[letter])
        if digits is None:
            self._fail("an escape that is cut short")
        return int(digits, 16)

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def _fail(self, what: str) -> NoReturn:
        raise NotALiteral(f"{what} at character {self.at}")
