"""What ``teamtr check`` says a run takes: of which messages, evaluations and precisions, and what it adds up."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from teamtr.cli.words import estimate_line
from teamtr.config import loads
from teamtr.rollout import Ledger
from teamtr.session import forecast
from teamtr.session.build import Session, build
from teamtr.session.estimate import Estimate, Scoring, estimate
from teamtr.session.forecast import Spoken, forecast_here
from teamtr.session.memory import WORDS_OF_A_LINE
from teamtr.session.success import planned_evaluations
from teamtr.session.train import train
from teamtr.session.trial import Trial
from teamtr.types import Message

TEAM = """
name: estimated
task: {name: code, half_length: 1}
team:
  model: tiny
  agents: [{name: left, max_tokens: 2}, {name: right, max_tokens: 2}, {name: speaker, max_tokens: 40}]
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {stages: 3, problems: 4, group_size: 2}
eval: {every: 0}
"""
NO_SCORING = Scoring(tokens=0, seconds=0.0)


def session(*settings: str) -> Session:
    return build(loads(TEAM, "estimated", settings))


def trial(*episodes: dict[str, int], ledger: Ledger | None = None) -> Trial:
    """Of so many tokens of each agent's message, behind prompts of five."""
    turns = [
        [
            SimpleNamespace(agent=agent, round=0, token_ids=np.zeros(tokens, np.int32), results=())
            for agent, tokens in episode.items()
        ]
        for episode in episodes
    ]

    def of(name: str) -> Any:
        messages = [turn.token_ids for episode in turns for turn in episode if turn.agent == name]
        return SimpleNamespace(prompts=[np.zeros(5, np.int32) for _ in messages], messages=messages)

    batch: Any = SimpleNamespace(episodes=[SimpleNamespace(turns=each) for each in turns], of=of)
    sampled = {name: sum(episode.get(name, 0) for episode in episodes) for name in ("left", "right", "speaker")}
    return Trial(batch, ledger or Ledger(sampled_tokens=sampled, seconds={"left": 2.0, "right": 1.0}))


SHORT_AND_LONG = trial({"left": 1, "right": 2, "speaker": 33}, {"left": 2, "right": 2, "speaker": 40})


ON_AVERAGE = {name: Spoken(tokens) for name, tokens in (("left", 2), ("right", 2), ("speaker", 37))}


def test_each_agent_s_messages_are_as_long_as_its_own() -> None:
    """On average 1.5, 2 and 36.5 tokens, rounded up: of 13.3 each the two who may say two would not make up for it."""
    built = session()
    found = estimate(built, SHORT_AND_LONG, NO_SCORING)
    planned = forecast_here(built, ON_AVERAGE)
    assert planned is not None
    assert [turn.message for turn in planned.setup.turns] == [2, 2, 37]
    assert found.card == "cpu"
    assert found.least_seconds == found.most_seconds == pytest.approx(planned.run_seconds)
    brief = forecast_here(built, {"speaker": Spoken(14)})
    assert brief is not None
    assert [turn.message for turn in brief.setup.turns] == [2, 2, 14], "of whom nothing is known, the most that it may"
    assert found.least_seconds > 1.2 * brief.run_seconds


