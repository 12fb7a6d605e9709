"""The map of staleness: its arithmetic by hand, its runs on tiny teams, and what is kept of a map that was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from called import invoke
from teamtr.cli.staleness import tables
from teamtr.config import loads, recipe_text
from teamtr.errors import TeamTRError, UserError
from teamtr.lab import figures, staleness_runs
from teamtr.lab.roles import roles
from teamtr.lab.staleness import compare
from teamtr.lab.staleness_cells import MAP, PLANS, QUICK, QUICK_PLANS, Cell, Point, Run, chosen, chosen_plans
from teamtr.lab.staleness_runs import Job, kept_runs, make_runs, train_run
from teamtr.session.demo import demo_file
from teamtr.session.processes import Died, beside
from work_beside import doing, in_process

TINY = Cell("roles", 2, 0.5, 1, problems=2)
CODE = Cell("code-exchange", 3, 0.5, 1, sees="everything")


# -- cells -----------------------------------------------------------------------------------------------------------


def test_cells_have_names_of_their_own_and_can_be_chosen() -> None:
    names = [cell.name for cell in MAP]
    assert len(set(names)) == len(names) == 13
    assert {"roles-8-0.1", "roles-5-0.1-everything", "roles-5-0.1-2-rounds", "code-exchange-3-0.5-length-2"} <= {*names}
    assert chosen(["roles-8-0.1", "roles-3-0.02"], MAP) == (MAP[0], MAP[5])
    assert chosen([], MAP) == MAP
    assert chosen_plans(["auto", "teamtr"]) == ("teamtr", "auto")


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UserError, match=r"no cell 'roles-8-1' \(did you mean roles-8-0.1\?\); it has roles-3-0.02, "):
        chosen(["roles-8-1"], MAP)
    said = invoke("lab", "staleness", "--cells", "roles-8-1", code=2).stderr
    assert "did you mean roles-8-0.1?" in said
    assert "code-exchange-3-0.5" in said
    said = invoke("lab", "staleness", "--plans", "atuo", code=2).stderr
    assert "no plan 'atuo' (did you mean auto?); it has teamtr, naive_sequential, reweighted, auto, partial" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length": 2}, "roles is one symbol"),
        ({"game": "code-exchange", "sees": "everything"}, "has 3 agents, not 5"),
        ({"game": "code-exchange", "agents": 3}, "must hear the others"),
        ({"agents": 1}, "at least two agents"),
        ({"radius": 0.0}, "a positive radius"),
        ({"rounds": 0}, "one round"),
    ],
)
def test_impossible_cells_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(Cell("roles", 5, 0.1, 4), **wrong)


def test_a_cell_is_what_its_team_file_says() -> None:
    """Every setting of a cell arrives, and the recipes stand for what is not asked for."""
    for cell in MAP:
        file = Job(cell, "auto", 3).team_file
        assert (len(file.team.agents), file.team.rounds, file.seed) == (cell.agents, cell.rounds, 3)
        assert (file.plan.stages, file.plan.plan().radii.nats) == (cell.stages, cell.radius)
        assert file.plan.plan().resample.sampling_cost == staleness_runs.SAMPLING_COST
        assert all(agent.sees == cell.sees for agent in file.team.agents)
        assert (file.eval.every == 0) == cell.is_exact
    long = Job(MAP[-1], "teamtr", 0).team_file
    assert long.task.half_length == 2  # type: ignore[union-attr]
    assert [agent.max_tokens for agent in long.team.agents] == [3, 3, 5]
    plain = demo_file("code", agents=3, seed=0)
    assert plain == loads(recipe_text("code-exchange"), "code-exchange")
    assert demo_file("roles", agents=5, seed=0) == loads(recipe_text("roles"), "roles")


def test_a_run_is_known_by_all_that_decides_it() -> None:
    job = Job(TINY, "auto", 0)
    others = [replace(job, seed=1), replace(job, plan="partial"), Job(replace(TINY, stages=2), "auto", 0)]
    assert len({job.settings, *(other.settings for other in others)}) == 4
    assert job.settings == Job(TINY, "auto", 0).settings


# -- the comparison, by hand -----------------------------------------------------------------------------------------


def made_up(plan: str, seed: int, *points: tuple[int, int, float, float], **more: Any) -> Run:
    return Run(CODE.name, plan, seed, f"{plan}{seed}", tuple(Point(*point) for point in points), **more)


RUNS = [
    # fresh: 100 tokens and 2 s an update
    made_up("teamtr", 0, (0, 0, 0.0, 0.1), (1, 100, 2.0, 0.5), (2, 200, 4.0, 0.9), samplings=2),
    made_up("teamtr", 1, (0, 0, 0.0, 0.1), (1, 100, 2.0, 0.5), (2, 200, 4.0, 1.0), samplings=2),
    # stale: one batch for both updates, 3 s an update
    made_up("naive_sequential", 0, (0, 0, 0.0, 0.1), (1, 100, 3.0, 0.4), (2, 100, 6.0, 0.6), samplings=1, share=0.8),
    made_up("naive_sequential", 1, (0, 0, 0.0, 0.1), (1, 100, 3.0, 0.4), (2, 100, 6.0, 0.7), samplings=1, share=0.6),
    # auto: half as much again
    made_up("auto", 0, (0, 0, 0.0, 0.1), (1, 100, 2.0, 0.4), (2, 150, 4.0, 0.8), samplings=1, redraws=1, kept=0.5),
    made_up("auto", 1, (0, 0, 0.0, 0.1), (1, 100, 2.0, 0.4), (2, 150, 4.0, 0.9), samplings=1, redraws=1, bias=0.1),
]
T1 = 12.706204736  # Student's t, one degree of freedom, 97.5 %


def test_plans_at_equal_updates_tokens_and_seconds() -> None:
    (cell,) = compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], RUNS).cells
    end, tokens, seconds = (cell.at_equal[cost] for cost in ("updates", "tokens", "seconds"))
    # the end of the run; two seeds 0.1 apart have a half width of t * 0.1 / 2
    assert {plan: mean.mean for plan, mean in end.success.items()} == pytest.approx(
        {"teamtr": 0.95, "naive_sequential": 0.65, "auto": 0.85}
    )
    fresh = end.success["teamtr"]
    assert (fresh.low, fresh.high) == pytest.approx((0.95 - 0.05 * T1, 0.95 + 0.05 * T1))
    # 100 tokens, which stale spent in all: its last team, not the first of the same cost
    assert tokens.budget == 100.0
    assert {plan: mean.mean for plan, mean in tokens.success.items()} == pytest.approx(
        {"teamtr": 0.5, "naive_sequential": 0.65, "auto": 0.4}
    )
    # 4 s, which fresh and auto took: stale was a third of the way through its second update
    assert seconds.budget == 4.0
    assert {plan: mean.mean for plan, mean in seconds.success.items()} == pytest.approx(
        {"teamtr": 0.95, "naive_sequential": (0.4 + 0.2 / 3 + 0.4 + 0.3 / 3) / 2, "auto": 0.85}
    )
    costs = cell.plans["naive_sequential"]
    assert (costs.tokens, costs.seconds, costs.samplings, costs.redraws) == (100.0, 6.0, 1.0, 0.0)
    assert costs.share == pytest.approx(0.7)
    assert (costs.kept, costs.bias) == (None, None)
    assert (cell.plans["auto"].kept, cell.plans["auto"].bias, cell.plans["auto"].redraws) == (0.5, 0.1, 1.0)


def test_the_budget_is_each_seeds_own() -> None:
    longer = replace(RUNS[3], points=(*RUNS[3].points, Point(3, 150, 9.0, 0.75)))
    (cell,) = compare([CODE], ["teamtr", "naive_sequential"], [0, 1], [*RUNS[:3], longer]).cells
    assert cell.at_equal["tokens"].budget == 125.0
    assert cell.at_equal["tokens"].success["teamtr"].mean == pytest.approx((0.5 + 0.75) / 2)


def test_verdicts_are_of_differences_paired_by_seed() -> None:
    """Fresh is 0.3 better in both seeds: certain, though the seeds themselves differ by more than the intervals."""
    (cell,) = compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], RUNS).cells
    end, tokens = cell.at_equal["updates"], cell.at_equal["tokens"]
    assert end.fresh_minus_stale is not None
    assert (end.fresh_minus_stale.low, end.fresh_minus_stale.high) == pytest.approx((0.3, 0.3))
    assert end.success["naive_sequential"].high > end.success["teamtr"].low
    assert end.difference == "fresh"
    assert end.auto_minus_better is not None
    assert end.auto_minus_better.mean == pytest.approx(-0.1)
    assert end.auto == "below"
    # at equal tokens stale is better by 0.1 and 0.2: an interval of 0.15 +- 0.05 t, which holds 0
    assert tokens.fresh_minus_stale is not None
    assert tokens.fresh_minus_stale.high == pytest.approx(-0.15 + 0.05 * T1)
    assert (tokens.difference, tokens.auto) == ("none", "level")
    # 0.3 and 0.1 better at the end, or 0.1 ahead and level: the means say yes, the intervals do not
    uneven = replace(RUNS[3], points=(*RUNS[3].points[:-1], Point(2, 100, 6.0, 0.9)))
    leading = replace(RUNS[4], points=(*RUNS[4].points[:-1], Point(2, 150, 4.0, 1.0)))
    level = replace(RUNS[5], points=RUNS[1].points)
    (cell,) = compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], [*RUNS[:3], uneven, leading, level]).cells
    end = cell.at_equal["updates"]
    assert end.fresh_minus_stale is not None
    assert end.auto_minus_better is not None
    assert (end.fresh_minus_stale.mean, end.auto_minus_better.mean) == pytest.approx((0.2, 0.05))
    assert (end.difference, end.auto) == ("none", "level")
    better = [*RUNS[:4], replace(RUNS[4], points=RUNS[0].points), replace(RUNS[5], points=RUNS[1].points)]
    (cell,) = compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], better).cells
    assert cell.at_equal["updates"].auto == "level"
    swapped = [replace(run, plan={"teamtr": "auto", "auto": "teamtr"}.get(run.plan, run.plan)) for run in RUNS]
    (cell,) = compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], swapped).cells
    assert (cell.at_equal["updates"].difference, cell.at_equal["updates"].auto) == ("fresh", "ahead")
    turned = {"teamtr": "naive_sequential", "naive_sequential": "auto", "auto": "teamtr"}
    backwards = [replace(run, plan=turned[run.plan]) for run in RUNS]
    (cell,) = compare([CODE], ["teamtr", "naive_sequential"], [0, 1], backwards).cells
    assert (cell.at_equal["updates"].difference, cell.at_equal["updates"].auto) == ("stale", None)
    (cell,) = compare([CODE], ["teamtr", "auto"], [0, 1], RUNS).cells
    assert (cell.at_equal["updates"].difference, cell.at_equal["updates"].auto) == (None, None)


def test_all_cells_together_by_seed() -> None:
    """In a second cell fresh and stale have changed places: over both no plan leads, and auto is 0.05 above each."""
    other = replace(CODE, stages=CODE.stages + 1, problems=CODE.problems + 1)
    changed = {"teamtr": "naive_sequential", "naive_sequential": "teamtr", "auto": "auto"}
    more = [replace(run, cell=other.name, plan=changed[run.plan]) for run in RUNS]
    report = compare([CODE, other], ["teamtr", "naive_sequential", "auto"], [0, 1], [*RUNS, *more])
    end = report.over_cells["updates"]
    assert {pair: mean.mean for pair, mean in end.items()} == pytest.approx(
        {"naive_sequential minus teamtr": 0.0, "auto minus teamtr": 0.05, "auto minus naive_sequential": 0.05}
    )
    assert (end["auto minus teamtr"].low, end["auto minus teamtr"].high) == pytest.approx((0.05, 0.05))
    # at equal tokens auto has 0.4 in both cells and seeds, fresh and stale 0.5 and 0.6 to 0.7
    assert report.over_cells["tokens"]["auto minus teamtr"].mean == pytest.approx(0.4 - (0.5 + 0.65) / 2)
    assert set(compare([CODE], ["teamtr", "auto"], [0, 1], RUNS).over_cells["updates"]) == {"auto minus teamtr"}


def test_one_seed_is_no_map() -> None:
    with pytest.raises(UserError, match="at least two seeds"):
        compare([CODE], ["teamtr"], [0], RUNS)


def test_cells_that_can_be_solved_have_the_exact_answer_beside_them() -> None:
    cell = Cell("roles", 3, 0.1, 4)
    runs = [replace(run, cell=cell.name) for run in RUNS]
    (found,) = compare([cell], ["teamtr", "naive_sequential"], [0, 1], runs).cells
    exact = roles((3,), seeds=64, stages=4, radius=0.1)
    assert found.exact_gradients == {"fresh": exact.curves["fresh"][0][3], "stale": exact.curves["stale"][0][3]}
    heard = replace(cell, sees="everything")
    (found,) = compare([heard], ["teamtr"], [0, 1], [replace(run, cell=heard.name) for run in RUNS]).cells
    assert found.exact_gradients is None


def test_the_tables_say_what_was_found() -> None:
    said = tables(compare([CODE], ["teamtr", "naive_sequential", "auto"], [0, 1], RUNS))
    assert "code-exchange-3-0.5  naive_sequential  0.650 [0.015, 1.285]" in said
    assert "fresh is better, auto below" in said
    assert "1 + 1 in part" in said


@pytest.mark.long
@pytest.mark.parametrize("cells", [-2, pytest.param(0, marks=pytest.mark.slow)], ids=["the last", "all"])
def test_the_figure_of_a_map(tmp_path: Path, cells: int) -> None:
    runs = [
        replace(run, cell=cell.name, plan=plan, seed=seed)
        for cell in MAP
        for plan, (one, two) in zip(PLANS, [(0, 1), (2, 3), (0, 1), (4, 5), (2, 3)], strict=True)
        for seed, run in ((0, RUNS[one]), (1, RUNS[two]))
    ]
    report = compare(MAP, PLANS, [0, 1], runs)
    part = replace(report, cells=report.cells[cells:])
    data = figures.draw_staleness(part, tmp_path / "map.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 10_000


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_map_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after two of four runs, with a line half written: the others are made, those two are not made again."""
    jobs = [Job(TINY, plan, seed) for plan in ("teamtr", "auto") for seed in (0, 1)]
    made: list[Job] = []

    def in_turn(work: Any, items: Any, workers: int) -> Any:
        for item in items:
            made.append(item)
            yield item, Run(item.cell.name, item.plan, item.seed, item.settings, RUNS[0].points)

    def stop(run: Run, left: int) -> None:
        if left == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(staleness_runs, "beside", in_turn)
    with pytest.raises(KeyboardInterrupt):
        make_runs(jobs, 1, tmp_path, stop)
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes() + b'{"cell": "roles-2')
    assert made == jobs[:2]
    told: list[tuple[int, int]] = []
    runs = make_runs(jobs, 1, tmp_path, lambda run, left: told.append((run.seed, left)))
    assert made == jobs
    assert told == [(0, 1), (1, 0)]
    assert [(run.plan, run.seed) for run in runs] == [("teamtr", 0), ("teamtr", 1), ("auto", 0), ("auto", 1)]
    assert len(file.read_text().splitlines()) == 4
    # other settings are other runs; a map of another machine may lie beside
    file.rename(tmp_path / "another-machine.jsonl")
    make_runs([*jobs, Job(replace(TINY, stages=2), "auto", 0)], 1, tmp_path)
    assert len(made) == 5
    assert len(kept_runs(tmp_path)) == 5


