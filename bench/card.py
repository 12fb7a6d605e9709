"""Benchmarks of docs/performance.md, docs/growth.md and docs/sizing.md that need a GPU, run one after the other.

    python bench/card.py --out OUT --model QWEN             # on a GPU; QWEN: a folder with Qwen2.5-Coder-1.5B-Instruct
    python bench/card.py --out OUT --jobs stage8,step       # some of them, in this order
    python bench/card.py --out OUT --model QWEN --for 570   # as many as fit into 570 s; run again for the next ones
    python bench/card.py --out OUT --rehearse               # on a CPU: all of them, tiny, in minutes, in OUT/rehearsal

The output of a job is written to OUT/NAME.txt and OUT/NAME.err while it runs. A job that succeeds is recorded in
OUT/NAME.done and not run again unless its command changes. A job that exceeds its limit is killed with its children,
and the next one starts; its output is kept. If no jobs are named, those that were cut off or failed are tried again
after all others. The exit status is 0 if all of them are done.

On an H200 whose host takes 10 to 16 s to import torch and transformers, all jobs take 4,190 s by earlier figures, and
the first four 730 s: the time until a team and TRL's model are better, the first token, and a stage compared with its
rivals. With ``--for``, a job starts if the time that it takes is left, and is cut off when the time is up.

Jobs are forked from a process that has imported torch and transformers once and has not touched CUDA, except those that
start processes of their own (``--fresh``: none is forked). GSM8K is read from the folder TEAMTR_DATA (../shared/data).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("common", "peft", "transformers.models.qwen3.modeling_qwen3", "teamtr.session.train")
LOOK_EVERY_S = 0.1
GONE_S = 10.0
"""Most seconds until killed processes, and their memory on the card, are gone."""
PRELOADING_S = 20.0
"""Seconds of importing once what jobs import, on a slow host."""
ENDING_S = 5.0
"""Seconds of the remaining time that are reserved for ending a job that is cut off."""
DONE = "done"


@dataclass(frozen=True)
class Job:
    """A command: the words after ``python``, run in the project's root folder."""

    name: str
    takes_s: float  # approximately, on an H200
    limit_s: float
    command: str
    tiny: str = ""  # options that make it small enough for a CPU
    fresh: bool = False  # not forked: it starts processes anyway, or measures how long that takes
    needs: tuple[tuple[str, Path | None], ...] = ()  # required files: description and path
    begin: Callable[[], None] | None = None  # prepares its input


