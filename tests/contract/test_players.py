"""Who plays the other roles: a policy of this process, or a model behind an endpoint that may fail in every way."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from small import LetterCodec
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.tabular import TabularPolicy
from teamtr.errors import Refused, UserError
from teamtr.tasks.benchmarks.arbench.endpoint import MAX_ANSWER_BYTES, EndpointError, EndpointPlayer
from teamtr.tasks.players import PolicyPlayer


def engine() -> LocalEngine:
    policy = TabularPolicy(6, end_ids=frozenset({0, 1}), rows=64, spread=1.0)
    return LocalEngine({"judge": PolicyLearner("judge", policy, micro_batch=8)})


CHATS = [[{"role": "user", "content": c}] for c in "abcdefgh"]


def test_a_policy_plays_in_one_batch_and_the_same_way_for_the_same_seed():
    player = PolicyPlayer(engine(), "judge", LetterCodec(), max_tokens=6)
    said = player.answer(CHATS, seed=3)
    assert len(said) == len(CHATS)
    assert set("".join(said)) <= set("abcd")
    assert said == player.answer(CHATS, seed=3) != player.answer(CHATS, seed=4)


def test_a_player_whose_weights_change_is_refused():
    judge = engine()
    player = PolicyPlayer(judge, "judge", LetterCodec())
    judge.learner("judge").perturb(0.1, seed=0)
    with pytest.raises(Refused, match=r"'judge'.*freeze it"):
        player.answer(CHATS, seed=0)


class FakeEndpoint(ThreadingHTTPServer):
    """Answers with the last message, unless ``trouble`` says what to do with the n-th request for this content."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.trouble: Callable[[str, int], tuple[int, dict[str, str], bytes] | None] = lambda content, n: None
        self.lock = threading.Lock()
        self.now = self.most = 0


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
            number = sum(b["messages"][-1]["content"] == content for _, _, b in self.server.requests)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        trouble = self.server.trouble(content, number)
        with self.server.lock:
            self.server.now -= 1
        answer = json.dumps({"choices": [{"message": {"content": f"said {content}"}}]}).encode()
        status, headers, data = trouble or (200, {}, answer)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # a client that has given up, as it should
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = FakeEndpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_answers_in_order_side_by_side_with_the_key_from_the_environment(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLAYER_KEY", "s3cret")
    last_asked = threading.Event()

    def trouble(content: str, n: int) -> None:
        """The first two are answered when the last has been asked: side by side, and not in their order."""
        if content == "h":
            last_asked.set()
        assert content not in "ab" or last_asked.wait(60)

    endpoint.trouble = trouble
    player = EndpointPlayer(endpoint.url + "/", "m", key_variable="PLAYER_KEY", max_tokens=7, concurrency=4)
    assert player.answer([], seed=0) == []
    assert player.answer(CHATS, seed=5) == [f"said {c}" for c in "abcdefgh"]
    assert 2 <= endpoint.most <= 4
    path, headers, body = endpoint.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer s3cret")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0.0)
    seeds = {b["messages"][-1]["content"]: b["seed"] for _, _, b in endpoint.requests}
    assert len(set(seeds.values())) == len(CHATS)
    endpoint.requests.clear()
    player.answer(CHATS, seed=5)
    assert {b["messages"][-1]["content"]: b["seed"] for _, _, b in endpoint.requests} == seeds
    assert "s3cret" not in repr(player)


def test_what_passes_is_tried_again_ever_more_slowly(endpoint: FakeEndpoint):
    pauses: list[float] = []
    failures = [
        (500, {}, b"oops"),
        (429, {"Retry-After": "9"}, b"slow down"),
        (200, {}, b"<html>not json"),
        (200, {}, b'{"choices": []}'),
    ]
    endpoint.trouble = lambda content, n: failures[n - 1] if n <= len(failures) else None
    player = EndpointPlayer(endpoint.url, "m", sleep=pauses.append)
    assert player.answer(CHATS[:1], seed=0) == ["said a"]
    assert pauses == [1.0, 9.0, 4.0, 8.0]
    endpoint.trouble = lambda content, n: (503, {}, b"always full")
    with pytest.raises(EndpointError, match=r"in 3 attempts.*503: always full"):
        EndpointPlayer(endpoint.url, "m", attempts=3, sleep=pauses.append).answer(CHATS[1:2], seed=0)
    assert sum(b["messages"][-1]["content"] == "b" for _, _, b in endpoint.requests) == 3


def test_what_does_not_pass_is_an_error_at_once(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAYER_KEY", "s3cret")
    player = EndpointPlayer(endpoint.url, "m", key_variable="PLAYER_KEY", concurrency=1)
    endpoint.trouble = lambda content, n: (401, {}, b"bad key")
    with pytest.raises(EndpointError, match="401: bad key") as caught:
        player.answer(CHATS, seed=0)
    assert "s3cret" not in str(caught.value)
    assert len(endpoint.requests) == 1, "the others are not asked in vain"
    endpoint.requests.clear()
    endpoint.trouble = lambda content, n: (400, {}, b"no") if content == "h" else (503, {}, b"full")
    with pytest.raises(EndpointError, match="400: no"):
        EndpointPlayer(endpoint.url, "m", attempts=400, sleep=lambda _: time.sleep(0.05)).answer(CHATS, seed=0)
    asked = Counter(body["messages"][-1]["content"] for _, _, body in endpoint.requests)
    assert max(asked.values()) < 400, "nor do those that are under way go on trying"
    elsewhere = FakeEndpoint()
    endpoint.trouble = lambda content, n: (302, {"Location": elsewhere.url}, b"")
    with pytest.raises(EndpointError, match="302"):
        player.answer(CHATS[:1], seed=0)
    elsewhere.server_close()


def test_a_server_that_hangs_or_is_not_there_ends_in_an_error(endpoint: FakeEndpoint):
    over = threading.Event()
    endpoint.trouble = lambda content, n: over.wait(60) and None
    impatient = EndpointPlayer(endpoint.url, "m", timeout_seconds=0.1, attempts=2, sleep=lambda _: None)
    with pytest.raises(EndpointError, match="timed out"):
        impatient.answer(CHATS[:2], seed=0)  # an answer would come in a minute
    over.set()
    with socket.socket() as deaf:  # holds the port, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        with pytest.raises(EndpointError, match=r"in 2 attempts.*refused"):
            EndpointPlayer(url, "m", attempts=2, sleep=lambda _: None).answer(CHATS[:1], seed=0)


HEAD = b"HTTP/1.0 200 OK\r\n"
REST = b"Content-Type: application/json\r\n\r\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("at_once", "then"),
    [
        (b"", HEAD),
        (HEAD, b"X-Slow: " + b"x" * 800),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 32),
        (HEAD + REST, b" " * 800),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 140),
        (b"HTTP/1.0 503 Full\r\n" + REST, b"still full " * 70),
        (b"HTTP/1.0 400 No\r\n" + REST, b"still no " * 90),
    ],
    ids=["status", "header", "interim answers", "body", "chunks", "passing error", "error"],
)
def test_an_answer_that_drips_ends_when_its_time_is_over(at_once: bytes, then: bytes):
    """A byte every twentieth of a second keeps every single read in time: all of them would take forty seconds."""
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(at_once)
            for byte in then:
                if over.wait(0.05):
                    return
                client.sendall(bytes([byte]))
            over.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        started = time.monotonic()
        try:
            with pytest.raises(EndpointError, match=r"timed out|status 503|status 400"):
                EndpointPlayer(url, "m", timeout_seconds=0.4, attempts=1).answer(CHATS[:1], seed=0)
            assert time.monotonic() - started < 30
        finally:
            over.set()
            socket.create_connection(server.getsockname()).close()  # for a player whose time was over before it called
            thread.join()


