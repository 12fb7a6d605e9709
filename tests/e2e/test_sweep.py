"""``teamtr train --seeds`` and ``teamtr sweep``: several runs of one team file, side by side, resumed, in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from called import invoke, last_json
from teamtr.config import Setting, load_team_file, several
from teamtr.errors import UserError
from teamtr.ports import GB
from teamtr.store import RunFolder
from teamtr.sweep import cells, problems
from teamtr.sweep import room as rooms
from teamtr.sweep.room import Room, fitting
from teamtr.sweep.sweep import Sweep
from teamtr.sweep.variants import variants_of

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5}
team:
  {model: tabular, max_tokens: 3, agents: [{name: left, frozen: true}, {name: right, frozen: true}, {name: speaker}]}
plan: {stages: 1, problems: 2, group_size: 2, radius_nats_per_message: 0.05}
eval: {every: 1, samples: 2}
device: cpu
"""
RADIUS = "plan.radius_nats_per_message"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "beside", lambda work, items, workers, **_: ((item, work(item)) for item in items))
    (tmp_path / "team.yaml").write_text(TEAM)
    return tmp_path


def final(folder: Path) -> dict[str, Any]:
    return [record for record in RunFolder.read(folder).log.read() if record["kind"] == "eval"][-1]


# -- values on the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("a.b=0.01,0.05", ["0.01", "0.05"]),
        ("a.b= 1 , x y ", ["1", "x y"]),
        ("a.b=[1, 2],[3,4]", ["[1, 2]", "[3,4]"]),
        ("a.b={x: [1,2], y: 'a,}'},{}", ["{x: [1,2], y: 'a,}'}", "{}"]),
        ('a.b="yes, or \\"no\\"",maybe', ['"yes, or \\"no\\""', "maybe"]),
        ("a.b='it''s, so',don't", ["'it''s, so'", "don't"]),
        ("a.b=x[1],y", ["x[1]", "y"]),
        ("a.b=c=d,e", ["c=d", "e"]),
    ],
)
def test_a_comma_separates_values_unless_it_stands_in_brackets_or_quotes(word: str, values: list[str]) -> None:
    found = several(word)
    assert (found.key, list(found.values)) == ("a.b", values)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("a.b=1,,2", "value 2 is empty"),
        ("a.b=1,", "value 2 is empty"),
        ("a.b=", "value 1 is empty"),
        ("a.b=[1,2", "not closed"),
        ('a.b="x,y', "not closed"),
        ("a.b=[1]2,3", "followed by '2'"),
        ("a.b", "no setting"),
        ("=1,2", "no setting"),
    ],
)
def test_values_that_are_not_clear_are_refused(word: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        several(word)


def test_a_value_has_one_name_however_it_is_written() -> None:
    names = [Setting("k", value).name for value in ("0.1", "0.10", "1e-1", "[1, 2]", "[1,2]", "tiny", "'tiny'", "'1'")]
    assert names == ["k=0.1", "k=0.1", "k=0.1", "k=[1, 2]", "k=[1, 2]", "k=tiny", "k=tiny", 'k="1"']


def swept(here: Path, *words: str, seeds: int = 1) -> Sweep:
    return Sweep(variants_of(here / "team.yaml", words), seeds, Path("sweeps/small"), "")


def test_several_keys_give_every_combination_and_one_value_is_set_in_all(here: Path) -> None:
    found = swept(here, f"{RADIUS}=0.01,0.1", "plan.preset=auto,grpo", "plan.stages=3", "seed=4", seeds=2)
    assert [variant.name for variant in found.variants] == [
        f"{RADIUS}={radius} plan.preset={preset}" for radius in ("0.01", "0.1") for preset in ("auto", "grpo")
    ]
    made = found.cells()
    assert [cell.seed for cell in made] == [4, 5] * 4
    assert len({cell.folder for cell in made}) == len({cell.team_file.name for cell in made if cell.team_file}) == 8
    for cell in made:
        assert cell.team_file is not None
        assert (cell.team_file.plan.stages, cell.team_file.seed, cell.team_file.seeds) == (3, cell.seed, 1)
    assert made[0].folder == Path("sweeps/small") / f"{RADIUS}=0.01,plan.preset=auto-seed4"
    more = swept(here, f"{RADIUS}=0.5,0.01", "plan.preset=auto,grpo", "plan.stages=3", "seed=4", seeds=2).cells()
    assert {cell.folder for cell in more} >= {cell.folder for cell in made[:4]}, "a value more renames no run"


def test_folders_of_odd_values_are_their_own(here: Path) -> None:
    path = "team.agents.left.system_prompt"
    found = swept(here, f'{path}=a/b,a b,"a,b",{"x" * 300},{"x" * 301}').cells()
    names = [cell.folder.name for cell in found]
    assert len(set(names)) == 5
    assert all("/" not in name and len(name) < 120 for name in names)
    assert all(cell.folder.parent == Path("sweeps/small") for cell in found)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["plan.stages=3"], "no setting has several values"),
        (["seed=0,1"], "--seeds 3"),
        (["seeds=2,3"], "--seeds 3"),
        (["name=a,b"], "changes nothing"),
        ([f"{RADIUS}=0.1,0.2", f"{RADIUS}=0.3"], "given twice"),
        ([f"{RADIUS}=0.1,0.10"], "are the same settings"),
        ([f"{RADIUS}=1,1.0"], "are the same settings"),
        (["plan.radius=0.1,0.2"], "radius_nats_per_message"),
        ([f"{RADIUS}=0.1,-1"], "-1"),
    ],
)
def test_a_sweep_that_makes_no_sense_trains_nothing(here: Path, words: list[str], why: str) -> None:
    told = invoke("sweep", "team.yaml", *words, code=2)
    assert why in told.stderr
    assert not (here / "sweeps").exists()


