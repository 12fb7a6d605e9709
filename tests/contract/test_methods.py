"""Inference-time methods on scripted models: who is asked what, whose answer counts, and what it costs."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

from scripted import Numbers, cast_of, problems
from teamtr.baselines import Method, make_methods, method_names, play_method, registry
from teamtr.baselines.best_of_n import BestOfN
from teamtr.baselines.chain_of_thought import ChainOfThought
from teamtr.baselines.debate import Debate
from teamtr.baselines.judged_debate import JudgedDebate
from teamtr.baselines.rating import UNRATED, rating
from teamtr.baselines.registry import methods, settings_of
from teamtr.baselines.role_play import RolePlay
from teamtr.baselines.self_consistency import SelfConsistency
from teamtr.baselines.team import AsWritten
from teamtr.baselines.tree_of_thoughts import TreeOfThoughts
from teamtr.baselines.voting import Repeated, repeated, vote
from teamtr.errors import UserError
from teamtr.rollout import Ledger, play
from teamtr.store import read_episodes, write_episodes
from teamtr.team import Addressed, Schedule
from teamtr.types import Message, Problem, Reply

P0 = problems(1)


def answers_of(method: Method, cast, *, count: int = 1, samples: int = 1, seed: int = 0) -> list[str]:
    return [e.answer for e in play_method(method, cast, problems(count), samples, seed=seed).episodes]


def in_turn(*texts: str):
    """A script that says one text after the other, whatever it is asked."""
    left = iter(texts)
    return lambda agent, prompt, noise: next(left)


# -- what holds for every method ------------------------------------------------------------------------------

EVERY = [make_methods([name], {})[0] for name in method_names()]


def rambling(agent: str, prompt: str, noise: float) -> str:
    return f"{'so ' * int(4 * noise)}{int(10 * noise)}"


@pytest.mark.parametrize("method", [*EVERY, Repeated(of=Debate(), votes=2)], ids=lambda m: f"{type(m).__name__}")
def test_every_token_is_counted_and_stands_in_the_episodes(method: Method) -> None:
    cast, sampler = cast_of(rambling, ("ann", "bob"))
    ledger = Ledger()
    batch = play_method(method, cast, problems(2), 3, seed=1, ledger=ledger)
    turns = [turn for episode in batch.episodes for turn in episode.turns]
    assert len(batch.episodes) == 6
    assert ledger.episodes == 6
    assert sum(ledger.sampled_tokens.values()) == sampler.sampled_tokens == sum(len(t.token_ids) for t in turns)
    assert sum(ledger.prompt_tokens.values()) == sampler.prompt_tokens == sum(len(t.context_ids) for t in turns)
    assert len(turns) == len(sampler.asked)
    assert all(0 <= turn.round < method.span(cast) for turn in turns)


@pytest.mark.parametrize("method", [*EVERY, Repeated(of=AsWritten(), votes=3)], ids=lambda m: f"{type(m).__name__}")
def test_answers_follow_from_the_turns_alone(method: Method, tmp_path) -> None:
    cast, _ = cast_of(rambling, ("ann", "bob"))
    batch = play_method(method, cast, problems(2), 2, seed=3)
    write_episodes(tmp_path / "batch.jsonl.gz", batch)
    for episode in read_episodes(tmp_path / "batch.jsonl.gz").episodes:
        assert method.answer(cast, episode.turns) == episode.answer
    again = play_method(method, cast, problems(2), 2, seed=3)
    assert [e.answer for e in again.episodes] == [e.answer for e in batch.episodes]


@pytest.mark.parametrize("method", [*EVERY, Repeated(of=Debate(), votes=2)], ids=lambda m: f"{type(m).__name__}")
def test_every_problem_gets_its_own_answer(method: Method) -> None:
    cast, _ = cast_of(lambda agent, prompt, noise: "41" if "problem 1" in prompt else "40")
    batch = play_method(method, cast, problems(2), 3, seed=0)
    assert [(e.problem_id, e.group_index, e.answer) for e in batch.episodes] == [
        (f"p{p}", k, str(40 + p)) for p in range(2) for k in range(3)
    ]
    assert all(e.verdict.right for e in batch.episodes)


@pytest.mark.parametrize("method", EVERY, ids=lambda m: m.name)
def test_who_plays_sees_what_is_private_to_it(method: Method) -> None:
    cast, sampler = cast_of(rambling, ("ann", "bob"))
    secret = replace(P0[0], private={"ann": "ann's half", "bob": "bob's half"})
    play_method(method, cast, [secret], 1, seed=0)
    for agent, prompt, _ in sampler.asked:
        other = "bob" if agent == "ann" else "ann"
        assert f"{agent}'s half" in prompt
        assert f"{other}'s half" not in prompt
        assert f"You are {agent.upper()}." in prompt


def test_a_role_with_the_name_of_an_agent_does_not_see_what_is_private_to_that_agent() -> None:
    secret = replace(P0[0], private={"solver": "the solver's half"})
    cast, sampler = cast_of(rambling, ("solver", "checker"))
    play_method(ChainOfThought(), cast, [secret], 1, seed=0)
    [(agent, prompt, _)] = sampler.asked
    assert agent == "checker"  # it plays the role "solver"
    assert "half" not in prompt


def test_the_team_as_written_is_what_play_plays() -> None:
    router = Schedule.repeated(("ann", "bob"), 2)
    cast, _ = cast_of(rambling, ("ann", "bob"), router=router, answer="ann")
    batch = play_method(AsWritten(), cast, problems(2), 2, seed=5)
    same = play(cast.context, cast.team, problems(2), 2, seed=5)
    told = [[(t.agent, t.round, t.text) for t in e.turns] for e in batch.episodes]
    assert told == [[(t.agent, t.round, t.text) for t in e.turns] for e in same.episodes]
    assert [(e.answer, e.verdict, e.team_version) for e in batch.episodes] == [
        (e.answer, e.verdict, e.team_version) for e in same.episodes
    ]


def test_one_model_plays_the_part_of_the_agent_that_answers_or_is_named() -> None:
    for cast, who in [
        (cast_of(rambling, ("ann", "bob"))[0], "bob"),
        (cast_of(rambling, ("ann", "bob"), answer="ann")[0], "ann"),
        (cast_of(rambling, ("ann", "bob"), answer="majority")[0], "bob"),
        (cast_of(rambling, ("ann", "bob"), answer="ann", agent="bob")[0], "bob"),
    ]:
        assert cast.answering == who
        play_method(ChainOfThought(), cast, P0, 1, seed=0)
        assert {agent for agent, _, _ in cast.context.sampler.asked} == {who}
    with pytest.raises(UserError, match="no agent 'eve' in the team; it has ann, bob"):
        cast_of(rambling, ("ann", "bob"), agent="eve")


def test_messages_may_be_longer_than_those_of_the_team() -> None:
    cast, sampler = cast_of(lambda *_: "x" * 100, max_tokens=90)
    play_method(ChainOfThought(), cast, P0, 1, seed=0)
    assert sampler.sampled_tokens == 90


# -- chain of thought and votes -------------------------------------------------------------------------------


def test_chain_of_thought_asks_once_and_says_to_think() -> None:
    cast, sampler = cast_of(in_turn("20 and 20 is 40"))
    batch = play_method(ChainOfThought(), cast, P0, 1, seed=0)
    [(_, prompt, _)] = sampler.asked
    assert "Think step by step" in prompt
    assert batch.episodes[0].verdict.right


def test_the_vote_goes_to_the_answer_not_to_the_wording() -> None:
    cast, _ = cast_of(in_turn("7", "it is 40", "7", "40!", "so 40"))
    assert answers_of(SelfConsistency(votes=5), cast) == ["it is 40"]


def test_votes_by_hand() -> None:
    extract = Numbers().extract
    assert vote(["1", "2", "2"], [1, 1, 1], extract) == "2"
    assert vote(["1", "2"], [1, 1], extract) == "1", "of equals, the answer given first"
    assert vote(["none", "none at all", "3"], [1, 1, 1], extract) == "3", "who states nothing has no vote"
    assert vote(["none", "nothing"], [1, 1], extract) == "none"
    assert vote(["1", "2", "2"], [0.9, 0.4, 0.4], extract) == "1"


def test_a_weighted_vote_counts_likely_texts_more() -> None:
    """Two texts at 0.4 a token weigh 0.8, less than one at 0.95, however many tokens that has: 0.95^31 would be 0.2."""
    likely = "a long way round, and it is 40"
    for weighted, answer in ((False, "7"), (True, likely)):
        cast, _ = cast_of(in_turn("7", "7", likely), sure=lambda text: 0.95 if text == likely else 0.4)
        assert answers_of(SelfConsistency(votes=3, weighted=weighted), cast) == [answer]


@pytest.mark.long
def test_self_consistency_is_right_as_often_as_a_majority_of_coins() -> None:
    """Each chain is right with probability 0.7: three votes are right with 0.7^3 + 3 * 0.7^2 * 0.3 = 0.784."""
    cast, _ = cast_of(lambda agent, prompt, noise: "40" if noise < 0.7 else "7")
    batch = play_method(SelfConsistency(votes=3), cast, P0, 1000, seed=0)
    right = np.mean([e.verdict.right for e in batch.episodes])
    assert abs(right - 0.784) < 4 * np.sqrt(0.784 * 0.216 / 1000)


def test_any_method_is_repeated_with_a_vote() -> None:
    assert repeated(SelfConsistency(votes=8, weighted=True), 3) == SelfConsistency(votes=3, weighted=True)
    assert repeated(BestOfN(candidates=4, verifier="ann"), 1) == BestOfN(candidates=1, verifier="ann")
    assert repeated(Debate(), 1) == Debate()
    twice = repeated(Debate(debaters=2, rounds=1), 3)
    assert isinstance(twice, Repeated)
    assert (twice.name, twice.tries) == ("debate", 3)
    # Turns go speaker by speaker: the first debaters of the three debates, then the second ones. The debates end
    # with 7 (a tie, said first), 40 and 40.
    cast, _ = cast_of(in_turn("7", "40", "40", "40", "40", "7"))
    assert answers_of(twice, cast) == ["40"]


def test_tries_of_different_length_are_told_apart() -> None:
    """A router that ends at a word gives tries of one to three turns; each keeps its own answer."""
    router = Addressed(order=("ann", "bob"), turns=3, then=("eve",))
    cast, _ = cast_of(
        lambda agent, prompt, noise: "40" if agent == "eve" else "@eve" if noise < 0.5 else "go on",
        ("ann", "bob", "eve"),
        router=router,
    )
    batch = play_method(Repeated(of=AsWritten(), votes=6), cast, P0, 4, seed=2)
    assert len({len(e.turns) for e in batch.episodes}) > 1
    assert {e.answer for e in batch.episodes} == {"40"}


# -- debates --------------------------------------------------------------------------------------------------


def test_the_first_round_of_a_debate_is_blind_and_then_all_see_all() -> None:
    said = iter(f"word{k}" for k in range(9))
    cast, sampler = cast_of(lambda *_: next(said))
    play_method(Debate(debaters=3, rounds=3), cast, P0, 1, seed=0)
    heard = [[k for k in range(9) if f"word{k}" in prompt] for _, prompt, _ in sampler.asked]
    assert heard == [[], [], [], *(list(range(k)) for k in range(3, 9))]


def test_the_answer_of_a_debate_is_what_most_say_last() -> None:
    first, last = ("40", "7", "8"), ("7", "it is 40", "40")
    cast, _ = cast_of(in_turn(*first, *last))
    assert answers_of(Debate(debaters=3, rounds=2), cast) == ["it is 40"]


def test_the_agents_of_a_team_debate_in_turn() -> None:
    cast, sampler = cast_of(rambling, ("ann", "bob"))
    play_method(Debate(debaters=3, rounds=1), cast, P0, 1, seed=0)
    assert [agent for agent, _, _ in sampler.asked] == ["ann", "bob", "ann"]
    cast, sampler = cast_of(rambling, ("ann", "bob"), agent="bob")
    play_method(Debate(debaters=3, rounds=1), cast, P0, 1, seed=0)
    assert [agent for agent, _, _ in sampler.asked] == ["bob"] * 3


def test_the_judge_speaks_once_at_the_end_hears_all_and_decides() -> None:
    cast, sampler = cast_of(in_turn("one 7", "two 7", "three 7", "four 7", "40"), ("ann", "bob", "eve"))
    method = JudgedDebate(debaters=2, rounds=2, judge="eve")
    [episode] = play_method(method, cast, P0, 1, seed=0).episodes
    assert [agent for agent, _, _ in sampler.asked] == ["ann", "bob", "ann", "bob", "eve"]
    assert [turn.agent for turn in episode.turns].count("judge") == 1
    assert all(word in sampler.asked[-1][1] for word in ("one 7", "two 7", "three 7", "four 7"))
    assert (episode.answer, episode.verdict.right) == ("40", True)


# -- roles and verifiers --------------------------------------------------------------------------------------


def test_roles_speak_in_order_under_their_names_and_the_last_answers() -> None:
    cast, sampler = cast_of(in_turn("plan it", "7", "no, 40"), ("ann", "bob"))
    [episode] = play_method(RolePlay(roles=("planner", "solver", "critic")), cast, P0, 1, seed=0).episodes
    assert [(turn.agent, turn.text) for turn in episode.turns] == [
        ("planner", "plan it"),
        ("solver", "7"),
        ("critic", "no, 40"),
    ]
    assert [agent for agent, _, _ in sampler.asked] == ["ann", "bob", "ann"]
    last = sampler.asked[-1][1]
    assert "You are the critic." in last
    assert "planner: plan it\nsolver: 7" in last
    assert ["state the answer" in prompt for _, prompt, _ in sampler.asked] == [False, False, True]
    assert episode.answer == "no, 40"
    for roles in (("a", "a"), ("you",), ("a:b",), ()):
        with pytest.raises(UserError, match="role_play: roles must be different names"):
            RolePlay(roles=roles)


def test_the_candidate_that_the_verifier_rates_highest_is_the_answer() -> None:
    cast, sampler = cast_of(in_turn("7", "40", "8", "rather not: 2", "9/10", "I would say 5"), ("ann", "bob"))
    [episode] = play_method(BestOfN(candidates=3, verifier="ann"), cast, P0, 1, seed=0).episodes
    assert [agent for agent, _, _ in sampler.asked] == ["bob"] * 3 + ["ann"] * 3
    assert [prompt.rsplit("\n", 1)[1] for _, prompt, _ in sampler.asked[3:]] == ["solver: 7", "solver: 40", "solver: 8"]
    assert (episode.answer, episode.verdict.right) == ("40", True)


def test_a_judge_or_verifier_that_is_not_in_the_team_is_refused() -> None:
    cast, sampler = cast_of(rambling, ("ann", "bob"))
    for method in (JudgedDebate(judge="eve"), BestOfN(verifier="eve"), Repeated(of=JudgedDebate(judge="eve"), votes=2)):
        with pytest.raises(UserError, match="no agent 'eve' in the team; it has ann, bob"):
            play_method(method, cast, P0, 1, seed=0)
    assert sampler.asked == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("8/10", 8),
        ("8 / 10.", 8),
        ("I rate it 3 out of 10.", 3),
        ("**3** out of 10", 3),
        ("3 (out of 10)", 3),
        ("3 of 10", 3),
        ("8/10 of 10 steps are right: 4", 4),
        ("two of 10", 10),
        ("I am 20% sure", 2),
        ("100%", 10),
        ("7.5", 7.5),
        ("1, no 3", 3),
        ("99", 10),
        ("-4", 0),
        ("1e300", 10),
        ("1/2", 0.5),
    ],
)
def test_ratings(text: str, value: float) -> None:
    assert rating(text) == value


def test_who_says_no_number_rates_below_everyone() -> None:
    assert rating("splendid") == UNRATED < rating("0")
    cast, _ = cast_of(in_turn("7", "40", "splendid", "0"))
    assert answers_of(BestOfN(candidates=2), cast) == ["40"]


# -- tree of thoughts -----------------------------------------------------------------------------------------

GREEDY, HIDDEN = "take the short way", "take the long way"


def maze(agent: str, prompt: str, noise: float) -> str:
    """The step that is proposed nine times in ten leads nowhere; the other leads to the answer, and a judge knows."""
    if "thinker:" in prompt:
        return "9" if HIDDEN in prompt else "1"
    if "you: " in prompt:
        return "40" if HIDDEN in prompt else "7"
    return GREEDY if noise < 0.9 else HIDDEN


@pytest.mark.long
def test_the_tree_finds_what_greedy_misses() -> None:
    """A path of one finds the way in one try of ten; ten proposals and a beam of one miss it with 0.9^10 = 0.35."""
    cast, _ = cast_of(maze)
    alone = play_method(TreeOfThoughts(breadth=1, depth=2, beam=1), cast, P0, 200, seed=0)
    tree = play_method(TreeOfThoughts(breadth=10, depth=2, beam=1), cast, P0, 200, seed=0)
    for batch, expected in ((alone, 0.1), (tree, 1 - 0.9**10)):
        right = np.mean([e.verdict.right for e in batch.episodes])
        assert abs(right - expected) < 4 * np.sqrt(expected * (1 - expected) / 200)


def test_a_beam_keeps_the_best_paths_and_goes_on_from_them_alone() -> None:
    first, second = ("s1", "s2", "s3"), ("a1", "a2", "a3", "a4", "a5", "a6")
    cast, sampler = cast_of(in_turn(*first, "1", "8", "5", *second, "0", "2", "9", "1", "1", "3"))
    method = TreeOfThoughts(breadth=3, depth=2, beam=2)
    [episode] = play_method(method, cast, P0, 1, seed=0).episodes
    steps = [prompt for _, prompt, text in sampler.asked if text in second]
    assert ["you: s2" in prompt for prompt in steps] == [True] * 3 + [False] * 3, "the best path comes first"
    assert ["you: s3" in prompt for prompt in steps] == [False] * 3 + [True] * 3
    assert episode.answer == "a3"
    assert ["step 1 and" in prompt for _, prompt, text in sampler.asked if text in first] == [True] * 3
    assert all("step 2, the last" in prompt for prompt in steps)
    rated = [prompt for _, prompt, text in sampler.asked if text.isdigit()]
    assert all("thinker: s" in prompt for prompt in rated)
    assert "thinker: s2\nthinker: a3" in rated[5]
    assert not any("evaluator" in prompt for _, prompt, _ in sampler.asked), "nobody sees a rating"


@pytest.mark.parametrize(
    ("breadth", "depth", "beam", "nodes"),
    [(3, 3, 2, (3, 6, 6)), (2, 4, 8, (2, 4, 8, 16)), (1, 2, 5, (1, 1)), (5, 1, 1, (5,))],
)
def test_the_cost_of_a_tree(breadth: int, depth: int, beam: int, nodes: tuple[int, ...]) -> None:
    method = TreeOfThoughts(breadth=breadth, depth=depth, beam=beam)
    assert method.nodes == nodes
    cast, sampler = cast_of(rambling)
    play_method(method, cast, P0, 1, seed=0)
    assert len(sampler.asked) == 2 * sum(nodes)


# -- refusals and names ---------------------------------------------------------------------------------------


def test_greedy_sampling_is_refused_where_texts_are_drawn_to_choose_from() -> None:
    cast, _ = cast_of(rambling)
    for method in (SelfConsistency(), BestOfN(), TreeOfThoughts(), Repeated(of=Debate(), votes=2)):
        with pytest.raises(UserError, match="at temperature 0 they are all the same"):
            play_method(method, cast, P0, 1, seed=0, temperature=0.0)
    for method in (ChainOfThought(), Debate(), SelfConsistency(votes=1)):
        play_method(method, cast, P0, 1, seed=0, temperature=0.0)


class Echo:
    """An environment that repeats the team's word once a round."""

    def speakers(self, problem: Problem) -> list[str]:
        return ["echo"]

    def reply(self, situations, *, seed: int) -> list[Reply]:
        return [Reply((Message("echo", f"heard {s.acts[-1] if s.acts else 'nothing'}"),)) for s in situations]


