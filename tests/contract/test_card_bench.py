"""bench/card.py: jobs one after the other, each with a limit; tiny scripts stand for the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from teamtr.config import load_team_file

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
LONG_S = 300.0
"""Nothing takes as long, also not on a busy machine, unless it hangs."""
DRIVER = """\
import sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = [{bench!r}, {here!r}]
import card
card.PRELOADED = ("loaded",)
card.jobs_of = lambda out, model, rehearse: tuple(card.Job(**job) for job in {jobs!r})
late = Path({here!r}) / "late"  # the clock jumps when a job has written this file
card.time = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 1000 * late.exists())
card.main()
"""
HANGS = """\
import os, time
from pathlib import Path
here = Path(__file__).parent
print("as far as this")
child = os.fork()
if child:
    (here / "processes").write_text(f"{os.getpid()} {child}")
    (here / "late").touch()
time.sleep(1000)
"""
COUNTS = """\
import sys
from pathlib import Path
with open(Path(__file__).with_name("count"), "a") as file:
    file.write("x")
print("counted")
"""
LOOKS = """\
import atexit, json, os, sys
import __main__
def told():
    return [__name__, __main__.__file__, told.__module__, hasattr(__main__, "told")]
print(json.dumps([sys.argv, told(), __file__, sys.path[0], os.getcwd(), "LOADED" in os.environ, sys.stdin.read()]))
print("a warning", file=sys.stderr)
atexit.register(print, "at its end", end="")
if "away" in sys.argv:
    print("forked" if "loaded" in sys.modules else "fresh", file=sys.stderr)
