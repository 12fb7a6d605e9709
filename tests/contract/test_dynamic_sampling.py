"""Dynamic sampling (DAPO, arXiv 2503.14476): until every group has a signal, each problem once, or up to a limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from small import World
from teamtr.presets import PRESETS, DynamicSampling
from teamtr.rollout import Collected, Ledger, certified_range, collect, has_signal_P
from teamtr.tasks import Task
from teamtr.theory.certificates import surrogate_by_problem
from teamtr.types import Problem, Verdict

PROBLEMS = [Problem(id=f"p{k}", prompt=chr(97 + k)) for k in range(20)]
GROUP = 4


class Scripted(Task):
    """Of the problems with a signal every second episode is right; of the others all are wrong. Remembers who came."""

    reward_range = 1.0

    def __init__(self, telling: set[str]) -> None:
        self.telling = telling
        self.rounds: list[list[str]] = []

    def problems(self, split: str) -> list[Problem]:
        return PROBLEMS

    def grade(self, episodes) -> list[Verdict]:
        ids = [problem.id for problem, _, _ in episodes]
        self.rounds.append(ids[::GROUP])
        return [Verdict("wrong", float(k % 2 and i in self.telling)) for k, i in enumerate(ids)]


def gathered(telling: set[str], count: int = 2, limit: int = 0, reserve=None) -> tuple[Collected, Scripted]:
    world, task = World(), Scripted(telling)
    context = replace(world.context, task=task)
    found = collect(
        context,
        world.team,
        PROBLEMS[:count],
        GROUP,
        seed=lambda r: 100 + r,
        reserve=PROBLEMS[count:] if reserve is None else reserve,
        limit=limit,
    )
    return found, task


def test_it_goes_on_past_three_rounds_until_every_group_has_a_signal():
    found, task = gathered({"p0", "p9"})
    assert (found.rounds, found.without_signal, found.ended) == (8, 0, "signal")
    assert [p.id for p in found.batch.problems] == ["p0", "p9"]
    assert has_signal_P(found.batch).all()
    assert task.rounds == [["p0", "p1"], *([f"p{k}"] for k in range(2, 10))]


def test_episodes_of_a_new_problem_stand_where_the_old_ones_did():
    found, _ = gathered({"p0", "p9"})
    assert [e.problem_id for e in found.batch.episodes] == ["p0"] * GROUP + ["p9"] * GROUP


def test_nothing_is_redrawn_where_every_group_has_a_signal():
    found, task = gathered({"p0", "p1"})
    assert (found.rounds, found.ended) == (0, "signal")
    assert task.rounds == [["p0", "p1"]]


def test_it_ends_when_all_problems_were_tried_each_once():
    found, task = gathered({"p3"}, count=3)
    assert (found.without_signal, found.ended) == (2, "all_tried")
    tried = [i for ids in task.rounds for i in ids]
    assert sorted(tried) == sorted(p.id for p in PROBLEMS), "no problem twice, none left out"
    assert len(found.batch.problems) == 3
    assert has_signal_P(found.batch).sum() == 1


def test_fewer_problems_left_than_groups_without_signal():
    found, task = gathered(set(), count=3, reserve=PROBLEMS[3:7])
    assert [len(ids) for ids in task.rounds] == [3, 3, 1]
    assert (found.rounds, found.without_signal, found.ended) == (2, 3, "all_tried")
    assert [p.id for p in found.batch.problems] == ["p6", "p4", "p5"]


def test_a_limit_ends_it():
    found, task = gathered({"p0", "p9"}, limit=3)
    assert (found.rounds, found.without_signal, found.ended) == (3, 1, "limit")
    assert len(task.rounds) == 4


def test_without_a_reserve_the_batch_is_what_was_played():
    found, task = gathered(set(), reserve=())
    assert (found.rounds, found.without_signal, found.ended) == (0, 2, "all_tried")
    assert task.rounds == [["p0", "p1"]]


def test_the_length_of_messages_is_no_signal():
    """DAPO asks whether answers are right: a group of equal rewards is redrawn, whatever its punishments."""
    found, _ = gathered(set(), reserve=())
    assert len({len(t.token_ids) for e in found.batch.episodes for t in e.turns}) > 1
    assert not has_signal_P(found.batch).any()


def test_rewards_that_are_not_finite_are_no_signal():
    found, _ = gathered({"p0", "p1"})
    broken = replace(found.batch.episodes[0], verdict=Verdict("crash", float("nan")))
    batch = replace(found.batch, episodes=(broken, *found.batch.episodes[1:]))
    assert has_signal_P(batch).tolist() == [False, True]
    assert np.isfinite(found.batch.returns_PG(1.0)).all()


def test_every_round_is_on_the_bill():
    world, ledger = World(), Ledger()
    context = replace(world.context, task=Scripted({"p0", "p9"}))
    settings = {"seed": lambda r: 100 + r, "reserve": PROBLEMS[2:], "ledger": ledger}
    found = collect(context, world.team, PROBLEMS[:2], GROUP, **settings)
    assert found.rounds == 8, "no limit unless one is set"
    assert ledger.episodes == GROUP * (2 + 8)
    assert sum(ledger.sampled_tokens.values()) > 0


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.15), (0.5, 0.45), (0.9, 0.95)])
def test_groups_chosen_by_their_rewards_overstate_the_gain_and_have_no_certificate(before, after):
    """Groups of two episodes, right with probability ``before``, exactly: over all four groups the surrogate is the
    gain, and over those with a signal it is the gain over the share of such groups, 5.6 times as much at 0.1."""
    groups = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    chance = np.array([np.prod([before if r else 1.0 - before for r in group]) for group in groups])
    log_ratio = np.log([after / before if r else (1.0 - after) / (1.0 - before) for group in groups for r in group])
    surrogate = surrogate_by_problem(log_ratio, np.arange(8), np.array(groups))
    told = np.array([a != b for a, b in groups])
    assert float(chance @ surrogate) == pytest.approx(after - before)
    share = float(chance[told].sum())
    assert float(chance[told] @ surrogate[told]) / share == pytest.approx((after - before) / share)

    world = World()
    for plan, known in (
        (PRESETS["teamtr"], 1.0),
        (replace(PRESETS["teamtr"], dynamic_sampling=DynamicSampling(True)), None),
    ):
        assert certified_range(plan, 1.0, world.team, world.context.router, "x") == known
    assert certified_range(PRESETS["dapo"], 1.0, world.team, world.context.router, "x") is None
