"""Generalized advantage estimation, by hand and against the exact values of small chains; the critic's loss."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from teamtr.batches import AgentBatch
from teamtr.theory.estimators import CriticAdvantage
from teamtr.theory.gae import chain_advantages, token_advantages
from teamtr.theory.value_loss import clipped_value_loss

PLAIN = {"normalize": False, "clip": math.inf, "eps": 1e-6}


def test_a_chain_by_hand():
    found = chain_advantages(np.array([0.5, 0.2, 0.6]), np.array([1.0, 0.5, 9.0]), final=2.0, lam=0.5)
    last = 2.0 - 0.6
    middle = 0.5 * 0.6 - 0.2 + 0.5 * 0.5 * last
    first = 1.0 * 0.2 - 0.5 + 1.0 * 0.5 * middle
    np.testing.assert_allclose(found, [first, middle, last], rtol=1e-15)


def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_the_one_step_error():
    rng = np.random.default_rng(0)
    values_T, discounts_T, final = rng.normal(size=9), rng.uniform(0.5, 1.0, 9), 1.7
    to_end_T = np.array([discounts_T[t:-1].prod() for t in range(9)])
    np.testing.assert_allclose(chain_advantages(values_T, discounts_T, final, 1.0), to_end_T * final - values_T)
    after_T = np.append(discounts_T[:-1] * values_T[1:], final)
    np.testing.assert_allclose(chain_advantages(values_T, discounts_T, final, 0.0), after_T - values_T)


def test_messages_of_an_episode_are_one_chain_and_turns_are_discounted_not_tokens():
    """Two episodes, given in another order than they were spoken in; the first has two messages, at turns 1 and 4."""
    values = [np.array([0.3]), np.array([0.1, 0.4]), np.array([0.2, 0.5, 0.6])]
    episode_M, turn_M = np.array([0, 1, 0]), np.array([4, 0, 1])
    gamma, lam = 0.9, 0.7
    returns_E = np.array([gamma**5, 0.0])  # a reward of 1 with the sixth turn, and none
    found = token_advantages(values, episode_M, turn_M, returns_E, gamma=gamma, lam=lam, **PLAIN)
    a3 = gamma**1 - 0.3  # one turn is left after turn 4
    a2 = gamma**3 * 0.3 - 0.6 + gamma**3 * lam * a3
    a1 = 0.6 - 0.5 + lam * a2
    a0 = 0.5 - 0.2 + lam * a1
    np.testing.assert_allclose(found.advantages[2], [a0, a1, a2], rtol=1e-14)
    np.testing.assert_allclose(found.advantages[0], [a3], rtol=1e-14)
    np.testing.assert_allclose(found.targets[2], [a0 + 0.2, a1 + 0.5, a2 + 0.6], rtol=1e-14)
    np.testing.assert_allclose(found.advantages[1], [0.4 - 0.1 - lam * 0.4, -0.4], rtol=1e-14)
    np.testing.assert_allclose(found.message_M, [gamma - 0.3, -0.1, gamma**4 - 0.2], rtol=1e-14)


def test_normalized_over_the_tokens_of_the_batch_and_clipped():
    rng = np.random.default_rng(1)
    values = [rng.normal(size=n) for n in (3, 1, 4, 2)]
    where, returns_E = (np.arange(4), np.zeros(4, dtype=np.int64)), rng.normal(size=4)
    plain = token_advantages(values, *where, returns_E, gamma=1.0, lam=0.9, **PLAIN)
    found = token_advantages(values, *where, returns_E, gamma=1.0, lam=0.9, normalize=True, clip=1.0, eps=0.0)
    raw_N = np.concatenate(plain.advantages)
    np.testing.assert_allclose(
        np.concatenate(found.advantages), np.clip((raw_N - raw_N.mean()) / raw_N.std(), -1, 1), rtol=1e-12
    )
    np.testing.assert_array_equal(np.concatenate(found.targets), np.concatenate(plain.targets))
    over_N = np.abs((raw_N - raw_N.mean()) / raw_N.std()) - 1.0
    assert found.clip_rate == np.mean(over_N > 0.0) > 0.0
    assert found.clip_error == pytest.approx(np.maximum(over_N, 0.0).mean())
    assert (plain.clip_rate, plain.clip_error) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_episode_without_a_finite_return_counts_for_nothing(bad):
    values = [np.array([0.5, 0.1]), np.array([0.2]), np.array([0.3])]
    episode_M, turn_M = np.arange(3), np.zeros(3, dtype=np.int64)
    settings = {"gamma": 1.0, "lam": 0.95, "normalize": True, "clip": math.inf, "eps": 1e-6}
    found = token_advantages(values, episode_M, turn_M, np.array([bad, 1.0, 0.0]), **settings)
    alone = token_advantages(values[1:], episode_M[:2], turn_M[:2], np.array([1.0, 0.0]), **settings)
    assert found.advantages[0].tolist() == [0.0, 0.0]
    assert found.targets[0].tolist() == [0.5, 0.1]
    np.testing.assert_array_equal(np.concatenate(found.advantages[1:]), np.concatenate(alone.advantages))
    np.testing.assert_array_equal(found.message_M[1:], alone.message_M)
    nothing = token_advantages(values, episode_M, turn_M, np.full(3, bad), **settings)
    assert not np.concatenate(nothing.advantages).any()
    clipped = token_advantages(values, episode_M, turn_M, np.array([bad, 1.0, 0.0]), **(settings | {"clip": 1.0}))
    here = token_advantages(values[1:], episode_M[:2], turn_M[:2], np.array([1.0, 0.0]), **(settings | {"clip": 0.5}))
    assert (here.clip_rate, here.clip_error) == (1.0, pytest.approx(0.5, abs=1e-5))
    assert clipped.clip_rate == 0.0


class Tree:
    """Messages of three tokens of three kinds, a random policy and a random reward for each: solved by going back from
    the ends."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        prefixes = [p for n in range(3) for p in product(range(3), repeat=n)]
        self.policy = {p: rng.dirichlet(np.ones(3)) for p in prefixes}
        self.value = {m: float(rng.normal()) for m in product(range(3), repeat=3)}
        for prefix in reversed(prefixes):
            self.value[prefix] = float(self.policy[prefix] @ [self.value[(*prefix, a)] for a in range(3)])

    def messages(self) -> list[tuple[int, ...]]:
        return list(product(range(3), repeat=3))

    def chance(self, message: tuple[int, ...]) -> float:
        return math.prod(self.policy[message[:u]][message[u]] for u in range(3))


