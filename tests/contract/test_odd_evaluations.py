"""Figures of evaluations in which replies state no answer, and of those with other settings."""

from __future__ import annotations

from scripted import cast_of
from teamtr.evaluation.evaluate import evaluate
from teamtr.types import Problem


def test_replies_without_an_answer_do_not_vote_even_if_they_are_the_same() -> None:
    cast, _ = cast_of(lambda agent, asked, chance: "I do not know" if chance < 0.6 else "So 42", ("ann",))
    problems = [Problem(f"p{k}", "6 * 7?", "42") for k in range(40)]
    report = evaluate(cast.context, cast.team, problems, 3, seed=0)
    assert report.verdicts["unparsed"] > report.verdicts["right"]
    assert report.avg_at_k < report.majority_at_k == report.pass_at_k[3] < 1, "of those that state one, all are right"