"""


class Here:
    """A folder with scripts, and bench/card.py with jobs that run them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.driver = folder, folder / "out", folder / "driver.py"
        self.write("loaded", "import os\nos.environ['LOADED'] = 'yes'\n")

    def write(self, name: str, text: str) -> str:
        (self.folder / f"{name}.py").write_text(text)
        return str(self.folder / f"{name}.py")

    def command(self, *jobs: dict[str, Any], more: tuple[str, ...] = ()) -> list[str]:
        made = [{"takes_s": 1.0, "limit_s": 900.0, **job} for job in jobs]
        text = DRIVER.format(bench=str(ROOT / "bench"), here=str(self.folder), jobs=made)
        self.driver.write_text(text)
        return [sys.executable, str(self.driver), "--out", str(self.out), *more]

    def started(self, *jobs: dict[str, Any], more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = self.command(*jobs, more=more)
        here = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        return subprocess.run(command, cwd=self.folder, env=here, capture_output=True, text=True, timeout=LONG_S)

    def run(self, *jobs: dict[str, Any], more: tuple[str, ...] = ()) -> tuple[int, list[list[str]]]:
        """The exit status, and the rows of the last table: name and how it ended."""
        done = self.started(*jobs, more=more)
        assert done.stderr == ""
        rows = done.stdout.rstrip().split("\n\n")[-1].splitlines()
        return done.returncode, [[row.split()[0], row.split(" s  ", 1)[1]] for row in rows]

    def said(self, name: str) -> str:
        return (self.out / f"{name}.txt").read_text()

    def complained(self, name: str) -> str:
        return (self.out / f"{name}.err").read_text()

    @property
    def count(self) -> int:
        return len((self.folder / "count").read_text())


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_job_that_hangs_is_ended_with_its_children_and_the_next_begins(here: Here) -> None:
    hangs, counts = here.write("hangs", HANGS), here.write("counts", COUNTS)
    status, rows = here.run({"name": "first", "command": hangs}, {"name": "second", "command": counts})
    assert (status, rows) == (1, [["first", "cut off after 900 s"], ["second", "done"]])
    assert here.said("first") == "as far as this\n", "what it printed stays"
    assert not (here.out / "first.done").exists()
    for process in map(int, (here.folder / "processes").read_text().split()):
        until(lambda process=process: gone(process))


def test_a_finished_job_is_run_again_only_with_another_command(here: Here) -> None:
    job = {"name": "one", "command": here.write("counts", COUNTS)}
    assert here.run(job) == here.run(job) == (0, [["one", "done"]])
    assert here.count == 1
    assert here.said("one") == "counted\n", "what it printed the first time stays"
    again = {**job, "command": f"{job['command']} 'another word'"}
    assert here.run(again) == (0, [["one", "done"]])
    assert here.count == 2
    assert json.loads((here.out / "one.done").read_text())["command"] == [job["command"], "another word"]
    assert here.run({**again, "command": here.write("breaks", "raise ValueError")})[0] == 1
    assert here.run(again) == (0, [["one", "done"]])
    assert here.count == 3, "what it had printed was written over"


def test_a_failed_job_says_its_last_line_and_is_run_again(here: Here) -> None:
    breaks = here.write("breaks", "print('begun')\nraise ValueError('no room')\n")
    jobs = (
        {"name": "broken", "command": breaks},
        {"name": "alone", "command": breaks, "fresh": True},
        {"name": "refused", "command": here.write("refuses", "raise SystemExit('a model is needed')\n")},
        {"name": "silent", "command": here.write("ends", "import os\nos._exit(3)\n")},
        {"name": "last", "command": here.write("counts", COUNTS)},
    )
    ends = ["ValueError: no room", "ValueError: no room", "a model is needed", "exit status 3"]
    rows = [*zip(("broken", "alone", "refused", "silent"), (f"failed: {end}" for end in ends), strict=True)]
    assert here.run(*jobs) == (1, [*map(list, rows), ["last", "done"]])
    assert here.said("broken") == "begun\n"
    here.write("breaks", COUNTS)
    assert here.run(jobs[0]) == (0, [["broken", "done"]])


def test_a_forked_job_finds_what_a_process_of_its_own_finds(here: Here) -> None:
    job = {"name": "forked", "command": f"{here.write('looks', LOOKS)} --shape 'two words' away"}
    calendar = {"name": "module", "command": "-m calendar 2026 2"}
    jobs = (job, {**job, "name": "fresh", "fresh": True}, calendar, {**calendar, "name": "module2", "fresh": True})
    status, rows = here.run(*jobs)
    assert (status, [how for _, how in rows]) == (0, ["done"] * 4)
    assert here.said("forked") == here.said("fresh")
    told, end = here.said("forked").splitlines()
    script = str(here.folder / "looks.py")
    assert json.loads(told) == [
        [script, "--shape", "two words", "away"], ["__main__", script, "__main__", True], script,
        str(here.folder), str(ROOT), False, "",
    ]  # fmt: skip
    assert end == "at its end", "it ends as any process does"
    assert [here.complained(name) for name in ("forked", "fresh")] == ["a warning\nforked\n", "a warning\nfresh\n"]
    assert here.said("module") == here.said("module2")
    assert "February 2026" in here.said("module")


def test_with_fresh_no_job_is_forked(here: Here) -> None:
    assert here.run({"name": "one", "command": f"{here.write('looks', LOOKS)} away"}, more=("--fresh",))[0] == 0
    assert here.complained("one").endswith("fresh\n")


def test_a_fork_that_cannot_use_the_card_is_started_anew(here: Here) -> None:
    here.write("torch", "class cuda:\n    _is_in_bad_fork = staticmethod(lambda: True)\n")
    here.write("loaded", "import torch\n")
    assert here.run({"name": "one", "command": f"{here.write('looks', LOOKS)} away"}) == (0, [["one", "done"]])
    note, *others = here.complained("one").splitlines()
    assert note.startswith("CUDA was in use before")
    assert others == ["a warning", "fresh"]


def test_jobs_run_in_the_order_in_which_they_are_named(here: Here) -> None:
    counts = here.write("counts", COUNTS)
    jobs = [{"name": name, "command": counts} for name in "abc"]
    assert here.run(*jobs, more=("--jobs", "c,a")) == (0, [["c", "done"], ["a", "done"]])
    refused = here.started(*jobs, more=("--jobs", "a,d"))
    assert refused.returncode == 2
    assert "--jobs: d; there are a, b, c" in refused.stderr


def test_what_does_not_fit_into_the_seconds_that_are_left_is_put_off(here: Here) -> None:
    counts = here.write("counts", COUNTS)
    long, short = ({"name": name, "command": counts, "takes_s": takes} for name, takes in (("a", 5e3), ("b", 10.0)))
    status, ((first, why), second) = here.run(long, short, more=("--for", "4000"))
    assert (status, first, second) == (1, "a", ["b", "done"])
    assert why.startswith("put off: takes 5020 s, 4000 are left"), "with what importing takes"
    assert here.run(long, short, more=("--for", "9000")) == (0, [["a", "done"], ["b", "done"]])
    assert here.count == 2


def test_a_job_ends_with_the_seconds_that_are_left(here: Here) -> None:
    hangs = here.write("hangs", HANGS)
    status, [[_, how]] = here.run({"name": "one", "command": hangs}, more=("--for", "500"))
    assert status == 1
    assert 480.0 < float(how.removeprefix("cut off after ").removesuffix(" s")) <= 495.0


def test_what_was_cut_off_is_tried_again_after_all_others(here: Here) -> None:
    hangs, counts = here.write("hangs", HANGS), here.write("counts", COUNTS)
    one, other = {"name": "one", "command": hangs}, {"name": "other", "command": counts}
    assert here.run(one, more=("--jobs", "one"))[0] == 1
    (here.folder / "late").unlink()
    here.write("hangs", COUNTS)
    assert here.run(one, other) == (0, [["other", "done"], ["one", "done"]])
    assert here.run(one, other) == (0, [["one", "done"], ["other", "done"]])


def test_who_ends_it_ends_the_job_that_is_running(here: Here) -> None:
    hangs = here.write("hangs", HANGS.replace("late", "hanging"))
    with subprocess.Popen(here.command({"name": "one", "command": hangs}), stdout=subprocess.PIPE) as running:
        until((here.folder / "hanging").exists)
        running.send_signal(signal.SIGTERM)
        assert running.wait(LONG_S) == 128 + signal.SIGTERM
    for process in map(int, (here.folder / "processes").read_text().split()):
        until(lambda process=process: gone(process))


# -- the benchmarks themselves ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def card() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("card")


class Parsed(Exception):
    pass


def test_every_benchmark_accepts_its_words(card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *given: Any) -> None:
        raise Parsed(parse(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    jobs = [job for job in card.jobs_of(tmp_path, tmp_path, False) if not job.command.startswith("-m")]
    assert len(jobs) > 10
    for job in jobs:
        for command in (job.command, f"{job.command} {job.tiny}"):
            script, *words = shlex.split(command)
            monkeypatch.setattr(sys, "argv", [script, *words])
            with pytest.raises(Parsed):
                importlib.import_module(Path(script).stem).main()


def test_what_a_job_needs_must_be_there(card: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_DATA", str(tmp_path))
    jobs = {job.name: job for job in card.jobs_of(tmp_path, None, False)}
    assert card.run(jobs["time_to"], tmp_path, False, False) == (
        0.0, "left out: needs --model FOLDER, GSM8K in TEAMTR_DATA",
    )  # fmt: skip
    assert card.run(jobs["ragged"], tmp_path, False, False) == (0.0, "left out: needs a run of time_to")
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    (tmp_path / "gsm8k").mkdir()
    jobs = {job.name: job for job in card.jobs_of(tmp_path, tmp_path, False)}
    assert card.run(jobs["time_to_trl"], tmp_path, False, False) == (0.0, "left out: needs TRL, its datasets")


def test_jobs_take_less_than_their_limits_and_what_the_docstring_says(card: ModuleType, tmp_path: Path) -> None:
    jobs = {job.name: job for job in card.jobs_of(tmp_path, None, False)}
    for job in jobs.values():
        assert job.takes_s < job.limit_s < 600, "one command may take ten minutes"
    first, whole = ([*jobs.values()][:4], [*jobs.values()])
    told = [sum(job.takes_s for job in some) + card.PRELOADING_S for some in (first, whole)]
    assert all(f"{seconds:,.0f} s" in card.__doc__ for seconds in told), told


def test_time_to_begins_with_the_team_of_the_results_and_without_runs(card: ModuleType, tmp_path: Path) -> None:
    team, runs, data = tmp_path / "team.yaml", tmp_path / "time_to", tmp_path / "gsm8k"
    for folder in (runs, data):
        folder.mkdir()
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text("")
    card.begin_time_to(team, runs, tmp_path / "QWEN", data, rehearse=False)
    assert not runs.exists()
    made = load_team_file(team)
    assert [agent.name for agent in made.team.agents] == ["solver", "checker", "finaliser"]
    assert {agent.model for agent in made.team.agents} == {str(tmp_path / "QWEN")}
    plan = made.plan
    assert (plan.preset, plan.problems, plan.group_size, plan.stages, plan.radius_nats_per_message) == (
        "teamtr", 16, 8, 10, 0.1,
    )  # fmt: skip
    assert made.diagnostics.every == 0
    assert str(data / "train.jsonl") in team.read_text()
    card.begin_time_to(team, runs, tmp_path / "QWEN", data, rehearse=True)
    assert load_team_file(team).plan.stages == 1


def test_growth_goes_on_with_the_points_of_the_documents(card: ModuleType, tmp_path: Path) -> None:
    jobs = {job.name: job for job in card.jobs_of(tmp_path, None, False)}
    jobs["growth"].begin()
    points = tmp_path / "growth.jsonl"
    assert points.read_text() == (ROOT / "docs" / "growth-card.jsonl").read_text()
    points.write_text("more\n")
    jobs["growth_length"].begin()
    assert points.read_text() == "more\n", "what was measured since stays"


@pytest.mark.parametrize("there", [(), ("trl",), ("datasets",), ("trl", "datasets")])
def test_trl_is_a_rival_of_the_stage_where_it_is_installed_with_its_datasets(card, tmp_path, monkeypatch, there):
    monkeypatch.setattr(card, "installed", lambda package: Path(__file__) if package in there else None)
    [stage] = [job for job in card.jobs_of(tmp_path, None, False) if job.name == "stage"]
    assert ("--rivals generate-static,trl " in stage.command) == (len(there) == 2)
    assert "--rivals generate-static" in stage.command
