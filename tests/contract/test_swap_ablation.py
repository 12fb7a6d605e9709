"""The rows of the protocol ablation differ in what they say they do, and leave the old team as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from teamtr.chat import ChatCodec, MessageFilter

FILE = Path(__file__).resolve().parents[2] / "experiments" / "ablation.py"


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("ablation", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shared(row: dict[str, str], text: str) -> str:
    return MessageFilter(think=row["think"], tools=row["tools"])(text)


def test_each_row_unifies_one_respect_more(ablation):
    said = '<think>B</think>s(x="A")'
    assert [shared(row, said) for row in ablation.UNIFIED.values()] == [
        said,
        said,
        's(x="A")',
        ablation.call("A"),
        ablation.call("A"),
    ]
    rows = list(ablation.UNIFIED.values())
    assert [row["system"] for row in rows] == ["template", *["explicit"] * 4]
    assert [row.get("mode", "direct") for row in rows] == [*["direct"] * 4, "aligned"]
    assert list(ablation.PAPER) == list(ablation.UNIFIED)


def test_the_old_team_says_the_same_under_every_row(ablation):
    for row in ablation.UNIFIED.values():
        for text in (ablation.call("A"), "A", "AB"):
            assert shared(row, text) == text


def test_the_new_template_speaks_up_only_where_nothing_is_said(ablation):
    _, tokenizer = ablation.untaught(0, width=16)
    tokenizer.chat_template = ablation.worded(tokenizer.chat_template)
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "u"}]
    told = {system: ChatCodec(tokenizer, system=system).text(talk) for system in ("template", "explicit")}
    assert told["template"] == f"<sys>{ablation.OWN_WORDS}{told['explicit']}"


def test_a_call_is_few_tokens_and_comes_back(ablation):
    _, tokenizer = ablation.untaught(0, width=16)
    codec = ChatCodec(tokenizer)
    for text in (ablation.call("A"), '<think>B</think>s(x="A")'):
        ids = codec.encode_message(text)
        assert codec.decode(ids) == text
        assert len(ids) <= 8, "the team's max_tokens"


def test_the_team_learns_to_read_calls(ablation):
    task = ablation.CallExchange("AB", skill=1.0)
    examples = task.format_examples(np.random.default_rng(0), 6)
    agents = [agent for agent, *_ in examples]
    assert agents[:3] == ["left", "right", "speaker"]
    *_, before, text = examples[2]
    assert before[0] == ("left", ablation.call(text[0]))
    assert before[1] == ("right", text[1])
    assert examples[0][3] == ablation.call(examples[0][1].private["left"])
