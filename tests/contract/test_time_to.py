"""bench/time_to.py: what somebody waited for, computed exactly from made logs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from teamtr.config import loads
from teamtr.evaluation.metrics import alike_interval, bootstrap_interval
from teamtr.store.log import Log

ROOT = Path(__file__).parents[2]
BEGAN = 1000.0


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("time_to")


def start(at: float = 9.0) -> dict[str, Any]:
    seconds = {"load": 4.0, "test": 0.5, "floors": 2.0, "rehearse": 1.0}
    return {"kind": "start", "time": BEGAN + at, "seconds": seconds}


def update(number: int, at: float, tokens: int) -> dict[str, Any]:
    return {"kind": "update", "update": number, "time": BEGAN + at, "sampled_tokens_total": tokens, "success": 1.0}


def evaluation(updates: int, seconds: float, success_P: Sequence[float], ids: str = "abcd") -> dict[str, Any]:
    return {
        "kind": "eval", "updates": updates, "seconds": seconds, "tokens": 1000, "samples": 4,
        "avg_at_k": float(np.mean(success_P)), "success_P": list(success_P), "problem_ids": list(ids),
    }  # fmt: skip


def run() -> list[dict[str, Any]]:
    """Two agents: evaluated for 50 s before training, for 7 s after two updates and for 5 s after four."""
    return [
        start(),
        evaluation(0, 50.0, [0.0, 0.25, 0.5, 0.75]),
        update(1, 70.0, 300),
        update(2, 80.0, 300),
        {"kind": "stage", "updates": 2},
        evaluation(2, 7.0, [0.0, 0.25, 0.5, 1.0]),
        update(3, 97.0, 700),
        update(4, 107.0, 900),
        {"kind": "stage", "updates": 4},
        evaluation(4, 5.0, [0.25, 0.25, 0.75, 1.0]),
        update(5, 122.0, 1200),
    ]


def waited(bench: ModuleType, records: Sequence[dict[str, Any]], points: float = 10.0, limit: float = 600.0):
    return bench.Wait.of(records, bench.FirstUpdate(12.0, {}), None, points, limit)


def test_the_seconds_to_the_first_update_are_those_of_the_clock_and_all_are_accounted_for(bench):
    found = bench.FirstUpdate.of([start(), update(1, 12.0, 5), update(2, 90.0, 5)], BEGAN)
    assert found.seconds == 12.0
    assert found.parts == {
        "other": 1.5, "load": 4.0, "test": 0.5, "floors": 2.0, "rehearse": 1.0, "batch and update": 3.0,
    }  # fmt: skip
    assert bench.FirstUpdate.of([start()], BEGAN) is None
    assert bench.FirstUpdate.of([], BEGAN) is None


def test_the_clock_goes_on_from_the_first_update_and_stands_still_while_the_team_is_evaluated(bench):
    found = bench.Course.of(run(), first_s=12.0, limit=600.0)
    # The evaluation before training lies before the first update, however long it and its warming up took.
    assert [look.seconds for look in found.looks] == [0.0, 12.0 + 10.0, 12.0 + 37.0 - 7.0]
    assert found.seconds == 12.0 + 52.0 - 7.0 - 5.0
    assert [look.updates for look in found.looks] == [0, 2, 4]


def test_who_is_evaluated_as_before_training_after_the_first_update_has_waited_for_nothing_then(bench):
    records = [start(), update(1, 12.0, 300), evaluation(0, 30.0, [0.0] * 4), update(2, 50.0, 500),
               evaluation(2, 6.0, [1.0] * 4), update(3, 66.0, 700)]  # fmt: skip
    found = bench.Course.of(records, first_s=12.0, limit=600.0)
    assert found.looks == (bench.Look(0, 0.0, 0, (0.0,) * 4), bench.Look(2, 20.0, 500, (1.0,) * 4))
    assert found.seconds == 30.0


def test_an_evaluation_counts_at_the_update_that_it_is_about_with_the_tokens_of_training_alone(bench):
    found = waited(bench, run())
    assert (found.seconds, found.tokens) == (42.0, 900)
    assert (found.evaluating_s, found.evaluating_tokens) == (62.0, 3000)
    assert found.looks[1] == bench.Look(2, 22.0, 300, (0.0, 0.25, 0.5, 1.0))


def test_better_is_the_first_evaluation_that_is_above_the_one_before_training_by_so_many_points(bench):
    found = waited(bench, run())
    assert (found.before, found.best, found.updates, found.problems) == (0.375, 0.5625, 4, 4)
    assert found.gain.value == 0.1875
    exactly = waited(bench, run(), points=18.75)
    assert exactly.seconds == 42.0
    first = waited(bench, run(), points=6.25)
    assert (first.seconds, first.tokens, first.gain.value) == (22.0, 300, 0.0625)


def test_success_of_the_batches_that_are_trained_on_does_not_count(bench):
    worst = [{**record, "success": 0.0} if record["kind"] == "update" else record for record in run()]
    assert waited(bench, worst) == waited(bench, run())


@pytest.mark.parametrize(("points", "limit"), [(18.76, 600.0), (10.0, 41.9)], ids=["never", "after the limit"])
def test_who_is_not_better_within_the_limit_has_no_seconds_and_no_tokens(bench, points, limit):
    found = waited(bench, run(), points, limit)
    assert (found.seconds, found.tokens) == (None, None)
    last = found.looks[-1]
    assert found.gain.value == pytest.approx(last.success - 0.375)
    assert found.updates == last.updates == (4 if limit == 600.0 else 2)
    assert found.best == last.success


def test_a_team_that_was_only_evaluated_before_training_has_no_gain(bench):
    found = waited(bench, run()[:3], points=0.0)
    assert (found.before, found.gain, found.seconds, found.best) == (0.375, None, None, 0.375)
    assert waited(bench, run()[:1]).before is None


def test_the_gain_is_paired_by_problem(bench):
    """Problems differ far more than the team changed: an interval that forgets which is which would hold 0."""
    before_P = np.tile([0.0, 0.25, 0.5, 0.75], 25)
    steps_P = np.tile([0.0, 0.25, 0.25, 0.0, 0.25], 20)
    records = [evaluation(0, 1.0, before_P), update(1, 70.0, 300), evaluation(1, 1.0, before_P + steps_P)]
    gain = waited(bench, records).gain
    assert gain.value == pytest.approx(0.15)
    deviation = steps_P.std() / 10
    assert gain.interval == pytest.approx((0.15 - 1.96 * deviation, 0.15 + 1.96 * deviation), abs=0.01)
    alone = bootstrap_interval(before_P, rng=np.random.default_rng(0))
    assert alone.high - alone.low > 2 * (gain.interval.high - gain.interval.low)
    every = [evaluation(0, 1.0, before_P), update(1, 70.0, 300), evaluation(1, 1.0, before_P + 0.25)]
    assert waited(bench, every).gain.interval == alike_interval(0.25, 100, least=-1.0)


def test_a_log_that_is_being_written_counts_up_to_its_last_whole_line(bench, tmp_path: Path):
    whole = Log(tmp_path / "whole.jsonl")
    for record in run()[:-1]:
        whole.append(record)
    data = whole.path.read_bytes()
    torn = Log(tmp_path / "log.jsonl", writable=False)
    last = data[:-1].rindex(b"\n") + 1
    for size in (last, last + 1, (last + len(data)) // 2, len(data) - 1):
        torn.path.write_bytes(data[:size])
        found = waited(bench, torn.read())
        assert (found.seconds, found.updates) == (None, 2), size
    torn.path.write_bytes(data)
    assert waited(bench, torn.read()).seconds == 42.0


def test_methods_are_evaluated_on_the_same_problems_as_often(bench):
    bench.require_same_problems({"auto": run(), "teamtr": run()[:2], "nothing": []})
    others = [evaluation(0, 1.0, [0.0, 0.0, 0.0, 0.0], ids="abce")]
    with pytest.raises(RuntimeError, match="teamtr was evaluated on other problems than auto"):
        bench.require_same_problems({"auto": run(), "teamtr": others})
    more = [{**record, "samples": 8} if record["kind"] == "eval" else record for record in run()]
    with pytest.raises(RuntimeError, match=r"teamtr .* number of answers"):
        bench.require_same_problems({"auto": run(), "teamtr": more})


# -- running a method ---------------------------------------------------------------------------------------------


def saying(folder: Path, *lines: str, then: str) -> list[str]:
    """A command that logs these lines, and then does something else."""
    text = "".join(line + "\n" for line in lines)
    script = f"import pathlib, sys, time; f = pathlib.Path({str(folder)!r}); f.mkdir(); "
    return [sys.executable, "-S", "-c", script + f"(f / 'log.jsonl').write_text({text!r}); {then}"]


def test_a_run_is_ended_when_there_is_enough_in_its_log_or_nothing_new_for_too_long(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LOOK_EVERY_S", 0.01)
    folder, asleep = tmp_path / "auto", "time.sleep(600)"
    before = time.time()
    command = saying(folder, '{"kind":"start"}', '{"kind":"update"}', then=asleep)
    began, found = bench.watch(command, folder, 600.0, {}, lambda records, _: len(records) > 1)
    assert [record["kind"] for record in found] == ["start", "update"]
    assert before <= began <= time.time()
    silent = tmp_path / "silent"
    _, found = bench.watch(saying(silent, '{"kind":"start"}', then=asleep), silent, 0.05, {}, lambda *_: False)
    assert len(found) <= 1
    over = tmp_path / "over"
    _, found = bench.watch(saying(over, '{"kind":"start"}', then="sys.exit(0)"), over, 600.0, {}, lambda *_: False)
    assert len(found) == 1


ENDED = """
import sys
import time_to

