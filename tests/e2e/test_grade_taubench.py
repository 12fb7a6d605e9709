"""``teamtr grade`` on stored dialogues of tau-bench, in the benchmark's own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from own_rows import DATA
from small_taubench import small, write_world
from teamtr.cli import app
from teamtr.tasks.benchmarks.taubench import Airline

GOLDEN = DATA / "taubench" / "airline" / "golden_trajectories_gpt-4o.json"


def grade(rows: Any, folder: Path, *more: object, name: str = "taubench:airline", code: int = 0) -> Any:
    """The rows that come out and what is told, or the message when it fails."""
    responses, out = folder / "stored.json", folder / "graded.jsonl"
    responses.write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    arguments = ["grade", name, "--responses", responses, "--out", out, *more, "--json"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code:
        assert not out.exists()
        assert not list(folder.glob(".tmp-*"))
        return " ".join(result.stderr.split())
    graded = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return graded, json.loads(result.stdout.strip().splitlines()[-1])


def stored(task_id: Any = 0, reply: str | None = None, **more: Any) -> dict[str, Any]:
    """A row as the benchmark writes it; with the right dialogue of the first task unless another is given."""
    task = small(Airline)
    return {"task_id": task_id, "reward": 0.5, "traj": json.loads(reply or task.gold(task.problems("test")[0])), **more}


def test_dialogues_are_graded_in_their_order_and_keep_their_fields(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    rows = [stored(0, trial=1), stored("1"), stored(0, "[]"), stored(1, '[{"role": "user", "content": "###STOP###"}]')]
    graded, told = grade(rows, tmp_path, "--data", world)
    assert [(row["verdict"], row["reward"]) for row in graded] == [
        ("right", 1.0),
        ("wrong", 0.0),
        ("unparsed", 0.0),
        ("right", 1.0),
    ]
    assert [row["traj"] for row in graded] == [row["traj"] for row in rows]
    assert graded[0]["trial"] == 1
    assert graded[0]["extracted"].startswith("reservations/OLD111 (")
    assert (told["rows"], told["accuracy"], told["mean_reward"]) == (4, 0.5, 0.5)


def test_several_trials_of_a_task_give_pass_at_k_and_pass_hat_k(tmp_path: Path) -> None:
    """By hand: task 0 is right in 2 of 4 trials, task 1 in 1 of 2; of pairs of trials that is 1/6 and 0 for both right,
    5/6 and 1 for one right."""
    world = write_world(tmp_path / "world", Airline)
    ended = '[{"role": "user", "content": "###STOP###"}]'
    rows = [stored(0), stored(0, "[]"), stored(0), stored(0, "[]"), stored(1, ended), stored(1)]
    _, told = grade(rows, tmp_path, "--data", world)
    assert told["problems"] == 2
    assert told["passed"].keys() == {"2", "4"}
    two, four = told["passed"]["2"], told["passed"]["4"]
    assert (two["problems"], four["problems"]) == (2, 1)
    assert two["pass_at_k"] == pytest.approx((5 / 6 + 1) / 2)
    assert two["pass_hat_k"] == pytest.approx((1 / 6 + 0) / 2)
    assert (four["pass_at_k"], four["pass_hat_k"]) == (1.0, 0.0)
    _, single = grade(rows[3:5], tmp_path, "--data", world)
    assert single["passed"] == {}, "nothing to say of one trial each"


def test_pass_hat_k_is_told_to_a_person(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    file = tmp_path / "stored.json"
    file.write_text(json.dumps([stored(0), stored(0), stored(1)]), encoding="utf-8")
    arguments = ["grade", "taubench:airline", "--responses", file, "--out", tmp_path / "o", "--data", world]
    told = CliRunner().invoke(app, list(map(str, arguments))).stdout
    assert "pass@2 100.0 %, pass^2 100.0 % (1 of 2 problems, those with 2 replies or more)" in " ".join(told.split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"traj": []}], "item 1: 'task_id' must be the number of a task, found None"),
        ([stored(True)], "item 1: 'task_id' must be the number of a task, found True"),
        ([stored(), {"task_id": 0}], "item 2: 'traj': a trajectory is a list of messages, found None"),
        ([{"task_id": 0, "traj": [{"role": "user"}, {}]}], "item 1: 'traj': message 2: must be an object with a role"),
        (
            [stored(), stored(7)],
            "item 2: no problem '7' in the problems of taubench:airline, where they are called 0",
        ),
        (
            [stored(0, info={"task": {"user_id": "eve_2"}})],
            "item 1: task 0 of the data is about ada_1, but this row is about 'eve_2': give the data",
        ),
        ([], "there is no row to grade"),
        ({"task_id": 0}, "a .json file must hold a list of objects"),
        (["x"], "item 1: a row must be a JSON object, found 'x'"),
        ("[{", "line 1, column 3: not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_nothing_written(rows: Any, message: str, tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    assert message in grade(rows, tmp_path, "--data", world, code=2)


@pytest.mark.long
def test_the_data_is_needed_once(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    assert "needs its data even to grade: give the folder" in grade([stored()], tmp_path, code=2)
    assert "give --data once" in grade([stored()], tmp_path, "--data", world, "--data", world, code=2)
    assert "there is no such data file" in grade([stored()], tmp_path, "--data", tmp_path / "nowhere", code=2)
    assert "has no option 'grader'" in grade([stored()], tmp_path, "--data", world, "--grader", "x", code=2)
    wrong = grade([stored()], tmp_path, "--data", world, name="taubench:retail", code=2)
    assert "db_orders.json: there is no such data file" in wrong
    cut = (world / "db_users.json").read_text(encoding="utf-8")[:-1]
    (world / "db_users.json").write_text(cut, encoding="utf-8")
    assert "db_users.json, line 1, column" in grade([stored()], tmp_path, "--data", world, code=2)


@pytest.mark.long
@pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no tau-bench data in {DATA}; set TEAMTR_DATA")
def test_the_golden_file_gets_its_own_rewards(tmp_path: Path) -> None:
    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))
    graded, told = grade(rows, tmp_path, "--data", GOLDEN.parent)
    assert [row["reward"] for row in graded] == [row["reward"] for row in rows]
    assert told["verdicts"]["right"] == sum(row["reward"] == 1 for row in rows)