def test_tools_are_called_as_often_and_answer_as_much_as_in_the_episodes(tmp_path) -> None:
    """Two messages of one turn with an answer of four characters in one episode, and one message in the other: at most
    it would be more, with 2,000 characters after each."""
    (tmp_path / "mine.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    built = session(f"tools=python:{tmp_path / 'mine.py'}:add")
    tried = trial({"left": 2, "right": 2, "speaker": 30}, {"left": 2, "right": 2, "speaker": 30})
    calling = SimpleNamespace(**{**vars(tried.batch.episodes[0].turns[2]), "results": (Message("add", "five"),)})
    tried.batch.episodes[0].turns.insert(2, calling)
    found = estimate(built, tried, NO_SCORING)
    others = dict.fromkeys(("left", "right"), Spoken(2, steps=1, results=0))
    results = ceil((len(built.context.codecs["speaker"].encode_message("five")) + WORDS_OF_A_LINE) / 3)
    turns = forecast_here(built, {**others, "speaker": Spoken(30, steps=2, results=results)})
    most = forecast_here(built, {**others, "speaker": Spoken(30)})
    assert [turn.agent for turn in turns.setup.turns] == ["left", "right", "speaker", "speaker"]
    assert len(most.setup.turns) == 2 + built.team_file.tools.steps
    assert found.least_seconds == pytest.approx(turns.run_seconds)
    assert most.run_seconds > 3 * turns.run_seconds


def test_tokens_and_seconds_of_a_plan_that_decides_as_it_goes() -> None:
    """3 stages of 8 episodes once or before each of three updates; grading and replies for every episode."""
    ledger = Ledger(sampled_tokens={"speaker": 70, "left": 10}, grading_seconds=0.5, environment_seconds=0.3)
    built = session("plan.preset=auto")
    found = estimate(built, replace(SHORT_AND_LONG, ledger=ledger), NO_SCORING)
    assert (found.least_tokens, found.most_tokens) == (3 * 8 * 40, 3 * 3 * 8 * 40)
    planned = forecast_here(built, ON_AVERAGE)
    assert planned is not None
    assert found.least_seconds == pytest.approx(planned.run_seconds + 3 * 8 * 0.4)
    more = 3 * 2 * planned.phases["sample"].seconds
    assert found.most_seconds == pytest.approx(planned.run_seconds + more + 3 * 3 * 8 * 0.4)


def test_dynamic_sampling_may_sample_more_and_says_so() -> None:
    for preset, more in (("dapo", True), ("auto", False)):
        assert estimate(session(f"plan.preset={preset}"), SHORT_AND_LONG, NO_SCORING).open_ended == more


def test_an_unknown_device_is_estimated_by_what_the_episodes_and_their_scoring_took(monkeypatch) -> None:
    """24 x 3 episodes of 1.5 s, and 24 of each agent's prompts and messages, read in 2 passes and 3 an epoch."""
    monkeypatch.setattr(forecast, "card_named", lambda _: None)
    built = session("learner.epochs=2")
    found = estimate(built, SHORT_AND_LONG, Scoring(tokens=100, seconds=0.5))
    read = (2 * 3 * 5 + 3 + 4 + 73) / 2
    assert found.card is None
    assert found.least_seconds == found.most_seconds == pytest.approx(72 * 1.5 + 24 * read * 8 * 0.005)
    assert estimate(built, SHORT_AND_LONG, NO_SCORING).least_seconds is None


def test_an_agent_that_is_a_table_has_no_shape_and_is_estimated_by_its_episodes() -> None:
    built = session("team.model=tabular")
    assert forecast_here(built, {}) is None
    found = estimate(built, SHORT_AND_LONG, Scoring(tokens=100, seconds=0.5))
    assert found.card is None
    assert found.least_seconds > 0


def test_where_nobody_said_anything_there_are_tokens_and_no_seconds() -> None:
    found = estimate(session(), trial({}, {}), NO_SCORING)
    assert found == Estimate(0, 0, None, None)


def test_seconds_are_those_of_the_precision_that_was_settled_on() -> None:
    """Not of the one that a plan without models takes to be likely."""
    built = session("learner.precision=auto")
    built.engine.set_precision("left", "bf16")
    found = forecast_here(built, {})
    assert found is not None
    assert found.as_record()["precision"] == {"left": "bf16", "right": "fp32", "speaker": "fp32"}


def test_seconds_of_a_frozen_agent_are_those_of_its_messages_alone() -> None:
    everybody, two = forecast_here(session(), {}), forecast_here(session("team.agents.left.frozen=true"), {})
    assert everybody is not None
    assert two is not None
    assert two.as_record()["precision"].keys() == {"right", "speaker"}
    assert two.phases["sample"].seconds == pytest.approx(2 / 3 * everybody.phases["sample"].seconds), "two batches"
    assert (
        forecast_here(session(*(f"team.agents.{name}.frozen=true" for name in ("left", "right", "speaker"))), {})
        is None
    )


@pytest.mark.long
@pytest.mark.parametrize(("stages", "every"), [(4, 2), (3, 2), (2, 5)])
def test_evaluations_are_planned_as_a_run_makes_them(stages: int, every: int, tmp_path) -> None:
    """Before every so many stages, and after the last one whatever its number."""
    settings = (
        "team.model=tabular",
        f"plan.stages={stages}",
        f"eval.every={every}",
        "eval.problems=2",
        "eval.samples=3",
    )
    text = TEAM.replace("eval: {every: 0}\n", "").replace(", half_length: 1", "")
    team_file = loads(text, "estimated", settings)
    made = [record for record in train(team_file, tmp_path / "run") if record["kind"] == "eval"]
    assert planned_evaluations(build(team_file)) == (2 * 3, len(made))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Estimate(1200, 1200, None, None), "about 1,200 sampled tokens"),
        (Estimate(10, 1200, 60.0, 3725.0), "about 10 to 1,200 sampled tokens, less than 1:02:05"),
        (
            Estimate(10, 10, 61.0, 61.0, open_ended=True, card="H200"),
            "about 10 sampled tokens, 1:01 by the model of teamtr plan --card H200, and more where dynamic sampling "
            "replaces groups",
        ),
    ],
)
def test_an_estimate_in_words(found: Estimate, told: str) -> None:
    assert estimate_line(found) == told