def test_lines_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"kind": "start"}\n')
    with pytest.raises(UserError, match=r"log.jsonl, line 1 is no run of this map"):
        kept_runs(tmp_path)


def update(number: int, tokens: int, *, exact: Any = None, action: str = "sample", **choice: Any) -> dict[str, Any]:
    rollouts = {"action": action, "share": None, "partly": None, **choice}
    counted = {"update": number, "sampled_tokens_total": tokens}
    return {"kind": "update", **counted, "exact_success": exact, "rollouts": rollouts}


def test_what_a_run_tells_is_read_off_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes a second between any two looks at it: each record costs one, and only updates count."""
    ticks = iter(range(100))
    monkeypatch.setattr(staleness_runs.time, "process_time", lambda: float(next(ticks)))
    bias = {"estimate": 0.1, "lower": 0.0, "upper": 0.2}
    exact = [
        {"kind": "start"},
        update(1, 100, exact=(0.2, 0.3)),
        update(2, 100, exact=(0.3, 0.5), action="reuse", share=0.9),
        {"kind": "stage"},
        update(3, 130, exact=(0.5, 0.4), action="redraw", share=0.4, partly={"kept": 0.7, "bias": bias}),
        update(4, 150, exact=(0.4, 0.6), action="redraw", share=0.2, partly={"kept": 0.5, "bias": None}),
    ]
    run = staleness_runs._told(Job(TINY, "partial", 7), exact)
    assert run.points == ((0, 0, 0, 0.2), (1, 100, 1, 0.3), (2, 100, 2, 0.5), (3, 130, 3, 0.4), (4, 150, 4, 0.6))
    assert (run.samplings, run.redraws, run.bias) == (1, 2, 0.1)
    assert (run.share, run.kept) == pytest.approx((0.5, 0.6))
    assert (run.cell, run.plan, run.seed) == (TINY.name, "partial", 7)
    played = [
        {"kind": "eval", "avg_at_k": 0.1},
        update(1, 100),
        update(2, 200),
        {"kind": "eval", "avg_at_k": 0.8},
        {"kind": "finished"},
    ]
    run = staleness_runs._told(Job(CODE, "teamtr", 0), played)
    assert run.points == ((0, 0, 0, 0.1), (2, 200, 2, 0.8))
    assert (run.share, run.kept, run.bias) == (None, None, None)
    assert Run.of_record(json.loads(json.dumps(run.as_record()))) == run


def without_seconds(run: Run) -> Run:
    return replace(run, points=tuple(point._replace(seconds=0.0) for point in run.points))


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_process_it_is_made_in() -> None:
    """Nor on what was made there before, and so on the number of workers."""
    jobs = [Job(TINY, "teamtr", 0), Job(TINY, "auto", 0)]
    made: dict[str, list[Run]] = {"teamtr": [], "auto": []}
    for _, run in beside(train_run, [*jobs, *jobs], 2):
        made[run.plan].append(run)
    for one, again in made.values():
        assert without_seconds(one) == without_seconds(again)
    fresh, auto = made["teamtr"][0], made["auto"][0]
    assert [point.updates for point in fresh.points] == [0, 1, 2]
    assert (fresh.samplings, auto.samplings) == (2, 1)
    assert fresh.points[-1].tokens > auto.points[-1].tokens > 0
    assert fresh.share is None
    assert auto.share is not None
    assert 0.0 < auto.share <= 1.0
    assert all(before.seconds < after.seconds for before, after in zip(fresh.points, fresh.points[1:], strict=False))


@pytest.mark.slow
def test_the_quick_map_from_the_command_line(tmp_path: Path) -> None:
    one = QUICK[0].name
    arguments = ("lab", "staleness", "--quick", "--cells", one, "--workers", 1, "--out", tmp_path / "map", "--json")
    result = invoke(*arguments, "--figure", tmp_path / "map.png")
    record = json.loads(result.stdout.splitlines()[-1])
    assert [cell["name"] for cell in record["cells"]] == [one]
    assert record["plans"] == list(QUICK_PLANS)
    for cell in record["cells"]:
        assert set(cell["at_equal"]) == {"updates", "tokens", "seconds"}
        assert 0.0 < cell["at_equal"]["updates"]["success"]["teamtr"]["mean"] < 1.0
        assert cell["plans"]["teamtr"]["tokens"] > cell["plans"]["naive_sequential"]["tokens"]
        assert cell["exact_gradients"]["fresh"] > cell["exact_gradients"]["stale"]
    assert "6/6" in result.stderr
    assert (tmp_path / "map.png").stat().st_size > 10_000
    again = invoke(*arguments)
    assert json.loads(again.stdout.splitlines()[-1]) == record
    assert "/6" not in again.stderr, "everything is there"


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_happens_in_a_worker_is_told_here() -> None:
    done = beside(doing, ["a", "bb", "ours", "ccc"], 1)
    assert [next(done), next(done)] == [("a", 1), ("bb", 2)]
    with pytest.raises(TeamTRError, match=r"^no such game$"):
        next(done)
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*ZeroDivisionError: theirs"):
        list(beside(doing, ["theirs"], 1))
    with pytest.raises(TeamTRError, match=r"ended by itself \(exit code -9"):
        list(beside(doing, ["killed"], 1))
    borne = dict(beside(doing, ["a", "killed", "bb"], 1, bear_deaths=True))
    assert isinstance(borne.pop("killed"), Died)
    assert borne == {"a": 1, "bb": 2}
    assert list(beside(doing, [], 2)) == []


@pytest.mark.slow
def test_work_on_a_card_has_a_process_each() -> None:
    processes = {process for _, process in beside(in_process, ["a", "bb", "ccc"], 1, bear_deaths=True, anew=True)}
    assert len(processes) == 3
    assert len({process for _, process in beside(in_process, ["a", "bb", "ccc"], 1)}) == 1


@pytest.mark.long
def test_an_interrupted_map_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C in the terminal: the parent leaves, and what it started has ended."""
    files = [str(tmp_path / name) for name in ("one", "two")]
    code = (
        "import signal\n"
        "from teamtr.session.processes import beside\n"
        "from work_beside import sleeping\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what a shell runs in the background
        f"if __name__ == '__main__': list(beside(sleeping, {files!r}, 2))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, str(script)], env=where, start_new_session=True, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("one", "two")):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=300)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert said.decode().strip().endswith("KeyboardInterrupt")
    for name in ("one", "two"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)
