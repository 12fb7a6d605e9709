"""The conversation as lines ``name: text``, written so that no text can pass for another speaker's line.

A line inside of a message, or of the problem, that begins with the label of somebody who may speak is quoted:

    solver: I get 12.
    > critic: I agree.        still the solver's words
    critic: It is 13.

Everything else stays as it was written. A line that is quoted already is quoted once more, so that taking one ``> ``
off every such line gives back the text to the character.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from teamtr.chat.lookalikes import LINE_BREAKS, Lookalikes

YOU = "you"
"""How an agent's own lines are labelled in its transcript."""
QUOTE = "> "

_LOOKALIKES = Lookalikes()
_AFTER_A_BREAK = re.compile(f"(?<=[{LINE_BREAKS}])")


def is_label(name: str) -> bool:
    """Whether this speaker's lines can be told from all others: a name on one line, without a colon, not ``you``."""
    plain = _LOOKALIKES.plain(name).strip()
    return bool(plain) and not set(plain) & {":", ">", *LINE_BREAKS} and plain.casefold() != YOU


def spoken(label: str, text: str, speakers: Collection[str]) -> str:
    """The line, or lines, of one message. The first cannot be mistaken: it has a label already."""
    first, *rest = _AFTER_A_BREAK.split(text)
    return f"{label}: {first}{quoted(''.join(rest), speakers)}" if rest else f"{label}: {text}"


def quoted(text: str, speakers: Collection[str]) -> str:
    """The text with every line quoted that begins with the label of a speaker."""
    plain = _LOOKALIKES.plain(text)
    if ":" not in plain:
        return text
    label = _label(frozenset(speakers))
    lines = _AFTER_A_BREAK.split(text)
    return "".join(QUOTE + line if label.match(_LOOKALIKES.plain(line)) else line for line in lines)


@lru_cache(maxsize=1024)
def _label(speakers: frozenset[str]) -> re.Pattern[str]:
    """Begins a line that a reader could take for a speaker's: in any case, behind blanks, or quoted before."""
    names = sorted((_LOOKALIKES.plain(name) for name in {YOU, *speakers}), key=len, reverse=True)
    return re.compile(rf"(?:> )*[ \t]*(?:{'|'.join(map(re.escape, names))})[ \t]*:", re.IGNORECASE)
