"""A campaign of random faults: ``python tests/chaos.py --seconds 1200 --seed 0``, or ``make test-chaos``.

A trial takes a training run, an evaluation, a swap, a report, the live page or a file of replies, injects one or more
faults into the command (kills, partial writes, a full disk, slow and torn reads, clock jumps, little memory), sometimes
damages a file, and then runs the same command without faults. It must end with exactly the figures and weights of an
undisturbed run, or with a clear error: a documented exit code, a message, no traceback. Anything else is *lost*. With
``--sabotage`` the library itself is broken, and the campaign must report something lost.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import killing
import torch

from forked import CONTEXT
from taught import remember_teaching

LONG = 300.0
"""Timeout of a command in seconds, long enough for a busy machine."""

TEAM = """
name: chaos
device: cpu
task: {name: code, symbols: AB, half_length: 1, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 30, warmup_learning_rate: 1e-2}
team: {model: tiny, max_tokens: 2, agents: [{name: left}, {name: right}, {name: speaker, max_tokens: 3}]}
plan: {stages: 2, problems: 4, group_size: 4, radius_nats_per_message: 0.5, order: largest_gain, allocate: gain}
learner: {minibatches: 2}
eval: {every: 1, samples: 2}
"""
REPLIES = [
    {"problem": "What is 2 + 3?", "answer": "5", "response": "It is \\boxed{5}."},
    {"problem": "What is 2 + 4?", "answer": "6", "response": "It is \\boxed{7}."},
    {"problem": "What is 1/2?", "answer": "1/2", "response": "\\boxed{\\frac12}"},
    {"problem": "What is 0?", "answer": "0", "response": "\\boxed{" * 2000},
    {"problem": "What is 1?", "answer": "1", "response": "\\boxed{9^{9^{9^{9}}}}"},
    {"problem": "What is 3?", "answer": "3", "response": "\udc80\x1b[2J\\boxed{3}"},
]


# -- one command in its own process, with a fault --------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault of a command: its ``kind``, at the ``at``-th operation or after ``at`` milliseconds."""

    kind: str
    at: int
    seed: int = 0


def command(arguments: list[str], taught: str, fault: Fault | None, sabotage: str, out: str) -> None:
    """Run ``teamtr`` with these arguments, and write its output and exit code to ``out``."""
    torch.set_num_threads(1)
    remember_teaching(Path(taught))
    if sabotage:
        SABOTAGE[sabotage]()
    said, code = io.StringIO(), 0
    keep = builtins.open, os.replace
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        from teamtr.cli import app

        if fault is not None:
            FAULTS[fault.kind](fault)
        try:
            code = _look(Path(arguments[1])) if arguments[0] == "view" else app(arguments, standalone_mode=False) or 0
        except SystemExit as error:
            code = int(error.code or 0)
        except KeyboardInterrupt:  # as ``teamtr.cli.main`` does
            code = 130
        except BaseException as error:
            import traceback

            code = getattr(error, "exit_code", None) or 70
            if code == 70:
                said.write("Traceback\n" + "".join(traceback.format_exception(error)[-6:]))
    signal.setitimer(signal.ITIMER_REAL, 0)  # the command is over: later faults would only disturb this harness
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    builtins.open, os.replace = keep
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(out + ".tmp").write_text(json.dumps({"code": code, "said": said.getvalue()[-20_000:]}, ensure_ascii=True))
    os.rename(out + ".tmp", out)


def _look(run: Path) -> int:
    """Serve the live page as ``teamtr view`` does, request the page and every batch, and return the exit code."""
    from teamtr.analysis.report.serve import Library, LiveServer

    with LiveServer(Library([run])) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            names = [file.name for file in sorted((run / "episodes").glob("*.gz"))]
            (entry,) = json.loads(_got(server, "api/runs"))["runs"]
            paths = ["", f"api/run/{entry['key']}", *(f"api/batch/{entry['key']}/{name}" for name in names)]
            looks = [_got(server, path) for path in paths]
        finally:
            server.shutdown()
    print(f"looked at {len(looks)} pages")
    return 0


