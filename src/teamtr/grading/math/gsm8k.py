"""GSM8K's official rule: the first ``#### n`` of the text, with commas removed, compared as text.

The authors' example solutions end with ``A: n`` on a line of its own instead, which is read in the same way.
"""

from __future__ import annotations

import re

_MARKED = (re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"^A: (-?[0-9.,]+)", re.MULTILINE))


def gsm8k_answer(text: str) -> str | None:
    """The number in a solution or a reply, as text; None if the rule finds none."""
    for marked in _MARKED:
        found = marked.search(text)
        if found is not None:
            return found.group(1).replace(",", "")
    return None
