"""HTTP routes of the team server: chat completions, models, health, metrics and the chat page.

All routes but the page and ``/health`` require the API key. Errors describe what is wrong with the request and reveal
nothing about this machine: no response contains a path or a stack trace.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from teamtr.bounded_json import NotJson, read_json
from teamtr.serving.desk import Busy, Desk, Draining, Ticket
from teamtr.serving.metrics import prometheus
from teamtr.serving.page import chat_page, page_policy
from teamtr.serving.reply import Body, Reply, bad_request, error_body, model_body
from teamtr.serving.request import BadRequest, ChatRequest, read_request
from teamtr.serving.schedule import Cancelled
from teamtr.serving.team import Choice, UnknownModel
from teamtr.text import on_terminal
from teamtr.web.answers import HEADERS, Gone, TooLarge, TooSlow, begin, header, read_body, send_bytes, until_gone

OPEN = ("/", "/health")
"""Paths that need no key, because they expose nothing secret."""
BODY_SECONDS = 30.0


class ServingApp:
    """The ASGI application in front of one ``Desk``."""

    def __init__(self, desk: Desk, key: str) -> None:
        self.desk = desk
        self._key = key.encode()
        self._started = int(time.time())
        self._routes = Starlette(
            routes=[
                Route("/", self._page, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/chat/completions", _Completions(desk), methods=["POST"]),
            ],
            exception_handlers={404: _nothing_here, 405: _not_so},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.desk.counts.statuses[message["status"]] += 1
            await send(message)

        if scope["path"] not in OPEN and not self._admits(header(scope, b"authorization")):
            body = error_body("a valid key is needed: Authorization: Bearer KEY", "invalid_api_key")
            await send_json(counted, 401, body, {"WWW-Authenticate": "Bearer"})
            return
        await self._routes(scope, receive, counted)

    def _admits(self, given: bytes | None) -> bool:
        scheme, _, key = (given or b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    async def _page(self, request: Request) -> Response:
        return Response(
            chat_page(), media_type="text/html", headers={**HEADERS, "Content-Security-Policy": page_policy()}
        )

    async def _health(self, request: Request) -> Response:
        desk = self.desk
        status = "draining" if desk.is_draining else "ok" if desk.scheduler.is_alive else "failed"
        return _json_response({"status": status}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        text = prometheus(self.desk.counts, self.desk.scheduler, self.desk.pending)
        return Response(text, media_type="text/plain; version=0.0.4", headers=dict(HEADERS))

    async def _models(self, request: Request) -> Response:
        models = [model_body(name, self._started) for name in self.desk.served.models]
        return _json_response({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.desk.served.models:
            return _json_response(bad_request(UnknownModel(name)), 404)
        return _json_response(model_body(name, self._started))


class _Completions:
    """``POST /v1/chat/completions``."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self.desk.limits
        try:
            raw = await read_body(scope, receive, most=limits.body_bytes, seconds=BODY_SECONDS)
            body = read_json(raw, deepest=limits.depth, strict=True, half_characters=False)
            answering = _Answering(self.desk, read_request(body), asyncio.get_running_loop())
        except Gone:
            return
        except Exception as error:
            await _refuse(send, error, limits.body_bytes)
            return
        await answering(receive, send)


