"""A fake vLLM server built on the standard library: it answers the endpoints that we use as vLLM 0.32 does.

A writer function provides the messages. As a program (``python fake_vllm.py --model NAME --uds SOCKET ...``) it writes
letters that depend only on the request. The environment variable FAKE_VLLM makes it fail: ``dies`` or ``hangs`` at the
start, or ``dies:N`` at the N-th message.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from teamtr.engines.sampling import TokenSampler

Written = tuple[list[int], list[float]]
Writer = Callable[[str | None, dict[str, Any]], Written]
"""Returns token ids and their log-probabilities for an adapter's folder (None: the base) and a request."""


class FakeVllm:
    """The state of a server: its model, its loaded adapters, and the requests received."""

    def __init__(self, model: str, write: Writer, *, name: str | None = None, context: int | None = None) -> None:
        self.model = model
        self.name = name or model
        self.context = context
        self.write = write
        self.adapters: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.given: list[tuple[str, str]] = []
        self.before: Callable[[str, dict[str, Any]], tuple[int, Any] | None] = lambda path, body: None
        """Called before the usual answer, which it replaces unless it returns None."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if (instead := self.before(path, body)) is not None:
            return instead
        match path:
            case "/health":
                return 200, ""
            case "/v1/models":
                base = {"id": self.name, "root": self.model, "max_model_len": self.context}
                return 200, {"data": [base, *({"id": n, "root": f} for n, f in self.adapters.items())]}
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    return 400, error(f"The lora adapter '{body['lora_name']}' has already been loaded.")
                self.adapters[body["lora_name"]] = body["lora_path"]
                self.given.append((body["lora_name"], body["lora_path"]))
                return 200, "Success"
            case "/v1/unload_lora_adapter":
                gone = self.adapters.pop(body["lora_name"], None) is None
                return (404, error("cannot be found")) if gone else (200, "Success")
            case "/v1/completions":
                return self._completion(body)
        return 404, {"detail": "Not Found"}

    def _completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        if body["model"] != self.name and body["model"] not in self.adapters:
            return 404, error(f"The model `{body['model']}` does not exist.")
        ids, logprobs = self.write(self.adapters.get(body["model"]), body)
        return 200, completion(body["prompt"], ids, logprobs)


def completion(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float | None]) -> dict[str, Any]:
    told = {"token_ids": list(ids), "logprobs": {"token_logprobs": list(logprobs)}, "prompt_token_ids": list(prompt)}
    return {"object": "text_completion", "choices": [{"index": 0, "text": "", **told}]}


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "NotFoundError", "code": 404}}


def letters(folder: str | None, body: dict[str, Any]) -> Written:
    """Ids from 3 to 9, computed from prompt, seed and adapter; no message ends before its last token."""
    said = json.dumps([folder and os.path.basename(folder), body["prompt"], body["seed"]]).encode()
    digest = hashlib.blake2b(said, digest_size=64).digest()
    ids = [3 + digest[k % 64] % 7 for k in range(body["max_tokens"])]
    return ids, [0.0 if body["top_k"] == 1 else -0.5] * len(ids)


def transformer(team_file: Any) -> Writer:
    """Writes with the team's own transformer and an adapter's weights, sampled as ours with the request's seed."""
    from pathlib import Path

    import numpy as np

    from teamtr.randomness import uniforms
    from teamtr.session.build import Parts, build
    from teamtr.session.models import local_engine

    engine: Any = build(team_file, parts=Parts(make_engine=local_engine)).engine
    policy = engine.learner(engine.agents[0]).policy
    held: list[str | None] = [None]
    alone = threading.Lock()  # one model, many requests

    def write(folder: str | None, body: dict[str, Any]) -> Written:
        with alone:
            if folder is not None and held[0] != folder:
                policy.load_weights(Path(folder))
                held[0] = folder
            assert frozenset(body["stop_token_ids"]) in (policy.end_ids, frozenset())
            drawn = TokenSampler(body["temperature"], body["top_p"], body["top_k"])
            prompt, noise = np.array(body["prompt"], np.int32), uniforms(body["seed"], 1, body["max_tokens"])
            (sample,) = policy.sample([prompt], noise, drawn)
        return sample.token_ids.tolist(), [float(x) for x in sample.logprobs]

    return write


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any]) -> None:
        status, value = self.server.fake.answer(self.path, body)  # type: ignore[attr-defined]
        if status == 0:  # the connection breaks in the middle of an answer
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        sent = value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()
        with contextlib.suppress(OSError):  # the client may have timed out
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


class Running:
    """Serves a fake at a local port until the block ends."""

    def __init__(self, fake: FakeVllm) -> None:
        class Listening(ThreadingHTTPServer):
            request_queue_size = 512
            daemon_threads = True

        self.server = Listening(("127.0.0.1", 0), Handler)
        self.server.fake = fake  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


class AtSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        request, _ = super().get_request()
        return request, ("socket", 0)


def main(arguments: Sequence[str]) -> None:
    told = dict(itertools.pairwise(arguments))
    manner, _, count = os.environ.get("FAKE_VLLM", "").partition(":")
    print("fake vLLM with", *arguments, flush=True)
    if manner == "dies" and not count:
        print("no room for the model", flush=True)
        sys.exit(7)
    if manner == "hangs":
        time.sleep(1000)
    fake = FakeVllm(told["--model"], letters, name=told["--served-model-name"])

    def dying(folder: str | None, body: dict[str, Any]) -> Written:
        if len(fake.asked) >= int(count):
            print("out of memory", flush=True)
            os._exit(9)
        return letters(folder, body)

    if manner == "dies":
        fake.write = dying
    server = AtSocket(told["--uds"], Handler)
    server.fake = fake  # type: ignore[attr-defined]
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
