"""Block verification: the law of what comes out, by enumeration of all drafts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from teamtr.theory.verification import chance_so_far, kept_tokens

VOCABULARY, LENGTH = 3, 3
END = 0
Policy = dict[tuple[int, ...], np.ndarray]


def random_policy(rng: np.random.Generator, spread: float, base: Policy | None = None) -> Policy:
    """Next-token chances for every beginning of a message of at most three tokens, of which 0 ends it."""
    found = {}
    for length in range(LENGTH):
        for beginning in itertools.product(range(1, VOCABULARY), repeat=length):
            logits = spread * rng.standard_normal(VOCABULARY) + (0 if base is None else np.log(base[beginning]))
            found[beginning] = np.exp(logits) / np.exp(logits).sum()
    return found


def messages() -> list[tuple[int, ...]]:
    """Every message: up to the end token, or three tokens without one."""
    whole = list(itertools.product(range(1, VOCABULARY), repeat=LENGTH))
    ended = [(*m, END) for k in range(LENGTH) for m in itertools.product(range(1, VOCABULARY), repeat=k)]
    return whole + ended


def probability(policy: Policy, message: tuple[int, ...], given: int = 0) -> float:
    """Of the message, where its first tokens are given."""
    return float(np.prod([policy[message[:k]][message[k]] for k in range(given, len(message))]))


def rest(old: Policy, new: Policy, beginning: tuple[int, ...], chance: float) -> np.ndarray:
    return np.maximum(chance * new[beginning] - old[beginning], 0.0)


def law_after(old: Policy, new: Policy, rest_of=rest) -> dict[tuple[int, ...], float]:
    """The law of what verification leaves of old's messages and new continues, over all drafts and all checks."""
    law = dict.fromkeys(messages(), 0.0)
    for draft in messages():
        ratio = np.log([new[draft[:k]][draft[k]] / old[draft[:k]][draft[k]] for k in range(len(draft))])
        chances = chance_so_far(ratio)
        rests = np.array([rest_of(old, new, draft[:k], chances[k]).sum() for k in range(len(draft))])
        # How many tokens stay depends on the noise through comparisons only: find each check's chance by bisection
        # of the function itself, then add up over what the last check that passes may be.
        checks = [check_chance(chances, rests, k) for k in range(len(draft))]
        none_later = 1.0
        for kept in range(len(draft), -1, -1):
            stays = (checks[kept - 1] if kept else 1.0) * none_later
            if kept:
                none_later *= 1.0 - checks[kept - 1]
            if kept == len(draft):
                law[draft] += probability(old, draft) * stays
                continue
            weights = rest_of(old, new, draft[:kept], chances[kept])
            if stays < 1e-15 or weights.sum() <= 0.0:
                continue
            for message in law:
                if message[:kept] == draft[:kept] and len(message) > kept:
                    follows = weights[message[kept]] / weights.sum()
                    law[message] += probability(old, draft) * stays * follows * probability(new, message, kept + 1)
    return law


def check_chance(chances: np.ndarray, rests: np.ndarray, token: int) -> float:
    """The chance that the check after this token passes, all others failing: where ``kept_tokens`` changes its mind."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        noise = np.full(len(rests), 1.0)
        noise[token] = middle
        low, high = (middle, high) if kept_tokens(chances, rests, noise) == token + 1 else (low, middle)
    return high


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_what_comes_out_is_the_new_policy_s_law(spread):
    rng = np.random.default_rng(3)
    for _ in range(3):
        old = random_policy(rng, 1.0)
        new = random_policy(rng, spread, old)
        law = law_after(old, new)
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
        for message, chance in law.items():
            assert chance == pytest.approx(probability(new, message), abs=1e-9)


def test_a_wrong_rest_is_caught():
    """The negative control: drawing the next token from the new policy itself is another law."""
    rng = np.random.default_rng(3)
    old = random_policy(rng, 1.0)
    new = random_policy(rng, 1.0, old)
    law = law_after(old, new, rest_of=lambda old, new, beginning, chance: chance * new[beginning])
    apart = 0.5 * sum(abs(law[m] - probability(new, m)) for m in law)
    assert apart > 0.01


def test_the_same_policy_keeps_every_message():
    for length in (1, 3):
        chances = chance_so_far(np.zeros(length))
        assert kept_tokens(chances, np.zeros(length), np.full(length, 0.999)) == length


def test_by_hand():
    # ratios 2, 1/4, 1: p = 1, min(1, 2) = 1, 1/4, 1/4
    chances = chance_so_far(np.log([2.0, 0.25, 1.0]))
    np.testing.assert_allclose(chances, [1.0, 1.0, 0.25, 0.25])
    rests = np.array([0.5, 0.5, 0.25])
    # checks: h_1 = .5 / (.5 + 0) = 1, h_2 = .25 / (.25 + .75) = .25, h_3 = p_3 = .25
    assert kept_tokens(chances, rests, np.array([0.9, 0.24, 0.24])) == 3
    assert kept_tokens(chances, rests, np.array([0.9, 0.24, 0.26])) == 2
    assert kept_tokens(chances, rests, np.array([0.9, 0.26, 0.26])) == 1
    assert kept_tokens(np.array([1.0, 0.5]), np.array([0.5]), np.array([0.6])) == 0


def test_a_rest_below_rounding_keeps_and_does_not_divide_by_zero():
    with np.errstate(divide="raise"):
        assert kept_tokens(np.array([1.0, 1.0, 1.0]), np.array([0.0, 1e-20]), np.array([0.999, 1.0])) == 1
    assert kept_tokens(np.array([1.0]), np.zeros(0), np.zeros(0)) == 0
