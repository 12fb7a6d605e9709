"""Bounded reading of request bodies, and responses with the headers that all of ours have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
PASSED_OVER = 64 << 20
"""Bytes of an oversized body that are read and discarded, because a client that is still sending would not read the
response."""


class TooLarge(Exception):
    """The body exceeds the size limit."""


class TooSlow(Exception):
    """The body did not arrive in time."""


class Gone(Exception):
    """The client disconnected."""


async def read_body(scope: Scope, receive: Receive, *, most: int, seconds: float) -> bytes:
    """Read the whole body. Raises TooLarge, TooSlow or Gone; never keeps more than ``most`` bytes."""
    declared = header(scope, b"content-length")
    too_large = declared is not None and (not declared.isdigit() or int(declared[:20]) > most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                too_large = too_large or size > most
                if too_large:
                    parts.clear()
                else:
                    parts.append(part)
                if not message.get("more_body", False) or size > PASSED_OVER:
                    break
    except TimeoutError:
        raise TooSlow from None
    if too_large:
        raise TooLarge
    return b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The header's value; None if it is missing or occurs more than once."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else None


async def begin(send: Send, status: int, kind: str, more: Mapping[str, str] | None = None) -> None:
    headers = {**HEADERS, "Content-Type": kind, **(more or {})}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_bytes(send: Send, status: int, body: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
    """Send a whole response."""
    await begin(send, status, kind, {"Content-Length": str(len(body)), **(more or {})})
    await send({"type": "http.response.body", "body": body})


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected; its body must have been read before."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return