@pytest.mark.parametrize("lam", [0.0, 0.4, 0.95, 1.0])
def test_with_exact_values_the_mean_advantage_is_the_exact_one_for_any_lambda(lam):
    """Over all messages, weighed by their probability: E(A | prefix, token) = Q - V; with lambda 0 in every sample."""
    tree = Tree()
    messages = tree.messages()
    values = [np.array([tree.value[m[:u]] for u in range(3)]) for m in messages]
    returns_E, chance_M = np.array([tree.value[m] for m in messages]), np.array([tree.chance(m) for m in messages])
    where = np.arange(len(messages)), np.zeros(len(messages), dtype=np.int64)
    found = token_advantages(values, *where, returns_E, gamma=1.0, lam=lam, **PLAIN).advantages
    for u in range(3):
        for taken in product(range(3), repeat=u + 1):
            own = [k for k, m in enumerate(messages) if m[: u + 1] == taken]
            exact = tree.value[taken] - tree.value[taken[:-1]]
            mean = sum(chance_M[k] * found[k][u] for k in own) / chance_M[own].sum()
            assert mean == pytest.approx(exact, abs=1e-12)
            if lam == 0.0:
                np.testing.assert_allclose([found[k][u] for k in own], exact, atol=1e-12)


def test_with_wrong_values_only_lambda_one_is_right_on_average():
    tree = Tree(1)
    messages = tree.messages()
    chance_M, returns_E = np.array([tree.chance(m) for m in messages]), np.array([tree.value[m] for m in messages])
    where = np.arange(len(messages)), np.zeros(len(messages), dtype=np.int64)
    wrong = [np.array([0.3, -1.0, 0.7])] * len(messages)
    own = [k for k, m in enumerate(messages) if m[0] == 1]

    def mean_at_first(lam: float) -> float:
        found = token_advantages(wrong, *where, returns_E, gamma=1.0, lam=lam, **PLAIN).advantages
        return sum(chance_M[k] * found[k][0] for k in own) / chance_M[own].sum()

    assert mean_at_first(1.0) + 0.3 == pytest.approx(tree.value[(1,)], abs=1e-12)
    assert mean_at_first(0.5) + 0.3 != pytest.approx(tree.value[(1,)], abs=1e-2)


