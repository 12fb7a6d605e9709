"""JSON frames over a socket with deadlines, for communication with processes that may never answer."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from teamtr.bounded_json import NotJson, read_json
from teamtr.grading.workers.worker import HEADER_BYTES, encode_frame


class LateError(Exception):
    """The other side did not answer before the deadline."""


class DeadError(Exception):
    """The other side closed the channel."""


class GarbledError(DeadError):
    """The other side sent something that is not a frame. Nothing after it can be trusted, so this counts as dead."""


class TooMuchError(Exception):
    """The other side announced a frame beyond the size limit."""


def read_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a frame: a JSON object within the depth that ``bounded_json`` accepts."""
    try:
        content = read_json(body)
    except NotJson as error:
        raise GarbledError(f"an answer that cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise GarbledError("an answer of another form")
    return content


class Channel:
    """One end of a socket. ``most_bytes`` limits a received frame, so that an answer cannot fill our memory."""

    def __init__(self, end: socket.socket, most_bytes: int) -> None:
        end.setblocking(False)
        self._end = end
        self._most_bytes = most_bytes
        self._received = bytearray()

    def send(self, content: Any, deadline: float, *, descriptors: Sequence[int] = ()) -> None:
        """Send a frame; ``descriptors`` travel with its first byte."""
        left = memoryview(encode_frame(content))
        while left:
            self._wait(select.POLLOUT, deadline)
            try:
                if descriptors:
                    sent = socket.send_fds(self._end, [left], descriptors)
                else:
                    sent = self._end.send(left)
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                raise DeadError from None
            left, descriptors = left[sent:], ()

    def receive(self, deadline: float) -> dict[str, Any]:
        return read_body(self.receive_bytes(deadline))

    def receive_bytes(self, deadline: float) -> bytes:
        """The body of the next frame, not parsed."""
        length = int.from_bytes(self._read(HEADER_BYTES, deadline), "big")
        if length > self._most_bytes:
            raise TooMuchError
        return self._read(length, deadline)

    def has_more(self) -> bool:
        """Whether anything has arrived that was not received yet, including the end of the stream."""
        poll = select.poll()
        poll.register(self._end.fileno(), select.POLLIN)
        return bool(self._received or poll.poll(0))

    def close(self) -> None:
        self._end.close()

    def _read(self, count: int, deadline: float) -> bytes:
        while len(self._received) < count:
            self._wait(select.POLLIN, deadline)
            try:
                chunk = os.read(self._end.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                raise DeadError from None
            if not chunk:
                raise DeadError
            self._received += chunk
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()  # unlike select.select, it takes descriptors above 1023
        poll.register(self._end.fileno(), event)
        left_s = max(0.0, deadline - time.monotonic())  # what has arrived is not late, even if we were suspended
        if not poll.poll(left_s * 1000):
            raise LateError
