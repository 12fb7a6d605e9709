"""Predictions beside everything that was measured, within the band that docs/sizing.md states."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench"
BAND = 1.35
"""For every figure; whole stages and memory are nearer."""
NEAR = 1.15


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        return importlib.import_module("throughput")


@pytest.fixture(scope="module")
def figures(bench: ModuleType) -> list:
    return bench.figures()


def test_every_prediction_is_within_the_band(figures):
    outside = [f"{one.what}: {one.ratio:.2f}" for one in figures if not 1 / BAND <= one.ratio <= BAND]
    assert outside == []


def test_stages_and_memory_are_nearer(figures):
    near = [one for one in figures if one.unit == "GB" or ": whole" in one.what]
    assert len(near) == 16
    assert [one.what for one in near if not 1 / NEAR <= one.ratio <= NEAR] == []


def test_most_figures_are_predictions_and_not_what_constants_were_taken_from(figures):
    fitted = [one.what for one in figures if one.fitted]
    assert len(fitted) == 13
    assert len(figures) - len(fitted) >= 40
    assert not any("8B" in what for what in fitted), "nothing was fitted on the larger model"


def test_the_page_has_every_figure_as_the_benchmark_prints_it(bench, figures):
    page = (BENCH.parent / "docs" / "sizing.md").read_text().splitlines()
    assert [row for one in figures if (row := bench.as_markdown(one)) not in page] == []


def test_what_a_benchmark_is_given_for_kv_blocks_is_planned(bench):
    """Half of the rows fit: they wait for each other, by plan as on the card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        long = importlib.import_module("long")
    given = {
        "shape": "8b", "problems": 1, "group": 4, "prompt": 256, "tokens": 32_768, "micro_batch": 16, "epochs": 1,
        "precision": "fp16", "sampler": "fp16", "one_copy": True, "recompute": "auto",
    }  # fmt: skip
    few, all_of_them = (long.planned(SimpleNamespace(**given, pages_gb=gb)) for gb in (25.0, 40.0))
    assert few.sampling.memory == 25 * 2**30
    seconds = [bench.settled_seconds(one, {"a0": 16, "a1": 16}, ())["all", "sample"] for one in (few, all_of_them)]
    assert seconds[0] > 1.1 * seconds[1]
    assert long.planned(SimpleNamespace(**given, pages_gb=None)).sampling.memory is None


@pytest.mark.slow
def test_the_page_has_the_sizing_tables_as_the_benchmark_prints_them(bench):
    page = (BENCH.parent / "docs" / "sizing.md").read_text().splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        sizing = importlib.import_module("sizing")
    for growing in (False, True):
        rows = [one.as_row() for one in sizing.choices(bench.H200, [1, 8, 64, 512], growing)]
        assert [row for row in map(sizing.as_markdown, rows) if row not in page] == []


@pytest.mark.long
def test_the_sizing_table_has_a_setting_that_fits_or_none(bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        sizing = importlib.import_module("sizing")
    choices = list(sizing.choices(bench.H200, [1, 8, 32], growing=False))
    found = {(one.model, one.train, one.cards): one.best for one in choices}
    assert all(best is None or best.memory.fits for best in found.values())
    assert found["1.7B", "lora", 8].seconds < found["1.7B", "lora", 1].seconds
    assert found["8B", "full", 8] is None
    assert found["8B", "full", 32].setup.cluster.shard_base
    assert found["32B", "lora", 1] is None
    assert found["32B", "lora", 32].setup.cluster.shard_base


@pytest.fixture(scope="module")
def workers() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        return importlib.import_module("cluster")


@pytest.mark.slow
def test_the_benchmark_of_workers_trains_and_is_predicted(workers):
    """It once played a game that its team never won, and every update was skipped."""
    options = workers.parsed(["--width", "32", "--set", "tiny.layers=1"])
    found = workers.stage_of(4, options, "cluster.shards=2")
    assert all(found.phases[phase] > 0.0 for phase in ("sample", "score", "train", "gate"))
    assert set(found.phases) - {"grade"} <= set(found.predicted_phases)
    assert found.predicted_seconds > 0.0


MISSING = {
    "a folder": (["--model", "./gone"], "gone"),
    "its config": (["--model", "./empty"], "config.json"),
    "a card": (["--card", "H20O"], "no card 'H20O' in the table (did you mean H200?)"),
    "a worker": (["--workers", "1,0"], "--workers '1,0': give numbers of workers from 1 on"),
    "all workers": (["--workers", ""], "--workers ''"),
    "a kind": (["--kinds", "stong"], "--kinds 'stong': there are strong and weak"),
    "problems": (["--problems", "0"], "numbers from 1 on"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_the_benchmark_of_workers_lacks_is_one_line_before_anything_runs(
    what, workers, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(workers, "stage_of", lambda *_: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    arguments, told = MISSING[what]
    with pytest.raises(SystemExit) as ended:
        workers.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench/cluster.py: ")
    assert told in line


def test_so_is_a_setting_that_is_none(workers, monkeypatch, capsys):
    monkeypatch.setattr(workers, "stage_of", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        workers.main(["--set", "cluster.shrads=3"])
    assert ended.value.code == 2
    assert "cluster.shrads" in capsys.readouterr().err


def cluster_of(cores: int) -> SimpleNamespace:
    """What stands in for Ray, and a cluster that runs with so many cores."""
    return SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **_: None,
        shutdown=lambda: None,
        cluster_resources=lambda: {"CPU": float(cores)},
    )


@pytest.mark.parametrize(
    ("ray", "told"),
    [
        (None, "needs Ray, which is not installed: pip install 'teamtr[ray]'"),
        (cluster_of(3), "cluster.workers is 4, and the cluster has 3 cores, one for each: lower it, or add machines"),
    ],
)
def test_so_are_workers_that_there_is_no_place_for(ray, told, workers, monkeypatch, capsys):
    """Of the most that are asked for; the run of one process before them takes minutes."""
    monkeypatch.setattr(workers, "stage_of", lambda *_: pytest.fail("it ran"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    with pytest.raises(SystemExit) as ended:
        workers.main(["--workers", "1,4,2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"bench/cluster.py: {'cluster.engine: ray ' if ray is None else ''}{told}\n"


def test_workers_that_there_is_a_place_for_are_counted_and_let_be(workers, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", cluster_of(4))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert workers.worker_counts(workers.parsed(["--workers", "1,4,2"])) == [1, 4, 2]
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setitem(sys.modules, "ray", cluster_of(0))  # one that is started here has as many as it takes
    assert workers.worker_counts(workers.parsed(["--workers", "8"])) == [8]


@pytest.mark.long
def test_the_page_has_what_fits_with_one_copy_of_a_base_as_the_benchmark_prints_it(bench):
    page = (BENCH.parent / "docs" / "sizing.md").read_text().splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        one_copy = importlib.import_module("one_copy")
    rows = list(one_copy.rows())
    assert [row for row in map(one_copy.as_markdown, rows) if row not in page] == []
    for held_once in (rows[2::4], rows[3::4]):
        assert [row["fits"] for row in held_once] == ["yes"] * 5, "in fp16 and in int8, each target fits by plan"
    assert all(small["base"] < 0.6 * half["base"] for half, small in zip(rows[2::4], rows[3::4], strict=True))