class _Answering:
    """One request in progress: text comes from other threads through an asyncio queue and is sent to the client."""

    def __init__(self, desk: Desk, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.desk, self.request = desk, request
        self._loop = loop
        self._events: asyncio.Queue[Callable[[], Awaitable[bool]] | None] = asyncio.Queue()
        self._talk: dict[int, int] = {}
        self.ticket: Ticket = desk.take(request, self)
        self.reply = Reply(request, self.ticket.seed, desk.served.team.version[:16])
        self._send: Send
        for k, future in enumerate(self.ticket.choices):
            future.add_done_callback(partial(self._choice_done, k))
        self._open = len(self.ticket.choices)

    async def __call__(self, receive: Receive, send: Send) -> None:
        self._send = send
        gone = asyncio.create_task(until_gone(receive))
        gone.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            async with asyncio.timeout(self.desk.limits.request_seconds):
                if self.request.stream:
                    await self._stream()
                else:
                    await self._whole()
        except TimeoutError:
            seconds = self.desk.limits.request_seconds
            body = error_body(f"no answer within {seconds:g} seconds", "timeout", kind="timeout_error")
            await self._break_off(504, body)
        except Gone:
            pass
        finally:
            self.desk.cancel(self.ticket)  # no-op for choices that are done
            gone.cancel()

    # -- teamtr.serving.team.Teller: called from other threads ----------------------------------------------------

    def discussion(self, choice: int, agent: str, text: str, *, begins: bool) -> None:
        self._post(lambda: self._told_discussion(choice, agent, text, begins))

    def answer(self, choice: int, agent: str, text: str) -> None:
        own = {"agent": agent}
        if self.request.stream:
            self._post(lambda: self._piece(choice, {"content": text, "teamtr": own}))

    def _choice_done(self, choice: int, future: Future[Choice]) -> None:
        self._post(lambda: self._ended(choice))

    def _post(self, event: Callable[[], Awaitable[bool]]) -> None:
        with suppress(RuntimeError):  # the event loop is closed: no client is left
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    # -- in the event loop ----------------------------------------------------------------------------------------

    async def _whole(self) -> None:
        while self._open:
            await self._next()
        try:
            choices = self._choices()
        except Exception as error:
            await _refuse(self._send, error, self.desk.limits.body_bytes)
            return
        await send_json(self._send, 200, self.reply.completion(choices))

    async def _stream(self) -> None:
        await begin(self._send, 200, "text/event-stream; charset=utf-8", {"X-Accel-Buffering": "no"})
        for choice in range(len(self.ticket.choices)):
            await self._piece(choice, {"role": "assistant", "content": ""})
        while self._open:
            if not await self._next():
                await self._break_off(500, _told_of(self._failure()))
                return
        if self.reply.wants_usage:
            await self._event(self.reply.last_chunk(self._choices()))
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _next(self) -> bool:
        """Process the next event; False if it is a choice that failed. Raises Gone."""
        event = await self._events.get()
        if event is None:
            raise Gone
        return await event()

    async def _ended(self, choice: int) -> bool:
        self._open -= 1
        future = self.ticket.choices[choice]
        failed = future.cancelled() or future.exception() is not None
        if self.request.stream and not failed:
            found = future.result()
            for chunk in self.reply.call_chunks(choice, found):
                await self._event(chunk)
            await self._event(self.reply.chunk(choice, {}, found.finish))
        return not failed

    async def _told_discussion(self, choice: int, agent: str, text: str, begins: bool) -> bool:
        label = ""
        if begins:
            label = f"{agent}: " if not self._talk.get(choice) else f"\n{agent}: "
            self._talk[choice] = self._talk.get(choice, 0) + 1
        return await self._piece(
            choice, {"reasoning_content": label + text, "teamtr": {"agent": agent, "text": text, "begins": begins}}
        )

    async def _piece(self, choice: int, delta: Body) -> bool:
        await self._event(self.reply.chunk(choice, delta))
        return True

    async def _event(self, body: Body) -> None:
        data = b"data: " + _dumped(body) + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _break_off(self, status: int, body: Body) -> None:
        if self.request.stream:
            await self._event(body)
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await send_json(self._send, status, body)

    def _choices(self) -> list[Choice]:
        return [future.result() for future in self.ticket.choices]

    def _failure(self) -> BaseException:
        for future in self.ticket.choices:
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                return error
        return Cancelled("the server is closed")


async def send_json(send: Send, status: int, body: Body, more: dict[str, str] | None = None) -> None:
    await send_bytes(send, status, _dumped(body), "application/json", more)


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _json_response(body: Body, status: int = 200) -> Response:
    return Response(_dumped(body), status, media_type="application/json", headers=dict(HEADERS))


async def _refuse(send: Send, error: Exception, most: int) -> None:
    more: dict[str, str] = {}
    match error:
        case TooLarge():
            status, body = (
                413,
                error_body(f"the body has more than {most} bytes", "too_large"),
            )
        case TooSlow():
            status, body = 408, error_body("the body did not come in time", "timeout")
        case NotJson():
            status, body = (
                400,
                error_body(f"the body is not taken: {error}", "invalid_json"),
            )
        case BadRequest():
            status, body = error.status, bad_request(error)
        case Busy():
            more = {"Retry-After": str(error.retry_after)}
            status, body = 429, error_body(str(error), "rate_limit_exceeded", kind="rate_limit_error")
        case Draining() | Cancelled() | CancelledError():
            status, body = 503, error_body("the server is about to stop", "unavailable", kind="server_error")
        case _:
            status, body = 500, _told_of(error)
    await send_json(send, status, body, more)


def _told_of(error: BaseException) -> Body:
    """The response body for a failure. An unexpected exception is also written to stderr, with its stack trace."""
    if isinstance(error, BadRequest):
        return bad_request(error)
    if isinstance(error, Cancelled | CancelledError):
        return error_body("the server is about to stop", "unavailable", kind="server_error")
    sys.stderr.write(on_terminal("".join(traceback.format_exception(error))))
    return error_body("the server failed to answer", kind="server_error")


async def _nothing_here(request: Request, error: Exception) -> Response:
    return _json_response(error_body("there is nothing here", "not_found"), 404)


async def _not_so(request: Request, error: Exception) -> Response:
    body = error_body(f"{request.method[:16]} is not for this path", "method_not_allowed")
    return _json_response(body, 405)
