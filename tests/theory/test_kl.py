"""KL against hand arithmetic, exact enumeration, and repeated sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from teamtr.theory.kl import (
    discounted_kl,
    kl_cur_to_new,
    kl_k1,
    kl_k3,
    pairwise_sum_per_message,
    per_message_sum,
    per_token,
    radius_per_message,
)


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def textbook_kl(logits_cur: Tensor, logits_new: Tensor) -> Tensor:
    """The plain formula, an independent reference in double precision."""
    logp, logq = logits_cur.double().log_softmax(-1), logits_new.double().log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum(-1)


# ---------------------------------------------------------------- full vocabulary


def test_a_position_has_the_same_bits_beside_one_that_is_far() -> None:
    """Where every token is near, the term for far ones is not computed."""
    cur, new = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)) * 0.1
    far = torch.tensor([[9.0, *[0.0] * 6]])
    beside = kl_cur_to_new(torch.cat([cur, far]), torch.cat([new, -far]))
    assert torch.equal(kl_cur_to_new(cur, new), beside[:3])
    torch.testing.assert_close(beside[3:], textbook_kl(far, -far).float())


def test_known_log_probabilities_change_no_bit_and_take_no_gradient() -> None:
    cur, new = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1))
    alone, beside = new.clone().requires_grad_(), new.clone().requires_grad_()
    known = beside.log_softmax(-1)
    expected, found = kl_cur_to_new(cur, alone), kl_cur_to_new(cur, beside, known)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(expected, found)
    assert alone.grad is not None
    assert beside.grad is not None
    assert torch.equal(alone.grad, beside.grad)


def test_kl_of_no_position_is_empty() -> None:
    assert kl_cur_to_new(torch.zeros(0, 7), torch.zeros(0, 7)).shape == (0,)


def test_kl_by_hand_and_in_the_order_of_its_name() -> None:
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = 1/2 log 2 + 1/2 log(2/3) = 1/2 log(4/3) = 0.14384
    # the other way round: 1/4 log(1/2) + 3/4 log(3/2) = 0.13081
    p, q = f64([[0.5, 0.5]]).log(), f64([[0.25, 0.75]]).log()
    assert float(kl_cur_to_new(p, q)) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-14)
    assert float(kl_cur_to_new(q, p)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-14)
    # logits are defined up to a constant per position
    assert float(kl_cur_to_new(p + 7.0, q - 3.0)) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-13)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_kl_agrees_with_the_textbook_formula(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cur = 3.0 * torch.randn(50, 40, generator=generator, dtype=torch.float64)
    new = cur + spread * torch.randn(50, 40, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(kl_cur_to_new(cur, new), textbook_kl(cur, new), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_logits_give_exactly_zero_and_an_exactly_zero_gradient(dtype: torch.dtype) -> None:
    cur = (5.0 * torch.randn(30, 1001, generator=torch.Generator().manual_seed(1))).to(dtype)
    new = cur.clone().requires_grad_()
    kl_N = kl_cur_to_new(cur, new)
    kl_N.sum().backward()
    assert kl_N.dtype == dtype
    assert (kl_N == 0.0).all()
    assert new.grad is not None
    assert (new.grad == 0.0).all()


def test_in_float32_the_kl_of_a_small_step_falls_with_its_square() -> None:
    """The textbook formula fails this: its rounding, 1e-7 a position, drowns everything below a step of 1e-3."""
    generator = torch.Generator().manual_seed(2)
    cur = 3.0 * torch.randn(64, 2000, generator=generator)
    step = torch.randn(64, 2000, generator=generator)
    for size in (1e-1, 1e-2, 1e-3, 1e-4):
        new = cur + size * step
        got, exact = kl_cur_to_new(cur, new).double(), textbook_kl(cur, new)
        assert float(got.min()) >= 0.0
        assert float((got - exact).abs().max() / exact.mean()) < 1e-2
    # the step itself must survive being added to float32 logits: at 1e-4 it does to a part in a thousand
    assert float(exact.mean() / (1e-4**2)) == pytest.approx(
        float(textbook_kl(cur, cur + 1e-1 * step).mean()) / 1e-2, rel=0.1
    )
    naive = (cur.log_softmax(-1).exp() * (cur.log_softmax(-1) - new.log_softmax(-1))).sum(-1).double()
    assert float((naive - exact).abs().max() / exact.mean()) > 1.0


def test_forbidden_tokens() -> None:
    inf = math.inf
    # forbidden in both: as if the token were not there, 1/2 log(4/3)
    both = kl_cur_to_new(f64([[math.log(0.5), -inf, math.log(0.5)]]), f64([[math.log(0.25), -inf, math.log(0.75)]]))
    assert float(both) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-14)
    # allowed again by new: p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): KL = log 2
    opened = kl_cur_to_new(f64([[0.0, 0.0, -inf]]), f64([[0.0, 0.0, math.log(2.0)]]))
    assert float(opened) == pytest.approx(math.log(2.0), rel=1e-14)
    # forbidden by new, possible under cur: infinite, not nan and not hidden
    assert float(kl_cur_to_new(f64([[0.0, 0.0]]), f64([[0.0, -inf]]))) == inf
    # a probability of exp(-800), 0 in double precision, that new forbids: no mass, no KL
    assert float(kl_cur_to_new(f64([[0.0, -800.0]]), f64([[0.0, -inf]]))) == 0.0
    # mass moved onto a token whose ratio overflows, exp(800): p = (1, ~0), q = (~0, 1): KL = 800
    assert float(kl_cur_to_new(f64([[0.0, -800.0]]), f64([[-800.0, 0.0]]))) == pytest.approx(800.0)
    # a broken forward pass stays visible
    assert math.isnan(float(kl_cur_to_new(f64([[0.0, math.nan]]), f64([[0.0, 0.0]]))))


def test_kl_gradient_agrees_with_finite_differences_on_both_sides() -> None:
    generator = torch.Generator().manual_seed(4)
    cur = torch.randn(3, 6, generator=generator, dtype=torch.float64).requires_grad_()
    new = (2.0 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(kl_cur_to_new, (cur, new))


def test_kl_gradient_is_q_minus_p_even_with_forbidden_tokens() -> None:
    cur = f64([[0.0, -math.inf, 0.0]])
    new = f64([[math.log(1.0), -math.inf, math.log(3.0)]]).requires_grad_()
    kl_cur_to_new(cur, new).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f64([[0.25 - 0.5, 0.0, 0.75 - 0.5]]))


def test_kl_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="logits of one shape"):
        kl_cur_to_new(torch.zeros(2, 3), torch.zeros(3))


# ---------------------------------------------------------------- sampled estimates


def test_k1_and_k3_by_hand_in_numpy_and_torch() -> None:
    # cur 0.5, new 0.25: k1 = log 2; k3 = 0.5 - 1 + log 2
    cur, new = np.log([0.5]), np.log([0.25])
    assert kl_k1(cur, new)[0] == pytest.approx(math.log(2.0))
    assert kl_k3(cur, new)[0] == pytest.approx(math.log(2.0) - 0.5)
    torch.testing.assert_close(kl_k1(torch.from_numpy(cur), torch.from_numpy(new)), f64([math.log(2.0)]))
    torch.testing.assert_close(kl_k3(torch.from_numpy(cur), torch.from_numpy(new)), f64([math.log(2.0) - 0.5]))


def test_k1_and_k3_are_unbiased_by_enumeration_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(5)
    cur = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    new = cur + torch.randn(4, 7, generator=generator, dtype=torch.float64)
    logp_NV, logq_NV = cur.log_softmax(-1), new.log_softmax(-1)
    exact_N = kl_cur_to_new(cur, new)
    k1_NV, k3_NV = kl_k1(logp_NV, logq_NV), kl_k3(logp_NV, logq_NV)
    torch.testing.assert_close((logp_NV.exp() * k1_NV).sum(-1), exact_N)
    torch.testing.assert_close((logp_NV.exp() * k3_NV).sum(-1), exact_N)
    assert (k3_NV >= 0.0).all()
    assert (k1_NV < 0.0).any()
    # under samples from new they would estimate something else: the direction matters
    assert ((logq_NV.exp() * k3_NV).sum(-1) - exact_N).abs().min() > 1e-3


def test_chain_rule_by_enumeration_of_messages() -> None:
    """lem:chainrule: vocabulary {a, b, end}, at most two tokens, so 1 + 2 * 3 = 7 messages of length 1 or 2."""
    generator = torch.Generator().manual_seed(6)
    # prefixes: empty, a, b
    cur = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    new = cur + 0.5 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
    logp, logq = cur.log_softmax(-1).numpy(), new.log_softmax(-1).numpy()
    end = 2
    messages = [(end,)] + [(first, second) for first in (0, 1) for second in (0, 1, end)]
    # the prefix of the first token is row 0, that of the second is row 1 + first token
    rows = [[0] if len(m) == 1 else [0, 1 + m[0]] for m in messages]
    lengths_M = np.array([len(m) for m in messages])
    row_N, token_N = np.concatenate(rows), np.concatenate(messages)

    logp_M = per_message_sum(logp[row_N, token_N], lengths_M)
    logq_M = per_message_sum(logq[row_N, token_N], lengths_M)
    assert np.exp(logp_M).sum() == pytest.approx(1.0)
    message_kl = float(np.sum(np.exp(logp_M) * (logp_M - logq_M)))  # the left side: KL between laws of messages

    token_kl_N = kl_cur_to_new(cur, new).numpy()[row_N]
    assert float(np.exp(logp_M) @ per_message_sum(token_kl_N, lengths_M)) == pytest.approx(message_kl, rel=1e-12)
    # and so do k1 and k3, summed over tokens
    for estimate in (kl_k1, kl_k3):
        sampled_M = per_message_sum(estimate(logp[row_N, token_N], logq[row_N, token_N]), lengths_M)
        assert float(np.exp(logp_M) @ sampled_M) == pytest.approx(message_kl, rel=1e-12)


# ---------------------------------------------------------------- units


def test_per_message_sum_by_hand() -> None:
    got = per_message_sum([1.0, 2.0, 4.0, 8.0, 16.0], [2, 0, 3, 0])
    np.testing.assert_array_equal(got, [3.0, 0.0, 28.0, 0.0])
    assert per_message_sum([], []).shape == (0,)
    broken = per_message_sum([math.nan, 1.0, 2.0], [1, 2])
    assert math.isnan(broken[0])
    assert broken[1] == 3.0
    with pytest.raises(ValueError, match="add up to the number of token values"):
        per_message_sum([1.0, 2.0], [1])
    with pytest.raises(ValueError, match="at least 0"):
        per_message_sum([1.0], [2, -1])


def test_pairwise_sum_per_message_has_the_bits_of_each_message_by_itself() -> None:
    rng = np.random.default_rng(0)
    lengths_M = rng.permutation([0, 1, 2, 3, 3, 7, 8, 9, 9, 127, 128, 129, 1000, 1000])
    values = [rng.normal(size=length) for length in lengths_M]
    assert pairwise_sum_per_message(np.concatenate(values), lengths_M).tolist() == [float(x.sum()) for x in values]
    assert pairwise_sum_per_message(np.zeros(0), np.zeros(0, dtype=np.int64)).shape == (0,)


def test_discounted_kl_by_hand() -> None:
    # three episodes; the agent speaks at turns 0 and 2 of the first, at turn 1 of the second, never in the third
    kl_M, turn_M, episode_M = [0.4, 0.8, 0.6], [0, 2, 1], [0, 0, 1]
    # gamma 1/2: (1 - 1/2) * (0.4 + 0.8 / 4 + 0.6 / 2) / 3 = 0.5 * 0.9 / 3 = 0.15
    assert discounted_kl(kl_M, turn_M, episode_M, 0.5, 3) == pytest.approx(0.15)
    # gamma 1, the plain sum per episode: (0.4 + 0.8 + 0.6) / 3
    assert discounted_kl(kl_M, turn_M, episode_M, 1.0, 3) == pytest.approx(0.6)
    # gamma 0: only the first turn is seen
    assert discounted_kl(kl_M, turn_M, episode_M, 0.0, 3) == pytest.approx(0.4 / 3)
    assert discounted_kl([], [], [], 0.9, 3) == 0.0


def test_discounted_kl_of_the_same_kl_at_every_turn_is_that_kl() -> None:
    # lem:kltokequals: d^rho is a distribution, (1 - gamma) * sum gamma**t = 1 - gamma**400 = 1 - 5e-19
    turns = np.arange(400)
    assert discounted_kl(np.full(400, 0.3), turns, np.zeros(400, int), 0.9, 1) == pytest.approx(0.3, rel=1e-12)


def test_discounted_kl_refuses_numbers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="within the 2 episodes"):
        discounted_kl([0.1], [0], [2], 0.9, 2)
    with pytest.raises(ValueError, match="one KL, turn and episode"):
        discounted_kl([0.1], [0, 1], [0], 0.9, 2)
    with pytest.raises(ValueError, match="gamma"):
        discounted_kl([0.1], [0], [0], -0.1, 2)


def test_per_token_by_hand() -> None:
    # (0.6 / 3 + 0.4 / 1) / 2 = 0.3: messages weigh alike, it is not 1.0 / 4 tokens
    assert per_token([0.6, 0.4], [3, 1]) == pytest.approx(0.3)
    assert radius_per_message(0.002, 17) == pytest.approx(0.034)
    with pytest.raises(ValueError, match="at least one token"):
        per_token([0.1, 0.1], [1, 0])
    with pytest.raises(ValueError, match="at least one message"):
        per_token([], [])
    for radius, t_max in ((-0.1, 3), (math.nan, 3), (0.1, 0)):
        with pytest.raises(ValueError, match="radius_per_message"):
            radius_per_message(radius, t_max)


@pytest.mark.long
@settings(max_examples=100)
@given(st.lists(st.lists(st.just(0.0) | st.floats(1e-9, 10.0), min_size=1, max_size=6), min_size=1, max_size=8))
def test_token_average_and_token_sum_bound_each_other(token_kls: list[list[float]]) -> None:
    """lem:avgvssum: E[A] <= E[S] <= T_max E[A], and so a token radius implies a message radius."""
    lengths_M = np.array([len(m) for m in token_kls])
    kl_M = per_message_sum(np.concatenate(token_kls), lengths_M)
    average, total = per_token(kl_M, lengths_M), float(kl_M.mean())
    assert average <= total * (1 + 1e-12)
    assert total <= radius_per_message(average, int(lengths_M.max())) * (1 + 1e-12)
    if (lengths_M == lengths_M[0]).all():  # equality when all messages are as long as the longest
        assert total == pytest.approx(radius_per_message(average, int(lengths_M[0])), rel=1e-12)