child = "import os, time; open({pid!r}, 'x').write(str(os.getpid()) + '.'); time.sleep(600)"
command = [sys.executable, "-c", child]
time_to.measure = lambda method, name, a: time_to.watch(command, a.out / name, 600, None, lambda *_: False)
sys.argv = ["time_to.py", "team.yaml", "--plans", "teamtr", "--out", {out!r}]
time_to.main()
"""


@pytest.mark.long
def test_the_run_that_is_watched_ends_with_whoever_watches_it(tmp_path):
    """Else it goes on using the card beside the next measurement."""
    pid = tmp_path / "pid"
    script = ENDED.format(pid=str(pid), out=str(tmp_path / "out"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])}
    watching = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        while not (pid.exists() and pid.read_text().endswith(".")):
            assert watching.poll() is None
            time.sleep(0.05)
        watched = psutil.Process(int(pid.read_text()[:-1]))
        watching.terminate()
        assert watching.wait() == 128 + signal.SIGTERM
        assert not watched.is_running()
    finally:
        watching.kill()


def test_what_a_run_has_logged_is_told_while_it_goes_on(bench, capsys):
    """One that is cut off has not been for nothing."""
    asked = []
    enough = bench.telling("auto", lambda records, began: asked.append((len(records), began)) or len(records) > 3)
    assert not enough(run()[:2], BEGAN)
    assert not enough(run()[:2], BEGAN)
    assert enough(run()[:5], BEGAN)
    assert asked == [(2, BEGAN), (2, BEGAN), (5, BEGAN)]
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("auto, start {'seconds': {'load': 4.0,")
    assert others == [
        "auto, eval {'updates': 0, 'seconds': 50.0, 'avg_at_k': 0.375}",
        "auto, update {'update': 1, 's after the command': 70.0}",
        "auto, update {'update': 2, 's after the command': 80.0}",
    ]


def test_one_run_tells_what_trl_takes_until_its_first_update_and_until_it_is_better(bench, tmp_path, monkeypatch):
    records = [start(), update(1, 12.0, 300), evaluation(0, 30.0, [0.0] * 4), update(2, 50.0, 500),
               evaluation(2, 6.0, [1.0] * 4)]  # fmt: skip
    asked = []

    def watch(command, folder, limit, environment, enough):
        asked.append((folder.name, "--as-trl" in command, "eval.every=2" in command, command[-4:-2]))
        done = [enough(records[:n], BEGAN) for n in range(6)]
        assert done == [False] * 5 + [True]
        return BEGAN, records

    monkeypatch.setattr(bench, "watch", watch)
    a = SimpleNamespace(team="team.yaml", settings=[], problems=4, samples=8, every=2, points=10.0, limit=30.0,
                        cold=False, out=tmp_path, trl_micro_batch=8, trl_tokens=256)  # fmt: skip
    found, _ = bench.measure(bench.TRL, "trl", a)
    (asked_once,) = asked
    assert asked_once == ("trl", True, True, ["--trl-tokens", "256"])
    assert (found.first.seconds, found.before, found.seconds, found.tokens) == (12.0, 0.0, 20.0, 500)
    records[1:] = []
    monkeypatch.setattr(bench, "watch", lambda *_: (BEGAN, records))
    assert bench.measure(bench.TRL, "trl", a)[0] == bench.Wait(None, None)


def test_a_run_that_fails_is_no_measurement(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LOOK_EVERY_S", 0.01)
    command = saying(tmp_path / "auto", '{"kind":"update"}', then="sys.exit('no such model')")
    with pytest.raises(RuntimeError, match=r"ended with 1; see .*auto\.txt"):
        bench.watch(command, tmp_path / "auto", 600.0, {}, lambda *_: False)
    assert (tmp_path / "auto.txt").read_text() == "no such model\n"


def test_a_method_is_run_cold_and_warm_to_its_first_update_and_then_until_it_is_better(bench, tmp_path, monkeypatch):
    asked = []

    def watch(command, folder, limit, environment, enough):
        asked.append(SimpleNamespace(command=command, name=folder.name, environment=environment, enough=enough))
        return BEGAN, run() if folder.name == "auto" else [start(), update(1, 12.0, 5)]

    monkeypatch.setattr(bench, "watch", watch)
    options = {
        "team": "team.yaml",
        "settings": ["plan.stages=3"],
        "problems": 4,
        "samples": 8,
        "every": 2,
        "points": 10.0,
    }
    a = SimpleNamespace(**options, limit=30.0, cold=True, out=tmp_path, trl_micro_batch=8, trl_tokens=None)
    found, records = bench.measure("auto", "auto", a)
    assert (found.first.seconds, found.cold.seconds, records) == (12.0, 12.0, run())
    assert [each.name for each in asked] == ["auto-cold", "auto-first", "auto"]
    for each, every in zip(asked, (0, 0, 2), strict=True):
        settings = ["plan.stages=3", f"eval.every={every}", "eval.problems=4", "eval.samples=8", "eval.patience=null"]
        assert each.command[3:] == [
            "train",
            "team.yaml",
            *settings,
            "plan.preset=auto",
            "--out",
            str(tmp_path / each.name),
        ]
        assert {str(tmp_path / "auto-caches" / name.lower()) for name in bench.CACHES} <= {*each.environment.values()}
    first, until_better = asked[1].enough, asked[2].enough
    assert not first([start()], BEGAN)
    assert first([start(), update(1, 12.0, 5)], BEGAN)
    assert not until_better(run()[:6], BEGAN)
    assert until_better(run()[:7], BEGAN), "22 s of training are within the limit, 32 are not"

    asked.clear()
    late, records = bench.measure("auto", "auto", SimpleNamespace(**{**vars(a), "limit": 11.0, "cold": False}))
    assert [each.name for each in asked] == ["auto-first"]
    assert (late.first.seconds, late.cold, late.before, records) == (12.0, None, None, [])
    assert not {*bench.CACHES} & {name for name, value in asked[0].environment.items() if str(tmp_path) in value}


# -- one model alone ----------------------------------------------------------------------------------------------


class Words:
    """A tokenizer of digits, with 2 for the end."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(message["content"] for message in messages)

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[int(digit) for digit in text] for text in texts]}

    def batch_decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["".join(str(token) for token in row if token != 2) for row in rows]


