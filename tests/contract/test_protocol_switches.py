"""The protocol of the team file reaches the words that agents share."""

from __future__ import annotations

import pytest

from teamtr.config import loads
from teamtr.session.build import build

TEAM = """
name: words
task: {name: sums, digits: 1}
team:
  model: tiny
  max_tokens: 4
  agents: [{name: a}, {name: b}]
tiny: {layers: 1, width: 32, heads: 4, warmup_steps: 0}
"""
THOUGHT = "<think>2+2</think>4"


def shared_text(text: str, *changes: str) -> tuple[str, dict[str, int]]:
    """What the team sees of a message, and the breaches counted."""
    session = build(loads(TEAM, "team", changes))
    codec = session.context.codecs["a"]
    return codec.decode(codec.encode_message(text)), session.breaches()


@pytest.mark.parametrize(
    ("think", "seen", "breaches"),
    [("keep", THOUGHT, 0), ("strip", "4", 0), ("forbid", "4", 1)],
)
def test_thinking_is_kept_stripped_or_forbidden(think, seen, breaches):
    text, counted = shared_text(THOUGHT, f"team.protocol.think={think}")
    assert text.strip() == seen
    assert sum(counted.values()) == breaches


def test_tool_calls_are_left_alone_unless_asked_for():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert shared_text(call)[0] == call
    canonical, _ = shared_text(call, "team.protocol.tools=canonical")
    assert canonical != call
    assert '"add"' in canonical


def test_agents_of_one_model_count_a_breach_once():
    session = build(loads(TEAM, "team", ["team.protocol.think=forbid"]))
    codec = session.context.codecs["b"]
    codec.decode(codec.encode_message(THOUGHT))
    assert sum(session.breaches().values()) == 1
