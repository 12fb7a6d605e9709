"""A served team calls the tools of its team file, as in training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from served import asked, make_session
from teamtr.answers import Sample
from teamtr.config import loads
from teamtr.config.recipe import recipe_text
from teamtr.errors import UserError
from teamtr.serving.reply import Reply
from teamtr.serving.schedule import Scheduler
from teamtr.serving.team import Ask, Choice, ServedTeam
from teamtr.session.build import build

TOOLS = """
def double(word: str) -> str:
    \"\"\"Says a word twice.\"\"\"
    return word * 2
"""


class Deaf:
    def discussion(self, *told: Any, **more: Any) -> None: ...

    def answer(self, *told: Any) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(TOOLS)
    session = make_session(f"tools=python:{tmp_path}/own.py:double", sharp=1.0)
    scheduler = Scheduler(session.engine)
    made = ServedTeam.of(session, session.current_team(), "trio", scheduler)
    codec, calls = made.codecs["left"], []

    def scripted(agent: str, prompts: Any, noise: Any, **settings: Any) -> list[Sample]:
        """``left`` calls the tool with the number it is asked about; whoever reads a result repeats it."""
        said = []
        for prompt in prompts:
            text = codec.codec.tokenizer.decode(prompt.tolist())
            number = text.split("#")[1][:2]
            calls.append((agent, number))
            word = number * 2 if f"{number * 2}" in text else f'double(word="{number}")'
            ids = codec.encode_message(word)
            said.append(Sample(ids, np.zeros(len(ids), np.float32), "stop", session.team[agent].version))
        return said

    session.engine.sample = scripted  # type: ignore[method-assign]
    yield made
    scheduler.close()


def played(served: ServedTeam, number: str, model: str = "trio") -> Choice:
    request = asked(f"#{number}", model)
    served.require(request)
    return served.play(Ask.of(request, 0, 0, Deaf(), threading.Event()))


def test_what_is_called_is_answered_and_only_the_last_word_counts(served):
    choice = played(served, "17")
    assert choice.text == "1717"
    assert [(message.agent, message.text) for message in choice.spoken] == [
        ("left", 'double(word="17")'),
        ("left", "1717"),
        ("right", "1717"),
        ("speaker", "1717"),
    ]


def test_results_are_part_of_the_discussion(served):
    told: list[tuple[str, str]] = []

    class Heard(Deaf):
        def discussion(self, choice: int, agent: str, text: str, *, begins: bool) -> None:
            told.append((agent, text))

    request = asked("#17", show="discussion", stream=True)
    choice = served.play(Ask.of(request, 0, 0, Heard(), threading.Event()))
    assert ("tool", "1717") in told
    # nobody knows before it ends that the speaker's message calls nothing, and is the answer
    assert [agent for agent, _ in told] == ["left", "tool", "left", "right", "speaker"]
    body = Reply(request, 0, "").completion([choice])
    assert body["choices"][0]["message"]["reasoning_content"].splitlines() == [
        'left: double(word="17")',
        "tool: 1717",
        "left: 1717",
        "right: 1717",
    ]
    assert body["teamtr"]["turns"][0][0]["results"] == ["1717"]


@pytest.mark.long
def test_many_at_once_get_their_own_results(served):
    numbers = [f"{k}" for k in range(10, 40)]
    found: dict[str, str] = {}

    def one(number: str) -> None:
        found[number] = played(served, number).text

    threads = [threading.Thread(target=one, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {number: number * 2 for number in numbers}


def test_an_agent_that_is_asked_by_itself_has_no_tools(served):
    assert played(served, "17", "trio/left").text == 'double(word="17")'


def test_tools_of_a_task_s_own_problems_are_refused():
    session = build(loads(recipe_text("tool-lookup"), "lookup", ["tiny.warmup_steps=0"]))
    scheduler = Scheduler(session.engine)
    try:
        with pytest.raises(UserError, match="answer for its own problems"):
            ServedTeam.of(session, session.current_team(), "lookup", scheduler)
    finally:
        scheduler.close()