# -- room ----------------------------------------------------------------------------------------------------------


def test_as_many_runs_as_cores_and_memory_allow() -> None:
    assert fitting(3, GB, 100 * GB, 8).workers == 3
    assert fitting(3, GB, 100 * GB, 2) == Room(2, "2 usable cores, one for each")
    assert fitting(8, 10 * GB, 32 * GB, 8).workers == 3, "0.95 of 32 holds three tens"
    assert fitting(8, 10 * GB, 32 * GB, None).workers == 3
    assert fitting(8, 10 * GB, 5 * GB, 8).workers == 1, "one is tried: it says itself that it does not fit"
    assert fitting(8, 10 * GB, None, 4).workers == 4


@pytest.mark.long
def test_what_a_run_needs_comes_from_its_models(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ["team.model=tiny", "task.skill=0.9"]
    small, large = (load_team_file(here / "team.yaml", [*tiny, f"tiny.width={width}"]) for width in (64, 8192))
    monkeypatch.setattr(rooms, "usable_cores", lambda: 8)
    monkeypatch.setattr(rooms, "memory_bytes", lambda: 4 * GB)
    assert rooms.room(small, 3) == Room(3, "all 3 fit")
    assert rooms.room(small, 8).workers == 5, "0.7 GB each of the process itself"
    crowded = rooms.room(large, 3)
    assert crowded.workers == 1
    assert "and 4 GB are free" in crowded.why
    alone = rooms.room(load_team_file(here / "team.yaml", [*tiny, "cluster.engine=ray"]), 3)
    assert alone == Room(1, "a run has several processes of its own")
    unknown = rooms.room(load_team_file(here / "team.yaml", ["team.model=./nowhere"]), 3)
    assert unknown.workers == 1
    assert "not known" in unknown.why


# -- intervals -----------------------------------------------------------------------------------------------------


def test_seeds_with_problems_of_their_own_have_an_interval_and_are_paired_by_seed() -> None:
    own = [{"a": 1.0, "b": 0.0}, {"c": 1.0, "d": 1.0}]
    found = problems.interval(own)
    assert found is not None
    assert found.low < 0.75 < found.high <= 1.0
    wide = problems.interval([own[0]])
    assert wide is not None
    assert found.high - found.low < wide.high - wide.low, "two seeds know more than one"
    alike = problems.interval([{"a": 1.0}, {"b": 1.0, "a": 1.0}])
    assert alike is not None
    assert (alike.low, alike.high) == (pytest.approx(0.05 ** (1 / 2)), 1.0)
    others = {0: {"a": 0.5, "b": 0.5}, 1: {"c": 0.0, "d": 0.0, "e": 1.0}, 2: {"f": 0.0}}
    apart = problems.difference_by_seed(dict(enumerate(own)), others)
    assert apart is not None
    assert apart.value == pytest.approx((0.0 + 1.0) / 2), "the mean over seeds, e and f aside"
    assert apart.interval.low < 0.5 < apart.interval.high
    assert problems.difference_by_seed({0: own[0]}, {1: own[1]}) is None
    assert problems.difference_by_seed({0: own[0]}, {0: own[1]}) is None


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_seeds_are_trained_beside_each_other_and_told_in_one_table(here: Path) -> None:
    (here / "team.yaml").write_text(TEAM + "seeds: 2\n")
    done = invoke("train", "team.yaml", "--json")
    found, out = last_json(done), here / "runs" / "small"
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"seed0", "seed1", "figures"}
    assert "at a time" in done.stderr
    ends = [final(out / f"seed{seed}") for seed in (0, 1)]
    assert [line["name"] for line in found["lines"]] == ["seed 0", "seed 1", "2 seeds"]
    rates = [100 * end["avg_at_k"] for end in ends]
    value = found["lines"][2]["values"]["accuracy, %"]
    assert (value["mean"], value["seeds"]) == (pytest.approx(np.mean(rates)), 2)
    assert value["deviation"] == pytest.approx(np.std(rates, ddof=1))
    assert value["interval"][0] <= value["mean"] <= value["interval"][1]
    assert [line["values"]["accuracy, %"]["mean"] for line in found["lines"][:2]] == pytest.approx(rates)
    assert all((out / name).exists() for name in ("table.md", "table.csv", "index.html", "result.json"))
    logs = [(out / f"seed{seed}" / "log.jsonl").read_bytes() for seed in (0, 1)]
    more = last_json(invoke("train", "team.yaml", "--seeds", 3, "--workers", 1, "--json"))
    assert logs == [(out / f"seed{seed}" / "log.jsonl").read_bytes() for seed in (0, 1)], "nothing is trained twice"
    assert more["lines"][:2] == found["lines"][:2]
    assert more["lines"][3]["name"] == "3 seeds"
    refused = invoke("train", "team.yaml", "--seeds", 2, "--out", out / "seed0", code=2)
    assert "holds one run" in refused.stderr
    one = invoke("train", "team.yaml", "--seeds", 2, "--accept-changes", code=2).stderr
    assert "--accept-changes is for one run" in one
    assert "is neither empty nor a run folder" in invoke("train", "team.yaml", "--seeds", 1, code=2).stderr