def test_one_model_is_asked_and_graded_as_often_as_the_team_and_its_tokens_are_counted(bench):
    class Digits:
        def grade(self, episodes: Any) -> list[Any]:
            return [SimpleNamespace(right=text == problem.answer) for problem, text, _ in episodes]

    asked: list[list[int]] = []

    def say(prompts: list[Any]) -> list[list[int]]:
        """The last digit of the prompt and the end; every third time 8, without an end."""
        asked.extend(prompt.tolist() for prompt in prompts)
        return [[8, 8, 8] if k % 3 == 2 else [int(prompt[-1]), 2] for k, prompt in enumerate(prompts)]

    problems = [SimpleNamespace(id=f"p{k}", prompt="1" * k + str(k), answer=str(k)) for k in (3, 4, 5)]
    alone = bench.Alone(Digits(), "70", Words())
    found = alone.evaluated(say, problems, samples=2)
    assert asked == [[7, 0, *[1] * k, k] for k in (3, 3, 4, 4, 5, 5)]
    assert found["problem_ids"] == ["p3", "p4", "p5"]
    assert found["success_P"] == [1.0, 0.5, 0.5]
    assert found["avg_at_k"] == pytest.approx(2 / 3)
    assert found["tokens"] == 4 * 2 + 2 * 3
    assert (found["kind"], found["samples"]) == ("eval", 2)
    assert alone.asked(problems[0])[0] == {"role": "system", "content": "70"}
    assert [m["role"] for m in bench.Alone(Digits(), "", Words()).asked(problems[0])] == ["user"]


