"""Interactive tasks: when the environment speaks, who hears it, and what is trained on."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.killing import result
from teamtr.answers import Sample
from teamtr.batches import RolloutBatch
from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.rollout import Ledger, RolloutContext, play
from teamtr.session import build
from teamtr.session import train as run
from teamtr.store import StoreError, read_episodes, write_episodes
from teamtr.streams import InTurns
from teamtr.tasks import Task
from teamtr.tasks.benchmarks.arbench.detective import DetectiveCases
from teamtr.tasks.benchmarks.arbench.numbers import GuessingNumbers
from teamtr.tasks.benchmarks.arbench.puzzles import SituationPuzzles
from teamtr.tasks.players import PolicyPlayer, ScriptedPlayer
from teamtr.team import Agent, Blind, Everything, Schedule, Team
from teamtr.theory.certificates import by_own_turn
from teamtr.types import Floats, Ids, Message, Problem, Reply, Situation, Verdict

# -- a world of scripts ---------------------------------------------------------------------------------------


class TextCodec:
    """A character is its number; a prompt is the text of the last chat message."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Ids:
        return self.encode_message(messages[-1]["content"])

    def encode_message(self, text: str) -> Ids:
        return np.array([ord(c) for c in text], dtype=np.int32)

    def decode(self, token_ids: Ids) -> str:
        return "".join(map(chr, token_ids))


class Script(InTurns):
    """A sampler whose agents say what a function of their name and prompt says; it remembers what they saw."""

    def __init__(self, say: Callable[[str, str], str]) -> None:
        self.say = say
        self.seen: list[tuple[str, str]] = []

    def version(self, agent: str) -> str:
        return "v"

    def sample(self, agent: str, prompts: Sequence[Ids], noise_BT: Floats, **settings: Any) -> list[Sample]:
        texts = [TextCodec().decode(prompt) for prompt in prompts]
        self.seen += [(agent, text) for text in texts]
        said = [TextCodec().encode_message(self.say(agent, text)) for text in texts]
        return [Sample(ids, np.zeros(len(ids), np.float32), "stop", "v") for ids in said]


class UpOrDown(Task):
    """A number from 0 to 9 is to be guessed; the environment says whether it is higher or lower, and how many rounds
    are left. Counts how it is called."""

    reward_range = 1.0

    def __init__(self) -> None:
        self.calls: list[list[Situation]] = []
        self.seeds: list[int] = []
        self.environment = self

    def problems(self, split: str) -> list[Problem]:
        return [Problem(id=str(n), prompt="guess", answer=n) for n in (3, 7, 8)]

    def grade(self, episodes: Any) -> list[Verdict]:
        return [Verdict("right", 1.0) if text == str(p.answer) else Verdict("wrong", 0.0) for p, text, _ in episodes]

    def extract(self, text: str) -> str | None:
        return text if text.isdigit() else None

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        self.calls.append(list(situations))
        self.seeds.append(seed)
        return [self._reply(s) for s in situations]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return ("host", "dealer")

    def _reply(self, s: Situation) -> Reply:
        budget = Message("host", f"left {s.rounds_left}")
        if not s.acts:
            return Reply((budget,))
        guess = int(s.acts[-1])
        if guess == s.problem.answer:
            return Reply((Message("host", "won"),), ends=True)
        return Reply((Message("dealer", "up" if guess < s.problem.answer else "down"), budget))


def world(task: Any, say: Callable[[str, str], str], order: Sequence[str] = ("x",), **settings: Any):
    names = tuple(dict.fromkeys(order))
    script = Script(say)
    blind = settings.pop("blind", ())
    context = RolloutContext(
        script,
        {n: TextCodec() for n in names},
        settings.pop("router", None) or Schedule.repeated(order, settings.pop("rounds", 5)),
        task,
        answer=settings.pop("answer", "last"),
    )
    team = Team(tuple(Agent(n, "v", sees=Blind() if n in blind else Everything(), max_tokens=99) for n in names))
    batch = play(context, team, task.problems("train"), settings.pop("group", 1), seed=1, **settings)
    return batch, script, context


def one_up(agent: str, prompt: str) -> str:
    """Guesses 5, 6, 7, ... as long as it is told up."""
    return str(5 + prompt.count("dealer: up"))


# -- play -----------------------------------------------------------------------------------------------------


