"""What a plan counts that changes with a setting: passes over messages, bytes between workers, turns of an episode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planned import SHAPE, TEAM, setup, workers
from teamtr.config import loads
from teamtr.planning import rates
from teamtr.planning.cards import CARDS
from teamtr.planning.exchange import exchange_seconds, gather_seconds
from teamtr.planning.learning import (
    LearnerCost,
    PassCount,
    Selection,
    all_rows,
    gate_seconds,
    score_seconds,
    some_rows,
    train_seconds,
)
from teamtr.planning.memory import memory_of
from teamtr.planning.seconds import Load
from teamtr.planning.setup import Cluster, Setup
from teamtr.session import forecast
from teamtr.session.build import build
from teamtr.session.memory import Opening
from teamtr.team import Schedule, ToolTurns
from teamtr.training.update import messages_measured


def learner_of(given: Setup) -> LearnerCost:
    return LearnerCost(given, given.members[0])


def test_where_the_objective_has_a_reference_it_is_scored_as_well() -> None:
    one = setup()
    beside = replace(one, plan=replace(one.plan, objective=replace(one.plan.objective, reference_kl=0.04)))
    (spent, passes), (more, twice) = (score_seconds(learner_of(given)) for given in (one, beside))
    everything = all_rows(learner_of(one), Load.learned(one))
    assert more.seconds - spent.seconds == pytest.approx(learner_of(one).forward(everything, 1).seconds)
    assert twice.forward - passes.forward == everything.micro_batches == 32


def test_steps_are_measured_once_an_epoch_where_there_is_a_gate() -> None:
    """After the first step, and between epochs."""
    one = setup()
    turns = one.turns_of(one.members[0].name)
    one = replace(one, learning=replace(one.learning, epochs=3))
    free = replace(one, plan=replace(one.plan, region=replace(one.plan.region, gate=False)))
    (spent, passes), (less, fewer) = (train_seconds(learner_of(given)) for given in (one, free))
    some = some_rows(learner_of(one), Load.learned(one), messages_measured(turns[0].message))
    assert spent.seconds - less.seconds == pytest.approx(3 * learner_of(one).forward(some, 2).seconds)
    assert passes.forward - fewer.forward == 3 * some.micro_batches
    assert fewer.backward == 3 * 4 * 8


def test_without_a_gate_beta_is_steered_by_all_messages() -> None:
    one = setup()
    steered, free = (
        replace(one, plan=replace(one.plan, region=replace(one.plan.region, gate=False, adapt_beta=adapt)))
        for adapt in (True, False)
    )
    everything = learner_of(one).forward(all_rows(learner_of(one), Load.learned(one)), 2).seconds
    assert gate_seconds(learner_of(steered))[0].seconds == pytest.approx(everything)
    assert gate_seconds(learner_of(free))[0].seconds == gate_seconds(learner_of(one))[0].seconds < 0.5 * everything


def test_a_plan_of_few_messages_has_no_more_of_them_to_measure() -> None:
    one = setup()
    few = replace(one, plan=replace(one.plan, problems=2, group_size=2))
    assert some_rows(learner_of(few), Load.learned(few), 16) == Selection(problems=2, episodes=4, micro_batches=1)


def test_workers_that_share_a_core_take_turns() -> None:
    def step(cards: int) -> dict[str, float]:
        two = replace(setup(), cluster=Cluster(CARDS["cpu"], cards=cards, workers=2, shards=2))
        return dict(learner_of(two).step(Selection(8, 64, 4)).by)

    apart, together = step(2), step(1)
    assert apart["launches"] == pytest.approx(28 * rates.CPU_BLOCK_S * 3 * 4)
    assert together == pytest.approx({name: 2 * seconds for name, seconds in apart.items()})


def test_the_least_that_a_worker_needs_has_pages_for_one_batch_only() -> None:
    """512 rows of 16 pages of 64 tokens, 114,688 bytes each; more are there, to be found again."""
    found = memory_of(setup())
    (pages,) = [item.bytes for item in found.plan.items if item.what == "keys and values"]
    one_batch = 64 * 114_688 * (512 * 16 + 1)
    assert pages > 1 << 33
    assert found.plan.total - found.least == max(0, pages - one_batch)
    roomy = memory_of(replace(setup(), sampling=replace(setup().sampling, memory=100 << 30)))
    assert roomy.plan.total - roomy.least == (100 << 30) - one_batch


def test_problems_that_are_fewer_than_shards_send_no_empty_gradients() -> None:
    """64 problems for 128 shards and 8 workers: eight shards of one problem each."""
    eight = setup(**workers(8, 128))
    size = 4 * SHAPE.adapter(16)
    seconds = 4 * size * ((8 + 1) * 7 / 8 / rates.GLOO + 8 / rates.HOST_ADD)
    assert exchange_seconds(eight, eight.members[0]).by == {"network": pytest.approx(seconds)}


def test_layers_in_parts_that_are_trained_send_their_gradients_away_on_the_way_back() -> None:
    once = 4 * SHAPE.blocks * 7 / 8 / (rates.GATHER * CARDS["H200"].link)
    for rank, times in ((16, 3 + 2), (None, 3 + 2 * 2)):
        eight = setup(rank=rank, **workers(8, shard_base=True))
        assert gather_seconds(eight, eight.members[0], PassCount(3, 2)).seconds == pytest.approx(times * once)


def test_turns_of_an_episode_with_replies_and_tools_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 10 tokens; 4 a message and 8 for its line; 7 an environment adds in the second round, and 5 a tool to
    each of two messages of the one agent that has tools."""
    session = build(loads(TEAM.format(train="lora", engine="plain"), "plan.yaml"))
    router = ToolTurns(Schedule.repeated(("left", "speaker"), 2), steps=2, agents=("left",))
    session = replace(session, context=replace(session.context, router=router))
    monkeypatch.setattr(forecast, "openings", lambda _: dict.fromkeys(session.team.names, Opening(10, 3, 7)))
    monkeypatch.setattr(forecast, "result_tokens", lambda _, agent: 5 if agent.name == "left" else 0)
    found = [(turn.agent, turn.context, turn.message, turn.known) for turn in forecast._turns(session, {})]
    assert found == [
        ("left", 10, 4, 0),
        ("left", 10 + 17, 4, 10),
        ("speaker", 10 + 2 * 17, 4, 0),
        ("left", 10 + 2 * 17 + 12 + 7, 4, 27),
        ("left", 10 + 3 * 17 + 12 + 7, 4, 63),
        ("speaker", 10 + 4 * 17 + 12 + 7, 4, 44),
    ]
    assert {turn.alike for turn in forecast._turns(session, {})} == {10}
