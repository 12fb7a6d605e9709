"""Who speaks when and who sees what: every router and visibility by hand, in play, in YAML and in whole runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.test_config import check_marked
from contract.test_environment import UpOrDown, world
from faults.killing import result
from teamtr.config import ConfigError, dump, load_team_file, loads
from teamtr.errors import UserError
from teamtr.session import build
from teamtr.session import train as run
from teamtr.session.checks import doubts, self_test
from teamtr.session.memory import longest
from teamtr.session.success import exact_success
from teamtr.store import read_episodes
from teamtr.tasks import Roles, Task
from teamtr.team import (
    Addressed,
    Agent,
    Blind,
    Each,
    Everything,
    Only,
    Router,
    Schedule,
    Visibility,
    visibility,
    visible,
)
from teamtr.team.router import ROUTERS, closers_of, most_before, next_turn, opens_round, speakers_of
from teamtr.team.visibility import FORMS
from teamtr.types import Problem, Turn, Verdict

NONE = np.zeros(0, dtype=np.int32)


def turn(agent: str, text: str = "", round: int = 0) -> Turn:
    return Turn(agent, round, NONE, NONE, np.zeros(0, np.float32), "stop", "v", text)


def episode(router: Router, says: dict[str, str] | None = None, names: Sequence[str] = "abcj") -> list[tuple[int, str]]:
    """(round, speaker) of an episode in which everybody always says the same."""
    turns: list[Turn] = []
    while found := next_turn(router, turns, tuple(names)):
        turns.append(turn(found.agent, (says or {}).get(found.agent, ""), found.round))
    return [(t.round, t.agent) for t in turns]


# -- schedules ------------------------------------------------------------------------------------------------


def test_one_order_for_several_rounds():
    router = Schedule.repeated(("a", "b"), rounds=2)
    assert episode(router) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert (router.rounds, router.horizon, router.turns_of("a"), router.turns_of("c")) == (2, 4, 2, 0)
    assert [name for _, name in episode(Schedule.repeated(("a", "b", "a")))] == ["a", "b", "a"]


def test_an_order_for_every_round():
    router = Schedule((("a", "b"), ("b", "a", "b"), ("j",)))
    assert episode(router) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (1, "b"), (2, "j")]
    assert [router.turns_of(name) for name in "abj"] == [2, 3, 1]
    assert (router.rounds, router.horizon) == (3, 6)
    assert (router.speakers, router.closers) == (("a", "b", "b", "a", "b", "j"), ("j",))


def test_a_judge_at_the_end():
    router = Schedule.repeated(("a", "b"), 2, then=("j",))
    assert router == Schedule((("a", "b"), ("a", "b"), ("j",)))
    assert router.speakers == ("a", "b", "j"), "rounds alike are told once"
    assert Schedule.planned(("a", "b", "j"), then=("j",)) == Schedule((("a", "b"), ("j",))), "the others come first"
    assert Schedule.planned(("a", "b"), then=("b", "a")) == Schedule((("a", "b"), ("b", "a"))), "everybody closes"


def test_a_schedule_without_speakers_is_refused():
    for make in (
        lambda: Schedule(()),
        lambda: Schedule((("a",), ())),
        lambda: Schedule.repeated(()),
        lambda: Schedule.repeated(("a",), 0),
    ):
        with pytest.raises(ValueError, match="needs at least one round"):
            make()


@given(order=st.lists(st.sampled_from("abc"), min_size=1, max_size=5), rounds=st.integers(1, 5))
def test_order_and_rounds_mean_what_they_always_did(order: list[str], rounds: int):
    """Beside the formulas of the router that knew one order only."""
    router = Schedule.planned(("a", "b", "c"), order=order, rounds=rounds)
    turns: list[Turn] = []
    for taken in range(len(order) * rounds):
        upcoming = router.next(turns)
        assert upcoming == (taken // len(order), order[taken % len(order)])
        assert opens_round(turns, upcoming) == (taken % len(order) == 0)
        turns.append(turn(upcoming.agent, "", upcoming.round))
    assert router.next(turns) is None
    assert not opens_round(turns, None)
    assert (router.horizon, router.rounds) == (len(order) * rounds, rounds)
    assert all(router.turns_of(name) == order.count(name) * rounds for name in "abc")


# -- a router that decides from what was said -----------------------------------------------------------------


def test_whoever_is_named_speaks_next_and_else_the_next_in_order():
    router = Addressed(("a", "b", "c"), turns=5)
    assert episode(router) == [(0, "a"), (1, "b"), (2, "c"), (3, "a"), (4, "b")]
    assert episode(router, {"a": "@c?", "c": "no, @a!"}) == [(0, "a"), (1, "c"), (2, "a"), (3, "c"), (4, "a")]
    assert episode(router, {"a": "@b or @c", "c": "hm"}) == [(0, "a"), (1, "c"), (2, "a"), (3, "c"), (4, "a")]
    assert episode(router, {"a": "I, @a"})[:2] == [(0, "a"), (1, "b")], "nobody passes the word to itself"
    assert episode(router, {"a": "@cat, @c-1, @cc, c, @ c"})[:2] == [(0, "a"), (1, "b")], "not a name"


def test_longer_names_are_not_taken_for_shorter_ones():
    router = Addressed(("a", "a-b", "a-b-c"), turns=2)
    for text, heard in (("@a-b", "a-b"), ("@a-b-c.", "a-b-c"), ("@a-bc", "a-b"), ("@a-b- so", "a-b")):
        assert router.next([turn("a", text)]) == (1, heard)


def test_naming_who_closes_ends_the_talk():
    router = Addressed(("a", "b"), turns=4, then=("j",), also=("c",))
    assert episode(router) == [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "j")]
    assert episode(router, {"b": "@j decide"}) == [(0, "a"), (1, "b"), (2, "j")]
    assert episode(router, {"a": "@c", "c": "@a"}) == [(0, "a"), (1, "c"), (2, "a"), (3, "c"), (4, "j")]
    assert episode(router, {"a": "@c"})[:4] == [(0, "a"), (1, "c"), (2, "a"), (3, "c")], (
        "after c the order begins again"
    )
    assert episode(Addressed(("a",), 2, ("j", "c")), {"j": "@a"}) == [(0, "a"), (1, "a"), (2, "j"), (2, "c")]
    assert (router.rounds, router.horizon, router.closers) == (5, 5, ("j",))
    assert (Addressed(("a", "b"), 4).rounds, Addressed(("a", "b"), 4).closers) == (4, ("a", "b"))


@given(
    order=st.permutations("abc").flatmap(lambda names: st.integers(1, 3).map(lambda n: tuple(names[:n]))),
    turns=st.integers(1, 7),
    then=st.sampled_from([(), ("j",), ("j", "a")]),
    words=st.lists(st.sampled_from(["", "@a", "@b", "@c", "@j"]), min_size=9, max_size=9),
)
def test_bounds_hold_whatever_is_said(order: tuple[str, ...], turns: int, then: tuple[str, ...], words: list[str]):
    router = Addressed.planned(("a", "b", "c", "j"), turns=turns, order=order, then=then)
    talk: list[Turn] = []
    while found := next_turn(router, talk, tuple("abcj")):  # it raises where a bound is broken
        talk.append(turn(found.agent, words[len(talk)], found.round))
    counts = Counter(t.agent for t in talk)
    assert len(talk) <= router.horizon
    assert all(counts[name] <= router.turns_of(name) for name in "abcj")
    if then:
        assert talk[-1].agent == then[-1]


def test_the_bounds_on_an_agents_turns_are_reached():
    router = Addressed.planned(("a", "b", "c", "j"), turns=5, order=("a", "b"), then=("j", "a"))
    assert [router.turns_of(name) for name in "abcjx"] == [4, 2, 2, 1, 0]
    assert Counter(name for _, name in episode(router)) == {"a": 4, "b": 2, "j": 1}
    alone = Addressed(("a",), turns=5, also=("b",))
    assert (alone.turns_of("a"), alone.turns_of("b")) == (5, 2)
    assert Counter(name for _, name in episode(alone)) == {"a": 5}
    assert Counter(name for _, name in episode(alone, {"a": "@b"})) == {"a": 3, "b": 2}


def test_an_addressed_router_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="somebody who begins"):
        Addressed((), 3)
    with pytest.raises(ValueError, match="somebody who begins"):
        Addressed(("a",), 0)
    with pytest.raises(ValueError, match="every agent of order once"):
        Addressed(("a", "a"), 3)


# -- routers of one's own: their word is checked --------------------------------------------------------------


class Own:
    """Says what it is told to, and has the bounds it is given."""

    def __init__(self, *said: tuple[int, str], rounds: int = 9, horizon: int = 9, most: int = 9) -> None:
        self.said, self.rounds, self.horizon, self.most = said, rounds, horizon, most

    def turns_of(self, agent: str) -> int:
        return self.most if agent in "ab" else 0

    def next(self, turns: Any) -> tuple[int, str] | None:
        return self.said[len(turns)] if len(turns) < len(self.said) else None


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Own((0, "x")), "gives the word to 'x', who is no agent"),
        (Own((1, "a")), "begins with round 1"),
        (Own((0, "a"), (2, "b")), "goes from round 0 to round 2"),
        (Own((0, "a"), (1, "a"), (0, "b")), "goes from round 1 to round 0"),
        (Own((0, "a"), (1, "b"), rounds=1), "goes on after its 1 rounds"),
        (Own((0, "a"), (0, "b"), horizon=1), "goes on after its 1 turns"),
        (Own((0, "a"), (0, "a"), most=1), "gives 'a' more than 1 turns"),
    ],
)
def test_a_router_that_breaks_its_word_is_told(router: Own, message: str):
    with pytest.raises(UserError, match=message):
        episode(router)


def test_what_is_not_known_of_a_router_is_bounded():
    own = Own((0, "a"), (0, "b"), rounds=2, horizon=3, most=2)
    assert isinstance(own, Router)
    assert speakers_of(own, ("c", "b", "a")) == closers_of(own, ("c", "b", "a")) == ("b", "a")
    sizes = {"a": 10, "b": 1, "c": 100}
    assert most_before(own, "b", sizes) == (20, 1), "two messages of a, in a talk of three"
    assert most_before(own, "a", sizes) == (11, 1)
    assert most_before(own, "c", sizes) == (0, 0)
    fixed = Schedule((("a", "b"), ("b",), ("c",)))
    assert [most_before(fixed, name, sizes) for name in "abc"] == [(0, 0), (11, 1), (12, 2)]
    assert most_before(Schedule((("a",),)), "b", sizes) == (0, 0)


# -- visibility -----------------------------------------------------------------------------------------------

TALK = [turn("a", "a0", 0), turn("b", "b0", 0), turn("c", "c0", 0), turn("a", "a1", 1), turn("b", "b1", 1)]


@pytest.mark.parametrize(
    ("sees", "written", "in_round_0", "in_round_1"),
    [
        (Everything(), "everything", "a0 b0", "a0 b0 c0 a1 b1"),
        (Blind(), "blind", "", "a0 b0 c0"),
        (Blind((0,)), {"blind": [0]}, "", "a0 b0 c0 a1 b1"),
        (Blind((1, 2)), {"blind": [1, 2]}, "a0 b0", "a0 b0 c0"),
        (Only(("b",)), {"only": ["b"]}, "b0", "b0 c0 b1"),
        (Each((Only(("a",)), Blind((1,)))), {"only": ["a"], "blind": [1]}, "a0", "a0 c0"),
    ],
)
def test_what_an_agent_sees(sees: Visibility, written: Any, in_round_0: str, in_round_1: str):
    """As the third speaker of the first round and of the second."""
    agent = Agent("c", "v", sees=sees)
    assert [t.text for t in visible(TALK[:2], agent, round=0)] == in_round_0.split()
    assert [t.text for t in visible(TALK, agent, round=1)] == in_round_1.split()
    assert visibility(written) == sees


def test_what_a_visibility_names():
    both = visibility({"only": ["a", "b"], "blind": [1]})
    assert (both.names, both.rounds) == (("a", "b"), (1,))
    assert (Everything().names, Blind().rounds) == ((), ())


# -- play -----------------------------------------------------------------------------------------------------


class Ask(Task):
    """Three problems; the answer is graded against the problem's own text."""

    reward_range = 1.0

    def problems(self, split: str) -> list[Problem]:
        return [Problem(id=text, prompt=text, answer=text) for text in ("one", "two", "three")]

    def grade(self, episodes: Any) -> list[Verdict]:
        return [Verdict("right", 1.0) if said == p.answer else Verdict("wrong", 0.0) for p, said, _ in episodes]


