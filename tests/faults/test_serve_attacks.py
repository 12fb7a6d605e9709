"""Clients that mean harm, or vanish: each is answered or let go, and everybody else is served as before."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from served import KEY, ask, make_session, serving
from teamtr.serving import app
from teamtr.serving.desk import Limits, Ticket
from teamtr.serving.request import ChatRequest
from teamtr.serving.server import TeamServer
from teamtr.session.build import Session
from teamtr.web.connections import Patience

BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module", autouse=True)
def ahead() -> Iterator[list[float]]:
    """Seconds that the servers' clock is ahead of the machine's. It never goes back while one of them runs."""
    seconds = [0.0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio.BaseEventLoop, "time", lambda loop: time.monotonic() + seconds[0])
        yield seconds


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session("team.max_tokens=64")


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[TeamServer]:
    """As patient as it ever is: a busy machine may stop a client that means no harm for seconds."""
    with serving(session, limits=Limits(body_bytes=1 << 20)) as running:
        yield running


def call(
    server: TeamServer, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        way = method or ("GET" if data is None else "POST")
        connection.request(way, path, data, BEARER if headers is None else headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def assert_serves(server: TeamServer) -> None:
    status, body = call(server, "/v1/chat/completions", ask(seed=1, max_tokens=3))
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]


def idle(server: TeamServer) -> None:
    """Wait until nothing is played, sampled or waited for any more."""
    while server.desk.pending or server.desk.scheduler.waiting:
        time.sleep(0.01)


def begun(session: Session, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Semaphore, list[int]]:
    """An engine that says when it has begun, goes on one token at a time, and counts them."""
    started, gate, tokens = threading.Event(), threading.Semaphore(0), [0]
    sample = session.engine.sample

    def slow(agent: str, prompts: Any, noise_BT: Any, *, follow: Any, **settings: Any) -> Any:
        def held(row: int, before: int, token_ids: Any) -> bool:
            started.set()
            assert gate.acquire(timeout=60)
            tokens[0] += 1
            return bool(follow(row, before, token_ids))

        return sample(agent, prompts, noise_BT, follow=held, **settings)

    monkeypatch.setattr(session.engine, "sample", slow)
    return started, gate, tokens


# -- keys and names ----------------------------------------------------------------------------------------------

PATHS = ["/v1/models", "/v1/models/trio", "/v1/chat/completions", "/metrics", "/v1", "/nothing", "/docs", "/..", "//"]
WRONG = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY.upper()}"},
    {"Authorization": f"Bearer x {KEY}"},
    {"Authorization": "Bearer \xff\xfe"},
    {"X-Api-Key": KEY},
]


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_without_the_key_nothing_is_told(server: TeamServer, headers: dict[str, str]):
    for path in PATHS:
        for body in (None, ask()):
            status, told = call(server, path, body, headers)
            assert status == 401, path
            assert json.loads(told)["error"]["code"] == "invalid_api_key"
            assert b"trio" not in told


def test_the_key_is_compared_in_constant_time(server: TeamServer, monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(app.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert call(server, "/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
    assert call(server, "/v1/models")[0] == 200
    assert [pair[0] for pair in compared] == [b"wrong", KEY.encode()]


def test_two_keys_in_one_request_are_none(server: TeamServer):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as caller:
        head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        caller.sendall(f"{head}Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert caller.recv(64).split()[1] == b"401"


def test_a_foreign_host_header_is_refused(server: TeamServer):
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1", ""):
        for path in ("/", "/health", "/v1/models"):
            assert call(server, path, headers={**BEARER, "Host": host})[0] == 403, host
    assert call(server, "/v1/models", headers={**BEARER, "Host": f"localhost:{server.server_port}"})[0] == 200


def test_other_methods_and_paths_find_nothing(server: TeamServer):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST"):
        assert call(server, "/v1/models", b"", method=method)[0] == 405, method
    assert call(server, "/v1/chat/completions")[0] == 405
    for path in (
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2fetc%2fpasswd",
        "/v1/models/%00",
        "/assets/chat.js",
    ):
        status, told = call(server, path)
        assert status == 404, path
        assert b"root" not in told


# -- bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_body_of_ten_megabytes_is_refused_and_never_held(server: TeamServer):
    huge = json.dumps(ask("x" * (10 << 20))).encode()
    chunk = huge[: 1 << 16]
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as caller:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
            caller.sendall(f"{head}Authorization: Bearer {KEY}\r\nContent-Length: {len(chunk) * 160}\r\n\r\n".encode())
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(160):
                caller.sendall(chunk)
            assert caller.recv(64).split()[1] == b"413"
            assert tracemalloc.get_traced_memory()[1] - before < 3 << 20
    finally:
        tracemalloc.stop()
    for headers in (BEARER, {**BEARER, "Transfer-Encoding": "chunked"}):  # without a length it is counted
        body = huge if "Transfer-Encoding" not in headers else b"a00001\r\n" + b"x" * 0xA00001 + b"\r\n0\r\n\r\n"
        assert call(server, "/v1/chat/completions", body, headers)[0] == 413
    assert_serves(server)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", b"not JSON"),
        (b"{", b"not JSON"),
        (b"\xff\xfe", b"not UTF-8"),
        (b"[" * 100_000, b"nested deeper"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, b"nested deeper"),
        (b'{"model": NaN}', b"NaN is not JSON"),
        (b'{"model": "trio", "model": "trio"}', b"twice"),
        (b'{"n": ' + b"9" * 5000 + b"}", b"digits"),
        (b'{"model": "\\ud800"}', b"surrogate"),
        (b"[]", b"must be a JSON object"),
        (b'"trio"', b"must be a JSON object"),
        (b"null", b"must be a JSON object"),
        (
            json.dumps({"model": "x" * 10_000, "messages": [{"role": "user", "content": "x"}]}).encode(),
            b"does not exist",
        ),
        (json.dumps({"y" * 10_000: 1}).encode(), b""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bodies_that_are_no_request_are_refused_in_a_few_words(server: TeamServer, body: bytes, told: bytes):
    status, answer = call(server, "/v1/chat/completions", body)
    assert status in (400, 404)
    assert told in answer
    assert len(answer) < 1000
    assert b"Traceback" not in answer
    assert b".py" not in answer


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [1] * 100},
        {"messages": [{"role": "user", "content": [1] * 100}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1] * 100}]},
        {"tools": [1] * 100},
        {"stop": [1] * 100},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_list_of_mistakes_is_read_up_to_the_first(wrong: dict[str, Any]):
    """A megabyte of them took the event loop six seconds, in which nobody was answered."""
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate({**ask(), **wrong})
    assert found.value.error_count() < 5


@pytest.mark.long
def test_a_body_that_never_comes_is_not_waited_for(server: TeamServer, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(app, "BODY_SECONDS", 0.2)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as caller:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
            caller.sendall(f"{head}Authorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{".encode())
            assert caller.recv(64).split()[1] == b"408"
    assert_serves(server)


# -- connections -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_thousand_half_open_connections_keep_nobody_out_and_are_let_go(session: Session, ahead: list[float]):
    """Some say nothing, some begin a request and stop, some begin a second one. By the server's clock, which jumps when
    all are there: on a busy machine it takes a while to call a thousand times."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        if hard < 4096 and hard != resource.RLIM_INFINITY:
            pytest.skip("needs 4096 open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    callers: list[socket.socket] = []
    with serving(session, patience=Patience(head_seconds=300.0)) as server:
        begins = [b"", b"G", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "]
        begins.append(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\nGET /he".encode())
        try:
            for k in range(1000):
                callers.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
                callers[-1].sendall(begins[k % 4])
            assert_serves(server)
            heard = [caller.recv(4096) if k % 4 == 3 else b"" for k, caller in enumerate(callers)]
            ahead[0] += 301.0
            for k, caller in enumerate(callers):
                try:
                    while data := caller.recv(4096):
                        heard[k] += data
                except ConnectionResetError:
                    pass
                assert heard[k].startswith(b"HTTP/1.1 200") if k % 4 == 3 else heard[k] == b""
            assert_serves(server)
        finally:
            for caller in callers:
                caller.close()


def noted(server: TeamServer, monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """Every request that is taken from now on."""
    taken: list[Ticket] = []
    take = server.desk.take

    def noting(*asked: Any) -> Ticket:
        taken.append(take(*asked))
        return taken[-1]

    monkeypatch.setattr(server.desk, "take", noting)
    return taken


def test_a_client_that_vanishes_is_no_longer_worked_for(
    session: Session, server: TeamServer, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of a stream, and while it waits for a whole answer; by a reset and by closing."""
    for stream in (True, False):
        for reset in (True, False):
            idle(server)
            with monkeypatch.context() as patched:
                started, gate, tokens = begun(session, patched)
                taken = noted(server, patched)
                caller = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
                body = json.dumps(ask(stream=stream)).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
                head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
                caller.sendall(head.encode() + body)
                assert started.wait(60)
                if reset:
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.close()
                assert taken[0].cancelled.wait(60), "nobody noticed"
                gate.release(1000)
                idle(server)
                assert tokens[0] <= 2, "sampling went on for nobody"
    assert_serves(server)


@pytest.mark.long
def test_a_client_that_does_not_read_is_let_go(session: Session, monkeypatch: pytest.MonkeyPatch):
    """Its answer is larger than what the system keeps for it; others are served meanwhile, and it is cut off."""
    with serving(session, patience=Patience(stalled_seconds=1.0)) as server:
        text, over = "y" * (1 << 16), threading.Event()

        async def flood(self: Any) -> None:
            await app.begin(self._send, 200, "text/event-stream")
            for _ in range(1024):
                await self._piece(0, {"content": text})  # waits for the reader; goes nowhere once that is gone
            over.set()

        monkeypatch.setattr(app._Answering, "_stream", flood)
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.settimeout(60)
        caller.connect(("127.0.0.1", server.server_port))
        body = json.dumps(ask(stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
        caller.recv(100)
        assert_serves(server)
        assert over.wait(60)
        got = 0
        try:
            while data := caller.recv(1 << 16):
                got += len(data)
        except ConnectionResetError:
            pass
        assert got < 1024 * len(text), "the rest was never sent"
        caller.close()
        idle(server)


@pytest.mark.long
def test_clients_that_are_killed_leave_no_trace(session: Session):
    """Forty streams broken off after one piece: nothing is pending, and answers are what they were."""
    with serving(session) as server, openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        create = client.chat.completions.create
        question: Any = [{"role": "user", "content": "What is 2+3?"}]
        before = create(model="trio", messages=question, seed=9).choices[0].message.content
        for _ in range(40):
            stream = create(model="trio", messages=question, stream=True)
            next(iter(stream))
            stream.close()
        idle(server)
        assert create(model="trio", messages=question, seed=9).choices[0].message.content == before
        assert server.desk.counts.cancelled > 0