def test_rows_for_trl_have_a_name_without_a_hash(bench, monkeypatch):
    """A hash pickles pyarrow's source where it lies in a folder of another name than usual, and fails."""
    fingerprint = pytest.importorskip("datasets.fingerprint")
    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", lambda _: pytest.fail("hashed"))
    rows = importlib.import_module("trl_step").dataset_of(
        {"prompt": [[{"role": "user", "content": "1"}]], "number": [5]}
    )
    assert fingerprint is not None
    assert rows[0] == {"prompt": [{"role": "user", "content": "1"}], "number": 5}


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_of_a_tiny_team_is_measured(bench, tmp_path, monkeypatch, capsys):
    """The whole of it, for real: better by -100 points at the first evaluation after training began."""
    team, out = ROOT / "src" / "teamtr" / "recipes" / "roles.yaml", tmp_path / "out"
    options = ["--plans", "auto", "--points", "-100", "--problems", "8", "--out", str(out), "--json"]
    monkeypatch.setattr(sys, "argv", ["time_to.py", str(team), "plan.problems=4", "plan.group_size=4", *options])
    bench.main()
    found = json.loads(capsys.readouterr().out)["results"]["auto"]
    assert found["first"]["seconds"] == pytest.approx(sum(found["first"]["parts"].values()))
    assert [look["updates"] for look in found["looks"]] == [0, 5]
    assert found["seconds"] > found["first"]["seconds"]
    assert found["tokens"] == found["looks"][1]["tokens"] > 0
    assert found["problems"] == 8
    first = Log(out / "auto-first" / "log.jsonl", writable=False).read()
    assert not [record for record in first if record["kind"] == "eval"]


