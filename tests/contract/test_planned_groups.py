"""Groups of workers, planned: a worker's memory is that of its group's agents, and seconds add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planned import LARGE, SHAPE, setup, workers
from teamtr.errors import UserError
from teamtr.planning.advice import helpful, smallest_sharing
from teamtr.planning.cards import CARDS
from teamtr.planning.memory import memory_of
from teamtr.planning.sampling import sample_seconds
from teamtr.planning.setup import Cluster, Group, Setup
from teamtr.planning.stage import predict


def in_groups(*counts: int, cards: int | None = None) -> Setup:
    """Agents a and b on one base, c on one half as deep; workers for those and for this one."""
    small = replace(SHAPE, layers=14)
    whole = setup(cards=cards or sum(counts), workers=sum(counts), shards=sum(counts))
    members = (*whole.members[:2], replace(whole.members[2], shape=small, source="other"))
    pairs = zip((("a", "b"), ("c",)), counts, strict=True)
    groups = tuple(Group(f"group {k}", names, count) for k, (names, count) in enumerate(pairs))
    return replace(whole, members=members, cluster=replace(whole.cluster, groups=groups, shards=max(counts)))


def without_groups(given: Setup) -> Setup:
    cluster = replace(given.cluster, groups=(), shards=given.cluster.workers)
    return replace(given, cluster=cluster)


def test_a_worker_of_a_group_has_the_memory_of_a_team_of_its_agents():
    given = in_groups(2, 1)
    found = predict(given)
    for part, names, workers_of in zip(found.groups, ("ab", "c"), (2, 1), strict=True):
        alone = replace(
            given,
            members=tuple(member for member in given.members if member.name in names),
            turns=tuple(turn for turn in given.turns if turn.agent in names),
            demand=given.demand.of(names),
            cluster=Cluster(CARDS["H200"], workers_of, workers_of, 2),
        )
        assert part.memory.plan.items == memory_of(alone).plan.items
    together = predict(without_groups(given)).memory.plan
    weights = [
        next(item.bytes for item in plan.items if item.what == "weights")
        for plan in (together, *(part.memory.plan for part in found.groups))
    ]
    assert weights[0] == weights[1] + weights[2]
    assert found.memory is max((part.memory for part in found.groups), key=lambda one: one.plan.total)
    assert found.memory.plan.where == "group 0"


def test_groups_take_turns_and_their_seconds_add_up():
    given = in_groups(2, 1)
    found, one = predict(given), predict(setup())
    assert found.sampled_tokens == predict(without_groups(given)).sampled_tokens == one.sampled_tokens
    for phase, spent in found.phases.items():
        assert spent.seconds == pytest.approx(sum(part.phases[phase].seconds for part in found.groups))
    assert found.groups[0].setup.batches == found.groups[1].setup.batches == one.setup.batches == 3
    assert found.phases["sample"].seconds > 0.0
    more = predict(in_groups(4, 1))
    assert more.groups[0].seconds < found.groups[0].seconds
    steps, others = more.groups[1].phases["train"].seconds, found.groups[1].phases["train"].seconds
    assert steps == pytest.approx(others, rel=0.02), "one worker has as many rows, and measures a few in more shards"
    evaluated = replace(given, evaluated=(64, 2))
    parts = [sample_seconds(one, predict(one).memory.pages, 64).seconds for one in evaluated.by_group]
    assert predict(evaluated).run_seconds == pytest.approx(evaluated.plan.stages * found.seconds + 2 * sum(parts))


def test_one_group_of_all_is_a_team_without_groups():
    plain = setup(**workers(2))
    everybody = replace(plain, cluster=replace(plain.cluster, groups=(Group("group 0", ("a", "b", "c"), 2),)))
    a, b = predict(plain), predict(everybody)
    assert a.phases == b.phases
    assert a.memory.plan.items == b.memory.plan.items
    assert (a.seconds, a.run_seconds, a.waves, a.micro_batch) == (b.seconds, b.run_seconds, b.waves, b.micro_batch)


def test_groups_on_one_card_share_its_memory_and_not_its_time():
    crowded, apart = in_groups(2, 1, cards=1), in_groups(2, 1)
    assert [one.cluster.workers_on_a_card for one in crowded.by_group] == [3, 3]
    assert [one.cluster.busy_on_a_card for one in crowded.by_group] == [2, 1], "the other group waits meanwhile"
    there, here = predict(apart), predict(crowded)
    assert here.groups[0].memory.plan.available < 0.34 * there.groups[0].memory.plan.available
    assert [one.cluster.workers_on_a_card for one in apart.by_group] == [1, 1]


def test_advice_for_groups_names_the_group():
    found = predict(in_groups(2, 1))
    settings = [change.settings for change in helpful(found)]
    assert any(told.startswith("cluster.groups.0.workers=4 --cards 5") for told in settings)
    assert any(told.startswith("cluster.groups.1.workers=2 --cards 4") for told in settings)
    assert not any("cluster.workers=" in told for told in settings)
    assert len(set(settings)) == len(settings)
    large = in_groups(1, 1)
    members = tuple(replace(member, shape=LARGE) if member.name != "c" else member for member in large.members)
    large = replace(large, members=members)
    assert not predict(large).memory.fits
    assert predict(large).memory.plan.where == "group 0"
    (change,) = [change for change in helpful(predict(large)) if "shard_base=true" in change.settings]
    assert smallest_sharing(large.by_group[0]) == 5
    assert change.settings.startswith("cluster.groups.0.workers=5 --cards 6 cluster.shard_base=true")
    with pytest.raises(UserError, match="4 workers need as many"):
        replace(in_groups(4, 1).cluster, shards=2)
