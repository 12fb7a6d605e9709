"""Where a reply's answer begins: after its thinking, if it says where that ends."""

from __future__ import annotations

END_OF_THINKING = "</think>"


def after_thinking(text: str) -> str:
    """What follows the last closing think tag; the whole text when there is none.

    So a reply is graded alike whether or not its model thinks aloud, and a model that opens its thinking and is cut
    off before it closes it is graded on what it wrote.
    """
    return text.rpartition(END_OF_THINKING)[2]
