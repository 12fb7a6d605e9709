"""A served team under load: tokens per second and time to first token, beside ``generate`` behind the same server.

    python bench/serving.py --tokenizer FOLDER --shape 1.7b --users 1,16,64,256      # on a GPU: three agents
    python bench/serving.py --tokenizer FOLDER --shape tiny --users 1,4 --tokens 8   # on a CPU

The server is that of ``teamtr serve``, in its own process. Each user sends a request over HTTP, reads the whole
discussion as a stream, and then sends the next. At every number of users, each sends one request for warm-up and then
``--rounds`` requests. Tokens are those of all agents. The first token is that of the agent that speaks first.

"ours" merges the adapter of one agent at a time and samples one agent at a time; "by_row" applies adapters by row, so
that messages of all agents form one batch (``sampling.adapters``). ``generate`` replaces the sampler with transformers'
loop: batched by the same scheduler, and streamed and ended through a stopping criterion. It leaves adapters out, which
changes nothing since they are new and equal the base. With ``--shape`` the weights are random and the tokenizer is that
of the model folder ``--tokenizer``; messages then last ``--tokens`` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import SHAPES, device, report, save_shape, so_far
from teamtr.answers import AS_TRAINED, Decoding, Sample
from teamtr.config import loads
from teamtr.ports import Engine, Follow, Heard, unfollowed, unheard
from teamtr.serving.desk import Limits
from teamtr.serving.server import TeamServer
from teamtr.session.build import build
from teamtr.types import Floats, Ids

KINDS = ("ours", "by_row", "generate")
KEY = "serving-benchmark-key"
NAME = "team"
TEAM = """
name: team
task: {{name: code, half_length: 1}}
team:
  model: {model}
  train: lora
  max_tokens: {tokens}
  agents: [{{name: left}}, {{name: right}}, {{name: speaker}}]
