"""A player behind an OpenAI-compatible endpoint: ``POST {base_url}/chat/completions``, by the standard library alone.

Transient failures (no connection, a timeout, 408, 409, 429 and every 5xx, an answer that is not JSON) are retried a
bounded number of times with growing pauses; anything else is an error at once. The time of a request is limited in
total, however slowly its response arrives, and so is the size of the response. The seed is sent along, but the server
need not honor it: a killed and resumed run is the same to the bit only if it does.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from teamtr.bounded_json import NotJson, read_json
from teamtr.chat.render import ChatMessages
from teamtr.errors import TeamTRError, UserError
from teamtr.randomness import seed_of
from teamtr.text import on_terminal, without_surrogates

PASSING = frozenset({408, 409, 429, *range(500, 600)})
MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


class EndpointError(TeamTRError):
    """The endpoint gave no usable answer."""


class _Passing(Exception):
    """A transient failure; ``pause`` is the seconds that the server asks to wait."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True)
class EndpointPlayer:
    """A chat model at an endpoint.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        model: its name at the endpoint.
        key_variable: the environment variable that holds the key; None for an endpoint without one.
        max_tokens: maximum tokens of one answer.
        temperature: sampling temperature; 0 is greedy.
        timeout_seconds: for one whole request, except the lookup of its host.
        attempts: number of attempts per prompt before the run stops.
        concurrency: maximum number of concurrent requests.
        sleep: called to wait between attempts.
    """

    base_url: str
    model: str
    key_variable: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    timeout_seconds: float = 120.0
    attempts: int = 5
    concurrency: int = 8
    sleep: Callable[[float], None] = time.sleep
    _key: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not _names_a_host(self.base_url):
            raise UserError(f"base_url must begin with http:// or https:// and name a host, got {self.base_url!r}")
        if min(self.attempts, self.concurrency, self.max_tokens) < 1 or self.timeout_seconds <= 0:
            raise UserError("attempts, concurrency and max_tokens are at least 1, timeout_seconds above 0")
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise UserError(f"the endpoint's key is looked for in {self.key_variable}, which is not set: export it")
            object.__setattr__(self, "_key", key)

    def answer(self, prompts: Sequence[ChatMessages], *, seed: int) -> list[str]:
        """The answers, in the order of the prompts. After one fails for good, no new request is made."""
        if not prompts:
            return []
        seeds = [seed_of(seed, "prompt", i) % 2**31 for i in range(len(prompts))]
        stopped = threading.Event()
        errors: list[BaseException] = []

        def answer_one(prompt: ChatMessages, seed: int) -> str:
            if stopped.is_set():
                raise EndpointError(f"{self._url} was not asked: another request had failed")
            try:
                return self._answer_one(prompt, seed, stopped)
            except BaseException as error:  # recorded here: the waiting thread may wake up late
                errors.append(error)
                stopped.set()
                raise

        executor = ThreadPoolExecutor(max_workers=min(self.concurrency, len(prompts)))
        try:
            futures = [executor.submit(answer_one, p, s) for p, s in zip(prompts, seeds, strict=True)]
            wait(futures, return_when=FIRST_EXCEPTION)
            if errors:
                raise errors[0]
            return [future.result() for future in futures]
        finally:
            stopped.set()
            executor.shutdown(cancel_futures=True)

    def _answer_one(self, prompt: ChatMessages, seed: int, stopped: threading.Event) -> str:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, self.attempts + 1):
            try:
                return self._request(prompt, seed)
            except _Passing as failure:
                if attempt == self.attempts or stopped.is_set():
                    raise EndpointError(
                        f"{self._url} gave no answer in {attempt} attempts; the last: {failure}. Check that the server "
                        "is up and not overloaded, or lower concurrency"
                    ) from failure
                self.sleep(min(max(pause, failure.pause or 0.0), MAX_PAUSE_SECONDS))
                pause *= 2
        raise AssertionError("unreachable: at least one attempt")

    @property
    def _url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def _request(self, prompt: ChatMessages, seed: int) -> str:
        body = {
            "model": self.model,
            "messages": prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
        }
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with _OPENER.open(request, timeout=self.timeout_seconds) as response:
                return _content(_read(response))
        except urllib.error.HTTPError as error:
            refused = error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _Passing(on_terminal(f"{type(error).__name__}: {error}")) from None
        with refused:
            message = f"status {refused.code}: {_beginning(refused)}"
        if refused.code in PASSING:
            asked = refused.headers.get("Retry-After", "")
            raise _Passing(message, float(asked) if asked.isdecimal() else None)
        raise EndpointError(f"{self._url} refused the request with {message}. Check base_url, model and key")


def _names_a_host(url: str) -> bool:
    try:
        address = urllib.parse.urlsplit(url)
        port_is_fine = address.port != 0  # reading an invalid port raises
    except ValueError:
        return False
    is_one_word = url.isprintable() and " " not in url
    return address.scheme in ("http", "https") and bool(address.hostname) and port_is_fine and is_one_word


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another host and turn a POST into a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _Hurried(io.RawIOBase):
    """A socket's file with a deadline for all reads, because a socket's own timeout restarts with every byte."""

    def __init__(self, file: Any, end: socket.socket, deadline: float) -> None:
        self._file = file
        self._end = end
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._end.settimeout(_left(self._deadline))
        read: int = self._file.readinto(buffer)
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Hurried(self.fp.detach(), sock, deadline))


class _InTime(http.client.HTTPConnection):
    """A connection with ``timeout`` seconds in total: each step gets what the steps before it left."""

    def __init__(self, host: str, /, *, timeout: float = 0.0, **options: Any) -> None:
        super().__init__(host, timeout=timeout, **options)
        self._deadline = time.monotonic() + timeout
        self.response_class = partial(_Response, deadline=self._deadline)  # type: ignore[assignment]
        self._create_connection = partial(_connected, self._deadline)

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_left(self._deadline))  # for sending the request


class _InTimeAndSecret(_InTime, http.client.HTTPSConnection):
    pass


def _connected(deadline: float, address: tuple[str, int], *ignored: Any) -> socket.socket:
    """A socket to the first of the host's addresses that accepts the connection."""
    failure = OSError("the host has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left(deadline))
            made.connect(place)
            made.settimeout(_left(deadline))  # for the whole TLS handshake, if there is one
            return made
        except OSError as error:
            made.close()
            failure = error
    raise failure


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_InTime, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_InTimeAndSecret, request)


_OPENER = urllib.request.build_opener(_NoRedirect, _Http, _Https)


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, of at most ``MAX_ANSWER_BYTES``."""
    body = response.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise _Passing(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return body


def _beginning(error: urllib.error.HTTPError) -> str:
    """The beginning of the body of an error response, as far as it arrived."""
    try:
        return on_terminal(error.read(300).decode(errors="replace").strip())
    except (OSError, http.client.HTTPException):
        return "no more was told"


def _content(body: bytes) -> str:
    """The text of the first choice; null is the empty text. A lone surrogate is not an error: it is replaced, because
    no tokenizer accepts it."""
    try:
        content = read_json(body)["choices"][0]["message"]["content"]
    except (NotJson, KeyError, IndexError, TypeError):
        shown = body[:200].decode(errors="replace")
        raise _Passing(f"not a chat completion: {shown!r}") from None
    if content is not None and not isinstance(content, str):
        raise _Passing(f"the content of the answer is no text: {str(content)[:200]!r}")
    return without_surrogates(content or "")
