"""Success of a session's team: measured on held-out problems, or exact for a task with a closed form."""

from __future__ import annotations

from teamtr.evaluation.evaluate import PROBLEMS_IN_A_RUN, SAMPLES_IN_A_RUN, evaluate
from teamtr.evaluation.exact import role_success
from teamtr.randomness import seed_of
from teamtr.reports import EvalReport
from teamtr.rollout import Ledger
from teamtr.session.build import Session
from teamtr.tasks import Roles
from teamtr.team import Blind, Schedule, Team


def evaluate_team(
    session: Session,
    team: Team,
    *,
    stage: int,
    split: str = "test",
    problems: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
) -> tuple[EvalReport, Ledger]:
    """Evaluate on held-out problems with the team file's evaluation settings, unless others are given."""
    settings = session.team_file.eval
    ledger = Ledger()
    report = evaluate(
        session.context,
        team,
        session.task.problems(split)[: problems or settings.problems or PROBLEMS_IN_A_RUN],
        samples or settings.samples or SAMPLES_IN_A_RUN,
        seed=seed_of(session.team_file.seed, "eval", split, stage),
        temperature=settings.temperature if temperature is None else temperature,
        ledger=ledger,
    )
    return report, ledger


def planned_evaluations(session: Session) -> tuple[int, int]:
    """Episodes per evaluation in a run, and the number of evaluations: one before every ``eval.every`` stages, and one
    after the last stage."""
    settings = session.team_file.eval
    if not settings.every:
        return 0, 0
    problems = len(session.task.problems("test")[: settings.problems or PROBLEMS_IN_A_RUN])
    return problems * (settings.samples or SAMPLES_IN_A_RUN), 1 - (-session.plan.stages // settings.every)


def exact_success(session: Session, team: Team) -> float | None:
    """The team's success without sampling noise, if the task has a closed form (roles); else None."""
    task, router = session.task, session.context.router
    one_round = isinstance(router, Schedule) and [sorted(order) for order in router.orders] == [sorted(team.names)]
    if not isinstance(task, Roles) or not one_round:
        return None
    blind = all(isinstance(agent.sees, Blind) and agent.sees.is_blind_in(0) for agent in team)
    if not blind or any(agent.max_tokens < 2 for agent in team):
        return None  # the closed form needs messages that are independent and end
    codecs = session.context.codecs
    words = {
        name: [codecs[name].encode_message(word) for word in (task.VOLUNTEER, task.ABSTAIN) if word is not None]
        for name in team.names
    }
    return role_success(team, session.engine, codecs, task.problems("test"), words)