def test_in_an_interactive_task_single_conversations_have_the_rounds_of_the_team() -> None:
    cast, sampler = cast_of(in_turn(*map(str, range(20))), router=Schedule.repeated(("ann",), 3))
    cast.context.task.environment = Echo()
    [episode] = play_method(ChainOfThought(), cast, P0, 1, seed=0).episodes
    assert [turn.text for turn in episode.turns] == ["0", "1", "2"]
    assert len(episode.replies) == 3
    assert "echo: heard 1" in sampler.asked[-1][1]
    [episode] = play_method(RolePlay(roles=("a", "b")), cast, P0, 1, seed=0).episodes
    assert len(episode.turns) == 6
    cast, sampler = cast_of(in_turn("7", "40", "40", "8", "9", "it is 9"), router=Schedule.repeated(("ann",), 2))
    cast.context.task.environment = Echo()
    [episode] = play_method(Debate(rounds=5), cast, P0, 1, seed=0).episodes
    assert [turn.round for turn in episode.turns] == [0, 0, 0, 1, 1, 1]
    assert "echo: heard 40" in sampler.asked[-1][1], "what most said"
    assert episode.answer == "9"
    for method in EVERY:
        if not method.interactive:
            with pytest.raises(UserError, match="cannot be played on an interactive task"):
                play_method(method, cast, P0, 1, seed=0)
    assert {m.name for m in EVERY if m.interactive} == {"team", "chain_of_thought", "role_play", "debate"}


