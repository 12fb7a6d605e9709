"""A short campaign of random faults, and proof that it would notice: see ``chaos``."""

from __future__ import annotations

import pytest

import chaos

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_a_short_campaign_loses_nothing() -> None:
    results = list(chaos.campaign(2, seed=20))
    assert not [result for result in results if result.outcome == "lost"]


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", sorted(chaos.SABOTAGE))
def test_negative_controls_are_noticed(sabotage: str) -> None:
    """A library that is broken on purpose: within a few minutes something is lost."""
    results = chaos.campaign(300, seed=1, sabotage=sabotage, only="train")
    assert any(result.outcome == "lost" for result in results)
