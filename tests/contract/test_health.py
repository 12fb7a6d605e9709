"""Health of a run: figures of a batch by hand, what is advised, and every place that shows them."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from made_run import changed, health_record, made_run, update_record
from small import World
from teamtr.analysis.report import build_report
from teamtr.analysis.report.section import shown
from teamtr.batches import RolloutBatch
from teamtr.cli.progress import TrainingScreen
from teamtr.config.keys import schema_keys
from teamtr.presets import PRESETS
from teamtr.records import decode_health
from teamtr.reports import NOTHING_KEPT, Health, MessageHealth, UpdateReport
from teamtr.trackers import point
from teamtr.training.advice import advise, untaught_share
from teamtr.training.health import LastHealth, health_of
from teamtr.types import Episode, Problem, Turn, Verdict


def turn(agent: str, logprobs: list[float], *, cut: bool = False) -> Turn:
    ids = np.arange(len(logprobs), dtype=np.int32)
    return Turn(
        agent, 0, ids[:1], ids, np.array(logprobs, dtype=np.float32), "length" if cut else "stop", "v", "a text"
    )


def episode(kind: str, reward: float, *turns: Turn) -> Episode:
    return Episode("p", 0, turns, "", Verdict(kind, reward), "team")


def batch(*, past: int = 0) -> RolloutBatch:
    """Two problems x 2. left is cut in three of four; right speaks in the first group alone."""
    long, short = [-0.5] * 4, [-1.5] * 2
    episodes = (
        episode("right", 1.0, turn("left", long, cut=True), turn("right", [-2.0])),
        episode("wrong", 0.0, turn("left", long, cut=True), turn("right", [-2.0, np.nan, -1.0])),
        episode("unparsed", 0.0, turn("left", long, cut=True)),
        episode("crash", 0.0, turn("left", short)),
    )
    problems = (Problem("p", "?"), Problem("q", "?"))
    return RolloutBatch(problems, episodes, 2, past=past)


LIMITS = {"left": 4, "right": 8, "silent": 3}


def test_figures_of_a_batch_by_hand():
    found = health_of(batch(), LIMITS)
    assert list(found.agents) == ["left", "right"]
    assert found.agents["left"] == MessageHealth(
        messages=4,
        limit=4,
        mean=3.5,
        p95=4.0,
        shortest=2,
        longest=4,
        cut=0.75,
        ended_mean=2.0,
        entropy=pytest.approx((12 * 0.5 + 2 * 1.5) / 14),
        reward=0.25,
    )
    right = found.agents["right"]
    assert (right.messages, right.cut, right.reward) == (2, 0.0, 0.5)
    assert right.entropy == pytest.approx(5 / 3), "the token without a log-probability is left out"
    assert found.messages is not None
    assert (found.messages.messages, found.messages.limit, found.messages.cut) == (6, None, 0.5)
    assert (found.groups, found.without_signal) == (2, 0.5)
    assert (found.unparsed, found.ungraded, found.success) == (0.25, 0.25, 0.25)
    assert found.reward_deviation == pytest.approx(np.std([1, 0, 0, 0]))
    assert found.kl_share is None


def test_episodes_of_an_earlier_stage_do_not_count():
    found = health_of(batch(past=1), LIMITS)
    assert (found.groups, found.without_signal, found.unparsed) == (1, 0.0, 0.0)
    assert found.agents["left"].messages == 2


def test_a_batch_in_which_nobody_spoke_and_no_reward_is_finite():
    silent = RolloutBatch((Problem("p", "?"),), (episode("wrong", float("nan")),), 1)
    found = health_of(silent, LIMITS)
    assert (found.messages, dict(found.agents), found.reward_deviation) == (None, {}, None)
    assert found.without_signal == 1.0


@pytest.mark.parametrize(
    ("report", "share"),
    [
        (UpdateReport("left", "accepted", "", 0.1, kl_upper=0.05), 0.5),
        (UpdateReport("left", "restored", "", 0.1), 0.0),
        (UpdateReport("left", "skipped_no_signal", "", 0.1), None),
        (UpdateReport("left", "accepted", "", float("inf"), kl_upper=0.05), None),
        (UpdateReport("left", "accepted", "", 0.1, kl_upper=float("inf")), None),
    ],
)
def test_the_step_as_a_share_of_its_radius(report, share):
    assert health_of(batch(), LIMITS, report).kl_share == share


def test_updates_that_learn_from_the_same_episodes_count_them_once(monkeypatch):
    counted = []
    monkeypatch.setattr("teamtr.training.health.health_of", lambda *given: counted.append(1) or health_of(*given))
    last, first, other = LastHealth(), batch(), batch(past=1)
    for number, data in enumerate((first, replace(first, redrawn=True), other, replace(other, past=0))):
        report = UpdateReport("left", "accepted", "", 0.1, kl_upper=0.01 * number)
        assert last.after(data, LIMITS, report) == health_of(data, LIMITS, report)
    assert len(counted) == 3  # the second has the episodes of the first; as many of them count


# -- advice ---------------------------------------------------------------------------------------------------

GOOD = MessageHealth(16, 64, 20.0, 40.0, 3, 50, 0.0, 20.0, 1.0, 0.5)
FINE = Health(GOOD, {"left": GOOD, "right": GOOD}, 8, 0.25, 0.05, 0.0, 0.5, 0.5, 0.5)
CUT = replace(GOOD, cut=0.957)


def texts(health: Health, updated: str | None = "left") -> list[str]:
    return [advice.text for advice in advise(health, updated)]


def test_a_fine_run_is_left_in_peace():
    assert texts(FINE) == []


def test_messages_that_are_cut_by_the_whole_team_or_by_one_agent():
    assert texts(replace(FINE, messages=CUT, agents={"left": CUT, "right": CUT})) == [
        "96 % of messages are cut at 64 tokens: raise team.max_tokens"
    ]
    assert texts(replace(FINE, agents={"left": GOOD, "right": CUT})) == [
        "96 % of right's messages are cut at 64 tokens: raise team.agents.right.max_tokens"
    ]
    assert texts(replace(FINE, messages=CUT, agents={"left": CUT})) == [
        "96 % of messages are cut at 64 tokens: raise team.max_tokens"
    ]
    other = replace(CUT, limit=32)
    both = texts(replace(FINE, messages=replace(CUT, limit=None), agents={"left": CUT, "right": other}))
    assert [text.split(": ")[1] for text in both] == [
        "raise team.agents.left.max_tokens",
        "raise team.agents.right.max_tokens",
    ]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"unparsed": 0.4}, "system_prompt"),
        ({"without_signal": 0.9}, "plan.group_size"),
        ({"agents": {"left": replace(GOOD, entropy=0.001)}}, "sampling.temperature"),
        ({"kl_share": 0.01}, "learner.learning_rate"),
    ],
)
def test_every_other_figure_has_its_key(change, key):
    (text,) = texts(replace(FINE, **change))
    assert key in text


def test_a_team_that_solves_everything_is_not_told_to_change():
    sure = replace(GOOD, entropy=0.001)
    assert texts(replace(FINE, success=0.95, without_signal=1.0, agents={"left": sure})) == []
    assert texts(replace(FINE, kl_share=0.0)) == [], "a step that was restored"


def test_groups_of_equal_rewards_that_teach_are_not_advised_against():
    """As with a critic, or where agents are credited with something else than the team's reward."""
    equal = replace(FINE, without_signal=0.9)
    for untaught, told in ((None, "90 %"), (0.85, "85 %"), (0.5, None), (0.0, None), (1.0, "90 %")):
        found = [each.text for each in advise(equal, "left", untaught)]
        assert [text[:4] for text in found] == ([] if told is None else [told])
    record = update_record(1, 0, 0, "left")
    assert untaught_share({**record, "groups": 8, "groups_without_signal": 3, "groups_non_finite": 1}) == 0.5
    assert untaught_share({**record, "groups": 0}) is None
    assert untaught_share({"groups": "x"}) is None


