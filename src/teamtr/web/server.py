"""An HTTP server on one address: binding, Host check, errors, graceful shutdown.

- By default it listens on the loopback address only. A request must then name that address in its Host header, so that
  a foreign site cannot reach it by rebinding its own name to 127.0.0.1 (DNS rebinding).
- On ``shutdown``, SIGTERM or Ctrl-C it accepts no new connections, and ends when all responses are sent.
- Unexpected exceptions are written to stderr; the client is only told that the server failed.
"""

from __future__ import annotations

import errno
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teamtr.errors import UserError
from teamtr.text import on_terminal
from teamtr.web.answers import header, send_bytes
from teamtr.web.connections import Patience, guarded

LOOPBACK = ("127.0.0.1", "localhost")
FAILED = b'{"error": {"message": "the server failed to answer", "type": "server_error", "param": null, "code": null}}'


class WebServer:
    """Serves an ASGI application until it is shut down."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        shown: str = "what it serves is shown to whoever holds the key",
        patience: Patience | None = None,
        drain_seconds: int = 600,
    ) -> None:
        _require_address(host)
        if host not in LOOPBACK and not allow_remote:
            raise UserError(
                f"--host {host} would let other machines in: {shown}, over plain HTTP. Add --allow-remote if that is "
                "what you want"
            )
        self._socket = _bound(host, port)
        self.server_address = self._socket.getsockname()
        self.server_port = int(self.server_address[1])
        self.host = host
        self.checks_host = host in LOOPBACK
        config = uvicorn.Config(
            _Guard(app, self.admits),
            loop="asyncio",
            http=guarded(patience or Patience()),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # _Guard reports errors, once
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=drain_seconds,
        )
        self._server = _Uvicorn(config)

    def admits(self, host_header: bytes | None) -> bool:
        """Whether the Host header names the loopback address that was bound; not checked on other addresses."""
        ports = (":80", "") if self.server_port == 80 else (f":{self.server_port}",)  # clients leave 80 out
        return not self.checks_host or host_header in {f"{name}{port}".encode() for name in LOOPBACK for port in ports}

    def serve_forever(self) -> None:
        """Serve until ``shutdown`` or, in the main thread, SIGINT or SIGTERM."""
        with _stopping_by_signal(self._told):
            self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        """Accept no new connections, and end when all responses are sent. Returns at once."""
        self._server.should_exit = True

    def _told(self) -> None:
        if self._server.should_exit:
            self._server.force_exit = True  # second signal: stop at once
        self.shutdown()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No-op: uvicorn's own version would end the process by the signal once all requests are answered."""
        yield


class _Guard:
    """Wraps every application: checks the Host header and handles exceptions."""

    def __init__(self, app: ASGIApp, admits: Callable[[bytes | None], bool]) -> None:
        self._app = app
        self._admits = admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not self._admits(header(scope, b"host")):
            await send_bytes(send, 403, b"forbidden\n", "text/plain")
            return
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            sys.stderr.write(on_terminal(traceback.format_exc()))
            if begun:
                raise _HalfAnswered from None  # uvicorn disconnects: a partial response must not look complete
            await send_bytes(send, 500, FAILED, "application/json")


class _HalfAnswered(Exception):
    """A response was interrupted."""


@contextmanager
def _stopping_by_signal(told: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        told()

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _bound(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(2048)
    except OSError as error:
        made.close()
        raise UserError(_why_not(host, port, error)) from error
    return made


def _require_address(host: str) -> None:
    """Reject what is not an IPv4 address or the name of one, before the check of who could reach it."""
    is_number = bool(host) and not host.strip("0123456789.")  # no name lookup needed
    try:
        socket.getaddrinfo(host, None, family=socket.AF_INET, flags=socket.AI_NUMERICHOST if is_number else 0)
    except (OSError, UnicodeError):
        raise UserError(f"--host {host!r} is no IPv4 address and no name of one: leave it out for 127.0.0.1") from None


def _why_not(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is in use: choose another, or --port 0, which takes a free one"
        case errno.EACCES:
            return f"port {port} is not for you to open: choose one from 1024 on, or --port 0, which takes a free one"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine: leave it out for 127.0.0.1"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"
