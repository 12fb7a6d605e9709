"""Who is credited with what: exact values on games where it matters, and the certificates that are left."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.config import loads
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.tabular import TabularPolicy
from teamtr.errors import UserError
from teamtr.presets import PRESETS, Overlong, Plan
from teamtr.randomness import generator, seed_of
from teamtr.rollout import (
    Ledger,
    RolloutContext,
    agent_returns_PG,
    certified_range,
    is_unheard,
    play,
    with_counterfactuals,
)
from teamtr.session.train import train
from teamtr.store import read_episodes, write_episodes
from teamtr.tasks import Roles
from teamtr.team import Addressed, Agent, Blind, Everything, Schedule, Team
from teamtr.theory.certificates import turn_aware_certificate
from teamtr.training.algorithm import run_stage, schedule
from teamtr.training.batch import Optimization
from teamtr.training.rewards import rewards_of
from teamtr.training.update import update_agent
from teamtr.types import Breakdown, Episode, Problem, Turn, Verdict

PLAN = PRESETS["teamtr"]
BLIND = Blind()
IN_TURN = Schedule.repeated(("a1", "a2"))
LIMITS = {f"a{k}": 4 for k in range(1, 9)}


class Bits(Roles):
    """Everyone should say 1: the team earns the share of agents that do, and each of them its own part."""

    def _grade_one(self, problem: Problem, texts: Any) -> Verdict:
        said = {name: float(text.strip() == "1") / len(texts) for name, text in zip(self.agents, texts, strict=True)}
        reward = sum(said.values())
        return Verdict("right" if reward == 1.0 else "wrong", reward, breakdown=Breakdown(by_agent=said))


class Commons(Roles):
    """Whoever says 1 gains 1, and costs every agent 0.6: good for itself, bad for a team of three."""

    def _grade_one(self, problem: Problem, texts: Any) -> Verdict:
        takes = [float(text.strip() == "1") for text in texts]
        by_agent = {name: own - 0.6 * sum(takes) for name, own in zip(self.agents, takes, strict=True)}
        return Verdict("wrong", sum(by_agent.values()), breakdown=Breakdown(by_agent=by_agent))


def turn(agent: str, text: str, round: int = 0, tokens: int = 1) -> Turn:
    blank = np.zeros(0, np.int32)
    return Turn(agent, round, blank, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", "v", text)


def team_of(count: int, sees: Any = BLIND) -> Team:
    return Team(tuple(Agent(f"a{k + 1}", "v", sees=sees) for k in range(count)))


def every_episode(task: Roles) -> RolloutBatch:
    """All that a blind round can be, each once: what uniform agents say, exactly."""
    context = RolloutContext(None, {}, Schedule.repeated(task.agents), task)  # type: ignore[arg-type]
    problem = task.problems("train")[0]
    said = list(product("01", repeat=len(task.agents)))
    verdicts = task.grade([(problem, texts[-1], texts) for texts in said])
    episodes = [
        Episode(problem.id, g, tuple(map(turn, task.agents, texts)), texts[-1], verdict, "t")
        for g, (texts, verdict) in enumerate(zip(said, verdicts, strict=True))
    ]
    batch = RolloutBatch((problem,), tuple(episodes), len(episodes))
    return with_counterfactuals(context, team_of(len(task.agents)), batch, replace(PLAN, credit="difference"), Ledger())


def credited(batch: RolloutBatch, agent: str, credit: Any, **changes: Any) -> np.ndarray:
    return agent_returns_PG(batch, agent, replace(PLAN, credit=credit, **changes), LIMITS)


# -- exact values ---------------------------------------------------------------------------------------------


def test_a_difference_is_what_the_team_would_have_lost_without_the_agent():
    """Exactly one of three must volunteer; by hand, in the order 000, 001, ..., 111."""
    batch = every_episode(Roles(3))
    assert batch.returns_PG(1.0).tolist() == [[0, 1, 1, 0, 1, 0, 0, 0]]
    assert credited(batch, "a1", "difference").tolist() == [[0, 0, 0, 0, 1, -1, -1, 0]]
    assert credited(batch, "a3", "difference").tolist() == [[0, 1, 0, -1, 0, -1, 0, 0]]
    assert credited(batch, "a1", "team").tolist() == batch.returns_PG(1.0).tolist()


@pytest.mark.parametrize("task", [Roles(3), Bits(4)], ids=["volunteers", "bits"])
def test_in_a_blind_round_a_difference_has_the_gradient_of_the_team(task):
    batch = every_episode(task)
    for name in task.agents:
        score_E = np.array([float(e.turns[task.agents.index(name)].text) - 0.5 for e in batch.episodes])
        team, difference = (credited(batch, name, credit).reshape(-1) for credit in ("team", "difference"))
        assert np.mean(difference * score_E) == pytest.approx(np.mean(team * score_E), abs=1e-15)


def test_where_everyone_adds_to_the_reward_credit_takes_the_noise_of_the_others_away():
    """The variance of the sum of four fair coins, a quarter each, is four times that of one of them."""
    batch = every_episode(Bits(4))
    assert np.var(credited(batch, "a1", "team")) == pytest.approx(1 / 16)
    assert np.var(credited(batch, "a1", "difference")) == pytest.approx(1 / 64)
    assert np.var(credited(batch, "a1", "own")) == pytest.approx(1 / 64)
    roles = every_episode(Roles(3))
    assert np.var(credited(roles, "a1", "team")) == pytest.approx(15 / 64)
    assert np.var(credited(roles, "a1", "difference")) == pytest.approx(23 / 64), "elsewhere it may be more"


def test_own_returns_by_agent_and_by_turn_with_a_discount():
    made = Breakdown(shared=1.0, by_agent={"x": 2.0, "y": 4.0}, by_turn=(8.0, 16.0, 32.0))
    turns = (turn("x", "p"), turn("y", "q"), turn("x", "r", 1))
    episode = Episode("p", 0, turns, "r", Verdict("right", made.reward, breakdown=made), "t")
    batch = RolloutBatch((Problem("p", "?"),), (episode,), 1)
    half = {"gamma": 0.5}
    assert made.reward == 63.0
    assert batch.returns_PG(0.5).tolist() == [[8 + 16 / 2 + 32 / 4 + (1 + 2 + 4) / 4]]
    assert credited(batch, "x", "team", **half).tolist() == batch.returns_PG(0.5).tolist()
    assert credited(batch, "x", "own", **half).tolist() == [[8 + 32 / 4 + (1 + 2) / 4]]
    assert credited(batch, "y", "own", **half).tolist() == [[16 / 2 + (1 + 4) / 4]]
    report = rewards_of(batch)
    assert report is not None
    assert report.agents == {"x": 42.0, "y": 20.0}


def test_a_difference_lets_the_punishment_of_the_agent_itself_stand_and_no_other():
    turns = (turn("a1", "1", tokens=4), turn("a2", "0", tokens=1))
    verdict, without = Verdict("right", 1.0), {"a1": Verdict("wrong", 0.0), "a2": Verdict("right", 1.0)}
    episode = Episode("p", 0, turns, "0", verdict, "t", without=without)
    batch = RolloutBatch((Problem("p", "?"),), (episode,), 1)
    punished = {"overlong": Overlong(cache=0.5)}  # over the last two of four tokens
    assert credited(batch, "a1", "team", **punished).tolist() == [[0.0]]
    assert credited(batch, "a1", "difference", **punished).tolist() == [[(1.0 - 1.0) - 0.0]]
    assert credited(batch, "a2", "difference", **punished).tolist() == [[(1.0 - 1.0) - (1.0 - 1.0)]]


def test_a_batch_comes_back_from_its_file_with_all_that_credit_needs(tmp_path: Path):
    batch = every_episode(Bits(2))
    write_episodes(tmp_path / "batch", batch)
    again = read_episodes(tmp_path / "batch")
    assert [(e.verdict, e.without) for e in again.episodes] == [(e.verdict, e.without) for e in batch.episodes]


def test_own_credit_needs_rewards_of_agents():
    with pytest.raises(UserError, match=r"plan\.credit: own needs rewards of agents or turns"):
        credited(every_episode(Roles(2)), "a1", "own")


# -- certificates ---------------------------------------------------------------------------------------------


def test_certificates_are_left_where_a_gain_is_the_teams():
    def found(credit: str, sees: Any, router: Any = IN_TURN) -> list[float | None]:
        plan, team = replace(PLAN, credit=credit), team_of(2, sees)
        return [certified_range(plan, 1.0, team, router, name) for name in team.names]

    assert found("team", Everything()) == [1.0, 1.0]
    assert found("own", Blind()) == [None, None]
    assert found("difference", Blind()) == [2.0, 2.0], "it may be as far below 0 as above"
    assert found("difference", Everything()) == [None, 2.0], "a2 reads a1, and nobody reads a2"
    two_rounds = Schedule.repeated(("a1", "a2"), 2)
    assert found("difference", Blind(), two_rounds) == [None, None], "in the second round both are read"
    assert found("difference", Blind(), Addressed(("a1", "a2"), 4)) == [None, None], "words decide who speaks"
    assert certified_range(replace(PLAN, credit="difference"), None, team_of(2), two_rounds, "a1") is None
    assert is_unheard(team_of(1, Everything()), Schedule.repeated(("a1",), 3), "a1"), "its own words are its own"


@pytest.mark.long
def test_where_nobody_reads_the_agent_its_certificate_is_of_the_teams_gain():
    """Random games: the agent speaks twice, another says something that it sees and that sees nothing; exactly."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        first, second = rng.dirichlet([1, 1], 2), rng.dirichlet([1, 1], (2, 2, 2))  # old and new; given (first, other)
        other, reward_ABO = rng.dirichlet([1, 1]), rng.random((2, 2, 2))
        law = [np.einsum("a,aob,o->abo", first[k], second[k], other) for k in (0, 1)]
        difference_ABO = reward_ABO - reward_ABO[0, 0]  # had it said 0 twice
        gain = float(((law[1] - law[0]) * reward_ABO).sum())
        ratios = [(first[1] / first[0])[:, None, None], (second[1] / second[0]).transpose(0, 2, 1)]
        surrogate = sum(float((law[0] * (ratio - 1.0) * difference_ABO).sum()) for ratio in ratios)
        kl = [-float((law[0] * np.log(ratio)).sum()) for ratio in ratios]
        assert gain >= turn_aware_certificate(surrogate, kl, 2.0).lower_bound - 1e-12
        once = float((law[0] * (ratios[0] - 1.0) * difference_ABO).sum())
        moved = np.einsum("a,aob,o->abo", first[1], second[0], other)
        assert once == pytest.approx(float(((moved - law[0]) * reward_ABO).sum())), "of one turn it is the gain itself"