def _got(server: Any, path: str) -> bytes:
    """The body of the answer; errors must be 404 or 503 with a message."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.server_port}/{server.token}/{path}", timeout=60
        ) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as refused:
        body, status = bytes(refused.read()), refused.code
    if status not in (404, 503) or not json.loads(body)["error"]:
        raise RuntimeError(f"{path}: {status} {body[:200]!r}")
    return body


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_sync(fault: Fault, act: Callable[[int], None]) -> None:
    """Call ``act`` with the descriptor at the ``at``-th fsync and at every later one."""
    sync, count = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        count[0] += 1
        if count[0] >= fault.at:
            act(descriptor)
        sync(descriptor)

    os.fsync = fsync


def _kill_at_write(fault: Fault) -> None:
    _at_sync(fault, lambda descriptor: _die())


def _half_write(fault: Fault) -> None:
    """As in a power cut: truncate a file that is not yet on the disk, and die."""

    def cut(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, random.Random(fault.seed).randrange(size + 1))
        _die()

    _at_sync(fault, cut)


def _disk_full(fault: Fault) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _at_sync(fault, full)


def _slow_reads(fault: Fault) -> None:
    read = Path.read_bytes

    def slow(self: Path) -> bytes:
        time.sleep(random.Random(fault.seed).random() / 20)
        return read(self)

    Path.read_bytes = slow  # type: ignore[method-assign]


def _torn_read(fault: Fault) -> None:
    """One read returns only half of its file."""
    read, count = Path.read_bytes, [0]

    def torn(self: Path) -> bytes:
        data = read(self)
        count[0] += 1
        return data[: len(data) // 2] if count[0] == fault.at else data

    Path.read_bytes = torn  # type: ignore[method-assign]


def _clock_jumps(fault: Fault) -> None:
    rng, real = random.Random(fault.seed), time.time
    offset = [0.0]

    def jumping() -> float:
        offset[0] += rng.choice((0.0, 0.0, 3600.0, -86400.0))
        return real() + offset[0]

    time.time = jumping


def _little_memory(fault: Fault) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + fault.at * 2**20, resource.RLIM_INFINITY))


def _interrupt(fault: Fault) -> None:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, max(0.02, fault.at / 1000))


def _kill_at_moment(fault: Fault) -> None:
    signal.signal(signal.SIGALRM, lambda *_: _die())
    signal.setitimer(signal.ITIMER_REAL, max(0.02, fault.at / 1000))


FAULTS: dict[str, Callable[[Fault], None]] = {
    "kill at a moment": _kill_at_moment,
    "kill at a write": _kill_at_write,
    "half write": _half_write,
    "disk full": _disk_full,
    "slow reads": _slow_reads,
    "torn read": _torn_read,
    "clock jumps": _clock_jumps,
    "little memory": _little_memory,
    "interrupt": _interrupt,
}


# -- the library, broken on purpose ----------------------------------------------------------------------------


def _log_is_never_cut_back() -> None:
    from teamtr.store import RunLog

    RunLog.rewind = lambda self, keep: 0  # type: ignore[method-assign]


def _folders_are_not_verified() -> None:
    from teamtr.store import checkpoint

    def trusting(folder: Path) -> str:
        return hashlib.sha256((folder / checkpoint.MANIFEST).read_bytes()).hexdigest()

    checkpoint.verify_folder = trusting


SABOTAGE: dict[str, Callable[[], None]] = {
    "optimizer": killing.SABOTAGE["optimizer"],
    "log": _log_is_never_cut_back,
    "trusting": _folders_are_not_verified,
}


# -- trials ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended: by its own exit code, or by a signal."""

    code: int | None
    said: str = ""

    @property
    def clear(self) -> bool:
        """Whether it ended with a documented exit code and an error message."""
        if self.code == 130:  # interrupted: the command says what it saved, or had not started
            return "Traceback" not in self.said
        return self.code in (1, 2, 3) and "Traceback" not in self.said and "error:" in self.said