def test_plans_are_reported_where_trl_fails(bench, tmp_path, monkeypatch, capsys):
    def measure(method, name, a):
        if method == bench.TRL:
            raise RuntimeError("no room")
        return waited(bench, run()), run()

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)
    words = ["time_to.py", "team.yaml", "--plans", "auto", "--trl", "--json", "--out"]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="one model: not measured: no room"):
        bench.main()
    assert json.loads(capsys.readouterr().out)["results"]["auto"]["seconds"] == 42.0
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "other"), "--plans", ""])
    with pytest.raises(RuntimeError, match="no room"):
        bench.main()
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "third")])
    with pytest.raises(SystemExit):
        bench.main()
    assert "trl is not installed" in capsys.readouterr().err


def test_what_the_benchmark_sets_itself_is_not_taken_as_a_setting(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["time_to.py", "team.yaml", "eval.problems=8", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        bench.main()
    assert "eval.problems=8: this benchmark evaluates by its own options" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_model_is_given_as_many_updates_and_tokens_as_the_team_by_hand(bench):
    """5 stages of two agents that are trained; three that say 7, 8 and 9 tokens in each of two rounds."""
    text = """
name: beside
task: {name: sums}
team:
  model: tiny
  router: {rounds: 2}
  agents: [{name: a, max_tokens: 7}, {name: b, max_tokens: 8, frozen: true}, {name: c, max_tokens: 9}]
plan: {stages: 5, problems: 3, group_size: 4}
"""
    team_file = loads(text, "beside")
    assert bench.Sizes.of(team_file, None) == bench.Sizes(updates=10, episodes=12, tokens=48)
    assert bench.Sizes.of(team_file, 11).tokens == 11
    unknown = SimpleNamespace(sized_plan=team_file.sized_plan, team=SimpleNamespace(agents=(), rounds=None))
    assert bench.Sizes.of(unknown, 11).tokens == 11
    with pytest.raises(SystemExit, match="give --trl-tokens"):
        bench.Sizes.of(unknown, None)


def test_a_stage_of_trl_s_steps_plays_every_agent_before_every_update(bench):
    step = {"generate s": 2.0, "train s": 5.0, "sampled tokens": 100, "peak GB": 7.0}
    found = importlib.import_module("trl_step").as_stage(step, agents=3, epochs=2)
    assert found == {"sample": 18.0, "train": 30.0, "whole": 48.0, "sampled tokens": 900, "peak GB": 7.0}
