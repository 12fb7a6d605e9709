"""Plays episodes to their end and grades them; ``conversing.py`` samples the messages, ``grading.py`` grades.

An interactive task has an environment that speaks before every round. It replies to the team's answer of the previous
round (the last message, if the answering agent did not speak in it), or ends the episode. The last round is the final
answer.

With tools, the calls in a message are answered at once (``calling.py``), and the same agent speaks again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from teamtr.batches import RolloutBatch
from teamtr.progress import working
from teamtr.rollout.context import Ledger, RolloutContext
from teamtr.rollout.conversing import converse
from teamtr.rollout.episode import EpisodeState
from teamtr.rollout.grading import Asked, Grading
from teamtr.rollout.outcome import graded_text
from teamtr.team import Team
from teamtr.types import Episode, Problem, Transcript, Verdict


def play(
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    *,
    seed: int,
    temperature: float | None = None,
    ledger: Ledger | None = None,
) -> RolloutBatch:
    """Play and grade G episodes of each problem. ``seed`` is the batch's; the seeds of turns are derived from it."""
    states = [EpisodeState(problem) for problem in problems for _ in range(group_size)]
    return play_out(
        context, team, problems, group_size, states, seed=seed, temperature=temperature, ledger=ledger or Ledger()
    )


def play_out(
    context: RolloutContext,
    team: Team,
    problems: Sequence[Problem],
    group_size: int,
    states: Sequence[EpisodeState],
    *,
    seed: int,
    temperature: float | None,
    ledger: Ledger,
    end_ids: Mapping[str, frozenset[int]] | None = None,
) -> RolloutBatch:
    """Play these episodes to their end and grade them. ``end_ids``: the end tokens by agent, needed for drafts."""
    with Grading(context.task) as grading:

        def ended(state: EpisodeState) -> None:
            if state.drafted_verdict is None:
                grading.ended(_asked(context, team, state))

        heard = ended if grading.is_early else None
        converse(context, team, states, seed=seed, temperature=temperature, ledger=ledger, end_ids=end_ids, ended=heard)
        asked = [_asked(context, team, state) for state in states]
        with working("grading"):
            verdicts = _verdicts(states, asked, grading, ledger)
    answers = [answer for _, answer, _ in asked]
    return RolloutBatch(
        problems=tuple(problems),
        episodes=_episodes(states, answers, verdicts, group_size, team.version),
        group_size=group_size,
    )


def _verdicts(
    states: Sequence[EpisodeState], asked: Sequence[Asked], grading: Grading, ledger: Ledger
) -> list[Verdict]:
    """All verdicts, in order; an episode that equals its draft reuses the draft's and is not graded again."""
    started = time.perf_counter()
    known = {e: verdict for e, state in enumerate(states) if (verdict := state.drafted_verdict) is not None}
    new = [e for e in range(len(states)) if e not in known]
    graded = grading.verdicts([asked[e] for e in new])
    ledger.grading_seconds += time.perf_counter() - started
    ledger.episodes += len(new)
    known.update(zip(new, graded, strict=True))
    return [known[e] for e in range(len(states))]


def _asked(context: RolloutContext, team: Team, state: EpisodeState) -> Asked:
    text = graded_text(context, team, state.problem, state.turns, state.replies)
    return state.problem, text, Transcript(state.turns, state.replies)


def _episodes(
    states: Sequence[EpisodeState],
    answers: Sequence[str],
    verdicts: Sequence[Verdict],
    group_size: int,
    team_version: str,
) -> tuple[Episode, ...]:
    return tuple(
        Episode(
            problem_id=state.problem.id,
            group_index=e % group_size,
            turns=tuple(state.turns),
            answer=answers[e],
            verdict=verdicts[e],
            team_version=team_version,
            replies=tuple(state.replies),
        )
        for e, state in enumerate(states)
    )
