"""The clipped surrogate against hand arithmetic, finite differences and its own identities."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from teamtr.presets import PRESETS
from teamtr.theory.gain import LOG_RATIO_BOUND, surrogate_gain
from teamtr.theory.objective import Objective
from teamtr.theory.surrogate import clipped_surrogate, message_log_ratio, reference_kl, surrogate_denominator

OBJECTIVES = [
    Objective(ratio=ratio, clip_low=0.2, clip_high=0.28, average_over=average_over)  # type: ignore[arg-type]
    for ratio, average_over in itertools.product(("message", "token", "length_normalized"), ("messages", "tokens"))
]
BY_NAME: dict[str, Any] = {"ids": [f"{o.ratio}-{o.average_over}" for o in OBJECTIVES]}


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def two_messages() -> tuple[Tensor, Tensor, Tensor]:
    """Token ratios (2, 1/2, 1.1) and (0.5), so message ratios 1.1 and 0.5, geometric means 1.1 ** (1/3) and 0.5."""
    ratio_MT = f64([[2.0, 0.5, 1.1], [0.5, 1.0, 1.0]])
    logp_cur_MT = f64([[-1.0, -2.0, -0.5], [-1.0, 0.0, 0.0]])
    return logp_cur_MT + ratio_MT.log(), logp_cur_MT, torch.tensor([[True, True, True], [True, False, False]])


def random_batch(messages: int = 8, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logp_cur_MT = -torch.rand(messages, tokens, generator=generator, dtype=torch.float64) - 0.1
    logp_new_MT = logp_cur_MT + 0.3 * torch.randn(messages, tokens, generator=generator, dtype=torch.float64)
    lengths_M = torch.randint(1, tokens + 1, (messages,), generator=generator)
    mask_MT = torch.arange(tokens)[None, :] < lengths_M[:, None]
    advantages_M = torch.randn(messages, generator=generator, dtype=torch.float64)
    weights_M = torch.rand(messages, generator=generator, dtype=torch.float64) + 0.5
    return logp_new_MT, logp_cur_MT, mask_MT, advantages_M, weights_M


def test_message_log_ratio_by_hand() -> None:
    log_ratio_M = message_log_ratio(*two_messages())
    torch.testing.assert_close(log_ratio_M, f64([math.log(1.1), math.log(0.5)]))


@pytest.mark.parametrize(
    ("ratio", "average_over", "total", "denominator", "clipped", "ratios"),
    [
        # message: w = (1.1, 0.5), A = (1, -1), clip to [0.8, 1.2]
        #   1: min(1.1, 1.1) = 1.1;  2: min(-0.5, -0.8) = -0.8;  sum 0.3
        ("message", "messages", 1.1 - 0.8, 2, 1, 2),
        #   by tokens: 3 * 1.1 - 1 * 0.8 = 2.5
        ("message", "tokens", 3 * 1.1 - 0.8, 4, 1, 2),
        # geometric mean: w = (1.1 ** (1/3), 0.5): the first is within, 1.0323
        ("length_normalized", "messages", 1.1 ** (1 / 3) - 0.8, 2, 1, 2),
        ("length_normalized", "tokens", 3 * 1.1 ** (1 / 3) - 0.8, 4, 1, 2),
        # token: 1: min(2, 1.2) = 1.2, min(0.5, 0.8) = 0.5, 1.1 -> sum 2.8, mean 2.8/3;  2: min(-0.5, -0.8) = -0.8
        ("token", "messages", 2.8 / 3 - 0.8, 2, 3, 4),
        ("token", "tokens", 2.8 - 0.8, 4, 3, 4),
    ],
)
def test_total_denominator_and_clip_count_by_hand(
    ratio: Any, average_over: Any, total: float, denominator: float, clipped: int, ratios: float
) -> None:
    objective = Objective(ratio=ratio, average_over=average_over)
    got = clipped_surrogate(*two_messages(), f64([1.0, -1.0]), objective)
    assert float(got.total) == pytest.approx(total, rel=1e-14)
    assert (got.denominator, int(got.clipped), got.ratios) == (denominator, clipped, ratios)
    weighted = clipped_surrogate(*two_messages(), f64([1.0, -1.0]), objective, f64([3.0, 0.0]))
    # the second message contributed -0.8 under every option: 3 * (total + 0.8)
    assert float(weighted.total) == pytest.approx(3 * (total + 0.8), rel=1e-14)
    assert weighted.denominator == denominator


def test_asymmetric_clip_of_dapo_by_hand() -> None:
    # token ratios 1.25 and 1.4, A = 1: [0.8, 1.28] leaves 1.25 and cuts 1.4 to 1.28; [0.8, 1.2] cuts both
    logp_new_MT, mask_MT = f64([[1.25, 1.4]]).log(), torch.ones(1, 2, dtype=torch.bool)
    dapo = PRESETS["dapo"].objective
    got = clipped_surrogate(logp_new_MT, torch.zeros_like(logp_new_MT), mask_MT, f64([1.0]), dapo)
    assert (float(got.total), got.denominator, int(got.clipped)) == (pytest.approx(2.53), 2.0, 1)
    symmetric = replace(dapo, clip_high=0.2)
    got = clipped_surrogate(logp_new_MT, torch.zeros_like(logp_new_MT), mask_MT, f64([1.0]), symmetric)
    assert (float(got.total), int(got.clipped)) == (pytest.approx(2.4), 2)


@pytest.mark.parametrize("objective", OBJECTIVES, **BY_NAME)
def test_clipping_is_pessimistic_and_only_where_the_ratio_has_gone_the_way_of_the_advantage(
    objective: Objective,
) -> None:
    # one token, ratio 1.5 or 0.5: clipped (no gradient) for A of the same direction, unclipped for the other
    mask_MT = torch.ones(1, 1, dtype=torch.bool)
    for ratio, advantage, value, gradient in [
        (1.5, 1.0, 1.28, 0.0),
        (1.5, -1.0, -1.5, -1.5),
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),
    ]:
        logp_new_MT = f64([[math.log(ratio)]]).requires_grad_()
        got = clipped_surrogate(logp_new_MT, f64([[0.0]]), mask_MT, f64([advantage]), objective)
        got.total.backward()
        assert logp_new_MT.grad is not None
        assert float(got.total.detach()) == pytest.approx(value)
        assert float(logp_new_MT.grad) == pytest.approx(gradient)  # d w / d log p = w


@pytest.mark.parametrize(
    ("ratio", "average_over", "gradient_MT"),
    [
        # at new = cur every w is 1; A = (2, -1), lengths (3, 1)
        ("message", "messages", [[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]),
        ("message", "tokens", [[6.0, 6.0, 6.0], [-1.0, 0.0, 0.0]]),
        ("length_normalized", "messages", [[2 / 3, 2 / 3, 2 / 3], [-1.0, 0.0, 0.0]]),
        ("length_normalized", "tokens", [[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]),
        ("token", "messages", [[2 / 3, 2 / 3, 2 / 3], [-1.0, 0.0, 0.0]]),
        ("token", "tokens", [[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]]),
    ],
)
def test_the_first_gradient_is_reinforce_by_hand(ratio: Any, average_over: Any, gradient_MT: Any) -> None:
    _, logp_cur_MT, mask_MT = two_messages()
    logp_new_MT = logp_cur_MT.clone().requires_grad_()
    objective = Objective(ratio=ratio, average_over=average_over)
    got = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, f64([2.0, -1.0]), objective)
    got.total.backward()
    assert logp_new_MT.grad is not None
    torch.testing.assert_close(logp_new_MT.grad, f64(gradient_MT))
    assert int(got.clipped) == 0


@pytest.mark.parametrize("objective", OBJECTIVES, **BY_NAME)
def test_gradient_agrees_with_finite_differences(objective: Objective) -> None:
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, weights_M = random_batch()
    # the batch keeps away from the kinks, and lies on both sides of them
    log_ratio_MT = torch.where(mask_MT, logp_new_MT - logp_cur_MT, torch.zeros_like(logp_new_MT))
    lengths_M = mask_MT.sum(-1)
    log_ratio = {
        "message": log_ratio_MT.sum(-1),
        "token": log_ratio_MT[mask_MT],
        "length_normalized": log_ratio_MT.sum(-1) / lengths_M,
    }[objective.ratio]
    edges = f64([math.log(0.8), math.log(1.28)])
    assert (log_ratio[:, None] - edges).abs().min() > 1e-3
    assert 0 < int(((log_ratio < edges[0]) | (log_ratio > edges[1])).sum()) < len(log_ratio)

    def total(x: Tensor) -> Tensor:
        return clipped_surrogate(x, logp_cur_MT, mask_MT, advantages_M, objective, weights_M).total

    assert torch.autograd.gradcheck(total, (logp_new_MT.clone().requires_grad_(),))


@pytest.mark.parametrize("objective", OBJECTIVES, **BY_NAME)
def test_micro_batches_add_up(objective: Objective) -> None:
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, weights_M = random_batch()

    def run(size: int) -> tuple[float, float, int, float, Tensor]:
        x = logp_new_MT.clone().requires_grad_()
        parts = [
            clipped_surrogate(
                x[i : i + size],
                logp_cur_MT[i : i + size],
                mask_MT[i : i + size],
                advantages_M[i : i + size],
                objective,
                weights_M[i : i + size],
            )
            for i in range(0, 8, size)
        ]
        denominator = sum(p.denominator for p in parts)
        for p in parts:
            (p.total / denominator).backward()
        assert x.grad is not None
        total = sum(float(p.total.detach()) for p in parts)
        return total, denominator, sum(int(p.clipped) for p in parts), sum(p.ratios for p in parts), x.grad

    whole, ones = run(8), run(1)
    assert ones[0] == pytest.approx(whole[0], rel=1e-13)
    assert ones[1:4] == whole[1:4]
    torch.testing.assert_close(ones[4], whole[4], rtol=1e-13, atol=0.0)
    assert whole[1] == surrogate_denominator(mask_MT.sum(-1).numpy(), objective.average_over)


def test_the_options_coincide_for_messages_of_one_token_and_differ_otherwise() -> None:
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, weights_M = random_batch()

    def values(mask: Tensor) -> set[float]:
        return {
            round(float(s.total) / float(s.denominator), 12)
            for s in (clipped_surrogate(logp_new_MT, logp_cur_MT, mask, advantages_M, o, weights_M) for o in OBJECTIVES)
        }

    first_only = mask_MT & (torch.arange(5) == 0)
    assert len(values(first_only)) == 1
    assert len(values(mask_MT)) == len(OBJECTIVES)


@pytest.mark.parametrize("objective", OBJECTIVES, **BY_NAME)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_in_padding_reaches_neither_value_nor_gradient(objective: Objective, garbage: float) -> None:
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, weights_M = random_batch()
    mask_MT[-1] = False  # a row that is padding from end to end, with garbage for advantage and weight too
    fill = torch.full_like(logp_new_MT, garbage)
    advantages_M, weights_M = advantages_M.clone(), weights_M.clone()
    clean = logp_new_MT[:-1].clone().requires_grad_()
    expected = clipped_surrogate(clean, logp_cur_MT[:-1], mask_MT[:-1], advantages_M[:-1], objective, weights_M[:-1])
    expected.total.backward()
    advantages_M[-1] = weights_M[-1] = garbage
    dirty = torch.where(mask_MT, logp_new_MT, fill).requires_grad_()
    got = clipped_surrogate(
        dirty, torch.where(mask_MT, logp_cur_MT, -fill), mask_MT, advantages_M, objective, weights_M
    )
    got.total.backward()
    assert dirty.grad is not None
    assert clean.grad is not None
    # Sums over 8 rows and over 7 may add up in another order: a few roundings of 2e-16, while garbage is off by more
    # than 1e-9 wherever it enters.
    assert float(got.total.detach()) == pytest.approx(float(expected.total.detach()), rel=1e-12)
    assert (got.denominator, got.ratios, int(got.clipped)) == (
        expected.denominator,
        expected.ratios,
        int(expected.clipped),
    )
    torch.testing.assert_close(dirty.grad[:-1], clean.grad, rtol=1e-12, atol=0.0)
    assert (dirty.grad[~mask_MT] == 0.0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, **BY_NAME)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_non_finite_log_probability_of_a_real_token_is_not_hidden(objective: Objective, bad: float) -> None:
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, _ = random_batch()
    logp_new_MT[0, 0] = bad
    assert math.isnan(float(clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, advantages_M, objective).total))


def test_a_runaway_ratio_is_bounded_with_a_finite_gradient() -> None:
    logp_new_MT = torch.tensor([[500.0], [-500.0]], requires_grad=True)
    mask_MT = torch.ones(2, 1, dtype=torch.bool)
    # A = (-1, 1): the pessimistic, unclipped branch in both: -exp(20) and exp(-20)
    got = clipped_surrogate(logp_new_MT, torch.zeros(2, 1), mask_MT, torch.tensor([-1.0, 1.0]), Objective())
    assert float(got.total.detach()) == pytest.approx(math.exp(-LOG_RATIO_BOUND) - math.exp(LOG_RATIO_BOUND), rel=1e-6)
    got.total.backward()
    assert logp_new_MT.grad is not None
    assert (logp_new_MT.grad == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    # 64 tokens of log-ratio 2**-8: sum 0.25 exactly, w = exp(0.25) = 1.284; all numbers are exact in every dtype
    logp_new_MT = torch.full((1, 64), 2.0**-8, dtype=dtype)
    mask_MT = torch.ones(1, 64, dtype=torch.bool)
    objective = Objective(clip_high=1.0)
    got = clipped_surrogate(logp_new_MT, torch.zeros_like(logp_new_MT), mask_MT, f64([1.0]), objective)
    assert float(got.total) == pytest.approx(math.exp(0.25), rel=1e-6)
    assert got.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_wrong_shapes_and_masks_are_refused() -> None:
    logp_new_MT, logp_cur_MT, mask_MT = two_messages()
    with pytest.raises(ValueError, match="one and the same M x T shape"):
        message_log_ratio(logp_new_MT, logp_cur_MT[:, :2], mask_MT)
    with pytest.raises(TypeError, match="mask_MT must be boolean"):
        message_log_ratio(logp_new_MT, logp_cur_MT, mask_MT.long())
    with pytest.raises(ValueError, match=r"advantages_M must hold one number per message \(2\)"):
        clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, f64([1.0]), Objective())
    with pytest.raises(ValueError, match="weights_M"):
        clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, f64([1.0, 1.0]), Objective(), f64([1.0]))


def test_surrogate_gain_by_hand() -> None:
    # w = (1.5, 0.5), A = (2, -1): (0.5 * 2 + (-0.5) * (-1)) / 2 = 0.75
    log_ratio_M = np.log([1.5, 0.5])
    assert surrogate_gain(log_ratio_M, [2.0, -1.0]) == pytest.approx(0.75, rel=1e-14)
    # weights (1, 3): (1 + 1.5) / 2
    assert surrogate_gain(log_ratio_M, [2.0, -1.0], [1.0, 3.0]) == pytest.approx(1.25, rel=1e-14)
    # no step, no gain, although the advantages do not average to zero
    assert surrogate_gain([0.0, 0.0], [2.0, -1.0]) == 0.0


def test_surrogate_gain_keeps_the_expectation_and_loses_the_noise() -> None:
    """Exactly, by enumeration: cur = (1/2, 1/2), new = (0.55, 0.45), A = (1, -1), two messages a batch."""
    cur, new, advantage = np.array([0.5, 0.5]), np.array([0.55, 0.45]), np.array([1.0, -1.0])
    pairs = list(itertools.product((0, 1), repeat=2))
    gains = [surrogate_gain(np.log(new / cur)[list(pair)], advantage[list(pair)]) for pair in pairs]
    plain = [float(((new / cur) * advantage)[list(pair)].mean()) for pair in pairs]
    # E_new[A] = 0.55 - 0.45 = 0.1, and every pair is equally likely
    assert np.mean(gains) == pytest.approx(0.1, rel=1e-13)
    assert np.mean(plain) == pytest.approx(0.1, rel=1e-13)
    assert np.var(gains) < 1e-30  # (w - 1) A = 0.1 for either message
    assert np.var(plain) > 0.4  # w A = 1.1 or -0.9: variance 1 a message, one half for two


def test_surrogate_gain_of_runaway_and_broken_ratios() -> None:
    assert surrogate_gain([1e4], [1.0]) == pytest.approx(math.expm1(LOG_RATIO_BOUND))
    assert math.isnan(surrogate_gain([0.0, -math.inf], [1.0, 1.0]))
    assert math.isnan(surrogate_gain([0.0, math.nan], [1.0, 0.0]))
    with pytest.raises(ValueError, match="never spoke"):
        surrogate_gain([], [])
    with pytest.raises(ValueError, match="one advantage per message"):
        surrogate_gain([0.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="one weight per message"):
        surrogate_gain([0.0], [1.0], [1.0, 2.0])


# ---------------------------------------------------------------- the KL to a reference policy


def test_reference_kl_by_hand() -> None:
    """ref / new = (2, 1/2) and (1/4): each token r - log r - 1; the second message is padded with garbage."""
    ratio_MT = f64([[2.0, 0.5], [0.25, 1.0]])
    mask_MT = torch.tensor([[True, True], [True, False]])
    logp_new_MT = f64([[-1.0, -2.0], [-1.5, math.nan]])
    logp_ref_MT = logp_new_MT + ratio_MT.log()
    first = [2.0 - math.log(2.0) - 1.0, 0.5 + math.log(2.0) - 1.0]
    second = 0.25 + math.log(4.0) - 1.0
    by_tokens = reference_kl(logp_new_MT, logp_ref_MT, mask_MT, "tokens")
    assert float(by_tokens) == pytest.approx(sum(first) + second, rel=1e-14)
    by_messages = reference_kl(logp_new_MT, logp_ref_MT, mask_MT, "messages")
    assert float(by_messages) == pytest.approx(sum(first) / 2 + second, rel=1e-14)
    assert float(reference_kl(logp_new_MT, logp_new_MT, mask_MT, "messages")) == 0.0


@pytest.mark.parametrize("average_over", ["messages", "tokens"])
def test_reference_kl_gradient_agrees_with_finite_differences(average_over: Any) -> None:
    logp_new_MT, logp_ref_MT, mask_MT, _, _ = random_batch(messages=4, tokens=3)
    logp_new_MT.requires_grad_()
    assert torch.autograd.gradcheck(lambda new: reference_kl(new, logp_ref_MT, mask_MT, average_over), logp_new_MT)
    reference_kl(logp_new_MT, logp_ref_MT, mask_MT, average_over).backward()
    assert logp_new_MT.grad is not None
    assert not logp_new_MT.grad[~mask_MT].any(), "padding has no gradient"
    # 1 - ref / new, by hand: a token that new likes more than ref is pushed down
    pushed = torch.where(mask_MT, logp_new_MT > logp_ref_MT, False)
    assert (logp_new_MT.grad[pushed] > 0).all()


def test_reference_kl_is_unbiased_under_the_new_policy() -> None:
    """By enumeration of the vocabulary: sum of new(v) times the estimate at v is KL(new || ref)."""
    generator = torch.Generator().manual_seed(6)
    logp_new_V = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp_ref_V = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    one = torch.ones(1, 1, dtype=torch.bool)
    pairs = zip(logp_new_V, logp_ref_V, strict=True)
    found = [float(reference_kl(a[None, None], b[None, None], one, "tokens")) for a, b in pairs]
    expected = float((logp_new_V.exp() * (logp_new_V - logp_ref_V)).sum())
    assert float((logp_new_V.exp() * f64(found)).sum()) == pytest.approx(expected, rel=1e-12)
    other_way = float((logp_ref_V.exp() * (logp_ref_V - logp_new_V)).sum())
    assert abs(expected - other_way) > 0.05, "the two directions must be told apart"


def test_reference_kl_of_runaway_and_broken_tokens() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    far = reference_kl(f64([[-1e4]]), f64([[0.0]]), one, "tokens")
    assert float(far) == pytest.approx(math.expm1(LOG_RATIO_BOUND) - LOG_RATIO_BOUND)
    assert math.isnan(float(reference_kl(f64([[-math.inf]]), f64([[0.0]]), one, "tokens")))


@pytest.mark.parametrize("average_over", ["messages", "tokens"])
def test_advantages_per_token_by_hand(average_over):
    logp_new_MT, logp_cur_MT, mask_MT, advantages_M, _ = random_batch()
    objective = Objective(ratio="token", average_over=average_over)
    alike_MT = advantages_M[:, None].expand(mask_MT.shape)
    one = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, advantages_M, objective)
    many = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, alike_MT, objective)
    assert float(one.total) == float(many.total), "a message's tokens may share their advantage"
    advantages_MT = torch.randn(mask_MT.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ratio_MT = (logp_new_MT - logp_cur_MT).exp()
    gain_MT = torch.minimum(ratio_MT * advantages_MT, ratio_MT.clamp(0.8, 1.2) * advantages_MT)
    rows = [gain[mask] for gain, mask in zip(gain_MT, mask_MT, strict=True)]
    expected = sum(float(row.sum() if average_over == "tokens" else row.mean()) for row in rows if len(row))
    dirty_MT = torch.where(mask_MT, advantages_MT, torch.full_like(advantages_MT, torch.nan))
    found = clipped_surrogate(logp_new_MT, logp_cur_MT, mask_MT, dirty_MT, objective)
    assert float(found.total) == pytest.approx(expected, rel=1e-12)


def test_advantages_per_token_need_the_ratio_of_tokens_and_one_for_each():
    logp_MT, mask_MT = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match='need the ratio "token", not "message"'):
        clipped_surrogate(logp_MT, logp_MT, mask_MT, torch.ones(2, 3), Objective())
    with pytest.raises(ValueError, match=r"one number per token \(\(2, 3\)\), got \(2, 2\)"):
        clipped_surrogate(logp_MT, logp_MT, mask_MT, torch.ones(2, 2), Objective(ratio="token"))
