"""Finds where a reply's answer begins: after its thinking, if that is marked. One policy for every grader."""

from __future__ import annotations

END_OF_THINKING = "</think>"


def after_thinking(text: str) -> str:
    """The text after the last closing think tag; the whole text if there is none, or nothing follows it.

    So a reply is graded in the same way whether or not its model uses think tags: they are never required. A model that
    is cut off before it closes its thinking is graded on what it wrote, and so is one that writes nothing after it.
    """
    after = text.rpartition(END_OF_THINKING)[2]
    return after if after.strip() else text