def test_where_somebody_reads_the_agent_a_difference_can_hide_a_loss():
    """a2 repeats a1 and is paid for a 1: whatever a1 says, without it a2 would have said the same."""
    problem = Problem("p", "?")
    episodes = [
        Episode("p", g, (turn("a1", word), turn("a2", word)), word, Verdict("right", float(word)), "t") for g, word in
        enumerate("01")
    ]  # fmt: skip
    batch = RolloutBatch((problem,), tuple(episodes), 2)

    class Last(Roles):
        def grade(self, episodes: Any) -> list[Verdict]:
            return [Verdict("right", float(answer)) for _, answer, _ in episodes]

    team = team_of(2, Everything())
    context = RolloutContext(None, {}, IN_TURN, Last(2))  # type: ignore[arg-type]
    batch = with_counterfactuals(context, team, batch, replace(PLAN, credit="difference"), Ledger())
    assert credited(batch, "a1", "difference").tolist() == [[0.0, 0.0]], "so no step of a1 seems to lose anything"
    assert credited(batch, "a1", "team").tolist() == [[0.0, 1.0]], "though the team loses all that a1 loses"
    assert certified_range(replace(PLAN, credit="difference"), 1.0, team, IN_TURN, "a1") is None


# -- learning -------------------------------------------------------------------------------------------------


