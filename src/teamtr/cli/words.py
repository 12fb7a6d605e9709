"""Figures formatted for a terminal: shares, times, the health of a batch, the estimate of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from teamtr.reports import Health
from teamtr.text import counted

if TYPE_CHECKING:
    from teamtr.session.estimate import Estimate


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def lengths(health: Health | None, agent: str | None = None) -> str:
    """Message lengths of the team or of one agent, with the share that is cut off and the entropy."""
    found = None if health is None else health.messages if agent is None else health.agents.get(agent)
    if found is None:
        return ""
    entropy = "" if found.entropy is None else f"  entropy {found.entropy:.2f}"
    return f"length {found.mean:.0f} (p95 {found.p95:.0f})  cut {percent(found.cut)}{entropy}"


def signals(health: Health | None) -> str:
    """The shares of the batch without signal and without a parsed answer."""
    if health is None:
        return ""
    return f"no signal {percent(health.without_signal)}  unparsed {percent(health.unparsed)}"


def health_line(health: Health | None, agent: str | None = None) -> str:
    return "  ".join(filter(None, (lengths(health, agent), signals(health))))


def warmup_line(agent: str, warmed: Mapping[str, Any]) -> str:
    """What an agent was trained on in the warm-up, before the first stage."""
    losses = f"{warmed['loss_before']:.2f} to {warmed['loss_after']:.2f} nats per token"
    steps = counted(warmed["steps"], "step")
    return f"warmed up {agent}: {warmed['tokens']:,} tokens of {warmed['source']} in {steps}, {losses}"


def estimate_line(found: Estimate) -> str:
    """The estimated tokens and time of the whole run."""
    tokens = _span(f"{found.least_tokens:,}", f"{found.most_tokens:,}")
    more = ", and more where dynamic sampling replaces groups" if found.open_ended else ""
    if found.least_seconds is None or found.most_seconds is None:
        return f"about {tokens} sampled tokens{more}"
    least, most = clock(found.least_seconds), clock(found.most_seconds)
    modeled = f"{_span(least, most)} by the model of teamtr plan --card {found.card}"
    how = f"less than {most}" if found.card is None else modeled
    return f"about {tokens} sampled tokens, {how}{more}"


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