def jobs_of(out: Path, model: Path | None, rehearse: bool) -> tuple[Job, ...]:
    """All jobs, those that matter most to users first. A point of growth.py and a method of time_to.py have limits of
    their own, which expire before the job's, so that the point is recorded and the method is reported."""
    data = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data")).resolve() / "gsm8k"
    team, points = out / "team.yaml", out / "growth.jsonl"
    goes_on = partial(go_on, ROOT / "docs" / f"growth-{'cpu' if rehearse else 'card'}.jsonl", points)
    grow = f"bench/growth.py --shape 1.7b --repeats 1 --out {shlex.quote(str(points))}"
    small_stage = "--shape tiny --problems 2 --group 2 --prompt 16 --tokens 8 --micro-batch 4"
    small_team = "--problems 2 --samples 1 --limit 120"
    asked = (("--model FOLDER", model), ("GSM8K in TEAMTR_DATA", data))
    trl = (("TRL", installed("trl")), ("its datasets", installed("datasets")))
    rivals = "generate-static,trl" if all(path for _, path in trl) else "generate-static"

    def until_better(name: str, takes_s: float, limit_s: float, method: str, seed: int = 0) -> Job:
        runs, alone = out / name, "--trl" in method
        return Job(
            name, takes_s, limit_s, f"bench/time_to.py {shlex.quote(str(team))} seed={seed} --points 10 {method} "
            f"--json --out {shlex.quote(str(runs))}", f"{small_team} {'--trl-micro-batch 2' if alone else ''}",
            fresh=True, needs=(*asked, *trl) if alone else asked,
            begin=partial(begin_time_to, team, runs, model, data, rehearse),
        )  # fmt: skip

    auto, one_model = "--plans auto --limit 240", "--plans '' --trl --trl-micro-batch 16 --limit 440"

    return (
        until_better("time_to", 180, 400, auto),
        Job("first_token", 80, 200, "bench/first_token.py --shape 1.7b --warm 1 --json", "--shape tiny", fresh=True),
        until_better("time_to_trl", 120, 575, one_model),
        Job("stage", 330, 480, "bench/stage.py --shape 1.7b --parts ours,rivals --sampler fp16 --score sampler "
            f"--rivals {rivals} --rival-micro-batch 16 --json",
            f"{small_stage} --sampler fp32 --rival-micro-batch 4"),
        Job("precision", 200, 330, "bench/precision.py --shape 1.7b --lengths 1024,4096,8192,16384 --floors "
            "--words random --json", "--shape tiny --lengths 4,16"),
        Job("growth_length", 330, 560, f"{grow} --axis length --length 16384 --pieces 8 --again --start-s 200 "
            "--limit-s 340", "--shape tiny --length 4 --pieces 2", fresh=True, begin=goes_on),
        Job("plans", 340, 480, "bench/stage.py --shape 1.7b --parts plans --plans auto,teamtr --sampler fp16 --json",
            f"{small_stage} --sampler fp32"),
        Job("growth", 200, 400, f"{grow} --axis episodes --episodes 16,256,1024 --again --start-s 140 --limit-s 120",
            "--shape tiny --episodes 8", fresh=True, begin=goes_on),
        until_better("time_to_trl_256", 80, 575, f"{one_model} --trl-tokens 256"),
        until_better("time_to_1", 150, 400, auto, seed=1),
        until_better("time_to_2", 150, 400, auto, seed=2),
        until_better("time_to_trl_1", 80, 575, one_model, seed=1),
        until_better("time_to_trl_2", 80, 575, one_model, seed=2),
        until_better("time_to_reweighted", 160, 400, "--plans reweighted --limit 240"),
        until_better("time_to_teamtr", 170, 400, "--plans teamtr --limit 240"),
        Job("stage8", 280, 400, "bench/stage.py --shape 8b --parts ours --problems 32 --sampler fp16 --one-copy "
            "--pages-gb 8 --micro-batch 4 --json", f"{small_stage} --pages-gb 0.1"),
        Job("ragged", 100, 130, f"bench/ragged.py --shape 1.7b --messages {shlex.quote(str(out / 'time_to' / 'auto'))} "
            "--json", "--shape tiny --episodes 4 --group 2 --prompt 8 --most 8 --rounds 1",
            needs=(("a run of time_to", out / "time_to" / "auto" / "episodes"),)),
        Job("step", 50, 80, "bench/step.py --shape 1.7b --json", "--shape tiny --problems 2 --group 2 --tokens 8"),
        Job("update", 90, 120, "bench/update.py --shape 1.7b --profile --json",
            "--shape tiny --messages 16 --context 32 --tokens 16"),
        Job("rollout", 180, 240, "bench/rollout.py --shape 1.7b --profile --skip 'continuous batching' --json",
            "--shape tiny --rows 4 --prompt 16 --new 4"),
        Job("products", 60, 90, "bench/products.py --json", "--shapes tiny --rows 8"),
        Job("steps", 40, 60, "bench/rollout.py --shape 1.7b --precision fp16 --new 96 "
            "--by-rows 8,16,32,48,64,96,128,192,256 --json", "--shape tiny --precision fp32 --prompt 16 --new 4 "
            "--by-rows 4,8"),
        Job("long", 230, 330, "bench/long.py --shape 1.7b --tokens 32768 --pieces 2 --radius 5 --json",
            "--shape tiny --tokens 64 --episodes 4"),
        Job("long8", 290, 400, "bench/long.py --shape 8b --one-copy --tokens 8192 --radius 1.25 --json",
            "--shape tiny --tokens 64 --episodes 4"),
        Job("tests", 200, 300, "-m pytest -q tests/gpu -x -p no:xdist", "-k 'overflow or resumes'"),
    )  # fmt: skip


def installed(package: str) -> Path | None:
    """The file of a package, without importing it; None if it is not installed."""
    found = find_spec(package)
    return Path(found.origin) if found and found.origin else None


def go_on(measured: Path, points: Path) -> None:
    """Copy earlier measurements to ``points``, so that they are not repeated."""
    if not points.exists():
        shutil.copyfile(measured, points)


def begin_time_to(team: Path, runs: Path, model: Path, data: Path, rehearse: bool) -> None:
    """Write the team of docs/results.md, with more stages than fit into the limit, and remove earlier runs, which would
    be resumed."""
    from teamtr.config import dump
    from teamtr.reproduce import Setting, find

    recipe = find("main-results")
    (variant,) = [each for each in recipe.variants if each.name == "teamtr"]
    files = (f"task.train={data / 'train.jsonl'}", f"task.test={data / 'test.jsonl'}")
    changes = (*files, "plan.problems=16", "plan.stages=10", "diagnostics.every=0")
    few = ("plan.problems=2", "plan.group_size=2", "plan.stages=1", "team.max_tokens=4") if rehearse else ()
    setting = Setting("small", str(model), changes=(*changes, *few))
    team.write_text(dump(setting.team_file(recipe, variant, seed=0)))
    shutil.rmtree(runs, ignore_errors=True)


def small_model(folder: Path) -> Path:
    """A small model of characters, to rehearse with."""
    from teamtr.engines.torch.loading import TinyShape, tiny_model

    if not (folder / "tokenizer.json").exists():
        for part in tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0):
            part.save_pretrained(folder)
    return folder