def test_what_an_endpoint_says_is_text_of_bounded_size(endpoint: FakeEndpoint):
    said = "half \ud83d, whole \U0001f600, odd \udc80\ud800"
    endpoint.trouble = lambda content, n: (
        200,
        {},
        json.dumps({"choices": [{"message": {"content": said}}]}).encode(),
    )
    (answer,) = EndpointPlayer(endpoint.url, "m").answer(CHATS[:1], seed=0)
    assert answer == "half \ufffd, whole \U0001f600, odd \ufffd\ufffd"
    answer.encode()
    endpoint.trouble = lambda content, n: (200, {}, b" " * (MAX_ANSWER_BYTES + 1))
    with pytest.raises(EndpointError, match=f"more than {MAX_ANSWER_BYTES} bytes"):
        EndpointPlayer(endpoint.url, "m", attempts=1).answer(CHATS[:1], seed=0)


@pytest.mark.parametrize("status", [400, 503])
def test_errors_of_an_endpoint_hold_no_escape_sequence(endpoint: FakeEndpoint, status: int):
    endpoint.trouble = lambda content, n: (status, {}, b"\x1b]0;owned\x07\x1b[2J\rfine \xc2\x9b1m")
    with pytest.raises(EndpointError, match="owned") as told:
        EndpointPlayer(endpoint.url, "m", attempts=1).answer(CHATS[:1], seed=0)
    assert str(told.value).isprintable()


def test_impossible_endpoints_are_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PLAYER_KEY", raising=False)
    with pytest.raises(UserError, match="PLAYER_KEY, which is not set"):
        EndpointPlayer("http://localhost/v1", "m", key_variable="PLAYER_KEY")
    hosts = ("", "[::1/", "host:port/v1", "host:99999/v1", "host:0/v1", ":80/v1", "ho st/v1", "h/\x1b[2J", "h/\nX: y")
    for url in ("localhost:8000/v1", "file:///etc/passwd", *(f"http://{host}" for host in hosts)):
        with pytest.raises(UserError, match="base_url"):
            EndpointPlayer(url, "m")
    with pytest.raises(UserError, match="at least 1"):
        EndpointPlayer("http://localhost/v1", "m", attempts=0)
