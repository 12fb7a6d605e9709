"""Slowdown of training while ``teamtr view`` is open: one run, alternately with and without a viewer.

    python bench/view.py --json                 # 15 rounds of 4 stretches of 3 s; one thread
    python bench/view.py --rounds 2             # quick
    python bench/view.py --nobody               # no viewer in either arm: the noise of the measurement

One run of a tiny team trains throughout. In stretches of a few seconds, in the order without, with, with, without, the
server of the live page and a browser's requests (the list of runs every 5 s, the run every 2 s) are resumed or stopped
with a signal, so that both arms have the same weights and conditions. A stretch ends at the end of a stage. Each round
gives a ratio of seconds per stage, and a ratio of processor time of the training process, which depends less on other
work on the machine. The result is the median over rounds with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from common import report
from teamtr.config import loads
from teamtr.config.recipe import recipe_text
from teamtr.session.train import train

TARGET = 1.02
ORDER = (False, True, True, False)
SETTINGS = ("plan.stages=100000", "eval.every=0", "plan.problems=4", "plan.group_size=8", "tiny.warmup_steps=20")


@dataclass(frozen=True)
class Stretch:
    """Some stages of the run, with or without the viewer."""

    viewed: bool
    stages: int
    seconds: float
    processor: float


def look(link: str) -> None:
    """Send the requests of the page at its pace until killed; print a line for every answer."""
    stamp, key, runs_due = "", "", 0.0
    while True:
        now = time.monotonic()
        if now >= runs_due:
            key, runs_due = _ask(f"{link}api/runs")["runs"][0]["key"], now + 5.0
        answer = _ask(f"{link}api/run/{key}?stamp={stamp}")
        stamp = answer["stamp"]
        print("unchanged" if answer.get("unchanged") else "new", flush=True)
        time.sleep(2.0)


def _ask(url: str) -> Any:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read()
        if answer.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
    return json.loads(body)


@contextmanager
def viewer(folder: Path, answers: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the server and its reader, and stop them with a signal; both are killed when the block ends."""
    command = [sys.executable, "-m", "teamtr.cli", "view", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    processes = [server]
    try:
        assert server.stdout is not None
        link = server.stdout.readline().strip()
        with answers.open("w") as file:
            reader = subprocess.Popen([sys.executable, __file__, "--look", link], stdout=file, text=True)
        processes.append(reader)
        end = time.monotonic() + 60
        while answers.stat().st_size == 0:  # until the reader has its first answer
            if reader.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the page does not answer")
            time.sleep(0.1)
        hold(processes, True)
        yield processes
    finally:
        for process in processes:
            process.kill()  # also ends a stopped process
            process.wait()


def hold(processes: list[subprocess.Popen[str]], held: bool) -> None:
    for process in processes:
        process.send_signal(signal.SIGSTOP if held else signal.SIGCONT)


def measure(a: argparse.Namespace, folder: Path) -> tuple[list[Stretch], dict[str, float]]:
    """All stretches, and the answers and processor seconds of the server and its reader."""
    team_file = loads(recipe_text("code-exchange"), name="code-exchange", overrides=SETTINGS)
    records = train(team_file, folder / "run")
    _stages(records, 2)  # one-time work, and a log for the page to show
    stretches = []
    with viewer(folder, folder / "answers") as processes:
        idle = sum(_processor_seconds(process.pid) for process in processes)
        for viewed in ORDER * a.rounds:
            if viewed and not a.nobody:
                hold(processes, False)
            started, processor, stages = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - started < a.seconds:
                _stages(records, 1)
                stages += 1
            took = time.perf_counter() - started, time.process_time() - processor
            hold(processes, True)
            stretches.append(Stretch(viewed, stages, *took))
        spent = sum(_processor_seconds(process.pid) for process in processes) - idle
    records.close()
    lines = (folder / "answers").read_text().split()
    return stretches, {"answers": len(lines), "with news": lines.count("new"), "processor seconds": spent}


def _stages(records: Iterator[dict[str, Any]], count: int) -> None:
    while count:
        count -= next(records)["kind"] == "stage"


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ratios(stretches: list[Stretch], what: str) -> np.ndarray:
    """The ratio per stage, with the page open to without, for each round."""
    rows = []
    for k in range(0, len(stretches), len(ORDER)):
        part = stretches[k : k + len(ORDER)]
        sides = [[s for s in part if s.viewed is viewed] for viewed in (True, False)]
        open_, closed = (sum(getattr(s, what) for s in side) / sum(s.stages for s in side) for side in sides)
        rows.append(open_ / closed)
    return np.array(rows)


def summary(ratios_R: np.ndarray) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios_R, size=(4000, len(ratios_R))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"median": float(np.median(ratios_R)), "low": float(low), "high": float(high), "rounds": ratios_R.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of four stretches each")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a stretch, at least")
    parser.add_argument("--nobody", action="store_true", help="hold the page in both arms")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--look", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.look:
        look(a.look)
    with tempfile.TemporaryDirectory() as folder:
        stretches, other = measure(a, Path(folder))
    found = {name: summary(ratios(stretches, what)) for name, what in (("wall", "seconds"), ("cpu", "processor"))}
    rows = [
        ("wall clock" if name == "wall" else "processor time of training", r["median"], r["low"], r["high"])
        for name, r in found.items()
    ]
    record = {"benchmark": "view", "rounds": a.rounds, "seconds": a.seconds, "nobody": a.nobody, "target": TARGET}
    record |= {**found, "other side": other, "stages": sum(s.stages for s in stretches)}
    title = f"training with the live page open over without, per stage; target {TARGET} at most"
    report(title, ("", "ratio", "from", "to"), rows, record, a.json)


if __name__ == "__main__":
    main()