def test_episodes_that_go_different_ways_are_played_in_one_batch_per_speaker():
    says = {
        ("a", "one"): "@j", ("a", "two"): "@b", ("a", "three"): "hm",
        ("b", "two"): "@a again", ("b", "three"): "@c",
    }  # fmt: skip

    def say(agent: str, prompt: str) -> str:
        asked = prompt.split("\n")[0]
        return asked if agent == "j" else says.get((agent, asked), "")

    router = Addressed(("a", "b", "c"), turns=3, then=("j",))
    batch, script, _ = world(Ask(), say, order="abcj", router=router, answer="j")
    assert [[t.agent for t in e.turns] for e in batch.episodes] == [["a", "j"], list("abaj"), list("abcj")]
    assert [[t.round for t in e.turns] for e in batch.episodes] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert all(e.verdict.right for e in batch.episodes)
    assert [agent for agent, _ in script.seen] == list("aaabbjacjj"), "together wherever they meet, the most first"
    assert ("j", "one\na: @j") in script.seen
    assert [len(batch.of(name)) for name in "abcj"] == [4, 2, 1, 3]
    assert max(Counter(batch.of("a").episode_M.tolist()).values()) <= router.turns_of("a") == 2


def test_an_environment_hears_the_last_message_of_a_round_without_the_one_who_answers():
    task = UpOrDown()
    says = {"x": "4", "y": "5", "j": "3"}
    batch, *_ = world(
        task, lambda agent, _: says[agent], order="xyj", router=Schedule((("x", "y"), ("y", "x"), ("j",))), answer="j"
    )
    assert [call[0].acts for call in task.calls] == [(), ("5",), ("5", "4")]
    assert [call[0].rounds_left for call in task.calls] == [2, 1, 0]
    assert [e.answer for e in batch.episodes] == ["3", "3", "3"]


