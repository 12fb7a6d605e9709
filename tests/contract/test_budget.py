"""Matched budgets: every plan spends what TeamTR would, by settings alone; and trained parameters."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.config import ConfigError, loads
from teamtr.config.plan import PlanConfig, plan_keys
from teamtr.presets import PRESETS, Budget, Plan, Resample, TeamSize, matched
from teamtr.session.budget import matched_ranks, trained_parameters
from teamtr.session.build import build

THREE = TeamSize(agents=3, turns=3)
TEAM = """
name: budget
task: {name: code, half_length: 1}
team: {model: tiny, max_tokens: 4, agents: [{name: left}, {name: right}, {name: speaker}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {stages: 4, problems: 5, group_size: 2}
"""


def team(*overrides: str):
    return loads(TEAM, "budget", overrides)


def test_what_plans_spend_by_hand():
    sizes = {"stages": 4, "problems": 5, "group_size": 2}
    assert Plan(**sizes).budget(THREE) == Budget(rollouts=4 * 3 * 10, messages=4 * 3 * 10 * 3, updates=12)
    assert Plan(**sizes, resample=Resample(every=0)).budget(THREE) == Budget(40, 120, 12)
    assert Plan(**sizes, resample=Resample(every=2)).budget(THREE) == Budget(80, 240, 12)
    assert Plan(**sizes, order=PRESETS["joint"].order).budget(THREE) == Budget(40, 120, 12)
    assert Plan(**sizes).budget(TeamSize(3, None)) == Budget(120, None, 12)
    for name in ("auto", "partial", "dapo", "sequential_dapo"):
        assert PRESETS[name].budget(THREE) is None, "known only when it has run"
    assert PRESETS["reweighted"].batches(3) == 1


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].batches(3) is not None])
def test_every_preset_spends_alike_when_matched(name):
    found = team(f"plan.preset={name}", "plan.match=rollouts", "plan.problems=6")
    own, reference = found.budgets()
    assert own == reference == Budget(144, 432, 12)
    assert found.plan.problems == 6, "the file stays as it was written"


def test_a_single_agent_beside_a_team():
    one, plan = TeamSize(1, 1), Plan(stages=4, problems=5, group_size=2)
    wanted = plan.budget(THREE)
    assert matched(plan, "rollouts", one, THREE).budget(one).rollouts == wanted.rollouts
    assert matched(plan, "tokens", one, THREE).budget(one).messages == wanted.messages
    assert matched(plan, "updates", one, THREE).budget(one).updates == wanted.updates
    assert (matched(plan, "tokens", one, THREE).problems, matched(plan, "updates", one, THREE).stages) == (45, 12)


def test_what_does_not_divide_is_rounded_and_told():
    plan = Plan(stages=1, problems=5, resample=Resample(every=2))
    assert matched(plan, "rollouts", THREE, THREE).problems == 8  # 7.5
    assert matched(Plan(problems=1), "rollouts", THREE, TeamSize(1, 3)).problems == 1
    own, reference = team("plan.preset=resample_every_2", "plan.match=rollouts").budgets()
    assert (own.rollouts, reference.rollouts) == (4 * 2 * 8 * 2, 4 * 3 * 5 * 2)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["plan.preset=dapo", "plan.match=rollouts"],
            "decides as it goes how much it samples: use plan.match: updates",
        ),
        (["plan.preset=auto", "plan.match=tokens"], "decides as it goes"),
        (["plan.match_agents=3"], "plan.match_agents needs plan.match"),
        (["plan.match=rollouts", "plan.match_turns=3"], "plan.match_turns changes nothing with plan.match: rollouts"),
        (["plan.match=money"], "plan.match must be one of off, rollouts, tokens, updates"),
        (["plan.match=tokens", "team.router.kind=python:mine.py:Mine"], "a router of your own"),
        (["plan.critic=true"], "a critic gives advantages per token: set plan.ratio: token, not message"),
        (["plan.value_clip=0.1"], "plan.value_clip needs a critic"),
        (["plan.preset=ppo", "plan.critic=false", "plan.gae_lambda=1"], "plan.gae_lambda needs a critic"),
        (["plan.preset=ppo", "plan.ratio=message"], "set plan.ratio: token, not message"),
        (["plan.preset=reweighted", "plan.critic=true", "plan.ratio=token"], "plan.reweight and plan.critic exclude"),
    ],
)
def test_what_is_refused(overrides, told):
    with pytest.raises(ConfigError) as error:
        team(*overrides)
    assert told in str(error.value)
    assert str(error.value).count("plan.match: ") <= 3, "told once"


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_plan_as_keys_is_the_same_plan(name):
    plan = PRESETS[name]
    assert PlanConfig(**plan_keys(plan)).plan() == plan


def test_a_critic_on_any_token_plan_and_off_again():
    plan = team("plan.preset=grpo", "plan.critic=true", "plan.gae_lambda=0.5").plan.plan()
    assert plan.critic is not None
    assert plan.critic.gae_lambda == 0.5
    assert team("plan.preset=ppo", "plan.critic=false").plan.plan().critic is None


@pytest.mark.long
def test_check_and_plan_print_the_sizes(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(TEAM)
    settings = [str(file), "plan.preset=sequential_grpo", "plan.match=rollouts", "team.train=lora", "team.lora.rank=2"]
    for command in ("check", "plan"):
        told = CliRunner().invoke(app, [command, *settings]).output
        assert "4 stages, batches of 15 problems x 2 episodes (plan.match: rollouts; the file has 4 and 5)" in told
        assert "spends 120 rollouts, 360 messages at most, 12 updates" in told
        assert "the preset teamtr would spend 120 rollouts, 360 messages at most, 12 updates" in told
    assert "left with lora.rank 6" in told
    record = json.loads(CliRunner().invoke(app, ["plan", *settings, "--json"]).stdout)
    assert record["sizes"] == {"stages": 4, "problems": 15, "group_size": 2}
    assert record["budget"] == record["reference_budget"] == {"rollouts": 120, "messages": 360, "updates": 12}
    assert record["matched_rank"] == {"left": 6, "right": 6, "speaker": 6}


@pytest.mark.long
def test_a_single_adapter_of_the_matched_rank_trains_as_many_parameters_as_the_team():
    settings = ("team.train=lora", "team.agents.left.lora.rank=2", "team.lora.rank=4", "team.agents.right.frozen=true")
    session = build(team(*settings), taught=False)
    trained = trained_parameters(session)
    assert set(trained) == {"left", "speaker"}, "of trained agents alone"
    ranks = matched_ranks(session)
    assert ranks == {"left": 6, "speaker": 6}
    alone = team(*settings, "team.agents.speaker.frozen=true", f"team.agents.left.lora.rank={ranks['left']}")
    assert trained_parameters(build(alone, taught=False)) == {"left": sum(trained.values())}