def test_the_environment_speaks_before_every_round_and_may_end_an_episode():
    task = UpOrDown()
    batch, script, _ = world(task, one_up, rounds=3)
    never, third, late = batch.episodes
    assert [(m.author, m.text) for m in third.messages] == [
        ("host", "left 2"),
        ("x", "5"),
        ("dealer", "up"),
        ("host", "left 1"),
        ("x", "6"),
        ("dealer", "up"),
        ("host", "left 0"),
        ("x", "7"),  # the final answer: nobody replies
    ]
    assert third.verdict.right
    assert [t.text for t in never.turns] == ["5", "5", "5"]
    assert not late.verdict.right
    assert not any(r.ends for e in batch.episodes for r in e.replies)
    assert script.seen[-1] == (
        "x",
        "guess\nhost: left 2\nyou: 5\ndealer: up\nhost: left 1\nyou: 6\ndealer: up\nhost: left 0",
    )
    longer, *_ = world(UpOrDown(), one_up, rounds=8)
    won = longer.episodes[2]
    assert [t.text for t in won.turns] == ["5", "6", "7", "8"]
    assert won.replies[-1] == Reply((Message("host", "won"),), ends=True)
    assert won.messages[-1] == Message("host", "won")
    assert won.answer == "8"
    assert won.verdict.right, "the act that ended it is the answer"


def test_one_call_per_tick_for_all_running_episodes_and_none_for_the_others():
    task = UpOrDown()
    batch, _, context = world(task, one_up, rounds=5, group=2)
    assert [len(call) for call in task.calls] == [6, 6, 6, 6, 4]  # 7 is guessed in the third round
    assert [s.rounds_left for call in task.calls for s in call[:1]] == [4, 3, 2, 1, 0]
    assert task.calls[2][2].acts == ("5", "6")
    assert len(task.calls[2][2].replies) == 2
    assert len(set(task.seeds)) == len(task.seeds)
    again = UpOrDown()
    repeated, *_ = world(again, one_up, rounds=5, group=2)
    assert [e.messages for e in repeated.episodes] == [e.messages for e in batch.episodes]
    assert again.seeds == task.seeds
    assert context.router.horizon == 5


def test_a_single_round_is_the_final_answer():
    task = UpOrDown()
    batch, *_ = world(task, one_up, rounds=1)
    assert [m.text for m in batch.episodes[0].messages] == ["left 0", "5"]


def test_replies_are_heard_by_blind_agents_too_but_never_the_round_they_speak_in():
    batch, script, _ = world(UpOrDown(), one_up, order=("x", "y"), rounds=2, blind=("y",))
    of_y = [prompt for agent, prompt in script.seen if agent == "y"]
    assert of_y[0] == "guess\nhost: left 1"
    assert of_y[4] == "guess\nhost: left 1\nx: 5\nyou: 5\ndealer: up\nhost: left 0"
    assert [prompt for agent, prompt in script.seen if agent == "x"][4].endswith("dealer: up\nhost: left 0")
    assert len(batch.episodes[1].replies) == 2


@pytest.mark.parametrize(("answer", "act"), [("last", "3"), ("x", "1"), ("majority", "2")])
def test_the_team_acts_by_its_answer_of_the_round(answer: str, act: str):
    task = UpOrDown()
    says = {"x": "1", "y": "2", "z": "2", "w": "3"}
    batch, *_ = world(task, lambda agent, _: says[agent], order=tuple(says), rounds=3, answer=answer)
    assert {s.acts[-1] for call in task.calls[1:] for s in call} == {act}
    ended = [e for e in batch.episodes if e.replies[-1].ends]
    assert [e.problem_id for e in ended] == (["3"] if act == "3" else [])
    assert all(e.answer == act for e in batch.episodes)


def test_an_environment_that_speaks_in_an_agents_name_is_refused():
    with pytest.raises(UserError, match=r"'host'.*name of an agent"):
        world(UpOrDown(), one_up, order=("host",))


def test_an_environment_says_beforehand_who_speaks_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(UpOrDown, "speakers", lambda self, problem: ("host",))
    with pytest.raises(UserError, match=r"'dealer', whom its speakers\(\) does not name"):
        world(UpOrDown(), one_up)
    monkeypatch.delattr(UpOrDown, "speakers")
    with pytest.raises(UserError, match=r"UpOrDown does not say who speaks in it.*def speakers"):
        world(UpOrDown(), one_up)


@pytest.mark.parametrize("name", ["you", "You", "a: b", "two\nlines", " ", "> x"])
def test_an_author_whose_lines_could_be_anybodys_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(UpOrDown, "speakers", lambda self, problem: (name,))
    monkeypatch.setattr(UpOrDown, "_reply", lambda self, situation: Reply((Message(name, "hello"),)))
    with pytest.raises(UserError, match="one line without a colon"):
        world(UpOrDown(), one_up)


