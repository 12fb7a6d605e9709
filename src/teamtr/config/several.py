"""Several values of one key on the command line: ``plan.stages=10,20``, and ``learner.betas=[0.9, 0.99],[0.9, 0.999]``.

Commas separate values. A value that contains a comma is written in brackets, braces or quotes, as in YAML.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from teamtr.config.source import read
from teamtr.errors import UserError

_CLOSING = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Several:
    """A dotted key and the text of each value, in the form that ``KEY=VALUE`` accepts."""

    key: str
    values: tuple[str, ...]

    def settings(self) -> list[Setting]:
        return [Setting(self.key, value) for value in self.values]


@dataclass(frozen=True)
class Setting:
    """One value of one key."""

    key: str
    value: str

    @property
    def override(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def name(self) -> str:
        """The setting in a form that does not depend on notation: ``0.1`` and ``0.10`` are the same."""
        document = read(self.value)
        if document.mistakes or (isinstance(document.data, str) and read(document.data).data == document.data):
            return f"{self.key}={document.data if isinstance(document.data, str) else self.value}"
        return f"{self.key}={json.dumps(document.data, ensure_ascii=False)}"


def several(word: str) -> Several:
    """Parse ``KEY=VALUE,VALUE``. Raises UserError if the values cannot be separated."""
    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{word!r} is no setting: write KEY=VALUE,VALUE with a dotted key, such as plan.stages=10,20")
    values: list[str] = []
    rest = text
    while True:
        value, rest = _first(rest, word)
        if not value:
            raise UserError(
                f"{word}: value {len(values) + 1} is empty; write a comma between values only, and a value that holds "
                f'commas in quotes or brackets, such as {key}="a, b"'
            )
        values.append(value)
        if not rest:
            return Several(key.strip(), tuple(values))
        rest = rest[1:]


def _first(text: str, word: str) -> tuple[str, str]:
    """The first value, and the rest of the text from the next comma on."""
    text = text.lstrip()
    if not text or text[0] not in "\"'[{":
        value, comma, rest = text.partition(",")
        return value.strip(), comma + rest
    end = _end(text)
    if end is None:
        raise UserError(f"{word}: what {text[0]} opens is not closed; write each value as YAML does")
    rest = text[end:].lstrip()
    if rest and not rest.startswith(","):
        raise UserError(f"{word}: {text[:end]} is followed by {rest[0]!r}; write a comma between two values")
    return text[:end], rest


def _end(text: str) -> int | None:
    """The end of the quotes or brackets that the text begins with; None if they are not closed."""
    awaited: list[str] = []
    k = 0
    while k < len(text):
        char = text[k]
        if awaited and awaited[-1] in "\"'":
            if char == "\\" and awaited[-1] == '"':
                k += 1
            elif char == awaited[-1]:
                if char == "'" and text[k + 1 : k + 2] == "'":
                    k += 1
                else:
                    awaited.pop()
        elif char in _CLOSING:
            awaited.append(_CLOSING[char])
        elif char in "\"'":
            awaited.append(char)
        elif awaited and char == awaited[-1]:
            awaited.pop()
        k += 1
        if not awaited:
            return k
    return None
