"""The numbers in tables of finished runs, read from run folders with chosen records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_run import changed, made_run
from teamtr.analysis.figures import Run, read_runs
from teamtr.sweep import measures as of


def run_with(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Run:
    [run] = read_runs([changed(made_run(folder), change)])
    return run


@pytest.mark.parametrize("end", [0.625, 0.0])
def test_without_evaluations_success_is_the_exact_one_after_the_last_update(tmp_path: Path, end: float) -> None:
    def exact(record: dict[str, Any]) -> dict[str, Any] | None:
        if record["kind"] == "update":
            record["exact_success"] = [0.25, end if record["update"] == 9 else 0.5]
        return None if record["kind"] == "eval" else record

    assert of.success(run_with(tmp_path / "run", exact)) == 100 * end


def test_a_radius_per_token_is_compared_with_the_kl_per_token(tmp_path: Path) -> None:
    def per_token(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update":  # messages of many tokens: 0.4 nats each, and 0.005 nats per token
            record |= {"unit": "token", "radius": 0.01, "kl_full": 0.4, "kl_upper": 0.005}
        return record

    run = run_with(tmp_path / "run", per_token)
    assert (of.outside(run), of.kl_quantile(1.0)(run)) == (0.0, 0.5)
