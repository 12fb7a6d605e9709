"""The look-up game: only the tool knows the value, and a tiny team learns to ask it for the right key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teamtr.calls import ToolCall
from teamtr.config import ConfigError, loads
from teamtr.config.recipe import recipe_text
from teamtr.rollout import play
from teamtr.session import train as run
from teamtr.session.build import build
from teamtr.tasks.games.lookup import Lookup, call_of
from teamtr.types import ToolRequest


def test_the_tool_knows_the_value_and_nothing_else_does():
    task = Lookup(tables=16)
    train, test = task.problems("train"), task.problems("test")
    assert (len(train), len(test)) == (96, 32)
    assert not {p.id for p in train} & {p.id for p in test}
    for problem in (*train, *test):
        request = ToolRequest(problem, "asker", (), (ToolCall("look_up", {"key": problem.prompt}),))
        assert task.tools.results([request]) == [(problem.answer,)]
    shares = [np.mean([p.answer == value for p in train]) for value in task.values]
    assert max(shares) < 0.3, "no value is a good guess"
    request = ToolRequest(train[0], "asker", (), (ToolCall("look_up", {"key": "9"}),))
    assert task.tools.results([request]) == [("Error: no such key",)]


def test_it_grades_values_alone():
    task = Lookup(tables=4)
    problem = task.problems("train")[0]
    wrong = [answer.reply for answer in task.wrong(problem, np.random.default_rng(0))]
    said = [task.gold(problem), f" {problem.answer.lower()}\n", *wrong]
    verdicts = task.grade([(problem, text, ()) for text in said])
    assert [verdict.right for verdict in verdicts] == [True, True, False, False, False]


def test_examples_show_as_much_skill_as_asked_for():
    task = Lookup(skill=0.25, reading_skill=0.5)
    shown = task.format_examples(np.random.default_rng(0), 4000)
    asked = [text == call_of(problem.prompt) for agent, problem, _, text in shown if agent == "asker"]
    read = [text == history[-1][1] for agent, _, history, text in shown if agent == "answerer"]
    assert np.mean(asked) == pytest.approx(0.25, abs=0.03)
    assert np.mean(read) == pytest.approx(0.5 + 0.5 / 8, abs=0.03)


def test_a_team_file_must_fit():
    for wrong in ("task.tables=3", "task.keys=11", "team.agents.asker.name=bob"):
        with pytest.raises(ConfigError):
            loads(recipe_text("tool-lookup"), "x", [wrong])


SMALL = [
    "plan.stages=1",
    "plan.problems=4",
    "plan.group_size=4",
    "tiny.warmup_steps=40",
    "tiny.width=32",
    "tiny.warmup_learning_rate=0.01",
    "eval.every=0",
]


@pytest.mark.long
def test_it_runs_from_the_team_file_and_only_own_tokens_are_trained_on(tmp_path: Path):
    team_file = loads(recipe_text("tool-lookup"), "x", SMALL)
    records = list(run.train(team_file, tmp_path / "run"))
    assert records[-1]["kind"] == "finished"
    session = build(team_file)
    batch = play(session.context, session.team, session.task.problems("train")[:4], 2, seed=0)
    called = [episode for episode in batch.episodes if episode.turns[0].results]
    assert called, "the form of a call was taught"
    codec = session.context.codecs["answerer"]
    for episode in called:
        asker, answerer = episode.turns
        (result,) = asker.results
        assert codec.decode(asker.token_ids) == asker.text
        prompt = codec.tokenizer.decode(answerer.context_ids)
        assert prompt.endswith(f"asker: {asker.text}\ntool: {result.text}<bot>")


@pytest.mark.slow
def test_a_tiny_team_learns_to_ask_for_the_right_key(tmp_path: Path):
    """The figures of docs/tools.md."""
    team_file = loads(recipe_text("tool-lookup"), "x")
    scores = [r["avg_at_k"] for r in run.train(team_file, tmp_path / "run") if r["kind"] == "eval"]
    assert scores[0] <= 0.30
    assert scores[-1] >= 0.85
