"""The text of a message while its tokens still come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from teamtr.chat.codec import ChatCodec
from teamtr.chat.message_filter import MessageFilter

UNREADABLE = "\ufffd"
"""What a tokenizer writes for bytes of a character that is not whole yet."""


class TextStream:
    """Pieces of a message's text that together are what the codec makes of the whole.

    ``plain`` is how tokens are spelled (``ChatCodec.plain``); None where that says nothing about the whole: then all
    comes at the end.
    """

    def __init__(self, plain: Callable[[Sequence[int]], str] | None) -> None:
        self._plain = plain
        self._ids: list[int] = []
        self._start = self._read = 0
        self.told = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these tokens, beyond what was told before."""
        if self._plain is None:
            return ""
        self._ids += token_ids
        # A tokenizer may write a token otherwise at the beginning than in the middle: decode with what came before.
        before = self._plain(self._ids[self._start : self._read])
        upto = self._plain(self._ids[self._start :])
        if upto.endswith(UNREADABLE) or len(upto) <= len(before) or not upto.startswith(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        piece = upto[len(before) :]
        self.told += piece
        return piece

    def end(self, whole: str) -> str:
        """What is left to tell of the whole text."""
        if not whole.startswith(self.told):
            raise ValueError("this tokenizer writes another text token by token than at once: ask without stream")
        piece, self.told = whole[len(self.told) :], whole
        return piece


def is_faithful(codec: object) -> bool:
    """Whether a message is the tokens of its beginning and the tokens of its end: nothing is hidden or rewritten."""
    if not isinstance(codec, ChatCodec):
        return False
    shares_all = codec.sharing is None or (isinstance(codec.sharing, MessageFilter) and codec.sharing.shares_all)
    return shares_all and not getattr(codec.tokenizer, "clean_up_tokenization_spaces", False)