"""
QUESTION = "Question {number}: a farmer has {number} fields with {rows} rows each. How many rows does the farmer have?"


class Generating:
    """An engine that samples with transformers' ``generate``."""

    def __init__(self, inner: Engine, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.inner = inner
        dtype = torch.float16 if device().type == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device()).eval()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @torch.no_grad()
    def sample(
        self,
        agent: str,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        *,
        decoding: Decoding = AS_TRAINED,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        width, ends = max(map(len, prompts)), self.inner.info(agent).end_ids
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        seen = np.zeros_like(ids)
        for b, prompt in enumerate(prompts):
            ids[b, width - len(prompt) :], seen[b, width - len(prompt) :] = prompt, 1
        wanted = [True] * len(prompts)

        def ended(ids_BT: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            said = ids_BT[:, width:].cpu().numpy().astype(np.int32)
            for b in range(len(prompts)):
                if wanted[b]:
                    wanted[b] = follow(b, said.shape[1] - 1, said[b, -1:]) and int(said[b, -1]) not in ends
            return torch.tensor([not goes_on for goes_on in wanted], device=ids_BT.device)

        found = self.model.generate(
            torch.as_tensor(ids, device=device()), attention_mask=torch.as_tensor(seen, device=device()),
            do_sample=True, temperature=decoding.temperature or 1.0, top_k=0, top_p=1.0, pad_token_id=0,
            eos_token_id=sorted(ends), max_new_tokens=noise_BT.shape[1], stopping_criteria=[ended],
        )  # fmt: skip
        version = self.inner.version(agent)
        return [_sample(row[width:].tolist(), ends, version) for row in found.cpu()]


def _sample(said: list[int], ends: frozenset[int], version: str) -> Sample:
    stop = next((t for t, token in enumerate(said) if token in ends), None)
    kept = np.array(said if stop is None else said[: stop + 1], dtype=np.int32)
    finish = "length" if stop is None else "stop"
    return Sample(kept, np.zeros(len(kept), dtype=np.float32), finish, version)  # type: ignore[arg-type]


def serve(kind: str, model: str, tokens: int, most_users: int) -> None:
    """Run the server in this process: print its port and serve until terminated."""
    adapters = "by_row" if kind == "by_row" else "merged"
    team_file = loads(TEAM.format(model=model, tokens=tokens), "bench", [f"sampling.adapters={adapters}"])
    session = build(team_file.anchored(Path.cwd()))
    if kind == "generate":
        session = replace(session, engine=Generating(session.engine, model))
    limits = Limits(at_once=most_users, waiting=most_users)
    with TeamServer(key=KEY, limits=limits) as server:
        server.take_up(session, session.current_team(), NAME)
        print(server.server_port, flush=True)
        server.serve_forever()
    session.engine.close()


@dataclass(frozen=True)
class Answered:
    """Seconds to a request's first token and to its end, and the number of tokens of all agents."""

    first: float
    whole: float
    tokens: int


async def ask(port: int, number: int) -> Answered:
    body = json.dumps(
        {
            "model": NAME,
            "messages": [{"role": "user", "content": QUESTION.format(number=number, rows=number % 13 + 2)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "show": "discussion",
            "seed": number,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    began, first, tokens = time.perf_counter(), None, None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status!r} {await reader.read(2000)!r}")
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            if first is None and (choice["delta"].get("content") or choice["delta"].get("reasoning_content")):
                first = time.perf_counter() - began
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    writer.close()
    if first is None or tokens is None:
        raise RuntimeError("a stream broke off")
    return Answered(first, time.perf_counter() - began, tokens)


async def crowd(port: int, users: int, rounds: int, start: int) -> list[Answered]:
    async def user(k: int) -> list[Answered]:
        return [await ask(port, start + round_ * users + k) for round_ in range(rounds)]

    return [answered for one in await asyncio.gather(*map(user, range(users))) for answered in one]


def level(port: int, users: int, rounds: int) -> dict[str, float]:
    asyncio.run(crowd(port, users, 1, 0))
    began = time.perf_counter()
    answers = asyncio.run(crowd(port, users, rounds, users))
    took = time.perf_counter() - began
    first = sorted(answer.first for answer in answers)
    return {
        "tokens/s": sum(answer.tokens for answer in answers) / took,
        "first token, median s": first[len(first) // 2],
        "first token, p95 s": first[len(first) * 95 // 100],
        "answer, median s": sorted(answer.whole for answer in answers)[len(answers) // 2],
        "answers": len(answers),
    }


def measure(kind: str, model: str, a: argparse.Namespace) -> dict[int, dict[str, float]]:
    users = [int(count) for count in a.users.split(",")]
    command = [sys.executable, __file__, "--as-server", kind, "--model", model, "--tokens", str(a.tokens)]
    server = subprocess.Popen([*command, "--users", a.users], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert server.stdout is not None
        began, line = time.perf_counter(), server.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"the server of {kind} did not start")
        so_far(f"{kind} serves after", round(time.perf_counter() - began, 1))
        found = {}
        for count in users:
            found[count] = level(int(line), count, a.rounds)
            so_far(f"{kind}, {count} users", found[count])
        return found
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder, or tiny; instead of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "small")
    parser.add_argument("--tokenizer", help="the folder of a model whose words are used with --shape")
    parser.add_argument("--users", default="1,16,64,256" if gpu else "1,4")
    parser.add_argument("--tokens", type=int, default=128 if gpu else 8, help="most tokens of a message")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of samplers (default: %(default)s)")
    parser.add_argument("--as-server", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.as_server:
        serve(a.as_server, a.model, a.tokens, max(map(int, a.users.split(","))))
        return
    kinds = a.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if not a.model and not a.tokenizer:
        parser.error("give --model, or --tokenizer with --shape")
    if a.model == "tiny" and "generate" in kinds:
        parser.error("--model tiny is made by the team file and has no folder that generate could load: --kinds ours")
    results: dict[str, dict[int, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or save_shape(a.shape, a.tokenizer, folder)
        for kind in kinds:
            results[kind] = measure(kind, model, a)
    keys = ("tokens/s", "first token, median s", "first token, p95 s", "answer, median s")
    rows = [(kind, users, *(row[k] for k in keys)) for kind, levels in results.items() for users, row in levels.items()]
    title = f"{a.model or a.shape}: a team of three, messages of at most {a.tokens} tokens"
    report(title, ("", "users", *keys), rows, {"benchmark": "serving", **vars(a), "results": results}, a.json)


if __name__ == "__main__":
    main()
