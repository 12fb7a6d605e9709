"""Sampled evaluation: K episodes of each held-out problem, and their report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from teamtr.batches import RolloutBatch
from teamtr.evaluation.metrics import summarise
from teamtr.progress import working
from teamtr.randomness import generator
from teamtr.reports import EvalReport
from teamtr.rollout import Ledger, RolloutContext, play
from teamtr.rollout.outcome import grades_dialogue
from teamtr.team import Team
from teamtr.types import Episode, Problem, Transcript, Verdict

PROBLEMS_IN_A_RUN, SAMPLES_IN_A_RUN = 64, 4
"""Defaults of evaluations during a run."""


@dataclass(frozen=True)
class Scores:
    """The per-sample data of an evaluation of some problems. ``stated_PK`` is None if consensus was not evaluated,
    ``reward_range`` if the task does not know it."""

    verdicts_PK: list[list[Verdict]]
    answers_PK: list[list[str | None]]
    stated_PK: list[list[list[bool | None]]] | None
    labels_P: list[Mapping[str, str]]
    measures_PK: list[list[Mapping[str, float]]]
    reward_range: float | None

    @classmethod
    def together(cls, parts: Sequence[Scores]) -> Scores:
        stated = [part.stated_PK for part in parts if part.stated_PK is not None]
        return cls(
            verdicts_PK=[row for part in parts for row in part.verdicts_PK],
            answers_PK=[row for part in parts for row in part.answers_PK],
            stated_PK=[row for rows in stated for row in rows] if len(stated) == len(parts) else None,
            labels_P=[labels for part in parts for labels in part.labels_P],
            measures_PK=[row for part in parts for row in part.measures_PK],
            reward_range=parts[0].reward_range,
        )

    def report(self, seed: int, problems: Sequence[Problem]) -> EvalReport:
        """The evaluation report; ``problems`` are those of the rows, in their order."""
        found = summarise(
            self.verdicts_PK,
            self.answers_PK,
            self.stated_PK,
            generator(seed, "bootstrap"),
            labels_P=self.labels_P,
            measures_PK=self.measures_PK,
            reward_range=self.reward_range,
        )
        return replace(found, problem_ids=tuple(problem.id for problem in problems))


def scores_of(context: RolloutContext, batch: RolloutBatch, *, consensus: bool = True) -> Scores:
    """The scores of a batch of graded episodes, with the task's labels of problems and measures of replies.

    Without ``consensus``, the answers stated by single agents are left out: messages of a method need not be answers,
    and messages of a dialogue that is graded as a whole never are.
    """
    task = context.task
    consensus = consensus and not any(grades_dialogue(context, problem) for problem in batch.problems)
    size = batch.group_size
    rows = [batch.episodes[p * size : (p + 1) * size] for p in range(len(batch.problems))]
    return Scores(
        verdicts_PK=[[e.verdict for e in row] for row in rows],
        answers_PK=[[_vote(context, p, e) for e in row] for p, row in zip(batch.problems, rows, strict=True)],
        stated_PK=_stated(context, batch) if consensus else None,
        labels_P=[task.labels(problem) for problem in batch.problems],
        measures_PK=[[task.measures(p, e.answer) for e in row] for p, row in zip(batch.problems, rows, strict=True)],
        reward_range=task.reward_range,
    )


def _vote(context: RolloutContext, problem: Problem, episode: Episode) -> str | None:
    """The answer in the form in which the task counts votes, as one answer may be written in several ways; None if the
    grader found none: a reply without an answer does not vote."""
    verdict = episode.verdict
    if verdict.kind == "unparsed":
        return None
    said = verdict.extracted or episode.answer or None
    if verdict.failed or not episode.answer or grades_dialogue(context, problem):
        return said
    stated = context.task.extract(episode.answer)
    return said if stated is None or stated == episode.answer else stated  # a task of its own may not extract


def evaluate(
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    samples: int,
    *,
    seed: int,
    temperature: float | None = None,
    ledger: Ledger | None = None,
) -> EvalReport:
    """Play K episodes of each problem and summarize them. Changes nothing."""
    with working("evaluating"):
        batch = play(context, team, problems, samples, seed=seed, temperature=temperature, ledger=ledger)
        return scores_of(context, batch).report(seed, problems)


def _stated(context: RolloutContext, batch: RolloutBatch) -> list[list[list[bool | None]]]:
    """Whether each agent's last message, taken as the answer, would be right; None if it states none. Messages equal to
    the team's answer use its verdict."""
    last = [{turn.agent: turn.text for turn in episode.turns} for episode in batch.episodes]
    others = [
        (batch.problems[e // batch.group_size], text, Transcript(episode.turns, episode.replies))
        for e, episode in enumerate(batch.episodes)
        for text in last[e].values()
        if text != episode.answer
    ]
    verdicts = iter(context.task.grade(others) if others else ())
    stated = []
    for e, episode in enumerate(batch.episodes):
        own = [episode.verdict if text == episode.answer else next(verdicts) for text in last[e].values()]
        stated.append([None if v.kind == "unparsed" else v.right for v in own])
    size = batch.group_size
    return [stated[p * size : (p + 1) * size] for p in range(len(batch.problems))]
