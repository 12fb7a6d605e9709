"""Figures of evaluations in which replies state no answer, and of those with other settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripted import Numbers, cast_of
from teamtr.batches import RolloutBatch
from teamtr.evaluation.evaluate import evaluate, scores_of
from teamtr.tasks.benchmarks.math import Math
from teamtr.types import Episode, Problem, Verdict


def test_replies_without_an_answer_do_not_vote_even_if_they_are_the_same() -> None:
    cast, _ = cast_of(lambda agent, asked, chance: "I do not know" if chance < 0.6 else "So 42", ("ann",))
    problems = [Problem(f"p{k}", "6 * 7?", "42") for k in range(40)]
    report = evaluate(cast.context, cast.team, problems, 3, seed=0)
    assert report.verdicts["unparsed"] > report.verdicts["right"]
    assert report.avg_at_k < report.majority_at_k == report.pass_at_k[3] < 1, "of those that state one, all are right"


def test_one_answer_in_several_spellings_is_one_vote() -> None:
    said = [r"\boxed{\frac12}", r"\boxed{0.5}", r"Answer: 1/2", r"\boxed{3}", r"\boxed{3}"]
    verdicts = [Verdict("right", 1.0, text) for text in (r"\frac12", "0.5", "1/2")] + [Verdict("wrong", 0.0, "3")] * 2
    cast, _ = cast_of(lambda *_: "")
    context = replace(cast.context, task=Math())
    episodes = tuple(Episode("p", g, (), text, verdicts[g], "v") for g, text in enumerate(said))
    batch = RolloutBatch((Problem("p", "?", "0.5"),), episodes, len(said))
    scores = scores_of(context, batch, consensus=False)
    assert scores.answers_PK == [["1/2"] * 3 + ["3"] * 2]


def test_equal_rewards_of_an_unknown_range_have_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    cast, _ = cast_of(lambda agent, asked, chance: "So 41", ("ann",))
    problems = [Problem(f"p{k}", "6 * 7?", "42") for k in range(8)]
    known = evaluate(cast.context, cast.team, problems, 2, seed=0)
    assert known.reward_interval == known.avg_interval == pytest.approx((0.0, 1 - 0.05 ** (1 / 8)))
    monkeypatch.setattr(Numbers, "reward_range", None)  # a reward of the user's own: it may be below 0 or above 1
    unknown = evaluate(cast.context, cast.team, problems, 2, seed=0)
    assert unknown.reward_interval == (0.0, 0.0), "shown as none"
    assert unknown.avg_interval == known.avg_interval
