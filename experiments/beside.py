"""Runs several ``teamtr train`` processes in parallel, and reads their logs."""

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
"""Success of a run after a number of updates, sampled tokens and seconds of training."""


@dataclass(frozen=True)
class Run:
    """A run: its folder, the text of its team file, and settings that override the file."""

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
        """Whether the run has finished with these settings. Read from a marker file, so that no model is loaded."""
        return self.marker.exists() and self.marker.read_text().splitlines() == list(self.changes)

    @property
    def marker(self) -> Path:
        return self.folder / "finished"

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        """Start the run, or resume it."""
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
    """Train all unfinished runs in this order, at most ``at_once`` in parallel (0: all), for at most ``limit`` seconds.
    Returns a line for each run that failed."""
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
        for process in running:  # every update is a checkpoint: only the one in progress is lost
            process.kill()
            process.wait()
    return failed


def _last_words(run: Run) -> str:
    lines = [line for line in run.output.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


# -- logs -----------------------------------------------------------------------------------------------------


def read(log: Path) -> Iterator[Record]:
    """Every record of a log, without a line that is only partly written."""
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def clocked(records: Iterable[Record]) -> Iterator[tuple[Record, float]]:
    """Every record with the seconds of training before it, without evaluations and pauses between two commands."""
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
    """Success where ``key`` is ``at``, interpolated linearly between the two neighboring points."""
    before = [point for point in points if point[key] <= at] or [points[0]]
    later = next((point for point in points if point[key] > at), None)
    first = before[-1]
    if later is None or later is first:
        return float(first["success"])
    share = (at - first[key]) / (later[key] - first[key])
    return float(first["success"] + share * (later["success"] - first["success"]))
