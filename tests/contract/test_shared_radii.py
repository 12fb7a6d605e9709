"""How a stage's KL budget is split among agents by their last updates, in either unit of the radius."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from teamtr.presets import Radii
from teamtr.reports import Certificate, UpdateReport
from teamtr.theory.certificates import turn_aware_price
from teamtr.training.radii import shared_radii


def after(agent: str, gain: float, kl: float, tokens: int) -> UpdateReport:
    """An update that gained this much with this KL per message, whose messages all have so many tokens."""
    certificate = Certificate("turn_aware", {"surrogate": gain}, gain)
    return UpdateReport(agent, "accepted", "", 0.1, kl_full=kl, kl_per_token=kl / tokens, certificates=(certificate,))


def shared(past: dict[str, UpdateReport], turns: dict[str, int], **radii: Any) -> np.ndarray:
    return np.array(list(shared_radii(Radii(**radii), past, turns, 1.0).values()))


@pytest.mark.parametrize("allocation", ["gain", "certified"])
def test_a_radius_per_token_of_messages_of_one_length_is_that_per_message(allocation: Any):
    past = {"a": after("a", 0.02, 0.01, 50), "b": after("b", 0.03, 0.02, 50), "c": after("c", 0.001, 0.01, 50)}
    turns = {"a": 1, "b": 2, "c": 3}
    per_message = shared(past, turns, nats=0.05, allocation=allocation)
    per_token = shared(past, turns, nats=0.001, per_token=True, allocation=allocation)
    assert per_token * 50 == pytest.approx(per_message)
    assert len(set(per_message.round(9))) == 3


def test_the_same_nats_per_token_move_a_long_message_further():
    """Two agents with one turn each and the same gain at the same KL per message: a nat per token buys as much of an
    agent with messages of 40 tokens as four do of one with 10. The budget goes by the square of the gain per root."""
    past = {"short": after("short", 0.02, 0.01, 10), "long": after("long", 0.02, 0.01, 40)}
    short, long = shared(past, {"short": 1, "long": 1}, nats=0.001, per_token=True, allocation="certified")
    assert (short, long) == pytest.approx((0.0001 + 0.0018 / 5, 0.0001 + 0.0018 * 4 / 5))


def test_what_a_second_turn_costs_counts_in_the_unit_of_the_radius():
    """Messages of 100 tokens with two turns: 1.75 per nat of a message, 175 per nat of a token. At kappa = 0.02 / 0.1
    per root of a message the best radius is (0.2 / (2 * 1.75))^2 = 0.0033 nats per message, far below the budget."""
    past = {"a": after("a", 0.02, 0.01, 100)}
    price = turn_aware_price(2, 1.0)
    assert price == pytest.approx(1.7526, abs=1e-4)
    (radius,) = shared(past, {"a": 2}, nats=1.0, allocation="certified")
    assert radius - 0.1 == pytest.approx((0.2 / (2 * price)) ** 2, rel=1e-6)
    (radius,) = shared(past, {"a": 2}, nats=1.0, per_token=True, allocation="certified")
    assert radius - 0.1 == pytest.approx((0.2 / (2 * price)) ** 2 / 100, rel=1e-6)
