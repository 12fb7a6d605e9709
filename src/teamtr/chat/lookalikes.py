"""Normalizes characters that a tokenizer or a reader may take for other characters."""

from __future__ import annotations

import unicodedata
from typing import Any

LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Every character that begins a new line for some reader."""


class Lookalikes(dict[int, str]):
    """A table for ``str.translate``, filled on demand: the tokenizer's own normalizer, then NFKC.

    Invisible format characters (category Cf) are dropped, and sentencepiece's mark for a space becomes a space.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        super().__init__()
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._plain_ascii = all(self[code] == chr(code) for code in range(128))

    def __missing__(self, code: int) -> str:
        written = self[code] = self._as_taken(chr(code))
        return written

    def plain(self, text: str) -> str:
        """The normalized text."""
        return text if self._plain_ascii and text.isascii() else text.translate(self)

    def places(self, text: str) -> list[int]:
        """For every character of ``plain(text)``, the position in the text that it came from."""
        return [place for place, character in enumerate(text) for _ in self[ord(character)]]

    def _as_taken(self, character: str) -> str:
        if character in LINE_BREAKS:
            return character
        if self._normalizer is not None:
            # Between two letters, so that what a normalizer does at the ends of a text has no effect.
            around = self._normalizer.normalize_str(f"a{character}a").lstrip("\u2581 ")
            if len(around) >= 2 and around[0] == around[-1] == "a":
                character = around[1:-1]
        taken = unicodedata.normalize("NFKC", character).replace("\u2581", " ")
        return "".join(c for c in taken if unicodedata.category(c) != "Cf")
