"""What is asked of a vLLM server, over HTTP by the standard library: token ids in, token ids and log-probabilities out.

An answer is taken apart and held against what was asked: the prompt that the server read, how many tokens it wrote and
what ended them. What does not fit is an error, because a message is trained on as it was sampled.
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
"""Requests under way at once; a server queues what it cannot compute yet."""
MOST_BYTES = 64 << 20
"""Of one answer."""
UNIX = "unix:"
"""How the address of a socket in the file system begins."""
COLDEST = 0.01
"""Below this temperature vLLM takes another one."""


class BadAnswer(TeamTRError):
    """A server said something that is no message of the prompt it was given."""


class NotFound(Exception):
    """The server has no such path, or no model of this name."""


@dataclass(frozen=True)
class Drawing:
    """How messages are drawn: by which model of the server, and what ends them.

    ``salt`` keeps the keys and values of a prompt apart from those of other weights.
    """

    model: str
    salt: str
    end_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def request(self, prompt: Ids, tokens: int, seed: int) -> dict[str, Any]:
        """All that decides a message is said, so that no default of the server or of the model does."""
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
    """One for each row: 53 bits of its first number. vLLM has a generator of its own for every request, which this
    seeds; it cannot take our numbers themselves."""
    return [int(first * 2**53) for first in noise_BT[:, 0]]


@dataclass(frozen=True)
class Served:
    """A model that a server has: its name, what it was read from, and how many tokens it reads at most."""

    name: str
    root: str
    context: int | None


class Client:
    """One server at an address: http://host:port, or unix: and the path of a socket.

    Args:
        patience_s: how long one answer may take.
        ended: why the server's process is gone; None while it runs, or where nobody here knows.
    """

    def __init__(
        self, address: str, *, patience_s: float = 600.0, ended: Callable[[], str | None] = lambda: None
    ) -> None:
        self.address = address.rstrip("/")
        self.patience_s = patience_s
        self.ended = ended

    def __str__(self) -> str:
        return "vLLM" if self.address.startswith(UNIX) else f"vLLM at {self.address}"

    # -- what is asked ----------------------------------------------------------------------------------------

    def healthy(self, patience_s: float) -> bool:
        """Whether it answers at all."""
        try:
            return self._exchange("GET", "/health", None, patience_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def models(self) -> list[Served]:
        """What it serves: the model it was started with, and adapters."""
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
        """Forget it, if it is there."""
        with contextlib.suppress(NotFound):
            self._exchanged("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sample(
        self,
        prompts: Sequence[Ids],
        tokens: int,
        seeds: Sequence[int],
        drawing: Drawing,
        heard: Heard = unheard,
    ) -> list[Sample]:
        """One message for each prompt, asked for side by side; ``heard`` is told of each as it comes."""
        if 0 < drawing.temperature < COLDEST:
            raise UserError(
                f"vLLM takes no temperature between 0 and {COLDEST}, and {drawing.temperature:g} is asked for: use 0 "
                "(greedy), a higher one, or another sampling.engine"
            )
        pool = ThreadPoolExecutor(min(AT_ONCE, len(prompts)))
        try:
            asked = [pool.submit(self.message, p, tokens, s, drawing) for p, s in zip(prompts, seeds, strict=True)]
            row_of = {one: row for row, one in enumerate(asked)}
            for one in as_completed(asked):
                heard(row_of[one], one.result())
            return [one.result() for one in asked]
        finally:  # by Ctrl-C too: nobody waits for rows that nobody wants
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

    # -- how --------------------------------------------------------------------------------------------------

    def _change(self, path: str, body: Mapping[str, Any], what: str) -> None:
        """Something that the server refuses for good where it refuses it once."""
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
        """A connection for each request: one that was kept may have been closed by the server meanwhile."""
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


# -- answers --------------------------------------------------------------------------------------------------


def _sample(answer: Any, prompt: Ids, tokens: int, drawing: Drawing) -> Sample:
    """The message in an answer, if it is one."""
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
    if drawing.temperature == 0.0:  # the most likely token was certain; vLLM tells how likely it would have been
        logp_T = np.zeros_like(logp_T)
    return Sample(np.array(ids, dtype=np.int32), logp_T, finish)


def _told(found: bytes) -> str:
    """What a server says of a failure, in its own words."""
    try:
        told = read_json(found)
    except NotJson:
        return _short(found.decode("utf-8", "replace"))
    error = told.get("error", told) if isinstance(told, dict) else told
    return _short(error.get("message", error) if isinstance(error, dict) else error)


def _short(value: Any, most: int = 400) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]} …"
