"""Runs of ``teamtr train`` beside each other, each in a process of its own, and what their logs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Point = dict[str, Any]
"""How good a run was at a time: success after so many updates, sampled tokens and seconds of training."""


@dataclass(frozen=True)
class Run:
    """A folder, a team file as text, and the settings that differ from it."""

    folder: Path
    team: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / "run" / "log.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    @property
    def finished(self) -> bool:
        """Whether it has come to its end with these settings, so that no model need be loaded to find that out."""
        return self.marker.exists() and self.marker.read_text().splitlines() == list(self.changes)

    @property
    def marker(self) -> Path:
        return self.folder / "finished"

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        """Begin it, or go on with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "start.yaml"
        file.write_text(self.team)
        arguments = ["train", str(file), *self.changes, "--out", str(self.folder / "run")]
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "teamtr.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
            )


def train(runs: Sequence[Run], *, limit: float, at_once: int = 0) -> list[str]:
    """Train all that are not finished, in this order and at most so many at once (0: all), until ``limit`` seconds are
    over; returns what went wrong, a line for each run that failed."""
    waiting = [run for run in runs if not run.finished]
    seats = at_once or max(1, len(waiting))
    threads = max(1, (os.cpu_count() or 1) // seats)
    running: dict[subprocess.Popen[bytes], Run] = {}
    failed: list[str] = []
    began = time.monotonic()
    try:
        while (waiting or running) and time.monotonic() < began + limit:
            while waiting and len(running) < seats:
                run = waiting.pop(0)
                running[run.start(threads)] = run
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                if process.returncode == 0:
                    run.marker.write_text("\n".join(run.changes))
                    print(f"{time.monotonic() - began:5.0f} s  {run.name} has finished", flush=True)
                else:
                    failed.append(f"{run.name}: exit code {process.returncode}: {_last_words(run)}")
                    print(failed[-1], flush=True)
            time.sleep(0.2)
    finally:
        for process in running:  # every update is a checkpoint: nothing but the one in progress is lost
            process.kill()
            process.wait()
    return failed


def _last_words(run: Run) -> str:
    lines = [line for line in run.output.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


# -- logs -----------------------------------------------------------------------------------------------------


def read(log: Path) -> Iterator[Record]:
    """Every record of a log; a line that was being written is left out."""
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def clocked(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Every record with the seconds of training before it: evaluations, and pauses between two commands, do not
    count."""
    spent, last = 0.0, None
    for record in records:
        now = record.get("time")
        if record["kind"] == "eval" and last is not None:
            last += record.get("seconds", 0.0)
        elif record["kind"] == "update" and now is not None:
            spent += 0.0 if last is None else max(0.0, now - last)
            last = now
        elif now is not None:
            last = now
        yield record, spent


def evaluated(records: Iterable[Record]) -> list[Point]:
    """A point for every evaluation."""
    tokens, updates, found = 0, 0, []
    for record, seconds in clocked(records):
        if record["kind"] == "update":
            tokens, updates = record["sampled_tokens_total"], updates + 1
        elif record["kind"] == "eval":
            place = {"updates": updates, "tokens": tokens, "seconds": seconds}
            found.append({**place, "success": record["avg_at_k"], "interval": record["avg_interval"]})
    return found


def between(points: Sequence[Point], at: float, key: str = "tokens") -> float:
    """Success where ``key`` is ``at``, on the line between the two points around it."""
    before = [point for point in points if point[key] <= at] or [points[0]]
    later = next((point for point in points if point[key] > at), None)
    first = before[-1]
    if later is None or later is first:
        return float(first["success"])
    share = (at - first[key]) / (later[key] - first[key])
    return float(first["success"] + share * (later["success"] - first["success"]))
