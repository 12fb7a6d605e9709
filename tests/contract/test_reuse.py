"""Which episodes an update learns from: the decision itself, in the loop, and in a run that is interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from small import World
from taught import remember_teaching
from teamtr.batches import Carried, RolloutBatch
from teamtr.config import ConfigError, loads
from teamtr.presets import PRESETS, Resample
from teamtr.rollout import StaleBatch
from teamtr.rollout.cost import Account
from teamtr.session.train import train
from teamtr.store import RunFolder, read_episodes
from teamtr.training.algorithm import run_stage, schedule
from teamtr.training.reuse import choose, effective_share, still_worth

AUTO = Resample(every=0, reweight=True, min_effective_share=0.5)


def weighed(ratios: list[float], group: int = 2) -> tuple[RolloutBatch, np.ndarray]:
    """A batch of three problems whose episodes have these weights, all in their first turn; all rewards differ."""
    world = World()
    batch = world.collect(world.team, 0, group=group)
    log_ratio_U = np.zeros(int(batch.first_U[-1]))
    log_ratio_U[batch.first_U[:-1]] = np.log(ratios)
    batch = replace(batch, carried=Carried("v", log_ratio_U))
    return batch, np.tile([0.0, 1.0], (3, 1))[:, :group]


def test_a_stage_begins_with_new_episodes_and_a_schedule_is_kept():
    assert choose(AUTO, None, 0, None, None).action == "sample"
    batch, returns = weighed([1.0] * 6)
    every = [choose(Resample(every=1), batch, step, returns, None).action for step in range(3)]
    second = [choose(Resample(every=2), batch, step, returns, None).action for step in range(4)]
    naive = [choose(Resample(every=0), batch, step, returns, None).action for step in range(3)]
    assert every == ["sample"] * 3
    assert second == ["sample", "reuse"] * 2
    assert naive == ["sample", "reuse", "reuse"]


def test_worn_out_episodes_are_sampled_anew_or_in_part():
    even, returns = weighed([1.0] * 6)
    kept = choose(AUTO, even, 1, returns, None)
    assert (kept.action, kept.share, kept.needed) == ("reuse", 1.0, 0.5)
    worn, _ = weighed([3.0, 0.1, 0.1, 0.1, 0.1, 0.1])  # 3.5^2 / (6 * 9.05) = 0.2256
    found = choose(AUTO, worn, 1, returns, None)
    assert found.action == "sample"
    assert found.share == pytest.approx(3.5**2 / (6 * 9.05))
    assert found.reason == "worth 22.6% of new ones, needed 50.0% (the least that the plan allows)"
    assert choose(replace(AUTO, partial=True), worn, 1, returns, None).action == "redraw"
    naive = choose(Resample(every=0), worn, 1, returns, None)
    assert (naive.action, naive.needed) == ("reuse", None)
    assert naive.share == found.share, "what it is worth is told of every plan"


def test_cheap_sampling_raises_what_is_needed_and_dear_sampling_does_not_lower_it():
    batch, returns = weighed([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # 64 / (6 * 14) = 0.76
    cheap = choose(AUTO, batch, 1, returns, 0.05)
    assert cheap.action == "sample"
    assert cheap.needed == pytest.approx(1 / 1.05**2)
    assert "sampling costs 0.05 of an update" in cheap.reason
    dear = choose(AUTO, batch, 1, returns, 10.0)
    assert (dear.action, dear.needed) == ("reuse", 0.5)


def test_only_episodes_with_a_signal_count():
    batch, returns = weighed([3.0, 3.0, 0.1, 0.1, 0.1, 0.1])
    assert effective_share(batch, returns) < 0.5
    returns[0] = 1.0  # the heavy ones are all paid alike: they teach nothing
    assert effective_share(batch, returns) == pytest.approx(1.0)
    returns[0] = [np.nan, 1.0]
    assert effective_share(batch, returns) == pytest.approx(1.0)
    returns[:] = 1.0
    assert effective_share(batch, returns) == 1.0, "nothing teaches: nothing is worn out"


def test_an_earlier_stage_comes_on_top():
    old, _ = weighed([1.0] * 6)
    world = World()
    both = world.collect(world.team, 1, group=2).joined(old)
    returns = np.tile([0.0, 1.0], (6, 1))
    assert effective_share(both, returns) == 1.0, "more than what the plan samples is not needed"
    heavy = replace(both, carried=replace(both.carried, log_ratio_U=both.carried.log_ratio_U.copy()))
    heavy.carried.log_ratio_U[heavy.first_U[:-1]] = np.log(0.1)
    heavy.carried.log_ratio_U[heavy.first_U[0]] = np.log(40.0)  # counts four times
    worn = effective_share(heavy, returns)
    assert worn == pytest.approx(2 * 5.1**2 / (12 * (4**2 + 0.11)))


def test_what_a_new_stage_may_learn_from_once_more():
    batch, _ = weighed([1.0, 1.0, 20.0, 0.1, 1.0, 1.0])
    assert [p.id for p in still_worth(batch, [0, 2], 0.9).problems] == ["a", "c"]
    assert still_worth(batch, [0, 1, 2], 0.9) is None, "worn out"
    assert still_worth(batch, [], 0.0) is None
    assert still_worth(replace(batch, carried=None), [0], 0.0) is None
    world = World()
    pooled = world.collect(world.team, 1, group=2).joined(batch)
    again = still_worth(replace(pooled, carried=replace(pooled.carried)), [0, 5], 0.0)
    assert [p.id for p in again.problems] == ["a"], "no episode is used for a third stage"


def run(world: World, plan=None, **options):
    plan = plan or world.plan
    slots = schedule(plan.order, world.team.trainable, np.random.default_rng(0))
    return list(run_stage(world.team, plan, world.collect, world.update, slots, **options))


@pytest.mark.long
def test_the_loop_samples_redraws_and_reuses_as_it_decides():
    names = ("x", "y", "z")
    for partial, expected in ((False, ["sample"] * 3), (True, ["sample", "redraw", "redraw"])):
        plan = replace(PRESETS["partial"], resample=replace(AUTO, min_effective_share=1.0, partial=partial))
        world = World(plan=plan, names=names, radius=0.2, learning_rate=0.5)
        steps = run(world)
        assert [step.choice.action for step in steps] == expected
        assert [step for _, step in world.collected] == [0, 1, 2]
        assert steps[1].batch.redrawn == partial
    reused = World(plan=PRESETS["reweighted"], names=names, radius=0.2, learning_rate=0.5)
    assert [step.choice.action for step in run(reused)] == ["sample", "reuse", "reuse"]
    bought = World(plan=replace(PRESETS["reweighted"], resample=AUTO), names=names, radius=0.2, learning_rate=0.5)
    steps = run(bought, price=lambda batch, own: 0.0)
    assert [step.choice.action for step in steps] == ["sample"] * 3, "free sampling is always the better buy"


def test_a_batch_whose_weights_lead_elsewhere_is_refused():
    """As after a resume that lost them."""
    world = World(plan=PRESETS["reweighted"])
    first = run(world)[0]
    world = World(plan=PRESETS["reweighted"])
    world.team = first.team
    for lost in (None, replace(first.batch.carried, team_version="another")):
        with pytest.raises(StaleBatch, match="do not lead to the present team"):
            run(world, done=1, batch=replace(first.batch, carried=lost))


def test_an_update_that_learned_from_kept_parts_issues_no_certificate():
    plan = replace(PRESETS["partial"], resample=replace(AUTO, min_effective_share=1.0, partial=True))
    world, given = World(plan=plan, radius=0.2, learning_rate=0.5), {}

    def watched(agent, data):
        given[agent] = data.fresh
        return world.update(agent, data)

    slots = schedule(plan.order, world.team.trainable, np.random.default_rng(0))
    list(run_stage(world.team, plan, world.collect, watched, slots))
    assert given == {"x": True, "y": False}


def test_the_cost_of_sampling_is_a_power_of_two():
    account = Account(
        tokens={"a": {"sampled": 1000, "trained": 4000}},
        seconds={"a": {"sample": 3.0, "score": 1.0, "train": 2.0, "gate": 1.0}, "team": {"grade": 9.0}},
    )
    assert account.sampling_cost() == 4.0, "3 ms a token beside 1 ms: to the nearest power"
    assert Account().sampling_cost() is None


# -- runs -----------------------------------------------------------------------------------------------------

TEAM = """
name: reuse
task: {name: roles}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 60}
team:
  model: tiny
  max_tokens: 2
  agents: [{name: a1, sees: blind}, {name: a2, sees: blind}, {name: a3, sees: blind}]
