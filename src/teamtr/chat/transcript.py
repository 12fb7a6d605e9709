"""The conversation as lines ``name: text``, quoted so that no text can imitate another speaker's line.

A line within a message or the problem that begins with the label of a possible speaker is quoted:

    solver: I get 12.
    > critic: I agree.        part of the solver's message
    critic: It is 13.

Everything else is unchanged. A line that is already quoted is quoted once more, so removing one ``> `` from every such
line restores the text exactly.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from teamtr.chat.lookalikes import LINE_BREAKS, Lookalikes

YOU = "you"
"""The label of an agent's own lines in its transcript."""
QUOTE = "> "

_LOOKALIKES = Lookalikes()
_AFTER_A_BREAK = re.compile(f"(?<=[{LINE_BREAKS}])")


def is_label(name: str) -> bool:
    """Whether lines with this name are unambiguous: one line, without ``:`` or ``>``, and not ``you``."""
    plain = _LOOKALIKES.plain(name).strip()
    return bool(plain) and not set(plain) & {":", ">", *LINE_BREAKS} and plain.casefold() != YOU


def spoken(label: str, text: str, speakers: Collection[str]) -> str:
    """The transcript lines of one message. The first has a label, so only the others need quoting."""
    first, *rest = _AFTER_A_BREAK.split(text)
    return f"{label}: {first}{quoted(''.join(rest), speakers)}" if rest else f"{label}: {text}"


def quoted(text: str, speakers: Collection[str]) -> str:
    """The text, with every line quoted that begins with the label of a speaker."""
    plain = _LOOKALIKES.plain(text)
    if ":" not in plain:
        return text
    label = _label(frozenset(speakers))
    lines = _AFTER_A_BREAK.split(text)
    return "".join(QUOTE + line if label.match(_LOOKALIKES.plain(line)) else line for line in lines)


@lru_cache(maxsize=1024)
def _label(speakers: frozenset[str]) -> re.Pattern[str]:
    """Matches the start of a line that could be read as a speaker's: in any case, after blanks, or already quoted."""
    names = sorted((_LOOKALIKES.plain(name) for name in {YOU, *speakers}), key=len, reverse=True)
    return re.compile(rf"(?:> )*[ \t]*(?:{'|'.join(map(re.escape, names))})[ \t]*:", re.IGNORECASE)
