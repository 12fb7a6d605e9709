"""HTTP client of a vLLM server (standard library only): token ids in, token ids and log-probabilities out.

Every response is validated against its request: the prompt that the server read, the number of tokens, and what ended
the message. A mismatch is an error, because messages are trained on exactly as they were sampled.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

from teamtr.answers import Sample
from teamtr.bounded_json import NotJson, read_json
from teamtr.errors import TeamTRError, UserError
from teamtr.ports import EngineLost, Heard, unheard
from teamtr.types import Finish, Floats, Ids

AT_ONCE = 256
"""Concurrent requests; the server queues those that it cannot process yet."""
MOST_BYTES = 64 << 20
"""Size limit of one response."""
UNIX = "unix:"
"""Address prefix of a Unix domain socket."""
COLDEST = 0.01
"""Temperatures between 0 and this are refused: vLLM would replace them with another one."""


class BadAnswer(TeamTRError):
    """A response does not match its request, or is not one that a vLLM server sends."""


class NotFound(Exception):
    """The server answered 404: it has no such path, or no model of this name."""


@dataclass(frozen=True)
class Drawing:
    """Sampling parameters of a request: the served model, what ends a message, and how tokens are drawn.

    ``salt`` separates cached keys and values of a prompt from those computed with other weights.
    """

    model: str
    salt: str
    end_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def request(self, prompt: Ids, tokens: int, seed: int) -> dict[str, Any]:
        """The request body. It sets everything that affects sampling, so that no default of the server or the model
        applies."""
        return {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": tokens,
            "seed": seed,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": sorted(self.end_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "cache_salt": self.salt,
        }


def seeds_of(noise_BT: Floats) -> list[int]:
    """One seed per row: 53 bits of the row's first noise value. Every vLLM request has its own random generator, which
    the seed initializes; vLLM cannot use our random numbers themselves."""
    return [int(first * 2**53) for first in noise_BT[:, 0]]


@dataclass(frozen=True)
class Served:
    """A model that a server lists: its name, the path or hub id it was loaded from, and its context length in
    tokens."""

    name: str
    root: str
    context: int | None


class Client:
    """Client of one server, whose address is http://host:port, or unix: followed by the path of a socket.

    Args:
        patience_s: timeout of one response.
        ended: returns why the server's process is gone; None while it runs, or if it is not a process of ours.
    """

    def __init__(
        self, address: str, *, patience_s: float = 600.0, ended: Callable[[], str | None] = lambda: None
    ) -> None:
        self.address = address.rstrip("/")
        self.patience_s = patience_s
        self.ended = ended

    def __str__(self) -> str:
        return "vLLM" if self.address.startswith(UNIX) else f"vLLM at {self.address}"

    # -- requests ---------------------------------------------------------------------------------------------

    def healthy(self, patience_s: float) -> bool:
        """Whether the server answers its health check."""
        try:
            return self._exchange("GET", "/health", None, patience_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def models(self) -> list[Served]:
        """The models that the server lists: the one it was started with, and its adapters."""
        try:
            found = self._answer("GET", "/v1/models", None)
        except NotFound as error:
            raise BadAnswer(f"{self} has no list of models ({error}); is it a vLLM server?") from None
        try:
            return [Served(str(m["id"]), str(m.get("root") or ""), m.get("max_model_len")) for m in found["data"]]
        except (TypeError, KeyError, AttributeError):
            raise BadAnswer(f"{self} does not list its models: {_short(found)}; is it a vLLM server?") from None

    def load_adapter(self, name: str, folder: str) -> None:
        self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, f"the adapter {name}")

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; a no-op if it is not loaded."""
        with contextlib.suppress(NotFound):
            self._exchanged("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sample(
        self,
        prompts: Sequence[Ids],
        tokens: Sequence[int],
        seeds: Sequence[int],
        drawing: Drawing,
        heard: Heard = unheard,
    ) -> list[Sample]:
        """One message of at most so many tokens per prompt, from concurrent requests; ``heard`` is called with each
        message as it arrives."""
        if 0 < drawing.temperature < COLDEST:
            raise UserError(
                f"vLLM takes no temperature between 0 and {COLDEST}, and {drawing.temperature:g} is asked for: use 0 "
                "(greedy), a higher one, or another sampling.engine"
            )
        pool = ThreadPoolExecutor(min(AT_ONCE, len(prompts)))
        try:
            rows = zip(prompts, tokens, seeds, strict=True)
            asked = [pool.submit(self.message, prompt, most, seed, drawing) for prompt, most, seed in rows]
            row_of = {one: row for row, one in enumerate(asked)}
            for one in as_completed(asked):
                heard(row_of[one], one.result())
            return [one.result() for one in asked]
        finally:  # also on Ctrl-C: do not wait for rows whose result is not needed
            pool.shutdown(wait=False, cancel_futures=True)

    def message(self, prompt: Ids, tokens: int, seed: int, drawing: Drawing) -> Sample:
        try:
            answer = self._answer("POST", "/v1/completions", drawing.request(prompt, tokens, seed))
        except NotFound:
            raise EngineLost(
                f"{self} does not have {drawing.model}: it was never given these weights, or was started again since"
            ) from None
        try:
            return _sample(answer, prompt, tokens, drawing)
        except BadAnswer as error:
            raise BadAnswer(f"{self}, {drawing.model}: {error}") from None

    # -- transport --------------------------------------------------------------------------------------------

    def _change(self, path: str, body: Mapping[str, Any], what: str) -> None:
        """A request that changes what the server holds. A refusal is final and raises a UserError."""
        try:
            status, found = self._exchanged("POST", path, body)
        except NotFound as error:
            raise UserError(
                f"{self} cannot be given {what} ({error}): start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            ) from None
        if status != 200:
            raise UserError(f"{self} does not take {what} ({status}: {_told(found)})")

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        status, found = self._exchanged(method, path, body)
        if status >= 500:
            raise EngineLost(f"{self} has failed ({status}: {_told(found)})")
        if status != 200:
            raise UserError(f"{self} refuses what it is asked ({status}: {_told(found)})")
        try:
            return read_json(found, longest=MOST_BYTES)
        except NotJson as error:
            raise BadAnswer(f"{self} answers {path} with something else than JSON ({error})") from None

    def _exchanged(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        try:
            status, found = self._exchange(method, path, body, self.patience_s)
        except TimeoutError:
            raise EngineLost(f"{self} has not answered for {self.patience_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            why = self.ended() or f"it cannot be reached: {str(error) or type(error).__name__}"
            raise EngineLost(f"{self} is gone ({why})") from None
        if status == 404:
            raise NotFound(_told(found))
        return status, found

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, patience_s: float) -> tuple[int, bytes]:
        """One connection per request: the server may have closed one that was kept open."""
        connection = _connection(self.address, patience_s)
        try:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, path, sent, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_BYTES + 1)
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _connection(address: str, patience_s: float) -> http.client.HTTPConnection:
    if address.startswith(UNIX):
        return _UnixConnection(address.removeprefix(UNIX), patience_s)
    return http.client.HTTPConnection(address.removeprefix("http://"), timeout=patience_s)


# -- responses ------------------------------------------------------------------------------------------------


def _sample(answer: Any, prompt: Ids, tokens: int, drawing: Drawing) -> Sample:
    """The message in a response, once it has been validated."""
    try:
        (choice,) = answer["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        read = choice["prompt_token_ids"]
        whole = all(isinstance(i, int) and 0 <= i < 2**31 for i in ids) and len(ids) == len(logprobs)
    except (TypeError, KeyError, ValueError):
        raise BadAnswer(f"no message in its answer {_short(answer)}: is it vLLM 0.11 or newer?") from None
    if read != prompt.tolist():
        raise BadAnswer(f"it read {len(read or ())} tokens that are not the {len(prompt)} of the prompt")
    if not whole or not 1 <= len(ids) <= tokens:
        raise BadAnswer(f"{len(ids)} tokens with {len(logprobs)} log-probabilities, of at most {tokens} asked for")
    ends = [place for place, token in enumerate(ids) if token in drawing.end_ids]
    finish: Finish = "stop" if ends else "length"
    if ends and ends[0] != len(ids) - 1:
        raise BadAnswer(f"it went on after the end token {ids[ends[0]]}")
    if not ends and len(ids) != tokens:
        raise BadAnswer(f"it stopped after {len(ids)} of {tokens} tokens, at {ids[-1]}, which ends no message")
    logp_T = np.array([np.nan if x is None else x for x in logprobs], dtype=np.float32)
    if not np.isfinite(logp_T).all() or (logp_T > 1e-3).any():
        raise BadAnswer(
            "log-probabilities that are none: its weights are broken, or sampling.precision is too narrow for them "
            "(bf16 and fp32 have more range than fp16)"
        )
    if drawing.temperature == 0.0:  # greedy: drawn with probability 1; vLLM reports the model's probability
        logp_T = np.zeros_like(logp_T)
    return Sample(np.array(ids, dtype=np.int32), logp_T, finish)


def _told(found: bytes) -> str:
    """The server's own message about a failure."""
    try:
        told = read_json(found)
    except NotJson:
        return _short(found.decode("utf-8", "replace"))
    error = told.get("error", told) if isinstance(told, dict) else told
    return _short(error.get("message", error) if isinstance(error, dict) else error)


def _short(value: Any, most: int = 400) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]} …"