def preload() -> None:
    """Import what jobs import. Meanwhile, GPUs are looked up through NVML: once CUDA is initialized, forked processes
    cannot use it. Changes that imports make to the environment are undone, because they are not meant for jobs that are
    not forked."""
    before = dict(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)


def start(words: Sequence[str], stdout: int, stderr: int, fresh: bool) -> int:
    """Start ``python WORDS`` as the leader of a process group of its own, and return its process id. In the new
    process, this function never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        with suppress(PermissionError, ProcessLookupError):  # the new process has already done so
            os.setpgid(process, process)
        return process
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(ROOT)
    for given, number in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(given, number)
    os.environ["PYTHONUNBUFFERED"] = "1"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        os.write(2, b"CUDA was in use before this process was forked: it is started anew\n")
        fresh = True
    if fresh:
        os.execv(sys.executable, [sys.executable, *words])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.path[0], sys.argv = str(ROOT), list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).parent), list(words)
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()  # unwinds all callers, as at the end of any process


def watch(process: int, limit_s: float) -> int | None:
    """Wait for the process. Returns its exit status, or None if it exceeded the limit. Its process group is killed in
    either case."""
    until = time.monotonic() + limit_s
    try:
        while time.monotonic() < until:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(LOOK_EVERY_S)
        return None
    finally:
        until = time.monotonic() + GONE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
                time.sleep(LOOK_EVERY_S)


def run(job: Job, out: Path, fresh: bool, rehearse: bool, left_s: float = float("inf")) -> tuple[float, str]:
    """Run a job that is not done yet, within ``left_s`` seconds. Returns its seconds and outcome, or why it was not
    started."""
    words = shlex.split(f"{job.command} {job.tiny}" if rehearse else job.command)
    done, tried, error = (out / f"{job.name}.{kind}" for kind in ("done", "tried", "err"))
    if done.exists() and (before := json.loads(done.read_text()))["command"] == words:
        return before["seconds"], DONE
    done.unlink(missing_ok=True)
    if lacking := [what for what, path in job.needs if path is None or not path.exists()]:
        return 0.0, f"left out: needs {', '.join(lacking)}"
    if (takes := job.takes_s + PRELOADING_S * (not (fresh or job.fresh or PRELOADED[-1] in sys.modules))) > left_s:
        return 0.0, f"put off: takes {takes:.0f} s, {left_s:.0f} are left"
    until = time.monotonic() + left_s - ENDING_S
    if job.begin is not None:
        job.begin()
    if not (fresh or job.fresh):
        preload()
    limit_s = min(job.limit_s, until - time.monotonic())
    script = words if words[0] == "-m" else [str(ROOT / words[0]), *words[1:]]
    began = time.monotonic()
    with open(out / f"{job.name}.txt", "wb") as told, open(error, "wb") as complained:
        process = start(script, told.fileno(), complained.fileno(), fresh or job.fresh)
        code = watch(process, limit_s)
    seconds = time.monotonic() - began
    if code != 0:
        tried.touch()
    if code is None:
        return seconds, f"cut off after {limit_s:.4g} s"
    if code:
        last = error.read_text(errors="replace").rstrip().rpartition("\n")[2]
        return seconds, f"failed: {last or f'exit status {code}'}"
    tried.unlink(missing_ok=True)
    done.write_text(json.dumps({"command": words, "seconds": seconds}))
    return seconds, DONE


def table(results: dict[str, tuple[float, str]]) -> str:
    width = max(map(len, results))
    return "".join(f"{name:{width}}  {seconds:6.1f} s  {how}\n" for name, (seconds, how) in results.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="a folder for what they print")
    parser.add_argument("--jobs", help="which of them, by comma, in this order (default: all)")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin what ends in so many")
    parser.add_argument("--model", type=Path, help="a folder with the model of time_to")
    parser.add_argument("--fresh", action="store_true", help="every job in a process that imports all anew")
    parser.add_argument("--rehearse", action="store_true", help="a tiny scale, on the CPU")
    a = parser.parse_args(arguments)
    began = time.monotonic()
    out = (a.out / "rehearsal" if a.rehearse else a.out).resolve()
    model = a.model and a.model.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, as in bench/common.py
    if a.rehearse:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TEAMTR_TEST_DEVICE": "cpu"}
        model = model or small_model(out / "model")
    known = {job.name: job for job in jobs_of(out, model, a.rehearse)}
    wanted = a.jobs.split(",") if a.jobs else sorted(known, key=lambda name: (out / f"{name}.tried").exists())
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--jobs: {', '.join(unknown)}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running job is ended too
    results: dict[str, tuple[float, str]] = {}
    for name in wanted:
        left = a.seconds - (time.monotonic() - began)
        results[name] = run(known[name], out, a.fresh, a.rehearse, left)
        print(table(results), flush=True)
    sys.exit(any(how != DONE for _, how in results.values()))


if __name__ == "__main__":
    main()
