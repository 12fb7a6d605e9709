"""Advice for bad health figures of a run: named thresholds, and the team file key to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from teamtr.records import Record, number
from teamtr.reports import Health

MOST_CUT = 0.2
"""Share of an agent's messages cut at the token limit. A cut message has no end, and often no answer."""
MOST_WITHOUT_SIGNAL = 0.8
"""Share of groups without a signal. An update learns only from the other groups."""
MOST_UNPARSED = 0.2
"""Share of answers that the grader cannot parse."""
LEAST_ENTROPY = 0.01
"""Nats per token. At this entropy, a message of 64 tokens repeats about every second time."""
LEAST_KL_SHARE = 0.02
"""Share of the radius that a kept update uses."""
SOLVED = 0.9
"""Success rate from which equal rewards and low entropy are no longer reported."""


@dataclass(frozen=True)
class Advice:
    """``about`` names the figure and the agent; the same advice about a later batch has the same ``about``."""

    about: str
    text: str


def advise(health: Health, updated: str | None = None, untaught: float | None = None) -> tuple[Advice, ...]:
    """Advice for every bad figure, the worst problem first. ``updated``: the agent that was updated. ``untaught``: the
    share of groups that teach an agent nothing; by default that of groups with equal rewards, from which a critic or
    other credit than the team's may learn."""
    equal = health.without_signal if untaught is None else min(untaught, health.without_signal)
    return (*_cut(health), *_unparsed(health), *_no_signal(health, equal), *_sure(health), *_small(health, updated))


def untaught_share(update: Record) -> float | None:
    """``untaught`` of an update, from its record; None if that does not say."""
    groups, equal, broken = (number(update, key) for key in ("groups", "groups_without_signal", "groups_non_finite"))
    return ((equal or 0.0) + (broken or 0.0)) / groups if groups else None


def _cut(health: Health) -> Iterator[Advice]:
    bad = {name: found for name, found in health.agents.items() if found.cut > MOST_CUT}
    team = health.messages
    if team is not None and len(bad) == len(health.agents) > 1 and team.limit is not None:
        yield Advice("cut", f"{_percent(team.cut)} of messages are cut at {team.limit} tokens: raise team.max_tokens")
        return
    for name, found in bad.items():
        key = "team.max_tokens" if len(health.agents) == 1 else f"team.agents.{name}.max_tokens"
        whose = "messages" if len(health.agents) == 1 else f"{name}'s messages"
        yield Advice(f"cut {name}", f"{_percent(found.cut)} of {whose} are cut at {found.limit} tokens: raise {key}")


def _unparsed(health: Health) -> Iterator[Advice]:
    if health.unparsed > MOST_UNPARSED:
        yield Advice(
            "unparsed",
            f"in {_percent(health.unparsed)} of answers the grader finds none: say in team.agents.NAME.system_prompt "
            "how an answer must end, or let messages be longer where they are cut",
        )


def _no_signal(health: Health, equal: float) -> Iterator[Advice]:
    if equal > MOST_WITHOUT_SIGNAL and health.success < SOLVED:
        yield Advice(
            "no signal",
            f"{_percent(equal)} of groups have equal rewards and teach nothing (success "
            f"{_percent(health.success)}): take easier problems or a reward with partial credit, raise "
            "plan.group_size, or set plan.dynamic_sampling: true",
        )


def _sure(health: Health) -> Iterator[Advice]:
    for name, found in health.agents.items():
        if found.entropy is not None and found.entropy < LEAST_ENTROPY and health.success < SOLVED:
            yield Advice(
                f"entropy {name}",
                f"{name} says nearly the same every time ({found.entropy:.2g} nats per token): raise "
                "sampling.temperature, or freeze it if it is as it should be",
            )


def _small(health: Health, updated: str | None) -> Iterator[Advice]:
    if updated is not None and health.kl_share is not None and 0.0 < health.kl_share < LEAST_KL_SHARE:
        yield Advice(
            f"small step {updated}",
            f"the update of {updated} uses {100 * health.kl_share:.2g} % of its radius: raise learner.learning_rate or "
            "learner.epochs",
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