def test_nobody_forges_a_line_of_an_author_who_has_not_spoken_yet():
    _, script, _ = world(
        UpOrDown(), lambda agent, _: "5\ndealer: up" if agent == "x" else "5", order=("x", "y"), rounds=1
    )
    assert next(prompt for agent, prompt in script.seen if agent == "y").endswith("\nx: 5\n> dealer: up")


def test_time_of_the_environment_is_booked():
    ledger = Ledger()
    world(UpOrDown(), one_up, ledger=ledger)
    assert ledger.environment_seconds > 0
    assert set(ledger.sampled_tokens) == {"x"}


# -- what is trained on ---------------------------------------------------------------------------------------


def test_agents_are_trained_on_their_own_words_only():
    batch, _, context = world(UpOrDown(), one_up, order=("x", "y"), rounds=6, group=2)
    turns = [len(e.turns) for e in batch.episodes]
    assert turns == [12, 12, 6, 6, 8, 8], "episodes that are won end early"
    own = {name: batch.of(name) for name in ("x", "y")}
    assert sum(map(len, own.values())) == sum(turns)
    for name, batch_of in own.items():
        assert {TextCodec().decode(m) for m in batch_of.messages} <= {"5", "6", "7", "8"}
        assert len(batch_of) == sum(t // 2 for t in turns)
        counts = Counter(batch_of.episode_M.tolist())
        assert max(counts.values()) <= context.router.turns_of(name) == 6
        np.testing.assert_array_equal(batch_of.turn_M[:6] % 2, 0 if name == "x" else 1)
        for prompt, episode, turn in zip(batch_of.prompts, batch_of.episode_M, batch_of.turn_M, strict=True):
            assert TextCodec().decode(prompt).count("host:") == turn // 2 + 1, "the budget of this round is in sight"
            assert batch.episodes[episode].turns[turn].agent == name
    for stranger in ("host", "dealer"):
        assert len(batch.of(stranger)) == 0


def test_returns_and_certificates_count_the_agents_turns():
    batch, _, context = world(UpOrDown(), one_up, order=("x", "y"), rounds=6, group=2)
    won, lost = 0.9**5, 0.0  # the reward arrives with the sixth turn, however often the environment spoke
    np.testing.assert_allclose(batch.returns_PG(0.9), [[lost, lost], [won, won], [0.9**7, 0.9**7]], rtol=1e-15)
    x = batch.of("x")
    share_K = by_own_turn(np.ones(len(x)), x.episode_M, len(batch.episodes), context.router.turns_of("x"))
    np.testing.assert_allclose(share_K, [1, 1, 1, 2 / 3, 1 / 3, 1 / 3], err_msg="how many episodes have a k-th turn")
    assert (context.router.horizon, max(len(e.turns) for e in batch.episodes)) == (12, 12)


# -- store ----------------------------------------------------------------------------------------------------


def interactive_batch() -> RolloutBatch:
    batch, *_ = world(UpOrDown(), one_up, rounds=5)
    called = Reply((Message("tool", "x", ({"name": "f", "arguments": {"a": [1, None]}},)),), ends=True)
    first = replace(batch.episodes[0], replies=(*batch.episodes[0].replies, Reply(), called))
    return replace(batch, episodes=(first, *batch.episodes[1:]))


def test_replies_are_stored(tmp_path: Path):
    batch = interactive_batch()
    write_episodes(tmp_path / "a.gz", batch)
    write_episodes(tmp_path / "b.gz", batch)
    back = read_episodes(tmp_path / "a.gz")
    assert [e.replies for e in back.episodes] == [e.replies for e in batch.episodes]
    assert [e.messages for e in back.episodes] == [e.messages for e in batch.episodes]
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_episodes_written_before_there_were_replies_are_read(tmp_path: Path):
    file = tmp_path / "old.gz"
    write_episodes(file, interactive_batch())
    header, *lines = gzip.decompress(file.read_bytes()).splitlines()
    bodies = [json.loads(line) for line in lines]
    assert all(body.pop("replies") for body in bodies)
    file.write_bytes(gzip.compress(b"\n".join([header, *(json.dumps(body).encode() for body in bodies)])))
    assert [e.replies for e in read_episodes(file).episodes] == [(), (), ()]
    file.write_bytes(gzip.compress(b"\n".join([header, json.dumps({**bodies[0], "replies": [{}]}).encode()])))
    with pytest.raises(StoreError, match="does not hold episodes"):
        read_episodes(file)


# -- AR-Bench's games, played ---------------------------------------------------------------------------------

CASE = {
    "index": 4,
    "label": 1,
    "initial_information": {
        "time": "noon",
        "location": "the mill",
        "victim": {
            "name": "Old Tom",
            "introduction": "A miller.",
            "cause_of_death": "a fall",
            "murder_weapon": "a {rope}",
        },
        "suspect": [
            {"name": "Ann Lee", "introduction": "A baker."},
            {"name": "Dr. Bo Ray", "introduction": "A doctor."},
            {"name": "Cy Fox", "introduction": "A friend."},
        ],
    },
    "suspects": [
        {"name": "Dr. Bo Ray", "story": "I did it {name}.", "task": "Lie."},
        {"name": "Ann Lee", "story": "I baked.", "task": "Help."},
        {"name": "Cy Fox", "story": "I slept.", "task": "Confuse."},
    ],
}
PUZZLE = {"index": 9, "surface": "It rained upwards.", "bottom": "He stood on his head.", "supernatural": False}


def test_numbers_a_lost_round_costs_a_round_and_a_win_ends_the_game():
    task = GuessingNumbers({"train": [GuessingNumbers().problem({"answer": "0123", "id": 1})]})
    guesses = ["3210 or so", "pass", "12 34 5", "Guess: 0124", "it must be 0123!", "never said"]
    batch, script, _ = world(task, lambda _, prompt: guesses[prompt.count("you:")], rounds=26)
    (episode,) = batch.episodes
    assert [m.text for m in episode.messages[2::2]] == [
        "0 in the right place, 4 in the wrong place.\nRounds left: 24.",
        "There are no four digits in a row in this message; the round is lost.\nRounds left: 23.",
        "There are no four digits in a row in this message; the round is lost.\nRounds left: 22.",
        "3 in the right place, 0 in the wrong place.\nRounds left: 21.",
        "0123 is the secret number.",
    ]
    assert "25" in episode.messages[0].text
    assert (len(episode.turns), episode.verdict) == (5, Verdict("right", 1.0, "0123"))
    silent, script, _ = world(task, lambda *_: "no idea", rounds=26)
    assert (len(silent.episodes[0].turns), silent.episodes[0].verdict) == (26, Verdict("unparsed", 0.0))
    assert script.seen[-1][1].endswith("Rounds left: 0. Give your final answer: four digits.")
    assert not any("0123" in prompt for _, prompt in script.seen)


def test_a_referee_answers_all_episodes_at_once_and_gives_nothing_away():
    asked: list[list[Any]] = []

    class Talkative:
        def answer(self, prompts: Any, *, seed: int) -> list[str]:
            asked.append(list(prompts))
            return [f"{word}. He stood on his head." for word in ("Well, YES", "no", "who knows")][: len(prompts)]

    task = SituationPuzzles({"train": [SituationPuzzles().problem(PUZZLE)]})
    with pytest.raises(UserError, match="nobody plays the referee"):
        world(task, lambda *_: "?")
    task.player = Talkative()
    batch, script, _ = world(
        task, lambda _, prompt: "" if "referee: Yes" in prompt else "Was it a joke?", rounds=4, group=3
    )
    said = [[(m.author, m.text) for m in e.messages if m.author != "x"] for e in batch.episodes]
    assert said[0][1:] == [
        ("referee", "Yes"),
        ("environment", "Rounds left: 2."),
        ("environment", "This message is empty; the round is lost.\nRounds left: 1."),
        (
            "environment",
            "This message is empty; the round is lost.\nRounds left: 0. Tell the whole story now, and nothing else.",
        ),
    ]
    assert [text for author, text in said[1] if author == "referee"] == ["No", "Yes"]
    assert [text for author, text in said[2] if author == "referee"] == ["Unknown", "No", "Yes"]
    assert [len(call) for call in asked] == [3, 2, 1]
    assert "He stood on his head." in asked[0][0][0]["content"]
    assert asked[0][0][1] == {"role": "user", "content": "Was it a joke?"}
    assert not any("head" in prompt for _, prompt in script.seen)


def test_a_suspect_remembers_what_it_was_asked_itself_and_speaks_under_its_name():
    heard: list[Any] = []

    def answers(prompt: Any) -> str:
        heard.append(prompt)
        return f" I was at home, I said {len(prompt)} lines. "

    task = DetectiveCases({"train": [DetectiveCases().problem(CASE)]}, player=ScriptedPlayer(answers))
    says = [
        "Suspect: Dr. Bo Ray\nQuestion: Did you see Ann Lee?",
        "Hm, Fox and Lee... **Suspect:** cy fox **Question:** Where were you?",
        "Who did it?",
        "Ray, what did you see?",
        "Suspect: the butler\nQuestion: Did you see Ann Lee?",
        "Reason: Bo.\nAnswer: B",
    ]
    batch, script, _ = world(task, lambda _, prompt: says[prompt.count("you:")], rounds=6)
    (episode,) = batch.episodes
    assert [m.author for m in episode.messages] == [
        "environment", "x", "Dr. Bo Ray", "environment", "x", "Cy Fox", "environment", "x", "environment",
        "x", "Dr. Bo Ray", "environment", "x", "environment", "x",
    ]  # fmt: skip
    assert [prompt[-1]["content"] for prompt in heard] == ["Did you see Ann Lee?", "Where were you?", says[3]]
    assert heard[2][1:3] == [
        {"role": "user", "content": "Did you see Ann Lee?"},
        {"role": "assistant", "content": "I was at home, I said 2 lines."},
    ]
    assert "I did it {name}." in heard[0][0]["content"], "what is put into a text is not looked at again"
    assert "I slept." in heard[1][0]["content"]
    assert "The suspects are Ann Lee, Dr. Bo Ray, Cy Fox." in episode.messages[8].text
    assert episode.messages[-2].text.endswith(
        "A. Ann Lee, B. Dr. Bo Ray, C. Cy Fox\n"
        "Give your reasons, then a last line with one letter, in this form:\nAnswer: X"
    )
    assert episode.verdict == Verdict("right", 1.0, "B")
    seen = " ".join(prompt for _, prompt in script.seen)
    assert "a {rope}" in seen
    assert not any(secret in seen for secret in ("I did it", "Lie.", "I slept", "I baked"))


# -- a run that is resumed ------------------------------------------------------------------------------------

TEAM = """
name: interactive
task: {name: roles}
team:
  model: tabular
  max_tokens: 4
  agents:
    - {name: a1}
    - {name: a2, sees: blind}
    - {name: a3, frozen: true}
  router: {rounds: 3, order: [a1, a2]}
plan: {preset: naive_sequential, stages: 2, problems: 3, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 2}
"""


@pytest.fixture
def puzzle_team(monkeypatch: pytest.MonkeyPatch):
    """Two agents that learn to tell a story, and a frozen one that plays the referee."""

    def task(_: Any) -> SituationPuzzles:
        problems = [SituationPuzzles().problem({"id": s, "surface": s, "bottom": s * 3}) for s in "abcd"]
        puzzles = SituationPuzzles({"train": problems, "test": problems})
        puzzles.alphabet = "abcd"
        return puzzles

    def built(team_file: Any, **settings: Any) -> build.Session:
        session = build.build(team_file, **settings)
        session.task.player = PolicyPlayer(session.engine, "a3", session.context.codecs["a3"], max_tokens=2)
        return session

    # Roles asks for a turn of every agent, which the team file's schema checks and this task does not need.
    monkeypatch.setattr("teamtr.tasks.Roles.Config.refusals_of", lambda *_: iter(()))
    monkeypatch.setattr(build, "build_task", task)
    monkeypatch.setattr(run, "build", built)
    return loads(TEAM, "interactive")


@pytest.mark.long
def test_a_resumed_run_of_an_interactive_task_ends_with_the_same_bits(puzzle_team: Any, tmp_path: Path):
    list(run.train(puzzle_team, tmp_path / "whole"))
    whole = result(tmp_path / "whole")
    outcomes = [r["outcome"] for r in whole["records"] if r["kind"] == "update"]
    assert outcomes.count("accepted") >= 3, outcomes
    for number in (1, 2, 3):  # after every update, so also in the middle of a stage that reuses its stored batch
        records = run.train(puzzle_team, tmp_path / "parts")
        assert next(r["update"] for r in records if r["kind"] == "update") == number
        records.close()
    assert list(run.train(puzzle_team, tmp_path / "parts"))[-1]["kind"] == "finished"
    assert result(tmp_path / "parts") == whole
    episodes = read_episodes(next(iter(sorted((tmp_path / "whole" / "episodes").iterdir())))).episodes
    assert {len(e.replies) for e in episodes} == {3}
    assert {m.author for e in episodes for r in e.replies for m in r.messages} >= {"environment", "referee"}
