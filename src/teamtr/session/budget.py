"""What a run spends by its settings, next to what it is matched to, and the parameters that its agents train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from teamtr.presets import Budget
from teamtr.records import MatchedBudget
from teamtr.session.build import Session
from teamtr.text import counted


def matched_budget(session: Session) -> MatchedBudget | None:
    """The sizes that ``plan.match`` sets, with both budgets; None if nothing is matched."""
    settings, plan = session.team_file, session.plan
    if settings.plan.match == "off":
        return None
    own, reference = settings.budgets()
    sizes = plan.stages, plan.problems, plan.group_size
    return MatchedBudget(settings.plan.match, *sizes, _known(own), _known(reference))


def _known(budget: Budget | None) -> dict[str, int]:
    found = {} if budget is None else asdict(budget)
    return {name: value for name, value in found.items() if value is not None}


def budget_lines(session: Session) -> list[str]:
    """The sizes of the run and its budget, one line each."""
    plan, settings = session.plan, session.team_file.plan
    own, reference = session.team_file.budgets() if session.plan == session.team_file.sized_plan() else (None, None)
    sizes = (
        f"{counted(plan.stages, 'stage')}, batches of {counted(plan.problems, 'problem')} x {plan.group_size} episodes"
    )
    lines = [f"sizes: {sizes}"]
    lines += [f"spends {_told(_known(own))}"] if own is not None else []
    if settings.match != "off":
        lines[0] += f" (plan.match: {settings.match}; the file has {settings.stages} and {settings.problems})"
        lines.append(f"the preset teamtr would spend {_told(_known(reference))}")
    return lines


def _told(spent: Mapping[str, int]) -> str:
    words = {"rollouts": "rollouts", "messages": "messages at most", "updates": "updates"}
    return ", ".join(f"{spent[name]:,} {word}" for name, word in words.items() if name in spent)


def trained_parameters(session: Session) -> dict[str, int]:
    """The number of parameters that each trainable agent trains, without critics."""
    return {name: session.engine.info(name).trained_parameters for name in session.team.trainable}


def matched_ranks(session: Session) -> dict[str, int]:
    """The LoRA rank at which each agent with an adapter would alone train as many parameters as the whole team. An
    adapter's parameters are proportional to its rank."""
    trained = trained_parameters(session)
    total = sum(trained.values())
    ranks = {agent.name: agent.lora.rank for agent in session.team_file.team.agents if agent.train == "lora"}
    return {name: max(1, round(ranks[name] * total / own)) for name, own in trained.items() if name in ranks and own}


def parameter_lines(session: Session) -> list[str]:
    """The trained parameters, and the rank at which a single agent trains as many."""
    trained, ranks = trained_parameters(session), matched_ranks(session)
    if not trained:
        return []
    each = ", ".join(f"{name} {count:,}" for name, count in trained.items())
    lines = [f"trained parameters: {each}; {sum(trained.values()):,} in all"]
    if len(trained) > 1 and ranks:
        told = ", ".join(f"{name} with lora.rank {rank}" for name, rank in ranks.items())
        lines.append(f"a single agent trains as many as the team: {told}")
    return lines


def sizes_record(session: Session) -> dict[str, Any]:
    """Sizes, budgets and trained parameters for JSON."""
    own, reference = session.team_file.budgets()
    plan = session.plan
    return {
        "sizes": {"stages": plan.stages, "problems": plan.problems, "group_size": plan.group_size},
        "budget": _known(own),
        "reference_budget": None if session.team_file.plan.match == "off" else _known(reference),
        "trained_parameters": trained_parameters(session),
        "matched_rank": matched_ranks(session),
    }