def batch_of(lengths: list[int]) -> AgentBatch:
    nothing = tuple(np.zeros(n, dtype=np.int32) for n in lengths)
    count = len(lengths)
    logprobs = tuple(np.zeros(n, dtype=np.float32) for n in lengths)
    return AgentBatch("x", nothing, nothing, logprobs, np.arange(count), np.arange(count), np.zeros(count, dtype=int))


def test_explained_variance_by_hand():
    estimator = CriticAdvantage(gae_lambda=1.0, normalize=False)
    returns_PG = np.array([[0.0], [1.0], [1.0], [0.0]])
    rows = np.arange(4)
    perfect = [np.array([value]) for value in (0.0, 1.0, 1.0, 0.0)]
    one = estimator.of_tokens(perfect, batch_of([1] * 4), returns_PG, 1.0)
    assert one.explained_variance(rows) == 1.0
    constant = estimator.of_tokens([np.array([0.3])] * 4, batch_of([1] * 4), returns_PG, 1.0)
    assert constant.explained_variance(rows) == pytest.approx(0.0, abs=1e-12)
    assert constant.value_error(rows) == pytest.approx(math.sqrt((0.3**2 + 0.7**2) / 2))
    half = estimator.of_tokens([np.array([v]) for v in (0.25, 0.75, 0.75, 0.25)], batch_of([1] * 4), returns_PG, 1.0)
    assert half.explained_variance(rows) == pytest.approx(0.75)
    assert half.explained_variance(rows[1:3]) is None, "equal returns have nothing to explain"


def test_every_finite_group_teaches_with_a_critic():
    found = CriticAdvantage().estimate(np.array([[1.0, 1.0], [0.0, 1.0], [math.nan, 1.0]]))
    assert found.informative_P.tolist() == [True, True, False]
    assert found.values_PG[1].tolist() == [-0.5, 0.5]
    assert CriticAdvantage().largest(16, 1.0) == math.inf


def test_the_value_loss_by_hand_and_where_it_has_no_gradient():
    """Within the range the square; beyond it no pull towards the target, and the whole pull back from it."""
    new_N = torch.tensor([0.1, 0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    old_N, target_N = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    total, outside = clipped_value_loss(new_N, old_N, target_N, clip=0.2)
    assert float(total.detach()) == pytest.approx((0.9**2 + 0.8**2 + 1.5**2 + 1.1**2) / 2)
    assert int(outside) == 2
    total.backward()
    np.testing.assert_allclose(new_N.grad, [-0.9, 0.0, -1.5, 1.1])
    unclipped, outside = clipped_value_loss(new_N, old_N, target_N, clip=math.inf)
    assert float(unclipped.detach()) == pytest.approx((0.9**2 + 0.5**2 + 1.5**2 + 1.1**2) / 2)
    assert int(outside) == 0
