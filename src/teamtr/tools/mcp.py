"""Tools of an MCP server, which is started here and used over its standard input and output.

The official client (``teamtr[mcp]``) runs in a thread with its own event loop. If a server dies, hangs or sends
something invalid, the result is an error; the server is stopped, and restarted for the next call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from teamtr.calls import Schema, ToolCall
from teamtr.errors import UserError
from teamtr.grading.workers.lifetime import Owner
from teamtr.tools.kinds import schema_of
from teamtr.types import Problem, ToolRequest

SECONDS_TO_START = 60.0
SECONDS_TO_END = 15.0
"""The client's own steps to stop a server take about seven."""
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """The command that starts a server, and its name in error messages."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class _Connection:
    """One run of a server. ``session`` is set once it has started; ``end`` may be called from any thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name=f"mcp {server.name}", daemon=True)
        self._thread.start()
        try:
            self.session = self._ready.result(SECONDS_TO_START)
        except BaseException:
            self.end()
            raise

    def ask(self, question: Coroutine[Any, Any, T], seconds: float) -> T:
        """The response. Raises TooLate after ``seconds``, and whatever the client raises."""
        asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return asked.result(seconds)
        except TooLate:
            asked.cancel()
            raise

    def end(self) -> None:
        """Stop the server and everything it started."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(SECONDS_TO_END)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:  # raised where the start is awaited
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # tool results say what went wrong
        server = self._server
        parameters = StdioServerParameters(command=server.command, args=list(server.args), env=dict(server.env))
        with open(os.devnull, "w", encoding="utf-8") as unheard:
            async with stdio_client(parameters, errlog=unheard) as streams, ClientSession(*streams) as session:
                starting = asyncio.ensure_future(session.initialize())
                ending = asyncio.ensure_future(self._over.wait())
                try:
                    await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
                    if starting.done():
                        starting.result()
                        self._ready.set_result(session)
                        await ending
                finally:
                    starting.cancel()
                    ending.cancel()


class McpTools(Owner):
    """All tools of one server.

    Args:
        server: how to start it.
        seconds: wall-clock limit for one call.
    """

    def __init__(self, server: Server, *, seconds: float) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise UserError("tools.mcp needs the official client: pip install 'teamtr[mcp]'") from None
        self._server = server
        self.seconds = seconds
        self._held: list[_Connection] = []
        super().__init__(partial(_end_all, self._held))
        try:
            self._schemas = tuple(self._listed())
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            raise UserError(f"tools.mcp: the server {server.name!r} does not start: {_why(error)}") from None

    def schemas(self, problem: Problem) -> Sequence[Schema]:
        return self._schemas

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        with self._use():
            return [tuple(self._result(call) for call in request.calls) for request in requests]

    def _listed(self) -> list[Schema]:
        connection, found, cursor = self._connection(), list[Schema](), None
        while True:
            from mcp.types import PaginatedRequestParams

            params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
            page = connection.ask(connection.session.list_tools(params=params), SECONDS_TO_START)
            found += [schema_of(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return found

    def _result(self, call: ToolCall) -> str:
        """The server's result for one call, or an error text."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            connection = self._connection()
            asked = connection.session.call_tool(call.name, dict(call.arguments))
            answer = connection.ask(asked, self.seconds)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:  # it died; an error that it returned itself is not fatal
                self._drop()
            return f"Error: {error}"
        except TooLate:
            self._drop()
            return f"Error: {call.name} took too long: no answer within {self.seconds:g} s"
        except Exception as error:  # the client may raise anything on an invalid response
            self._drop()
            return f"Error: the server {self._server.name} failed: {_why(error)}"
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in answer.content)
        return f"Error: {text}" if answer.is_error else text

    def _connection(self) -> _Connection:
        if not self._held:
            self._held.append(_Connection(self._server))
        return self._held[0]

    def _drop(self) -> None:
        """Stop a failed server; the next call restarts it."""
        _end_all(self._held)


def _end_all(held: list[_Connection]) -> None:
    while held:
        held.pop().end()


def _why(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