def test_methods_are_made_by_name_each_with_its_own_settings() -> None:
    assert make_methods(["debate", "self_consistency"], {"rounds": 5, "votes": 2}) == (
        Debate(rounds=5),
        SelfConsistency(votes=2),
    )
    for names, settings, message in [
        (["debat"], {}, "no method 'debat'; the nearest is 'debate'"),
        (["debate", "debate"], {}, "debate is asked for twice"),
        (["debate"], {"votes": 3}, "--votes is a setting of self_consistency"),
        (["debate"], {"wit": 3}, "no method has a setting 'wit'"),
        (["debate"], {"rounds": 0}, "debate: rounds must be 1 or more, got 0"),
    ]:
        with pytest.raises(UserError, match=message):
            make_methods(names, settings)


def test_every_setting_of_every_method_says_what_it_is() -> None:
    for cls in methods().values():
        assert {each.name for each in fields(cls)} == set(settings_of(cls))
        assert cls.__doc__
    assert set(method_names()) == {
        "best_of_n",
        "chain_of_thought",
        "debate",
        "judged_debate",
        "role_play",
        "self_consistency",
        "team",
        "tree_of_thoughts",
    }


def test_the_method_of_the_docs_is_one_that_plays(monkeypatch, tmp_path) -> None:
    """Its file is all that a new method takes."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "@method(" in block]
    (tmp_path / "second_thought.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("second_thought")
    cast, sampler = cast_of(in_turn("7", "40"))
    assert answers_of(make_methods(["second_thought"], {})[0], cast) == ["40"]
    assert "you: 7" in sampler.asked[1][1]


def test_two_methods_cannot_have_one_name() -> None:
    from teamtr.baselines import method

    with pytest.raises(UserError, match="two methods are called 'debate'"):

        @method("debate")
        @dataclass(frozen=True)
        class Other(Debate):
            pass
