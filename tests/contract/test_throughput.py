"""Predictions beside everything that was measured, within the band that docs/sizing.md states."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

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
    near = [one for one in figures if one.unit == "GB" or one.what.endswith("stage: whole")]
    assert len(near) == 12
    assert [one.what for one in near if not 1 / NEAR <= one.ratio <= NEAR] == []


def test_most_figures_are_predictions_and_not_what_constants_were_taken_from(figures):
    fitted = [one.what for one in figures if one.fitted]
    assert len(fitted) == 10
    assert len(figures) - len(fitted) >= 40
    assert not any("8B" in what for what in fitted), "nothing was fitted on the larger model"


def test_the_page_has_every_figure_as_the_benchmark_prints_it(bench, figures):
    page = (BENCH.parent / "docs" / "sizing.md").read_text().splitlines()
    assert [row for one in figures if (row := bench.as_markdown(one)) not in page] == []


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


@pytest.mark.slow
def test_the_benchmark_of_workers_trains_and_is_predicted():
    """It once played a game that its team never won, and every update was skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        cluster = importlib.import_module("cluster")
    found = cluster.stage_of(4, 32, "cluster.shards=2", "tiny.layers=1")
    assert all(found.phases[phase] > 0.0 for phase in ("sample", "score", "train", "gate"))
    assert set(found.phases) - {"grade"} <= set(found.predicted_phases)
    assert found.predicted_seconds > 0.0
