"""Teams with tools through the commands: check, plan, train, resume, eval, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from teamtr import Agent, TeamTrainer
from teamtr.cli import app
from teamtr.config import load_team_file
from teamtr.rollout import play
from teamtr.session.build import build
from teamtr.session.memory import demand_of, longest

TEAM = """\
name: small
task: {name: lookup, keys: "1234", values: AB, tables: 8, skill: 0.5}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 60, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: asker, max_tokens: 17}
    - {name: answerer, max_tokens: 2, tools: none}
tools: {use: ["python:own.py:count"], steps: 2, tell: false, max_characters: 40}
plan: {stages: 1, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 0, samples: 2}
"""
OWN = "def count(word: str) -> int:\n    return len(word)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools")
    (made / "team.yaml").write_text(TEAM)
    (made / "own.py").write_text(OWN)
    invoke("train", made / "team.yaml", "--out", made / "run")
    return made


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.long
def test_check_and_plan_know_the_tools(folder: Path) -> None:
    assert "asker calls look_up, count\n" in invoke("check", folder / "team.yaml")
    assert "in all" in invoke("plan", folder / "team.yaml")
    assert "a stage" in invoke("plan", folder / "team.yaml", "--card", "H200")
    told = invoke("check", folder / "team.yaml", "team.agents.asker.tools=[lookup]", code=2)
    assert "team.agents.asker.tools names no tool 'lookup'; there are count, look_up" in " ".join(told.split())


@pytest.mark.long
def test_a_run_is_evaluated_and_reported_with_its_results(folder: Path) -> None:
    answer: dict[str, Any] = json.loads(invoke("eval", folder / "run", "--json").strip().splitlines()[-1])
    assert 0.0 <= answer["avg_at_k"] <= 1.0
    invoke("report", folder / "run")
    page = (folder / "run" / "report.html").read_text()
    assert '"who":"tool"' in page.replace(" ", "")


@pytest.mark.long
def test_what_was_played_with_another_tool_is_not_taken_for_an_evaluation_with_this_one(folder: Path) -> None:
    def evaluated() -> str:
        return invoke("eval", folder / "run", "--samples", 1)

    evaluated()
    assert "were already stored" in evaluated()
    (folder / "own.py").write_text(OWN.replace("len(word)", "2 * len(word)"))
    assert "were already stored" not in evaluated()
    (folder / "own.py").write_text(OWN)


@pytest.mark.long
def test_no_episode_is_longer_than_planned(folder: Path) -> None:
    session = build(load_team_file(folder / "team.yaml"))
    problems = session.task.problems("train")[:8]
    batch = play(session.context, session.team, problems, 4, seed=3)
    lengths, router = longest(session), session.context.router
    spoken: dict[str, int] = dict.fromkeys(session.team.names, 0)
    for episode in batch.episodes:
        assert len(episode.turns) <= router.horizon == 3
        for turn in episode.turns:
            assert len(turn.context_ids) <= lengths[turn.agent].prompt
            spoken[turn.agent] += 1
    assert spoken["asker"] > spoken["answerer"] == 32, "it spoke again after a result"
    assert demand_of(session).messages == {"asker": 32, "answerer": 16}, "16 episodes, of which each may have 2 calls"


@pytest.mark.long
def test_a_changed_tool_is_noticed_when_a_run_goes_on(folder: Path) -> None:
    invoke("train", folder / "team.yaml", "--out", folder / "run", "plan.stages=2")
    (folder / "own.py").write_text(OWN.replace("len(word)", "len(word) + 1"))
    told = invoke("train", folder / "team.yaml", "--out", folder / "run", "plan.stages=3", code=3)
    assert "tools.use.0: the code has changed" in told
    (folder / "own.py").write_text(OWN)


def test_a_python_program_gives_tools_by_the_keys_of_the_team_file(tmp_path: Path) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = TeamTrainer(
        agents=[Agent("a", "tiny"), Agent("b", "tiny", tools="none"), Agent("c", "tiny", tools=("count",))],
        reward_funcs=reward,
        train_dataset=[{"prompt": str(k)} for k in range(4)],
        output_dir=tmp_path / "run",
        config={"tools.use": [f"python:{tmp_path / 'own.py'}:count"], "tools.steps": 2},
    )
    assert [agent.own_tools for agent in trainer.team_file.team.agents] == [None, (), ("count",)]
    assert trainer.team_file.tools.use == (f"python:{tmp_path / 'own.py'}:count",)
    assert trainer.team_file.tools.steps == 2