# -- team files -----------------------------------------------------------------------------------------------

HEAD = "name: trial\ntask: {name: data, path: x}\nteam:\n  model: tiny\n"
DEBATE = """\
  agents: [{name: a, sees: blind}, {name: b, sees: blind}, {name: judge}]
  router: {order: [a, b], rounds: 2, then: [judge]}
  answer: judge
"""
THREE = "  agents: [{name: a}, {name: b}, {name: judge}]\n"


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("{}", Schedule((("a", "b", "judge"),))),
        ("{rounds: 2}", Schedule((("a", "b", "judge"),) * 2)),
        ("{order: [b, a, b, judge], rounds: 2}", Schedule((("b", "a", "b", "judge"),) * 2)),
        ("{order: [b, a]}", Schedule((("b", "a"),))),
        ("{rounds: 2, then: [judge]}", Schedule((("a", "b"), ("a", "b"), ("judge",)))),
        ("{order: [b, a], then: [judge, a]}", Schedule((("b", "a"), ("judge", "a")))),
        ("{rounds: [[a, b], [b, a], [judge]]}", Schedule((("a", "b"), ("b", "a"), ("judge",)))),
        ("{rounds: [[a, b], [b, a]], then: [judge]}", Schedule((("a", "b"), ("b", "a"), ("judge",)))),
        ("{kind: addressed, turns: 6}", Addressed(("a", "b", "judge"), 6)),
        ("{kind: addressed, turns: 6, then: [judge]}", Addressed(("a", "b"), 6, ("judge",))),
        ("{kind: addressed, turns: 6, order: [b], then: [judge]}", Addressed(("b",), 6, ("judge",), ("a",))),
    ],
)
def test_routers_in_a_team_file(router: str, expected: Router):
    team_file = loads(f"{HEAD}{THREE}  router: {router}\n")
    assert build.build_router(team_file) == team_file.team.known_router == expected
    assert loads(dump(team_file)) == team_file, "a stored copy means the same"
    assert team_file.team.rounds == expected.rounds


