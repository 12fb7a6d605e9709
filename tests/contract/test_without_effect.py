"""Settings that change nothing, and that only a built team shows: warnings of ``teamtr check`` and ``teamtr train``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.session.build import build
from teamtr.session.checks import doubts
from teamtr.session.train import train
from teamtr.session.without_effect import without_effect
from teamtr.swap.request import Request, new_team_file

TEAM = """\
name: idle
task: {{name: data, path: {path}, held_out: 0.5}}
team: {{model: tiny, agents: [{{name: ann}}, {{name: bob}}]}}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
plan: {{stages: 1, problems: 4, group_size: 2}}
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("idle") / "rows.jsonl"
    rows = [{"question": f"1+{k}?", "answer": str(k + 1)} for k in range(24)]
    file.write_text("\n".join(map(json.dumps, rows)))
    (file.parent / "own.py").write_text(
        "def double(x: int) -> int:\n    '''Twice x.'''\n    return 2 * x\n\n\n"
        "def reward(prompts, completions, **columns):\n    return [0.5 for _ in completions]\n"
    )
    return TEAM.format(path=file)


def told(team: str, *overrides: str) -> list[str]:
    return list(without_effect(build(loads(team, "idle", overrides))))


def test_nothing_is_told_of_defaults(team: str) -> None:
    assert told(team) == []


@pytest.mark.parametrize(
    ("idle", "warning", "effective"),
    [
        ("team.lora.rank=8", "team.lora changes nothing: no agent trains an adapter", "team.train=lora"),
        ("warmup.learning_rate=1e-3", "warmup.learning_rate changes nothing: there is no", "warmup.tokens=1000"),
        ("warmup.batch=4", "warmup.batch changes nothing: there is no", "warmup.tokens=1000"),
        ("tracking.project=mine", "tracking.project changes nothing: no trackers", "trackers=[tensorboard]"),
        (
            "tools.steps=2",
            "tools.steps changes nothing: there are no tools",
            "tools.use=['python:FOLDER/own.py:double']",
        ),
        (
            "learner.certify_share=0.5",
            "learner.certify_share changes nothing: the range of this task's rewards is not known",
            "task.grader=exact",
        ),
    ],
)
def test_what_changes_nothing_is_told(team: str, idle: str, warning: str, effective: str) -> None:
    folder = team.partition("path: ")[2].partition("/rows.jsonl")[0]
    before = ("task.grader=python:FOLDER/own.py:reward", "tools.tell=true")
    here = [each.replace("FOLDER", folder) for each in (*before, idle)]
    session = build(loads(team, "idle", here))
    (found,) = without_effect(session)
    assert found.startswith(warning)
    assert found in doubts(session)
    assert told(team, *here, effective.replace("FOLDER", folder)) == []


def test_keys_of_the_template_that_it_does_not_read_are_told(team: str) -> None:
    session = build(loads(team, "idle", ["team.template_kwargs={enable_thinkng: false, title: x, tools: null}"]))
    tokenizer = session.context.codecs["ann"].tokenizer  # type: ignore[attr-defined]
    tokenizer.chat_template += "{# {{ title }} #}"
    (found,) = without_effect(session)
    assert found == "team.template_kwargs.enable_thinkng changes nothing: no chat template of the team reads it"


def test_a_model_of_the_team_that_nobody_uses_is_told(team: str) -> None:
    own = team.replace("{name: ann}", "{name: ann, model: tiny}").replace("{name: bob}", "{name: bob, model: tiny}")
    (found,) = told(own, "team.model=org/model")
    assert found == "team.model: org/model changes nothing: every agent has a model of its own"


def test_a_team_of_which_nobody_is_trained_is_told_and_not_trained(team: str, tmp_path: Path) -> None:
    frozen = team.replace("ann}", "ann, frozen: true}").replace("bob}", "bob, frozen: true}")
    assert told(frozen) == ["every agent is frozen: there is nobody to train"]
    with pytest.raises(UserError, match="every agent of this team is frozen, so that there is nobody to train"):
        list(train(loads(frozen), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_swap_leaves_no_settings_of_adapters_behind(team: str, tmp_path: Path) -> None:
    """They would be refused in the new team file, whose reader has no say in them."""
    lora = team.replace("ann}", "ann, frozen: true}").replace("bob}", "bob, train: lora, lora: {rank: 4}}")
    old = loads(lora, "idle", ["learner.base=fp16", "team.lora.alpha=8"])
    new = new_team_file(old, Request("bob", "tiny"), next_stage=0, models=tmp_path)
    assert [agent.train for agent in new.team.agents] == ["full", "full"]
    assert new.learner.base == "fp32"
    kept = new_team_file(old, Request("bob", "tiny", train="lora"), next_stage=0, models=tmp_path)
    assert (kept.team.agents[1].lora.rank, kept.learner.base) == (4, "fp16")