@pytest.mark.parametrize(("preset", "told"), [("teamtr", True), ("ppo", False)])
def test_a_critic_is_not_told_that_equal_rewards_teach_nothing(preset, told):
    world = World(plan=PRESETS[preset], reward=lambda k, value: 0.5)
    data = world.training_batch("x", world.collect(world.team, 0))
    report = world.update("x", data).report
    health = replace(FINE, without_signal=1.0)
    assert bool(advise(health, "x", untaught_share(asdict(report)))) == told


def test_keys_that_are_advised_are_keys_of_the_team_file():
    advised = {"team.max_tokens", "plan.group_size", "plan.dynamic_sampling", "sampling.temperature"}
    assert {*advised, "learner.learning_rate", "learner.epochs"} <= {key.key for key in schema_keys()}


# -- where they are shown -------------------------------------------------------------------------------------

BAD = health_record("left") | {
    "messages": health_record("left")["messages"] | {"cut": 0.96, "limit": 64},
    "agents": {"left": health_record("left")["messages"] | {"cut": 0.96, "limit": 64, "mean": 63.2, "p95": 64.0}},
}
ADVICE = "96 % of messages are cut at 64 tokens: raise team.max_tokens"


START = {
    "kind": "start",
    "stages": 3,
    "trained_agents": 1,
    "samplers": {"left": "plain"},
    "name": "a run",
    "agents": ["left"],
}


