"""Locks around objects that are not thread-safe: tokenizers, and the workers of tools."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from teamtr.calls import Schema
from teamtr.chat.codec import ChatCodec
from teamtr.chat.stream import TextStream, is_faithful
from teamtr.chat.template import check_tools
from teamtr.errors import UserError, first_line
from teamtr.ports import Codec, Tools
from teamtr.serving.request import BadRequest, NotKept
from teamtr.types import Ids, Problem, ToolRequest


class LockedCodec:
    """A codec that one thread uses at a time, because tokenizers are not thread-safe."""

    def __init__(self, codec: Codec, lock: threading.Lock) -> None:
        self.codec = codec
        self._lock = lock
        self._is_faithful = is_faithful(codec)

    def stream(self) -> TextStream:
        return TextStream(self._plain if self._is_faithful else None)

    def _plain(self, token_ids: Sequence[int]) -> str:
        assert isinstance(self.codec, ChatCodec)
        with self._lock:
            return self.codec.plain(token_ids)

    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Schema] = ()) -> Ids:
        with self._template_of("this conversation", "messages"):
            return self.codec.encode(messages, tools)

    def require_tools(self, tools: Sequence[Schema]) -> None:
        """Raises BadRequest if the chat template cannot describe these tools without changing the conversation."""
        if not tools or not isinstance(self.codec, ChatCodec):
            return
        with self._template_of("these tools", "tools"):
            try:
                check_tools(self.codec, "transcript", tools)
            except UserError as error:
                raise NotKept("tools", "told of tools, the model's chat template changes what was said") from error

    @contextmanager
    def _template_of(self, given: str, field: str) -> Iterator[None]:
        """Hold the lock, and turn any exception of the template into a BadRequest about this field."""
        with self._lock:
            try:
                yield
            except (UserError, BadRequest):
                raise
            except Exception as error:  # templates can raise anything
                told = f"the model's chat template does not take {given}: {first_line(error)[:200]}"
                raise BadRequest(told, field, "invalid_value") from error

    def encode_message(self, text: str) -> Ids:
        with self._lock:
            return self.codec.encode_message(text)

    def decode(self, token_ids: Ids) -> str:
        with self._lock:
            return self.codec.decode(token_ids)


@dataclass(frozen=True)
class LockedTools:
    """Tools that one thread uses at a time, because their workers are not thread-safe."""

    tools: Tools
    lock: threading.Lock = field(default_factory=threading.Lock)

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        with self.lock:
            return self.tools.schemas(problem)

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        with self.lock:
            return self.tools.results(requests)