plan: {stages: 2, problems: 40, group_size: 4, radius_nats_per_message: 0.3}
eval: {every: 0}
"""


def records(folder: Path, *overrides: str) -> list[dict]:
    return [r for r in train(loads(TEAM, "reuse", overrides), folder) if r["kind"] == "update"]


@pytest.fixture(autouse=True)
def _taught(taught):
    remember_teaching(taught)


@pytest.mark.long
def test_every_decision_is_logged_with_its_reason(tmp_path):
    found = records(tmp_path / "run", "plan.preset=auto", "plan.sampling_cost=0.01")
    choices = [r["rollouts"] for r in found]
    assert [c["action"] for c in choices[:3]] == ["sample"] * 3, "next to nothing, so that any loss is too much"
    assert choices[0]["reason"] == "a stage begins"
    assert "sampling costs" in choices[1]["reason"]
    assert RunFolder.read(tmp_path / "run").log.read()[-2]["rollouts"] == choices[-1]


@pytest.mark.long
def test_the_cost_is_measured_once_and_kept(tmp_path):
    records(tmp_path / "run", "plan.preset=auto")
    progress = RunFolder.read(tmp_path / "run").checkpoints.latest().progress
    assert np.log2(progress["sampling_cost"]) % 1 == 0


@pytest.mark.slow
def test_a_partial_run_keeps_most_of_its_words_and_measures_its_bias(tmp_path):
    found = records(tmp_path / "run", "plan.preset=partial", "plan.min_effective_share=1", "plan.control_share=0.1")
    redrawn = [r["rollouts"]["partly"] for r in found if r["rollouts"]["action"] == "redraw"]
    assert len(redrawn) == 4
    assert all(0.5 < part["kept"] <= 1.0 for part in redrawn)
    assert all(part["bias"]["lower"] <= part["bias"]["estimate"] <= part["bias"]["upper"] for part in redrawn)
    assert {part["bias"]["problems"] for part in redrawn} == {4}
    fresh = records(tmp_path / "fresh", "plan.preset=teamtr")
    assert found[-1]["sampled_tokens_total"] < 0.8 * fresh[-1]["sampled_tokens_total"]


@pytest.mark.long
@pytest.mark.slow
def test_across_stages_the_last_episodes_are_learned_from_again(tmp_path):
    found = records(tmp_path / "run", "plan.preset=reweighted", "plan.reuse_across_stages=true")
    alone = records(tmp_path / "alone", "plan.preset=reweighted")
    assert found[3]["messages"] > alone[3]["messages"] == 160, "40 problems of 64: some are drawn again"
    assert found[0]["messages"] == 160
    stored = read_episodes(sorted((tmp_path / "run" / "episodes").glob("stage-0001-*"))[0])
    assert len(stored.problems) == 40, "a file holds what was sampled for it"
    assert found[3]["sampled_tokens_total"] == pytest.approx(2 * found[0]["sampled_tokens_total"], rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.min_effective_share=0.5"], "plan.min_effective_share needs plan.reweight: true"),
        (
            ["plan.preset=reweighted", "plan.control_share=0.5"],
            "plan.control_share needs plan.resample_partially: true",
        ),
        (["plan.reweight=true"], "plan.reweight needs rollouts that are reused"),
        (["plan.preset=auto", "plan.resample_every=1"], "plan.reweight needs rollouts that are reused"),
        (["plan.preset=partial", "plan.reuse_across_stages=true"], "exclude each other"),
        (["plan.preset=auto", "plan.sampling_cost=0"], "plan.sampling_cost"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        loads(TEAM, "reuse", overrides)