def test_the_console_says_once_that_the_sampler_s_scores_are_not_used(capsys):
    """Nothing where they are, or where a plan that reuses rollouts had none."""
    reasons = ("", NOTHING_KEPT, "they are too far off", "they are further off")
    with TrainingScreen() as screen:
        list(
            screen.watch([START, *(update_record(n, n, 0, "left", own_scores=why) for n, why in enumerate(reasons, 1))])
        )
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "learner.score" in line]
    assert "they are too far off. A finer sampling.precision" in told


def test_the_console_line_has_the_figures_and_says_each_advice_once(capsys):
    updates = [update_record(n, n - 1, 0, "left", health=BAD) for n in (1, 2)]
    with TrainingScreen() as screen:
        list(screen.watch([START, *updates, update_record(3, 2, 0, "left", health=None)]))
    told = capsys.readouterr().err
    assert told.count(f"advice: {ADVICE}") == 1
    assert told.count("length 63 (p95 64)  cut 96 %  entropy 0.75  no signal 25 %  unparsed 6 %") == 2


def test_trackers_get_them_of_every_agent_and_by_the_names_of_trl():
    health = health_record("left")
    health["agents"]["train"] = health["agents"]["left"] | {"cut": 0.5}
    found = point(update_record(1, 0, 0, "left", health=health, kl_reference=0.125)).values
    assert (found["left/cut"], found["agent.train/cut"]) == (0.125, 0.5)
    assert (found["left/length"], found["left/length_p95"], found["left/entropy"]) == (3.5, 6.0, 0.75)
    assert (found["left/reward"], found["left/kl_share"], found["train/unparsed"]) == (0.25, 0.8, 0.0625)
    trl = {name: found[f"train/{name}"] for name in ("reward_std", "frac_reward_zero_std", "entropy", "kl")}
    assert trl == {"reward_std": 0.4, "frac_reward_zero_std": 0.25, "entropy": 0.75, "kl": 0.125}
    lengths = {key.removeprefix("train/completions/"): x for key, x in found.items() if "completions" in key}
    assert lengths == {
        "mean_length": 3.5,
        "min_length": 2.0,
        "max_length": 7.0,
        "clipped_ratio": 0.125,
        "mean_terminated_length": 3.0,
    }


def test_the_report_opens_with_them(tmp_path):
    made = made_run(tmp_path / "run")
    data = build_report(made).data
    assert shown(data)[0].key == "health"
    assert (data["headlines"][0]["question"], data["headlines"][0]["headline"]) == ("Is the run healthy?", "healthy")

    def worsen(record):
        return {**record, "health": BAD} if record.get("agent") == "left" else record

    data = build_report(changed(made, worsen)).data
    assert data["health"]["advice"] == [ADVICE]
    headline = data["headlines"][0]
    assert (headline["tone"], headline["headline"], headline["text"]) == ("bad", "1 to mend", f"{ADVICE}.")


@pytest.mark.parametrize("damage", [None, 5, {}, {"agents": 3}, {**BAD, "agents": {"left": 1}}, {**BAD, "groups": "x"}])
def test_a_damaged_or_missing_health_is_none(damage):
    assert decode_health({"health": damage}) is None
    assert decode_health({"health": BAD}) is not None