def test_a_blind_debate_with_a_judge_is_three_lines():
    team = loads(HEAD + DEBATE).team
    assert team.known_router == Schedule((("a", "b"), ("a", "b"), ("judge",)))
    assert [visibility(agent.sees) for agent in team.agents] == [Blind(), Blind(), Everything()]
    assert team.speaking_order == ("a", "b", "judge")


def test_sees_in_a_team_file():
    text = f"{HEAD}  agents: [{{name: a, sees: {{blind: [0]}}}}, {{name: b, sees: {{only: [a], blind: [0]}}}}]\n"
    team_file = loads(text)
    seen = [visibility(agent.sees) for agent in team_file.team.agents]
    assert seen == [Blind((0,)), Each((Only(("a",)), Blind((0,))))]
    assert loads(dump(team_file)) == team_file
    agent = team_file.team.agents[0].model_copy()
    assert type(agent)(name="a", sees={"blind": (0,)}).sees == {"blind": [0]}


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        (
            THREE + "  router: {rounds: [[a, «jude»]]}",
            'team.router.rounds names no agent "jude"; did you mean "judge"?',
        ),
        (THREE + "  router: {then: [«c»]}", 'team.router.then names no agent "c"; the agents are: a, b, judge'),
        (
            THREE + "  router: {rounds: «x»}",
            'team.router.rounds must be a whole number, or a list with the order of every round, got "x"',
        ),
        (THREE + "  router: {rounds: «0»}", "team.router.rounds must be at least 1, got 0"),
        (THREE + "  router: {rounds: «2.0»}", "team.router.rounds must be a whole number, got 2.0; write 2"),
        (
            THREE + "  router: {rounds: [[a], «[]»]}",
            "team.router.rounds.1 must have at least 1 item, got an empty list",
        ),
        (THREE + "  router: {rounds: [«a», [b]]}", 'team.router.rounds.0 must be a list, got "a"'),
        (THREE + "  router: {rounds: [[a, «1»]]}", "team.router.rounds.0.1 must be text, got 1; put it in quotes"),
        (
            THREE + "  router: «{order: [a], rounds: [[b], [judge, a]]}»",
            "team.router lists an order for every round in rounds; leave order out",
        ),
        (
            "  agents: [{name: a}, «{name: b}», {name: judge}]\n  router: {rounds: [[a], [judge]]}",
            'agent "b" never speaks in team.router; name it there, or set frozen: true',
        ),
        (
            THREE + "  answer: «judge»\n  router: {rounds: [[a], [b]]}",
            'team.answer names "judge", who never speaks in team.router',
        ),
        (
            THREE + "  router: {kind: «adressed», turns: 3}",
            "team.router.kind must be schedule, addressed or python:FILE.py:CLASS (FILE relative to the team file), "
            'got "adressed"; did you mean "addressed"?',
        ),
        (THREE + "  router: {kind: «addressed»}", 'team.router.kind is "addressed", which needs team.router.turns'),
        (THREE + "  router: {kind: addressed, turns: «0»}", "team.router.turns must be at least 1, got 0"),
        (
            THREE + "  router: {kind: addressed, turns: 3, «rounds»: 2}",
            'team.router.rounds is not a setting of router "addressed"; it takes turns, order, then',
        ),
        (
            THREE + "  router: {«turns»: 3}",
            'team.router.turns is not a setting of router "schedule"; it takes order, rounds, then',
        ),
        (
            THREE + "  router: {kind: 'python:x.py:X', «order»: [a]}",
            'team.router.order is not a setting of router "python:x.py:X"; give it in team.router.options',
        ),
        (THREE + "  router: {options: {«x»: 1}}", 'team.router.options has no "x" for router "schedule"'),
        (
            THREE + "  router: «{kind: addressed, turns: 3, order: [a, a]}»",
            "team.router takes every agent of order once",
        ),
        (THREE + "  router: {«ordr»: [a]}", 'unknown key "ordr" in team.router; did you mean "order"?'),
        (
            "  agents: [{name: a, sees: «blnd»}]",
            "team.agents.a.sees must be everything, blind or a mapping with blind or only, got "
            '"blnd"; did you mean "blind"?',
        ),
        (
            "  agents: [{name: a, sees: «{bling: [0]}»}]",
            "team.agents.a.sees must be everything, blind or a mapping with blind or only, got a mapping",
        ),
        (
            "  agents: [{name: a, sees: «{blind: 0}»}]",
            "team.agents.a.sees must list rounds under blind, counted from 0, such as {blind: [0]}, got a mapping",
        ),
        (
            "  agents: [{name: a, sees: «{only: []}»}]",
            "team.agents.a.sees must list agents under only, such as {only: [ann, bob]}, got a mapping",
        ),
        (
            "  agents: [{name: ann, sees: «{only: [bo]}»}, {name: bob}]",
            'team.agents.ann.sees names no agent "bo"; did you mean "bob"?',
        ),
        (
            "  agents: [{name: a, sees: «{blind: [0, 2]}»}]\n  router: {rounds: 2}",
            "team.agents.a.sees names round 2, but the rounds are 0 to 1",
        ),
    ],
)
def test_one_mistake(marked: str, message: str):
    check_marked(HEAD + marked, message)