class Coins:
    """A message is one token, 0 or 1."""

    def encode(self, messages: Any) -> np.ndarray:
        return np.array([ord(c) for m in messages for c in m["content"]], dtype=np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        return "".join("01"[i] for i in token_ids)


def learned(task: Roles, credit: Any, stages: int, *, problems: int = 8) -> np.ndarray:
    """The exact probability that each agent says 1 after so many stages; nearly a half before."""
    names = task.agents
    engine = LocalEngine(
        {
            name: PolicyLearner(name, TabularPolicy(2, end_ids=frozenset({0, 1}), spread=0.1, seed=k), micro_batch=4096)
            for k, name in enumerate(names)
        }
    )
    context = RolloutContext(engine, dict.fromkeys(names, Coins()), Schedule.repeated(names), task)
    team = Team(tuple(Agent(name, engine.version(name), sees=Blind(), max_tokens=1) for name in names))
    plan = Plan.preset(credit=credit, radius=0.05, group_size=4)
    states, asked = dict.fromkeys(names, plan.first_state()), task.problems("train")[:problems]

    stage = 0

    def update(agent: str, data: Any) -> Any:
        learner, optimization = engine.learner(agent), Optimization(learning_rate=0.1, gate_share=1.0)
        done = update_agent(learner, data, plan, optimization, states[agent], seed=seed_of(0, agent, stage))
        states[agent] = done.state
        return done

    def collect(team: Team, step: int, worn: Any) -> RolloutBatch:
        batch = play(context, team, asked, plan.group_size, seed=seed_of(1, stage, step))
        return with_counterfactuals(context, team, batch, plan, Ledger())

    while stage < stages:
        slots = schedule(plan.order, names, generator(0, "order"))
        for step in run_stage(team, plan, collect, update, slots):
            team = step.team
        stage += 1
    return np.array([_says_one(engine, context, team, name) for name in names])


def _says_one(engine: LocalEngine, context: RolloutContext, team: Team, name: str) -> float:
    prompt = context.prompt(team, team[name], context.task.problems("train")[0], ())
    word, where = (np.ones(1, np.int32),), np.zeros(1, np.int64)
    learner = engine.learner(name)
    logp_M = learner.begin(AgentBatch(name, (prompt,), word, (np.zeros(0, np.float32),), where, where, where))
    learner.end()
    return float(np.exp(logp_M[0]))


@pytest.mark.long
def test_where_everyone_adds_to_the_reward_credited_agents_learn_faster():
    """Eight agents, groups of four: what a team's reward says of one of them drowns in the luck of the others. Here a
    difference is an agent's own reward."""
    ended = {credit: learned(Bits(8), credit, 3, problems=2).mean() for credit in ("team", "difference", "crossed")}
    assert ended["difference"] > ended["team"] + 0.05
    assert ended["crossed"] > ended["team"] + 0.05, "what its words earn with everybody's is their own worth, too"
    batch = every_episode(Bits(4))
    assert credited(batch, "a2", "difference").tolist() == credited(batch, "a2", "own").tolist()


@pytest.mark.long
def test_own_rewards_may_be_had_at_the_teams_cost():
    """With three agents each 1 that is said gains its speaker 0.4 and costs the team 0.8."""
    says_one = {credit: learned(Commons(3), credit, 4).mean() for credit in ("own", "difference")}
    assert says_one["own"] > 0.75
    assert says_one["difference"] < 0.25


# -- whole runs -----------------------------------------------------------------------------------------------

TEAM = """\
name: credit
seed: 3
task: {{name: "python:{here}:{game}", options: {{agents: 2}}}}
team: {{model: tabular, max_tokens: 2, agents: [{{name: a1}}, {{name: a2}}]}}
plan: {{credit: {credit}, stages: 1, problems: 4, group_size: 16, radius_nats_per_message: 0.1}}
eval: {{every: 0}}
"""


def run(folder: Path, game: str, credit: str) -> list[dict[str, Any]]:
    text = TEAM.format(here=Path(__file__), game=game, credit=credit)
    return list(train(loads(text, "team.yaml"), folder))


@pytest.mark.long
@pytest.mark.parametrize(("credit", "certified", "warned"), [
    ("own", set(), "no certificates for a1, a2: a gain of its own reward is none of the team's"),
    ("difference", {"a2"}, "no certificates for a1: others read what it says"),
])  # fmt: skip
def test_a_run_issues_certificates_where_they_hold_and_says_where_not(tmp_path: Path, credit, certified, warned):
    records = run(tmp_path / "run", "Bits", credit)
    updates = [record for record in records if record["kind"] == "update"]
    assert any(warned in text for text in records[0]["warnings"])
    assert [u["outcome"] for u in updates] == ["accepted", "accepted"]
    assert {u["agent"] for u in updates if u["certificates"]} == certified
    for update in updates:
        assert sum(update["rewards"]["agents"].values()) == pytest.approx(update["reward"]), (
            "the team's reward is logged"
        )


@pytest.mark.long
@pytest.mark.parametrize("credit", ["team", "own", "crossed"])
def test_a_run_with_dynamic_sampling_says_that_it_has_no_certificates(tmp_path: Path, credit):
    text = TEAM.format(here=Path(__file__), game="Bits", credit=credit)
    records = list(
        train(loads(text.replace("stages: 1,", "stages: 1, dynamic_sampling: true,"), "team.yaml"), tmp_path / "run")
    )
    updates = [record for record in records if record["kind"] == "update"]
    assert [(u["outcome"], u["certificates"]) for u in updates] == [("accepted", [])] * 2
    assert sum("plan.dynamic_sampling: true: no certificates" in text for text in records[0]["warnings"]) == 1


@pytest.mark.long
def test_a_run_that_goes_on_in_the_middle_of_a_stage_credits_the_same(tmp_path: Path):
    """The second agent learns from the stored batch: with what it would have earned without each of them."""
    text = TEAM.format(here=Path(__file__), game="Bits", credit="difference").replace(
        "stages: 1,", "stages: 1, preset: joint,"
    )
    team_file = loads(text, "team.yaml")
    whole = [r for r in train(team_file, tmp_path / "whole") if r["kind"] == "update"]
    done: list[dict[str, Any]] = []
    for record in train(team_file, tmp_path / "parted", stop=lambda: bool(done)):
        if record["kind"] == "update":
            done.append(record)
    rest = [r for r in train(team_file, tmp_path / "parted") if r["kind"] == "update"]
    assert [len(done), len(rest)] == [1, 1]
    assert [r["version_after"] for r in (*done, *rest)] == [r["version_after"] for r in whole]
    assert rest[0]["surrogate"] == whole[1]["surrogate"]


@pytest.mark.long
def test_what_cannot_be_credited_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"own needs rewards of agents or turns"):
        run(tmp_path / "run", "Roles", "own")
    text = TEAM.format(here="x.py", game="G", credit="own")
    with pytest.raises(UserError, match=r"compares what agents gain for the team"):
        loads(text.replace("stages: 1,", "stages: 1, allocate: gain,"), "team.yaml")
    dynamic = text.replace("credit: own, stages: 1,", "stages: 1, dynamic_sampling: true, allocate: certified,")
    with pytest.raises(UserError, match=r"dynamic sampling, which chooses groups by their rewards, leaves none"):
        loads(dynamic, "team.yaml")
