"""DAPO's soft punishment of overlong messages, by hand (arXiv 2503.14476)."""

from __future__ import annotations

import numpy as np
import pytest

from teamtr.theory.overlong import cache_tokens, soft_punishment


def test_the_punishment_of_the_paper_by_hand() -> None:
    """Limit 20480, cache 4096: nothing up to 16384 tokens, then a line down to -1."""
    lengths = [1, 16384, 16385, 17408, 18432, 20479, 20480]
    got = soft_punishment(lengths, [20480] * 7, [False] * 7, 0.2)
    np.testing.assert_array_equal(got, [0, 0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1])
    assert not np.signbit(got[:2]).any(), "a zero is a zero"


def test_a_cut_message_is_punished_by_one() -> None:
    np.testing.assert_array_equal(soft_punishment([10, 10], [10, 10], [True, False], 0.5), [-1, -1])
    np.testing.assert_array_equal(soft_punishment([3], [10], [True], 0.5), [-1])


def test_every_message_has_its_own_limit() -> None:
    # limit 10, cache 5: (5 - 8) / 5; limit 20, cache 10: 0
    np.testing.assert_allclose(soft_punishment([8, 8], [10, 20], [False, False], 0.5), [-0.6, 0.0], rtol=1e-15)


def test_a_cache_of_less_than_a_token_punishes_only_cut_messages() -> None:
    assert [cache_tokens(limit, 0.2) for limit in (3, 4, 5, 16, 20480)] == [0, 0, 1, 3, 4096]
    assert cache_tokens(100, 0.29) == 29, "a share that floating point cannot hold"
    np.testing.assert_array_equal(soft_punishment([3, 3, 2], [3, 3, 3], [False, True, False], 0.2), [0, -1, 0])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="share of the limit"):
        soft_punishment([1], [2], [False], 0.0)
    with pytest.raises(ValueError, match="one length, limit and mark"):
        soft_punishment([1, 2], [2], [False], 0.5)