def test_a_new_router_and_a_new_visibility_touch_one_file(monkeypatch: pytest.MonkeyPatch):
    """The team file, its errors and the session learn of them from the two tables alone."""

    @dataclass(frozen=True)
    class Backwards(Schedule):
        @classmethod
        def planned(cls, agents: Sequence[str], *, order: Sequence[str] = (), skip: int = 0) -> Backwards:
            return cls((tuple(order or agents)[::-1][skip:],))

    monkeypatch.setitem(ROUTERS, "backwards", Backwards.planned)
    monkeypatch.setitem(FORMS, "without", lambda names: Only(tuple({"a", "b", "judge"} - {*names})))
    agents = THREE.replace("name: b", "name: b, sees: {without: [a, b]}")
    team_file = loads(f"{HEAD}{agents}  router: {{kind: backwards, options: {{skip: 1}}}}\n")
    assert build.build_router(team_file) == Backwards((("b", "a"),))
    assert visibility(team_file.team.agents[1].sees) == Only(("judge",))
    check_marked(
        f"{HEAD}{agents}  router: {{kind: backwards, «then»: [a]}}\n",
        'team.router.then is not a setting of router "backwards"; it takes order, skip',
    )
    check_marked(
        f"{HEAD}{agents}  router: {{kind: backwards, options: {{«skp»: 1}}}}\n",
        'team.router.options has no "skp" for router "backwards"',
    )


