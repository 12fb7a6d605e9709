"""Streams the text of a message while its tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from teamtr.chat.codec import ChatCodec
from teamtr.chat.message_filter import MessageFilter

UNREADABLE = "\ufffd"
"""What a tokenizer writes for the bytes of an incomplete character."""


class TextStream:
    """Emits pieces of a message's text that together are the codec's text of the whole message.

    ``plain`` decodes tokens (``ChatCodec.plain``). It is None if the text of a prefix need not be a prefix of the
    text; then everything comes at the end.
    """

    def __init__(self, plain: Callable[[Sequence[int]], str] | None) -> None:
        self._plain = plain
        self._ids: list[int] = []
        self._start = self._read = 0
        self.told = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens, beyond what was emitted before."""
        if self._plain is None:
            return ""
        self._ids += token_ids
        # A tokenizer may decode a token differently at the beginning of a text: decode it with the tokens before it.
        before = self._plain(self._ids[self._start : self._read])
        upto = self._plain(self._ids[self._start :])
        if upto.endswith(UNREADABLE) or len(upto) <= len(before) or not upto.startswith(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        piece = upto[len(before) :]
        self.told += piece
        return piece

    def end(self, whole: str) -> str:
        """The part of the whole text that was not emitted yet."""
        if not whole.startswith(self.told):
            raise ValueError("this tokenizer writes another text token by token than at once: ask without stream")
        piece, self.told = whole[len(self.told) :], whole
        return piece


def is_faithful(codec: object) -> bool:
    """Whether the text of a message's first tokens is the beginning of its text: nothing is hidden or rewritten."""
    if not isinstance(codec, ChatCodec):
        return False
    shares_all = codec.sharing is None or (isinstance(codec.sharing, MessageFilter) and codec.sharing.shares_all)
    return shares_all and not getattr(codec.tokenizer, "clean_up_tokenization_spaces", False)
