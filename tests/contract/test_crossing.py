"""Words crossed with what the others said elsewhere: who may be, what is graded, and what it changes for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.batches import Carried, RolloutBatch
from teamtr.config import loads
from teamtr.presets import PRESETS, Overlong
from teamtr.rollout import (
    Ledger,
    RolloutContext,
    agent_returns_PG,
    certified_range,
    credited,
    is_apart,
    is_crossed,
    with_counterfactuals,
)
from teamtr.rollout.crossing import crossed_returns_PGG
from teamtr.session.train import train
from teamtr.store import read_episodes, write_episodes
from teamtr.tasks import Roles
from teamtr.team import Addressed, Agent, Blind, Everything, Schedule, Team, ToolTurns
from teamtr.training.lesson import lesson
from teamtr.types import Episode, Problem, Turn, Verdict

PLAN = replace(PRESETS["teamtr"], credit="crossed")
REUSES = replace(PRESETS["auto"], credit="crossed")
BLIND = Blind()
LIMITS = {f"a{k}": 4 for k in range(1, 5)}


class Counted(Roles):
    """Counts how many conversations it is asked to grade."""

    asked = 0

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        self.asked += len(episodes)
        return super().grade(episodes)


def turn(agent: str, text: str, tokens: int = 1, round: int = 0) -> Turn:
    blank = np.zeros(0, np.int32)
    return Turn(agent, round, blank, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", "v", text)


def team_of(count: int, sees: Any = BLIND) -> Team:
    return Team(tuple(Agent(f"a{k + 1}", "v", sees=sees, max_tokens=4) for k in range(count)))


def batch_of(task: Roles, groups: Sequence[Sequence[str]], tokens: int = 1) -> RolloutBatch:
    """``groups[p][g]`` is what each agent says, a letter each."""
    problems = task.problems("train")[: len(groups)]
    episodes = []
    for problem, group in zip(problems, groups, strict=True):
        for g, said in enumerate(group):
            turns = tuple(turn(name, text, tokens) for name, text in zip(task.agents, said, strict=True))
            (verdict,) = Roles.grade(task, [(problem, said[-1], tuple(said))])
            episodes.append(Episode(problem.id, g, turns, said[-1], verdict, "v"))
    return RolloutBatch(tuple(problems), tuple(episodes), len(groups[0]))


def crossed(task: Roles, batch: RolloutBatch, plan: Any = PLAN, sees: Any = BLIND) -> RolloutBatch:
    context = RolloutContext(None, {}, Schedule.repeated(task.agents), task)  # type: ignore[arg-type]
    return with_counterfactuals(context, team_of(len(task.agents), sees), batch, plan, Ledger())


def test_only_who_reads_nobody_and_is_read_by_nobody_is_apart() -> None:
    once, twice = Schedule.repeated(("a1", "a2")), Schedule.repeated(("a1", "a2"), 2)
    assert all(is_apart(team_of(2), once, name) for name in ("a1", "a2"))
    assert not any(is_apart(team_of(2, Everything()), once, name) for name in ("a1", "a2")), "a2 reads a1"
    assert not any(is_apart(team_of(2), twice, name) for name in ("a1", "a2")), "later they read the first round"
    assert not is_apart(team_of(2), Addressed(("a1", "a2"), 4), "a1"), "words decide who speaks"
    listener = Team((Agent("a1", "v", sees=Blind()), Agent("a2", "v", sees=Everything())))
    assert not is_apart(listener, once, "a2"), "nobody reads a2, but it reads a1"
    assert not is_apart(team_of(1), Schedule.repeated(("a1",)), "a1"), "one agent alone has nobody to be crossed with"
    assert not is_apart(team_of(2), Schedule.repeated(("a1",)), "a2"), "nor has one that never speaks"


def test_every_pair_is_graded_as_if_it_had_been_played() -> None:
    """Exactly one of three must volunteer. By hand: a1 says 1, 0, 0, the others 00, 10, 11."""
    task = Counted(3)
    batch = crossed(task, batch_of(task, [["100", "010", "011"]]))
    found = crossed_returns_PGG(batch, "a1")
    assert found is not None
    assert found.tolist() == [[[1, 0, 0], [0, 1, 0], [0, 1, 0]]]
    diagonal = np.einsum("pgg->pg", found)
    assert diagonal.tolist() == batch.returns_PG(1.0).tolist(), "with its own company it earns what it did"
    assert agent_returns_PG(batch, "a1", PLAN, LIMITS) == pytest.approx(found.mean(axis=2))
    # a1: 2 different words x 3 different companies; a2: 2 x 3 (10, 00, 01); a3: 2 x 2 (10, 01)
    assert task.asked == 6 + 6 + 4, "what was said twice is graded once"


def test_malformed_words_are_crossed_like_any_others() -> None:
    task = Roles(2)
    batch = crossed(task, batch_of(task, [["10", "x1"]]))
    found = crossed_returns_PGG(batch, "a1")
    assert found is not None
    assert found.tolist() == [[[1, 0], [0, 0]]]


def test_punishments_are_those_of_the_words_that_are_put_together() -> None:
    task, plan = Roles(2), replace(PLAN, overlong=Overlong(cache=0.5))
    long, short = batch_of(task, [["10", "01"]], tokens=4), batch_of(task, [["10", "01"]], tokens=1)
    mixed = replace(long, episodes=(long.episodes[0], short.episodes[1]))
    found = crossed_returns_PGG(crossed(task, mixed, plan), "a1")
    assert found is not None
    assert found.tolist() == [[[1 - 1, 0 - 1], [0 - 1, 1]]], "one long message is punished, whoever says it"


def test_a_critic_learns_from_crossed_groups_in_which_all_messages_earn_the_same() -> None:
    """The first agent says 1 in all episodes of the first problem, and what the second says decides."""
    task = Roles(2)
    batch = crossed(task, batch_of(task, [("10", "11", "10", "10"), ("10", "01", "11", "00")]))
    plan = replace(PRESETS["ppo"], credit="crossed")
    found = credited(batch, "a1", plan, LIMITS)
    assert found.returns_PG.tolist() == [[0.75] * 4, [0.5] * 4]
    assert found.advantages.informative_P.tolist() == [True, True]
    assert credited(batch, "a1", PLAN, LIMITS).advantages.informative_P.tolist() == [False, True]
    data = lesson(batch, "a1", plan, team_of(2)).data
    assert data.gradient_M(plan.objective).all()


def test_a_team_that_hears_itself_is_credited_as_ever() -> None:
    task = Counted(3)
    batch = batch_of(task, [["100", "010", "011"]])
    heard = crossed(task, batch, sees=Everything())
    assert heard is batch
    assert task.asked == 0, "and nothing is graded for it"
    for name in task.agents:
        assert not is_crossed(heard, name, PLAN)
        plain = credited(batch, name, replace(PLAN, credit="team"), LIMITS)
        assert credited(heard, name, PLAN, LIMITS).advantages.values_PG.tolist() == plain.advantages.values_PG.tolist()


def test_where_somebody_replies_to_a_message_nobody_is_apart() -> None:
    """What an environment would have said to the words that are put together, nobody knows; who calls tools speaks as
    often as it likes."""
    task = Counted(2)
    context = RolloutContext(None, {}, Schedule.repeated(task.agents), task)  # type: ignore[arg-type]
    task.environment = object()  # type: ignore[assignment]
    assert not is_apart(team_of(2), ToolTurns(Schedule.repeated(task.agents), 2, ("a1",)), "a1")
    batch = batch_of(task, [["10", "01"]])
    assert with_counterfactuals(context, team_of(2), batch, PLAN, Ledger()) is batch
    assert task.asked == 0


def test_grading_pairs_counts_as_grading() -> None:
    task, ledger = Roles(2), Ledger()
    context = RolloutContext(None, {}, Schedule.repeated(task.agents), task)  # type: ignore[arg-type]
    with_counterfactuals(context, team_of(2), batch_of(task, [["10", "01"]]), PLAN, ledger)
    assert 0.0 < ledger.grading_seconds < 60.0


def test_a_batch_comes_back_from_its_file_with_its_crossings(tmp_path: Path) -> None:
    task = Roles(2)
    batch = crossed(task, batch_of(task, [["10", "11"], ["01", "00"]]))
    write_episodes(tmp_path / "batch", batch)
    assert [e.crossed for e in read_episodes(tmp_path / "batch").episodes] == [e.crossed for e in batch.episodes]
    assert batch.episodes[0].crossed == {"a1": (1.0, 0.0), "a2": (1.0, 1.0)}


def test_certificates_are_of_the_teams_gain() -> None:
    team, router = team_of(2), Schedule.repeated(("a1", "a2"))
    assert certified_range(PLAN, 1.0, team, router, "a1") == 1.0


# -- weights --------------------------------------------------------------------------------------------------


def moved(batch: RolloutBatch, log_ratio_U: list[float]) -> RolloutBatch:
    return replace(batch, carried=Carried("w", np.array(log_ratio_U)))


def test_the_others_updates_weigh_returns_and_neither_kl_nor_what_is_climbed() -> None:
    """Two agents; a1 was updated, and what it said in the first episode is now twice as likely."""
    task, team = Roles(2), team_of(2).replace("a1", "w")
    batch = moved(crossed(task, batch_of(task, [["10", "00"]])), [np.log(2.0), 0.0, 0.0, 0.0])
    found = lesson(batch, "a2", REUSES, team).data
    assert found.weights_E is None
    assert found.contexts_M is None
    assert found.returns_PG.tolist() == [[2 / 3, 2 / 3]], "0 earns 1 with a1's first words, which count twice"
    plain = lesson(batch, "a2", replace(REUSES, credit="team"), team).data
    assert plain.weights_E == pytest.approx([4 / 3, 2 / 3]), "played episodes are weighed themselves"


def test_own_words_of_an_earlier_stage_keep_their_own_weight() -> None:
    task, team = Roles(2), team_of(2).replace("a2", "w")
    batch = moved(crossed(task, batch_of(task, [["10", "01"]])), [0.0, np.log(2.0), 0.0, 0.0])
    found = lesson(batch, "a2", REUSES, team).data
    assert found.weights_E == pytest.approx([4 / 3, 2 / 3])
    assert found.contexts_M == pytest.approx([1.0, 1.0]), "a message's context does not hold the message"
    assert found.returns_PG.tolist() == [[0.5, 0.5]], "the others' words weigh alike"


def test_what_truncation_took_of_the_others_is_told() -> None:
    """Of a1's words one is ten times as likely now and counts four times, which is above one on average: nothing is
    missing. Where both are a tenth as likely, nine tenths of what it says now are not there."""
    task, team = Roles(2), team_of(2).replace("a1", "w")
    batch = crossed(task, batch_of(task, [["10", "00"]]))
    cuts = [
        lesson(moved(batch, [np.log(first), 0.0, np.log(second), 0.0]), "a2", REUSES, team).cut
        for first, second in ((10.0, 0.01), (0.1, 0.1))
    ]
    assert cuts == pytest.approx([0.0, 0.9])
    assert lesson(batch, "a2", REUSES, team_of(2)).cut == 0.0, "nobody was updated"


def test_own_words_before_a_message_weigh_its_context() -> None:
    """a1 speaks twice in each of two episodes of an earlier stage; both of its first words became likelier."""
    said = (turn("a1", "1"), turn("a2", "0"), turn("a1", "0", round=1))
    episodes = tuple(
        Episode("p", g, said, "0", Verdict("right", 1.0), "v", crossed={"a1": (1.0, 0.0)}) for g in range(2)
    )
    batch = RolloutBatch((Problem("p", "?"),), episodes, 2)
    batch = moved(batch, [np.log(2.0), 0.0, np.log(3.0), np.log(0.5), 0.0, 0.0])
    found = lesson(batch, "a1", REUSES, team_of(2).replace("a1", "w")).data
    assert found.contexts_M == pytest.approx(np.array([1.0, 2.0, 1.0, 0.5]) / 1.125)
    assert found.weights_E == pytest.approx(np.array([4.0, 0.5]) / 2.25), "six times counts four times"
    assert not found.fresh, "it learned from them before"


# -- whole runs -----------------------------------------------------------------------------------------------


TEAM = """\
name: crossed
seed: 3
task: {name: roles}
team: {model: tabular, max_tokens: 2, agents: [{name: a1, sees: blind}, {name: a2, sees: blind}]}
plan: {preset: auto, sampling_cost: 1.0, stages: 1, problems: 4, group_size: 8, radius_nats_per_message: 0.1}
eval: {every: 0}
"""


def updates(
    folder: Path, *changes: str, stop: Callable[[list[Any]], bool] = lambda done: False
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for record in train(loads(TEAM, "team.yaml", changes), folder, stop=lambda: stop(found)):
        if record["kind"] == "update":
            found.append(record)
    return found


@pytest.mark.long
def test_a_run_that_goes_on_in_the_middle_of_a_stage_learns_from_the_same_crossings(tmp_path: Path) -> None:
    """The second agent learns from the stored batch, reweighted to the first one's update."""
    whole = updates(tmp_path / "whole")
    done = updates(tmp_path / "parted", stop=bool)
    rest = updates(tmp_path / "parted")
    assert [len(done), len(rest)] == [1, 1]
    assert [r["version_after"] for r in (*done, *rest)] == [r["version_after"] for r in whole]
    assert rest[0]["surrogate"] == whole[1]["surrogate"]
    plain = updates(tmp_path / "plain", "plan.credit=team")
    assert plain[0]["version_after"] != whole[0]["version_after"], "crossing changes what is learned"
