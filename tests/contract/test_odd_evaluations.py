"""Figures of evaluations in which replies state no answer, and of those with other settings."""

from __future__ import annotations

import pytest

from scripted import Numbers, cast_of
from teamtr.evaluation.evaluate import evaluate
from teamtr.types import Problem


def test_replies_without_an_answer_do_not_vote_even_if_they_are_the_same() -> None:
    cast, _ = cast_of(lambda agent, asked, chance: "I do not know" if chance < 0.6 else "So 42", ("ann",))
    problems = [Problem(f"p{k}", "6 * 7?", "42") for k in range(40)]
    report = evaluate(cast.context, cast.team, problems, 3, seed=0)
    assert report.verdicts["unparsed"] > report.verdicts["right"]
    assert report.avg_at_k < report.majority_at_k == report.pass_at_k[3] < 1, "of those that state one, all are right"


def test_equal_rewards_of_an_unknown_range_have_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    cast, _ = cast_of(lambda agent, asked, chance: "So 41", ("ann",))
    problems = [Problem(f"p{k}", "6 * 7?", "42") for k in range(8)]
    known = evaluate(cast.context, cast.team, problems, 2, seed=0)
    assert known.reward_interval == known.avg_interval == pytest.approx((0.0, 1 - 0.05 ** (1 / 8)))
    monkeypatch.setattr(Numbers, "reward_range", None)  # a reward of the user's own: it may be below 0 or above 1
    unknown = evaluate(cast.context, cast.team, problems, 2, seed=0)
    assert unknown.reward_interval == (0.0, 0.0), "shown as none"
    assert unknown.avg_interval == known.avg_interval
