"""Redrawn episodes are the present team's own: exactly, where no update learned from the drafts, else nearly.

Teams of two tabular agents with messages of at most two tokens: whole conversations are counted and compared with those
of the present team.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from small import World
from teamtr.batches import RolloutBatch
from teamtr.engines import measuring
from teamtr.randomness import generator
from teamtr.rollout import play
from teamtr.rollout.redraw import redraw
from teamtr.team import visibility
from teamtr.theory.verification import chance_so_far, kept_tokens

ENDS = {name: frozenset({0, 1}) for name in ("x", "y")}
SURE = 1e-4
"""A p-value below which chance is no explanation."""


def short_world(sees: str = "everything", rounds: int = 1) -> World:
    world = World(rounds=rounds)
    agents = tuple(replace(agent, max_tokens=3 - rounds, sees=visibility(sees)) for agent in world.team)
    world.team = replace(world.team, agents=agents)
    return world


def sample(world: World, group: int, seed: int) -> RolloutBatch:
    return play(world.context, world.team, world.context.task.problems("train")[:1], group, seed=seed)


def move(world: World, batch: RolloutBatch, name: str, seed: int, by: float = 0.5) -> RolloutBatch:
    """Another policy for this agent that knows nothing of the batch, and what may stay of its messages."""
    learner, own = world.engine.learner(name), batch.of(name)
    learner.begin(own)
    noise = torch.randn(learner.policy.logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        learner.policy.logits.add_(by * noise)
    learner._touched()
    rng = generator(seed, "verify")
    verified = learner.verify(rng.random(int(own.lengths_M.sum())), rng.random(len(own)))
    ratio_M = learner.measure().log_ratio_M
    learner.end()
    world.engine.publish(name, learner.version())
    world.team = world.team.replace(name, learner.version())
    return batch.after(own, ratio_M, world.team.version, verified)


def counts(batch: RolloutBatch, turns: slice, fine: bool) -> dict[tuple, int]:
    found: dict[tuple, int] = {}
    for episode in batch.episodes:
        key = tuple(tuple((turn.token_ids // (1 if fine else 2)).tolist()) for turn in episode.turns[turns])
        found[key] = found.get(key, 0) + 1
    return found


def p_value(one: RolloutBatch, other: RolloutBatch, turns: slice = slice(None), *, fine: bool = True) -> float:
    """That both are of one law: chi-square over whole conversations, rare ones together; unless ``fine``, tokens are
    taken in pairs."""
    a, b = counts(one, turns, fine), counts(other, turns, fine)
    keys = [key for key in a.keys() | b.keys() if a.get(key, 0) + b.get(key, 0) >= 20]
    table = np.array([[c.get(key, 0) for key in keys] for c in (a, b)])
    rest = np.array([[sum(c.values()) - row.sum()] for c, row in zip((a, b), table, strict=True)])
    return float(stats.chi2_contingency(np.hstack([table, rest]) if rest.any() else table).pvalue)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sees", "rounds"),
    [
        ("everything", 1),
        pytest.param("blind", 1, marks=pytest.mark.slow),
        pytest.param("everything", 2, marks=pytest.mark.slow),
    ],
)
def test_redrawn_episodes_have_the_present_team_s_law(sees, rounds):
    world = short_world(sees, rounds)
    drafts = sample(world, 3000, seed=1)
    batch = move(world, move(world, drafts, "x", seed=2), "y", seed=3)
    found = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS)
    fresh = sample(world, 3000, seed=5)
    assert p_value(found.batch, fresh, fine=rounds == 1) > SURE
    assert p_value(drafts, fresh, fine=rounds == 1) < SURE, "the drafts are of another law"
    assert 0.2 < found.kept < 0.99
    assert found.batch.redrawn
    assert {turn.agent_version for e in found.batch.episodes for turn in e.turns} == set(world.team.versions.values())


@pytest.mark.long
def test_a_wrong_rest_is_caught(monkeypatch):
    """Drawing the next token from the new policy, instead of from what it says too seldom."""

    def wrong(logits_new, logits_cur, chance_N, draw_N):
        total, _ = right(logits_new, logits_cur, chance_N, draw_N)
        below = logits_new.softmax(-1).cumsum(-1)
        return total, torch.searchsorted(below, draw_N[:, None].to(below.dtype)).squeeze(-1).clamp(max=5)

    right = measuring._rest
    monkeypatch.setattr(measuring, "_rest", wrong)
    world = short_world()
    batch = move(world, sample(world, 3000, seed=1), "x", seed=2, by=1.0)
    found = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS)
    fresh = sample(world, 3000, seed=5)
    assert p_value(found.batch, fresh, slice(1)) < SURE


def test_in_a_blind_round_the_words_of_others_stay():
    world = short_world("blind")
    drafts = sample(world, 200, seed=1)
    batch = move(world, drafts, "x", seed=2)
    found = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS)
    kept_U = batch.carried.kept_U
    for e, (then, now) in enumerate(zip(drafts.episodes, found.batch.episodes, strict=True)):
        assert now.turns[1].token_ids.tolist() == then.turns[1].token_ids.tolist()
        kept = kept_U[2 * e]
        assert now.turns[0].token_ids[:kept].tolist() == then.turns[0].token_ids[:kept].tolist()
        assert kept_U[2 * e + 1] == -1
    assert any(a.turns[0].text != b.turns[0].text for a, b in zip(drafts.episodes, found.batch.episodes, strict=True))
    assert [e.verdict for e in found.batch.episodes] == world.context.task.grade(
        [(drafts.problems[0], e.answer, [t.text for t in e.turns]) for e in found.batch.episodes]
    ), "what was kept keeps its verdict, and what changed is graded anew"


def test_who_reads_other_words_speaks_anew():
    world = short_world("everything")
    drafts = sample(world, 200, seed=1)
    batch = move(world, drafts, "x", seed=2)
    found = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS)
    for then, now in zip(drafts.episodes, found.batch.episodes, strict=True):
        if then.turns[0].text == now.turns[0].text:
            assert now.turns[1].token_ids.tolist() == then.turns[1].token_ids.tolist()
        else:
            assert now.turns[1].context_ids.tolist() != then.turns[1].context_ids.tolist()
    pairs = zip(drafts.episodes, found.batch.episodes, strict=True)
    assert 0 < sum(then.turns[0].text != now.turns[0].text for then, now in pairs) < 200


def flattery(own: bool, repeats: int = 4000) -> tuple[float, float]:
    """How much more redrawn episodes earn than the new policy truly does, and the standard error of that.

    One agent says one of four words and is paid by a coin that depends on the word. Its update climbs on eight
    episodes; those are redrawn, or eight others of the same policy.
    """
    rng = np.random.default_rng(0)
    chances, words, apart = np.array([0.2, 0.4, 0.6, 0.8]), np.arange(4), []
    for _ in range(repeats):
        logits = rng.standard_normal(4)
        old = np.exp(logits) / np.exp(logits).sum()
        said = rng.choice(words, size=(2, 8), p=old)
        paid = (rng.random((2, 8)) < chances[said]).astype(float)
        centred = paid[0] - paid[0].mean()
        logits = logits + 0.5 * (centred[:, None] * (words == said[0][:, None])).sum(axis=0)
        new = np.exp(logits) / np.exp(logits).sum()
        rest = np.maximum(new - old, 0.0)
        earned = []
        for word, pay in zip(*(x[0 if own else 1] for x in (said, paid)), strict=True):
            chance = chance_so_far(np.log(new[[word]] / old[[word]]))
            if kept_tokens(chance, np.array([rest.sum()]), rng.random(1)) == 0:
                pay = float(rng.random() < chances[rng.choice(words, p=rest / rest.sum())])
            earned.append(pay)
        apart.append(np.mean(earned) - new @ chances)
    return float(np.mean(apart)), float(np.std(apart) / np.sqrt(repeats))


@pytest.mark.slow
def test_drafts_that_the_update_climbed_on_flatter_the_team_and_others_do_not():
    """The bias that the guarantees speak of is there (about two points here), and there alone."""
    bias, error = flattery(own=True)
    assert bias > 5 * error
    fair, error = flattery(own=False)
    assert abs(fair) < 4 * error


def test_the_control_measures_on_problems_that_are_played_twice():
    world = short_world()
    problems = world.context.task.problems("train")
    batch = move(world, play(world.context, world.team, problems, 16, seed=1), "x", seed=2)
    plain = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS)
    control = np.array([True, False, True])
    found = redraw(world.context, world.team, batch, seed=4, end_ids=ENDS, control_P=control)
    assert plain.bias is None
    assert found.bias.problems == 2
    rewards = np.array([e.reward for e in plain.batch.episodes]).reshape(3, 16)
    replaced = np.array([e.reward for e in found.batch.episodes]).reshape(3, 16)
    assert found.bias.estimate == pytest.approx((rewards[control].mean(axis=1) - replaced[control].mean(axis=1)).mean())
    assert (replaced[1] == rewards[1]).all()