class World:
    """The undisturbed outcomes of all trials, and a runner for their commands."""

    def __init__(self, folder: Path, sabotage: str = "") -> None:
        self.folder = folder
        self.taught = folder / "taught"
        self.sabotage = sabotage
        (folder / "team.yaml").write_text(TEAM)
        with open(folder / "replies.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in REPLIES)
        whole = folder / "whole"
        whole.mkdir()
        self.expected: dict[str, Any] = {}
        for name, trial in TRIALS.items():
            for arguments in trial.commands(self, whole):
                ended = self.ended(arguments, None, sabotage="")
                assert ended.code == 0, (name, ended)
            self.expected[name] = trial.outcome(whole, ended)

    def ended(self, arguments: list[str], fault: Fault | None, sabotage: str | None = None) -> Ended:
        out = Path(tempfile.mkstemp(dir=self.folder)[1])
        out.unlink()
        given = (arguments, str(self.taught), fault, self.sabotage if sabotage is None else sabotage, str(out))
        process = CONTEXT.Process(target=command, args=given)
        process.start()
        process.join(LONG)
        if process.is_alive():
            process.kill()
            process.join()
            return Ended(None, "it hung")
        if not out.exists():
            return Ended(process.exitcode)
        found = json.loads(out.read_text())
        out.unlink()
        return Ended(found["code"], found["said"])


@dataclass(frozen=True)
class Trial:
    """Commands to disturb, and the outcome that they must have."""

    commands: Callable[[World, Path], list[list[str]]]
    outcome: Callable[[Path, Ended], Any]
    damages: bool = False
    """Whether files of its run folder are damaged as well."""


def _train(world: World, folder: Path) -> list[list[str]]:
    return [["train", str(world.folder / "team.yaml"), "--out", str(folder / "run")]]


def _trained(folder: Path, ended: Ended) -> Any:
    run = folder / "run"
    commit = killing.RunFolder.read(run).checkpoints.latest()
    assert commit is not None
    log = killing.Log(run / "log.jsonl").read()
    records = [record for record in log if record["kind"] in ("update", "eval", "stage")]
    return {
        "agents": dict(commit.agents),
        "tokens": _digest(commit.progress["account"]["tokens"]),
        "records": _digest([{k: v for k, v in r.items() if k not in killing.TIMES} for r in records]),
        "episodes": {file.name: _digest(file.read_bytes()) for file in sorted((run / "episodes").iterdir())},
    }


def _evaluate(world: World, folder: Path) -> list[list[str]]:
    _give_run(world, folder)
    return [["eval", str(folder / "run"), "--samples", "3", "--json"]]


def _evaluated(folder: Path, ended: Ended) -> Any:
    """The report that the command printed. Stored files do not count: an earlier torn read may have left a reported
    evaluation of an older checkpoint."""
    report = json.loads(ended.said.strip().splitlines()[-1])
    return {key: value for key, value in report.items() if key not in ("tokens", "folder")}


def _swap(world: World, folder: Path) -> list[list[str]]:
    _give_run(world, folder)
    small = ["--probes", "16", "--max-steps", "4", "--check-every", "2", "--doublings", "0", "--learning-rate", "0.01"]
    which = ["--agent", "speaker", "--with", "tiny", "--out", str(folder / "swapped"), "--stages", "1"]
    return [["swap", str(folder / "run"), *which, *small, "--eval-samples", "2"]]


def _swapped(folder: Path, ended: Ended) -> Any:
    commit = killing.RunFolder.read(folder / "swapped").checkpoints.latest()
    assert commit is not None
    return dict(commit.agents)


def _report(world: World, folder: Path) -> list[list[str]]:
    _give_run(world, folder)
    return [["report", str(folder / "run"), "--out", str(folder / "report.html")]]


def _reported(folder: Path, ended: Ended) -> Any:
    return len((folder / "report.html").read_text()) > 10_000


def _view(world: World, folder: Path) -> list[list[str]]:
    _give_run(world, folder)
    return [["view", str(folder / "run")]]


def _viewed(folder: Path, ended: Ended) -> Any:
    return "looked at" in ended.said


def _grade(world: World, folder: Path) -> list[list[str]]:
    replies, out = world.folder / "replies.jsonl", folder / "graded.jsonl"
    return [["grade", "math500", "--responses", str(replies), "--out", str(out)]]


def _graded(folder: Path, ended: Ended) -> Any:
    return [json.loads(line)["verdict"] for line in (folder / "graded.jsonl").read_text().splitlines()]


TRIALS: dict[str, Trial] = {
    "train": Trial(_train, _trained, damages=True),
    "eval": Trial(_evaluate, _evaluated, damages=True),
    "swap": Trial(_swap, _swapped),
    "report": Trial(_report, _reported, damages=True),
    "view": Trial(_view, _viewed, damages=True),
    "grade": Trial(_grade, _graded),
}


def _give_run(world: World, folder: Path) -> None:
    """Copy the finished run into the folder, if it has none."""
    if not (folder / "run").exists():
        shutil.copytree(world.folder / "whole" / "run", folder / "run")


def _digest(value: Any) -> str:
    """A digest that ignores key order: a record logged again after a kill comes from its commit, which sorts keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


# -- damage to files -------------------------------------------------------------------------------------------


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one random file of a run; returns a description."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return "nothing"
    file = rng.choice(files)
    kind = rng.choice(("flip a byte", "cut", "empty", "remove", "link", "add a long line"))
    data = file.read_bytes()
    if kind == "flip a byte" and data:
        at = rng.randrange(len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "remove":
        file.unlink()
    elif kind == "link":
        file.unlink()
        file.symlink_to("/etc/hostname")
    else:
        file.write_bytes(data + b'{"kind":"' + b"x" * 100_000 + b'"}\n')
    return f"{kind}: {file.relative_to(folder)}"


# -- the campaign ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    trial: str
    faults: tuple[str, ...]
    outcome: str
    """``identical``, ``clear error`` or ``lost``."""
    said: str = ""


def one(world: World, folder: Path, rng: random.Random, only: str | None = None) -> Result:
    """Run one trial in this empty folder."""
    name = only or rng.choice(sorted(TRIALS))
    trial = TRIALS[name]
    done: list[str] = []
    if name in ("report", "view", "eval", "swap"):
        _give_run(world, folder)
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(sorted(FAULTS))
        at = {"little memory": rng.randint(24, 200), "torn read": rng.randint(1, 6)}.get(kind, rng.randint(1, 60))
        if kind in ("kill at a moment", "interrupt"):
            at = rng.randint(20, 3000)
        fault = Fault(kind, at, rng.randrange(2**31))
        for arguments in trial.commands(world, folder):
            ended = world.ended(arguments, fault)
        done.append(f"{kind} {at}")
        if ended.code is not None and ended.code > 0 and not ended.clear:
            return Result(name, tuple(done), "lost", f"disturbed: {ended}")
        if ended.code is None:
            return Result(name, tuple(done), "lost", ended.said)
    damaged = trial.damages and rng.random() < 0.4 and (folder / "run").is_dir()
    if damaged:
        done.append(damage(folder / "run", rng))
    for arguments in trial.commands(world, folder):
        ended = world.ended(arguments, None)
    if ended.code != 0:
        clear = ended.clear and damaged  # without damage, there is no reason for an error
        return Result(name, tuple(done), "clear error" if clear else "lost", str(ended))
    try:
        same = trial.outcome(folder, ended) == world.expected[name]
    except Exception as error:  # the outcome cannot even be read
        return Result(name, tuple(done), "lost", repr(error))
    if not same and damaged and _loss_was_told(name, folder, world, ended):
        return Result(name, tuple(done), "clear error", ended.said)
    return Result(name, tuple(done), "identical" if same else "lost", ended.said if not same else "")


def _loss_was_told(name: str, folder: Path, world: World, ended: Ended) -> bool:
    """Whether a different outcome after damage was reported. A removed log or old episodes cannot be restored, but lost
    log lines and the evaluation of an older checkpoint must be reported. Any page of a damaged run is accepted."""
    if name in ("report", "view"):
        return True
    if name == "eval":
        return "was passed over" in ended.said
    if name != "train":
        return False
    found, expected = _trained(folder, ended), world.expected[name]
    weights = all(found[part] == expected[part] for part in ("agents", "tokens"))
    return weights and ("log.jsonl" in ended.said or found["records"] == expected["records"])


def campaign(seconds: float, seed: int, *, sabotage: str = "", only: str | None = None) -> Iterator[Result]:
    """Run trials until the time is up, at least one."""
    with tempfile.TemporaryDirectory() as temporary:
        world = World(Path(temporary), sabotage)
        rng, end = random.Random(seed), time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < end:
            folder = world.folder / f"trial-{number}"
            folder.mkdir()
            yield one(world, folder, random.Random(rng.random()), only)
            shutil.rmtree(folder, ignore_errors=True)
            number += 1


def table(results: list[Result]) -> str:
    outcomes = ("identical", "clear error", "lost")
    rows = [f"{'command':<8}{'trials':>8}{'faults':>8}" + "".join(f"{each:>13}" for each in outcomes)]
    for name in sorted({result.trial for result in results}):
        mine = [result for result in results if result.trial == name]
        counts = Counter(result.outcome for result in mine)
        faults = sum(len(result.faults) for result in mine)
        rows.append(f"{name:<8}{len(mine):>8}{faults:>8}" + "".join(f"{counts[each]:>13}" for each in outcomes))
    kinds = Counter(fault.rstrip("0123456789 ").partition(":")[0] for result in results for fault in result.faults)
    return "\n".join([*rows, "", *(f"{count:>6}  {kind}" for kind, count in kinds.most_common())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=sorted(SABOTAGE), default="")
    parser.add_argument("--only", choices=sorted(TRIALS))
    asked = parser.parse_args()
    results = []
    for result in campaign(asked.seconds, asked.seed, sabotage=asked.sabotage, only=asked.only):
        results.append(result)
        if result.outcome == "lost":
            print(f"LOST {result.trial}: {'; '.join(result.faults)}\n  {result.said[-1500:]}", flush=True)
    print(table(results))
    return int(any(result.outcome == "lost" for result in results))


if __name__ == "__main__":
    # Imported as a module, so that objects passed to child processes have an importable module name.
    import chaos

    sys.exit(chaos.main())
