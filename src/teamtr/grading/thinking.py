"""Where a reply's answer begins: after its thinking, if it says where that ends. One policy for every grader."""

from __future__ import annotations

END_OF_THINKING = "</think>"


def after_thinking(text: str) -> str:
    """What follows the last closing think tag; the whole text when there is none, or nothing follows it.

    So a reply is graded alike whether or not its model thinks aloud: tags are never asked for, a model that is cut off
    before it closes its thinking is graded on what it wrote, and so is one that says nothing more after closing it.
    """
    after = text.rpartition(END_OF_THINKING)[2]
    return after if after.strip() else text
