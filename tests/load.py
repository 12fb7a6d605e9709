"""Load test of the server: many concurrent clients, no lost or mixed-up answers, and constant memory.

    python tests/load.py --clients 64 --seconds 600        (make load)

The server is ``teamtr serve`` with the demo's team in its own process. Every answer is compared with the answer of the
same team to the same problem and seed, computed alone in this process. In one request of eight the client disconnects
after the first line of a stream. If the server is full, the request is repeated after the time that it states.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from teamtr.config import loads, recipe_text
from teamtr.rollout import play
from teamtr.session.build import build

KEY = "load-test-key-012345"
WARM_UP = 0.25
"""Share of the time after which memory should no longer grow."""
MOST_GROWTH = 0.05


@dataclass(frozen=True)
class Exchange:
    """A request and the answer that it must get."""

    body: dict[str, Any]
    answer: str


@dataclass
class Seen:
    """Counts, times and errors seen by the clients."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, took: float | None = None, wrong: str | None = None) -> None:
        with self.lock:
            self.counts[what] += 1
            if took is not None:
                self.seconds.append(took)
            if wrong is not None:
                self.wrong.append(wrong)


def exchanges(count: int) -> tuple[list[Exchange], str]:
    """Requests with the demo's problems and their expected answers, and the version of the team."""
    team_file = loads(recipe_text("code-exchange"), "demo")
    session = build(team_file)
    team = session.current_team()
    problems = session.task.problems("test")
    made = []
    for seed in range(count):
        problem = problems[seed % len(problems)]
        [episode] = play(session.context, team, [problem], 1, seed=seed).episodes
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": problem.prompt}],
            "private": dict(problem.private),
            "seed": seed,
        }
        made.append(Exchange(body, episode.answer))
    return made, team.version[:16]


def client(number: int, port: int, pool: list[Exchange], version: str, until: float, seen: Seen) -> None:
    rng = random.Random(number)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while time.monotonic() < until:
        exchange = rng.choice(pool)
        killed, stream = rng.random() < 1 / 8, rng.random() < 1 / 2
        body = json.dumps({**exchange.body, "stream": stream or killed})
        started = time.monotonic()
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            reply = connection.getresponse()
            if reply.status == 429:
                reply.read()
                seen.note("told to come again")
                time.sleep(min(2.0, float(reply.headers["Retry-After"])) * rng.random())
                continue
            if killed:
                reply.readline()
                connection.close()
                seen.note("killed")
                continue
            found, fingerprint = _answer(reply.read(), stream)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            seen.note("lost", wrong=f"{type(error).__name__}: {error}")
            connection.close()
            continue
        right = found == exchange.answer and fingerprint == version and reply.status == 200
        told = None if right else f"{reply.status} {found!r} instead of {exchange.answer!r}"
        seen.note("right" if right else "mixed up", time.monotonic() - started, told)
    with suppress(OSError):
        connection.close()


def _answer(body: bytes, stream: bool) -> tuple[str, str]:
    if not stream:
        whole = json.loads(body)
        return whole["choices"][0]["message"]["content"], whole["system_fingerprint"]
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    if events[-1] != "[DONE]":
        raise ValueError("a stream broke off")
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return text, chunks[0]["system_fingerprint"]


def run(clients: int, seconds: float, at_once: int, problems: int = 512) -> dict[str, Any]:
    pool, version = exchanges(problems)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "team.yaml"
        file.write_text(recipe_text("code-exchange"))
        options = ["--name", "demo", "--port", "0", "--at-once", str(at_once)]
        server = subprocess.Popen(
            [sys.executable, "-m", "teamtr.cli", "serve", str(file), *options],
            stdout=subprocess.PIPE,
            env={**os.environ, "TEAMTR_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().strip().rstrip("/").rpartition(":")[2])
            seen, started = Seen(), time.monotonic()
            threads = [
                threading.Thread(target=client, args=(k, port, pool, version, started + seconds, seen))
                for k in range(clients)
            ]
            for thread in threads:
                thread.start()
            memory: list[tuple[float, int]] = []
            process = psutil.Process(server.pid)
            while any(thread.is_alive() for thread in threads):
                memory.append((time.monotonic() - started, process.memory_info().rss))
                time.sleep(min(1.0, seconds / 50))
            for thread in threads:
                thread.join()
            metrics = _metrics(port)
        finally:
            server.terminate()
            code = server.wait(120)
    return _report(seen, memory, metrics, seconds, code)


def _metrics(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
        lines = connection.getresponse().read().decode().splitlines()
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
        if not found["teamtr_choices_pending"]:
            connection.close()
            return found
        time.sleep(0.1)


def _report(
    seen: Seen, memory: list[tuple[float, int]], metrics: dict[str, float], seconds: float, code: int
) -> dict[str, Any]:
    warm = [rss for at, rss in memory if at >= WARM_UP * seconds]
    growth = warm[-1] / warm[0] - 1
    took = sorted(seen.seconds)
    good = not seen.wrong and seen.counts["right"] > 0 and growth <= MOST_GROWTH and code == 0
    return {
        "good": good,
        **seen.counts,
        "wrong": seen.wrong[:5],
        "answers_per_second": round(seen.counts["right"] / seconds, 1),
        "median_seconds": round(took[len(took) // 2], 3) if took else None,
        "p99_seconds": round(took[len(took) * 99 // 100], 3) if took else None,
        "rows_per_batch": round(metrics["teamtr_rows_total"] / metrics["teamtr_batches_total"], 1),
        "memory_mb": [round(warm[0] / 2**20), round(warm[-1] / 2**20)],
        "exit_code": code,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--at-once", type=int, default=64, help="as of teamtr serve")
    given = parser.parse_args()
    found = run(given.clients, given.seconds, given.at_once)
    print(json.dumps(found))
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