@pytest.mark.parametrize(("router", "refused"), [("then: [speaker]", False), ("order: [left, right, speaker]", True)])
def test_the_last_word_may_be_anyones_where_what_was_said_decides(router: str, refused: bool):
    agents = "[{name: left}, {name: right}, {name: speaker}]"
    text = f"name: c\ntask: {{name: code}}\nteam:\n  model: tiny\n  agents: {agents}\n"
    text += f"  router: {{kind: addressed, turns: 3, {router}}}\n"
    if refused:
        with pytest.raises(ConfigError, match='gives the word to "left"'):
            loads(text)
    assert loads(text, overrides=["team.answer=speaker"]).team.answer == "speaker"
    if not refused:
        assert loads(text).team.closing == ("speaker",)


@pytest.mark.long
def test_an_order_that_leaves_an_agent_out_still_loads_and_is_told():
    text = "name: r\ntask: {name: sums}\nteam:\n  model: tabular\n" + THREE + "  router: {order: [a, b]}\n"
    told = doubts(build.build(loads(text)))
    assert any("'judge' never speaks under team.router" in doubt for doubt in told)
    quiet = doubts(build.build(loads(text.replace("name: judge", "name: judge, frozen: true"))))
    assert not any("never speaks" in doubt for doubt in quiet)


# -- whole runs -----------------------------------------------------------------------------------------------

TASK = '''
from teamtr.tasks import Benchmark, WrongAnswer
from teamtr.types import Problem, Verdict


class FirstLetter(Benchmark):
    """Right when the answer begins with the problem's letter."""

    name = "first"

    def __init__(self, alphabet="xy"):
        self.alphabet = alphabet
        problems = [self.problem({"letter": letter}) for letter in "xyxy"]
        super().__init__({"train": problems, "test": problems})

    def problem(self, row, where=""):
        return Problem(id=row["letter"], prompt=row["letter"], answer=row["letter"])

    def grade_replies(self, replies):
        return [
            Verdict("right", 1.0, said[:1]) if said[:1] == p.answer else Verdict("wrong", 0.0, said[:1])
            for p, said in replies
        ]

    def extract(self, text):
        return text[:1] or None

    def gold(self, problem):
        return problem.answer

    def wrong(self, problem, rng):
        return [WrongAnswer("empty", "")]
'''
RUN = """
plan: {preset: naive_sequential, stages: 2, problems: 4, group_size: 16, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 2}
"""
FIRST = "name: first\ntask: {name: 'python:first.py:FirstLetter'}\nteam:\n  model: tabular\n  max_tokens: 2\n"
MODERATED = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Moderated:
    """The judge speaks after every message that begins with the letter x; else the others take turns."""

    agents: tuple
    turns: int = 4

    rounds = 1

    @property
    def horizon(self):
        return self.turns

    def turns_of(self, agent):
        return self.turns if agent in self.agents else 0

    def next(self, turns):
        if len(turns) >= self.turns:
            return None
        if turns and turns[-1].agent != "judge" and turns[-1].text.startswith("x"):
            return 0, "judge"
        return 0, "ab"[len(turns) % 2]


def nobody(agents):
    return agents
