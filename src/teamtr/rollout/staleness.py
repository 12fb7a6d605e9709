"""Staleness checks: an update refuses a batch that the current team did not write, unless the plan allows it."""

from __future__ import annotations

from teamtr.batches import RolloutBatch
from teamtr.presets import Plan
from teamtr.team import Team


class StaleBatch(RuntimeError):
    """The batch was written by weights that the team no longer has."""


def stale_agents(batch: RolloutBatch, team: Team) -> tuple[str, ...]:
    """The agents with turns in the batch that were written by weights other than their current ones."""
    written = {(turn.agent, turn.agent_version) for episode in batch.episodes for turn in episode.turns}
    current = team.versions
    return tuple(sorted({agent for agent, version in written if current.get(agent) != version}))


def require_fresh(batch: RolloutBatch, team: Team, plan: Plan) -> None:
    """Raise StaleBatch unless the present team wrote every turn of the batch or the plan allows staleness. A plan that
    reweights also needs the batch's log-ratios to be those of the present team."""
    stale = stale_agents(batch, team)
    if stale and not plan.resample.may_be_stale:
        raise StaleBatch(
            f"the batch holds turns that older weights of {', '.join(stale)} wrote; "
            "collect it anew, or choose a plan that allows staleness (resample_every other than 1)"
        )
    if stale and plan.resample.reweight and (batch.carried is None or batch.carried.team_version != team.version):
        raise StaleBatch(
            f"the batch holds turns that older weights of {', '.join(stale)} wrote, and its weights do not lead to the "
            "present team: collect it anew"
        )
