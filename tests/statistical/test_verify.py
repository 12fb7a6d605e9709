"""``lab.verify``: no statement is broken on random teams, and every wrong one is."""

from __future__ import annotations

import numpy as np
import pytest

from teamtr.lab.checks import Draw, Outcome
from teamtr.lab.team_checks import CHECKS, SABOTAGED
from teamtr.lab.verify import VerifyReport, draw, verify

TEAMS = 300


@pytest.fixture(scope="module")
def report() -> VerifyReport:
    return verify(TEAMS, seed=0)


@pytest.fixture(scope="module")
def wrong() -> VerifyReport:
    return verify(TEAMS, seed=0, checks=SABOTAGED)


@pytest.mark.long
def test_no_violation(report: VerifyReport) -> None:
    assert {name: check.violations for name, check in report.checks.items() if check.violations} == {}
    assert report.violations == 0
    assert report.teams == TEAMS


@pytest.mark.long
@pytest.mark.parametrize(
    "label",
    [
        "lem:activefactor", "lem:chainrule", "lem:avgvssum", "lem:kltokequals", "eq:occ_measure_identity",
        "lem:kltokfactor", "lem:klstep", "lem:occmax", "lem:occexp", "lem:occ", "lem:expectedklpenalty", "lem:cumocc",
        "eq:stale_surrogate_gap", "rem:quad2lin", "thm:single", "thm:stage", "thm:stage_stale", "thm:stage-hp",
        "prop:pnp", "prop:tight", "ours:turn_aware", "ours:turn_aware_tv", "ours:turn_aware_stage",
        "ours:turn_aware_stale", "ours:second_order", "ours:joint_stage", "ours:one_turn", "ours:measured_pairs",
        "ours:change_of_measure", "ours:reweighted_gain",
    ],
)  # fmt: skip
def test_every_statement_is_tested_and_not_on_empty_cases(report: VerifyReport, label: str) -> None:
    check = report.checks[label]
    assert check.tested >= TEAMS / 2
    assert np.isfinite(check.median_ratio), "the true value was never above zero"


@pytest.mark.parametrize(
    ("label", "at_most"),
    [
        ("lem:occmax", 1.1),
        ("lem:occexp", 1.0001),
        ("lem:occ", 1.05),
        ("lem:cumocc", 1.05),
        ("eq:stale_surrogate_gap", 1.05),
        ("ours:turn_aware", 1.01),
        ("ours:turn_aware_stale", 1.01),
        ("ours:second_order", 1.1),
        ("ours:joint_stage", 1.3),
        ("ours:change_of_measure", 1.01),
    ],
)
def test_some_team_nearly_attains_the_bound(report: VerifyReport, label: str, at_most: float) -> None:
    assert 1.0 - 1e-9 <= report.checks[label].min_ratio <= at_most


@pytest.mark.long
def test_every_wrong_statement_is_caught(wrong: VerifyReport) -> None:
    assert len(wrong.checks) >= 5
    assert [name for name, check in wrong.checks.items() if check.violations == 0] == []


def test_a_violation_can_be_built_again(wrong: VerifyReport) -> None:
    name = "wrong:lem:occ, half"
    batch = wrong.checks[name].first_violation
    assert batch is not None
    again = draw(wrong.seed, batch, wrong.batch_size)
    outcomes = [o for check in SABOTAGED for o in check(again) if o.name == name]
    assert sum(o.violations() for o in outcomes) > 0


def test_the_same_seed_gives_the_same_numbers_and_another_does_not() -> None:
    first, second, other = (verify(40, seed, checks=CHECKS[:4]) for seed in (1, 1, 2))
    assert first.checks == second.checks
    assert first.checks != other.checks


def test_the_order_of_checks_does_not_matter() -> None:
    """Each check has its own generator: adding one does not change what the others see."""
    both = verify(40, 1, checks=CHECKS)
    alone = verify(40, 1, checks=CHECKS[-1:])
    assert all(both.checks[name] == check for name, check in alone.checks.items())


def test_json_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    got = verify(30, 0, lambda done, total: seen.append((done, total)), checks=CHECKS[:2]).as_json()
    assert seen[-1] == (30, 30)
    assert [done for done, _ in seen] == [5, 10, 15, 20, 25, 30]
    assert got["teams"] == 30
    assert set(got["checks"]["lem:chainrule"]) == {"tested", "violations", "median_ratio", "p99_ratio", "min_ratio"}
    with pytest.raises(ValueError, match="at least one team"):
        verify(0)


def test_what_counts_as_a_violation() -> None:
    def broken(bound: list[float], true: list[float], equal: bool = False) -> int:
        return Outcome("x", np.array(bound), np.array(true), equal).violations()

    assert broken([1.0, 1.0, 1.0], [1.0 + 1e-9, 1.1, 0.0]) == 1
    assert broken([1.0, 1.0], [1.1, 0.9], equal=True) == 2
    assert broken([np.inf, np.inf], [5.0, np.inf]) == 0
    assert broken([np.nan, 1.0, np.inf], [0.0, np.nan, np.nan]) == 3
    assert broken([np.inf], [1.0], equal=True) == 1
    assert Outcome("x", np.array([2.0, 1.0, 1.0]), np.array([1.0, 0.0, -1.0])).ratios().tolist() == [2.0]


def test_a_check_that_lies_is_caught_by_name() -> None:
    def lies(batch: Draw) -> list[Outcome]:
        return [Outcome("lie", np.zeros(batch.size), np.ones(batch.size))]

    got = verify(12, 0, checks=[lies])
    assert got.checks["lie"].violations == 12
    assert got.checks["lie"].first_violation == 0