'''


def first(folder: Path, team: str, task: str = "") -> Any:
    (folder / "first.py").write_text(TASK)
    (folder / "moderated.py").write_text(MODERATED)
    (folder / "team.yaml").write_text(FIRST.replace("FirstLetter'}", f"FirstLetter'{task}}}") + team + RUN)
    return load_team_file(folder / "team.yaml")


def played(folder: Path) -> list[Any]:
    return [e for file in sorted((folder / "episodes").iterdir()) for e in read_episodes(file).episodes]


@pytest.mark.long
def test_a_run_of_a_blind_debate_with_a_judge(tmp_path: Path):
    team_file = first(tmp_path, DEBATE)
    records = list(run.train(team_file, tmp_path / "run"))
    updates = [r for r in records if r["kind"] == "update"]
    assert [r["agent"] for r in updates] == ["a", "b", "judge"] * 2
    assert "accepted" in {r["outcome"] for r in updates if r["agent"] == "judge"}
    session = build.build(team_file)
    codec = session.context.codecs["a"]
    for e in played(tmp_path / "run"):
        assert [(t.round, t.agent) for t in e.turns] == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "judge")]
        assert e.answer == e.turns[-1].text
        seen = [codec.tokenizer.decode(t.context_ids) for t in e.turns]
        heard = [[name for name in ("a:", "b:", "you:") if f"\n{name}" in prompt] for prompt in seen]
        assert heard == [[], [], ["b:", "you:"], ["a:", "you:"], ["a:", "b:"]]
    judge, debater = longest(session)["judge"], longest(session)["a"]
    assert judge.prompt > debater.prompt, "it has read everything"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "task"),
    [
        ("{kind: addressed, turns: 4, order: [a, b], then: [j]}", ", options: {alphabet: '@jcx'}"),
        pytest.param("{kind: 'python:moderated.py:Moderated', options: {turns: 5}}", "", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_speakers_depend_on_what_was_said_resumes_to_the_same_bits(router: str, task: str, tmp_path: Path):
    agents = "  agents: [{name: a}, {name: b}, {name: c}, {name: j}]\n" if task else THREE
    team_file = first(tmp_path, f"{agents}  router: {router}\n", task)
    list(run.train(team_file, tmp_path / "whole"))
    whole = result(tmp_path / "whole")
    orders = {tuple(t.agent for t in e.turns) for e in played(tmp_path / "whole")}
    assert len(orders) > 2, "episodes go different ways"
    session = build.build(team_file)
    bound = session.context.router
    assert all(len(order) <= bound.horizon for order in orders)
    assert all(order.count(name) <= bound.turns_of(name) for order in orders for name in team_file.team.names)
    assert set().union(*orders) == {*team_file.team.names}
    lengths = longest(session)
    for e in played(tmp_path / "whole"):
        assert all(len(t.context_ids) <= lengths[t.agent].prompt for t in e.turns)
    for number in (1, 2, 4):  # also in the middle of a stage that reuses its stored batch
        records = run.train(team_file, tmp_path / "parts")
        assert next(r["update"] for r in records if r["kind"] == "update" and r["update"] == number) == number
        records.close()
    assert list(run.train(team_file, tmp_path / "parts"))[-1]["kind"] == "finished"
    assert result(tmp_path / "parts") == whole


ONE_ORDER = '''
class OneOrder:
    """The router that knew one order only, by its own formulas."""

    def __init__(self, agents, order, rounds):
        self.order, self.rounds, self.horizon = order, rounds, len(order) * rounds

    def turns_of(self, agent):
        return self.order.count(agent) * self.rounds

    def next(self, turns):
        taken = len(turns)
        return None if taken >= self.horizon else (taken // len(self.order), self.order[taken % len(self.order)])
'''


@pytest.mark.long
def test_a_run_of_order_and_rounds_is_what_it_was_to_the_bit(tmp_path: Path):
    agents = "  agents: [{name: a, sees: blind}, {name: b}, {name: judge, sees: blind}]\n"
    plan = "order: [b, a, judge, a], rounds: 2"
    (tmp_path / "old.py").write_text(ONE_ORDER)
    for name, router in ("new", plan), ("old", f"kind: 'python:old.py:OneOrder', options: {{{plan}}}"):
        list(run.train(first(tmp_path, f"{agents}  router: {{{router}}}\n"), tmp_path / name))
    assert result(tmp_path / "new") == result(tmp_path / "old")


def test_right_answers_come_out_right_from_one_who_speaks_only_when_named(tmp_path: Path):
    agents = "  agents: [{name: a}, {name: b}, {name: c, max_tokens: 1}]\n  answer: c\n"
    session = build.build(first(tmp_path, f"{agents}  router: {{kind: addressed, turns: 2, order: [a, b]}}\n"))
    assert self_test(session) == [
        "agent 'c' may write 1 tokens, but the shortest of 3 right answers takes 2: raise max_tokens"
    ]


@pytest.mark.long
def test_a_router_of_ones_own_that_cannot_be_used(tmp_path: Path):
    def told(router: str) -> str:
        with pytest.raises(UserError) as caught:
            build.build(first(tmp_path, f"{THREE}  router: {router}\n"))
        return str(caught.value)

    own = "'python:moderated.py:Moderated'"
    assert "there is no file" in told("{kind: 'python:none.py:X'}")
    assert "name a team.router python:FILE.py:CLASS" in told("{kind: 'python:none.py:X'}")
    assert "has no option 'turn'; it has turns" in told(f"{{kind: {own}, options: {{turn: 1}}}}")
    assert "what it makes has no next, turns_of, horizon, rounds" in told("{kind: 'python:moderated.py:nobody'}")
    with pytest.raises(ConfigError, match=r"must be schedule, addressed or python:FILE\.py:CLASS"):
        loads(f"{HEAD}{THREE}  router: {{kind: 'python:moderated:X'}}\n")
    team_file = first(tmp_path, f"{THREE}  answer: judge\n  router: {{kind: {own}}}\n")
    assert build.build_router(team_file).turns_of("judge") == 4
    (tmp_path / "moderated.py").write_text(MODERATED.replace("if agent in self.agents", "if agent in 'ab'"))
    with pytest.raises(UserError, match=r"team\.answer names 'judge', who never speaks under the router"):
        build.build(team_file)


def test_what_the_page_on_teams_shows_can_be_used(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "teams.md").read_text()
    head = "name: shown\ntask: {name: data, path: x}\n"
    debate, addressed = (loads(head + text) for text in re.findall("^```yaml\n(.*?)^```", page, flags=re.M | re.S))
    assert debate.team.known_router == Schedule((("ann", "bob"), ("ann", "bob"), ("judge",)))
    assert addressed.team.known_router == Addressed(("ann", "bob"), 6, ("judge",), ("eve",))
    three = head + "team:\n  model: tiny\n  agents: [{name: ann}, {name: bob}, {name: judge, frozen: true}]\n"
    rows = re.findall(r"^\| `(\{.*?\})` \|", page, flags=re.M)
    assert len(rows) == 7
    for row in rows:
        word = "sees" if "blind" in row or "only" in row else "router"
        text = three.replace("name: judge", f"name: judge, sees: {row}") if word == "sees" else three
        loads(text + (f"  router: {row}\n" if word == "router" else ""))
    (code,) = re.findall("^```python\n(.*?)^```", page, flags=re.M | re.S)
    (tmp_path / "moderated.py").write_text(code)
    (kind,) = re.findall(r"^Then use it with `router: (.*?)`\.", page, flags=re.M)
    (tmp_path / "team.yaml").write_text(f"{three}  router: {kind}\n")
    router = build.build_router(load_team_file(tmp_path / "team.yaml"))
    spoken = episode(router, {"bob": "why?"}, names=("ann", "bob", "judge"))
    assert spoken == [(0, "bob"), (0, "ann"), (0, "bob"), (0, "ann")]


@pytest.mark.long
def test_exact_success_is_for_one_blind_round_only(monkeypatch):
    def exact(sees: str, router: str = "{}") -> float | None:
        agents = ", ".join(f"{{name: a{k}, sees: {sees}}}" for k in (1, 2))
        team = f"{{model: tabular, max_tokens: 2, agents: [{agents}], router: {router}}}"
        session = build.build(loads(f"name: r\ntask: {{name: roles}}\nteam: {team}\n"))
        return exact_success(session, session.current_team())

    blind = exact("blind")
    assert blind is not None
    assert 0.0 < blind < 1.0
    says = np.sqrt(blind / 2)  # of untrained tables, "1" as likely as "0"
    with monkeypatch.context() as patch:
        patch.setattr(Roles, "ABSTAIN", None)
        assert exact("blind") == pytest.approx(2 * says * (1 - says), rel=1e-6)
    assert exact("{blind: [0]}") == exact("blind", "{rounds: [[a2, a1]]}") == blind
    for sees, router in [
        ("everything", "{}"),
        ("{only: [a1]}", "{}"),
        ("{blind: [1]}", "{rounds: 2}"),
        ("blind", "{rounds: 2}"),
        ("blind", "{order: [a1], then: [a2]}"),
        ("blind", "{order: [a1, a2, a1]}"),
        ("blind", "{kind: addressed, turns: 2}"),
    ]:
        assert exact(sees, router) is None, (sees, router)