@pytest.mark.long
def test_a_sweep_goes_on_and_a_failing_run_loses_no_other(here: Path) -> None:
    out = here / "sweeps" / "small"
    out.mkdir(parents=True)
    blocked = out / f"{RADIUS}=0.1-seed0"
    blocked.write_text("in the way")
    words = ["sweep", "team.yaml", f"{RADIUS}=0.01,0.1", "--json"]
    found = last_json(invoke(*words, code=1))
    low, high = found["lines"]
    assert (low["name"], high["name"]) == (f"{RADIUS}=0.01", f"{RADIUS}=0.1")
    assert low["values"]["accuracy, %"] is not None
    assert high["values"]["accuracy, %"] is None
    assert len(found["failed"]) == 1
    assert f"{RADIUS}=0.1, seed 0" in found["failed"][0]
    log = out / f"{RADIUS}=0.01-seed0" / "log.jsonl"
    before = log.read_bytes()
    blocked.unlink()
    half = last_json(invoke(*words, "--finished"))
    assert half["failed"] == []
    assert f"not finished: {RADIUS}=0.1, seed 0" in half["notes"]
    whole = last_json(invoke(*words))
    assert log.read_bytes() == before, "what is trained is not trained again"
    assert whole["lines"][0] == low
    shares = [np.array(final(out / f"{RADIUS}={radius}-seed0")["success_P"]) for radius in ("0.01", "0.1")]
    apart = whole["lines"][1]["values"][f"points above {RADIUS}=0.01"]
    assert apart["mean"] == pytest.approx(100 * float((shares[1] - shares[0]).mean()))
    page, table = (out / "index.html").read_text(), (out / "table.md").read_text()
    assert f"<td>{RADIUS}=0.1</td>" in page
    assert f"teamtr sweep team.yaml {RADIUS}=0.01,0.1" in table
    assert json.loads((out / "result.json").read_text())["lines"] == whole["lines"]


def test_one_run_is_not_trained_from_a_file_that_asks_for_several(here: Path) -> None:
    from teamtr.session.train import train

    with pytest.raises(UserError, match="asks for several runs"):
        next(train(load_team_file(here / "team.yaml", ["seeds=2"]), here / "run"))
    assert not (here / "run").exists()
