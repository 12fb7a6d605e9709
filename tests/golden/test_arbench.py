"""AR-Bench: final answers graded as its own evaluators grade them, for every row, and an exact game of numbers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_growth import assert_linear
from teamtr.errors import UserError
from teamtr.tasks.benchmarks.arbench.detective import DetectiveCases, letter_in, question_in
from teamtr.tasks.benchmarks.arbench.numbers import GuessingNumbers, feedback, guess_in
from teamtr.tasks.benchmarks.arbench.puzzles import HACKABLE, SituationPuzzles, character_f1, word_f1, word_in
from teamtr.tasks.benchmarks.arbench.task import ArBench
from teamtr.tasks.benchmarks.arbench.texts import texts_of
from teamtr.tasks.data.replies import grade_file
from teamtr.tasks.players import ScriptedPlayer
from teamtr.types import Problem, Reply, Situation

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data")) / "arbench"
FILES = {
    GuessingNumbers: ({"train": "gn_train.json", "test": "gn_test.json"}, {"train": 4940, "test": 100}),
    SituationPuzzles: ({"train": "sp_train.jsonl", "test": "sp_test.jsonl"}, {"train": 400, "test": 100}),
    DetectiveCases: ({"test": "dc_test.jsonl"}, {"test": 100}),
}
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no AR-Bench data in {DATA}; set TEAMTR_DATA")

GAMES = [GuessingNumbers, SituationPuzzles, DetectiveCases]
SECRETS = ["".join(digits) for digits in permutations("0123456789", 4)]


def person(name: str, **more: str) -> dict[str, str]:
    return {"name": name, "introduction": f"{name} is here.", **more}


def case(label: int, names: tuple[str, ...] = ("Ada Bell", "Ben Cole", "Dr. Eve Dunn")) -> dict[str, Any]:
    victim = person("Abe", cause_of_death="poison", murder_weapon="tea")
    return {
        "index": label,
        "label": label,
        "initial_information": {
            "time": "night",
            "location": "attic",
            "victim": victim,
            "suspect": [person(n) for n in names],
        },
        "suspects": [person(n, story=f"{n}'s story", task=f"{n}'s task") for n in reversed(names)],
    }


OWN_ROWS: dict[type[ArBench], list[dict[str, Any]]] = {
    GuessingNumbers: [{"answer": "0123"}, {"number": 9876}, {"secret": "5061"}],
    SituationPuzzles: [{"index": i, "surface": f"Why {i}?", "bottom": f"Because of {i} old owls."} for i in range(3)],
    DetectiveCases: [case(label) for label in range(3)],
}


def own(game: type[ArBench]) -> ArBench:
    return game({"test": [game().problem(row) for row in OWN_ROWS[game]]})


def real(game: type[ArBench], **settings: Any) -> ArBench:
    return game.from_files({split: DATA / file for split, file in FILES[game][0].items()}, **settings)


def assert_gold_is_right_and_wrong_is_not(task: ArBench, problems: list[Problem]) -> None:
    rng = np.random.default_rng(0)
    for problem, verdict in zip(problems, task.grade_replies([(p, task.gold(p)) for p in problems]), strict=True):
        assert (verdict.kind, verdict.reward) == ("right", 1.0), problem.id
    for problem in problems:
        wrong = task.wrong(problem, rng)
        assert len({w.kind for w in wrong}) >= 5
        for answer, verdict in zip(wrong, task.grade_replies([(problem, w.reply) for w in wrong]), strict=True):
            assert not verdict.right, (problem.id, answer)
            assert verdict.reward < 1.0, (problem.id, answer)


# -- every row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", GAMES)
def test_own_rows(game: type[ArBench]) -> None:
    task = own(game)
    assert_gold_is_right_and_wrong_is_not(task, list(task.problems("test")))


@pytest.mark.long
@needs_data
@pytest.mark.parametrize("game", GAMES)
def test_every_row_of_the_benchmark(game: type[ArBench]) -> None:
    task = real(game)
    assert {split: len(task.problems(split)) for split in FILES[game][1]} == FILES[game][1]
    for split in FILES[game][1]:
        problems = list(task.problems(split))
        assert len({p.id for p in problems}) == len(problems)
        assert_gold_is_right_and_wrong_is_not(task, problems)


@needs_data
def test_the_murderers_letter_is_that_of_the_person_who_did_it() -> None:
    rows = [json.loads(line) for line in (DATA / "dc_test.jsonl").read_text().splitlines()]
    for row, problem in zip(rows, real(DetectiveCases).problems("test"), strict=True):
        (guilty,) = [person["name"] for person in row["suspects"] if person.get("is_murderer")]
        assert problem.columns["names"]["ABCDE".index(problem.answer)] == guilty


@needs_data
@pytest.mark.parametrize("game", [SituationPuzzles, DetectiveCases])
def test_what_the_team_is_told_holds_nothing_hidden(game: type[ArBench]) -> None:
    task = real(game, player=ScriptedPlayer(lambda prompt: "Yes"))
    for problem in task.problems("test"):
        (opening,) = task.environment.reply([Situation(problem, (), (), 25)], seed=0)
        told = problem.prompt + "".join(m.text for m in opening.messages)
        hidden = [problem.answer] if game is SituationPuzzles else [s["story"] for s in problem.columns["suspects"]]
        assert not any(secret in told for secret in hidden)
        assert "25" in told


# -- the official rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("Guess: 8362", "8362"),
        ("1234 then 5678.", "5678"),
        ("83621", "8362"),  # fours are read from the left: the fifth digit stands alone
        ("12345678", "5678"),
        ("[8362]", "8362"),
        ("٠١٢٣", "0123"),
        ("8 3 6 2", None),
        ("836", None),
        ("", None),
    ],
)
def test_guess(text: str, guess: str | None) -> None:
    assert guess_in(text) == guess


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Reason: so.\nAnswer: B", "B"),
        ("Answer:\n\n C", "C"),
        ("Answer: A, no: D", "D"),
        ("Answer: B. Ada Cole", "C"),  # letters of names count too
        ("Answer: A\nAnswer: B", "A"),  # the first marker counts
        ("Answer: none\nB", None),
        ("answer: B", None),
        ("B", None),
        ("Answer: b", None),
        ("Answer:", None),
    ],
)
def test_letter(text: str, letter: str | None) -> None:
    assert letter_in(text) == letter


def test_character_f1() -> None:
    assert character_f1("abc", "abc") == 1.0
    assert character_f1("abcd", "abef") == 0.5
    assert character_f1("aab", "ab") == pytest.approx(0.8)  # 2 of 3 and 2 of 2
    assert character_f1("AB", "ab") == character_f1("", "ab") == character_f1("xyz", "ab") == 0.0


def test_a_story_is_right_word_for_word_and_its_reward_is_the_f1_of_the_whole_reply() -> None:
    task = own(SituationPuzzles)
    problem = task.problems("test")[0]
    bottom = str(problem.answer)
    replies = [bottom, f"A: {bottom}", f"  {bottom.upper()}\n", "".join(sorted(bottom)), "\n"]
    verdicts = task.grade_replies([(problem, reply) for reply in replies])
    assert [v.kind for v in verdicts] == ["right", "right", "right", "wrong", "unparsed"]
    assert [v.reward for v in verdicts] == [character_f1(reply, bottom) for reply in replies]
    assert verdicts[3].reward == 1.0, "the benchmark's score knows no order, so it alone cannot tell what is right"


def test_word_f1() -> None:
    assert word_f1("Owls, eating mice!", "owls eating mice") == 1.0
    assert word_f1("the owls ate", "owls ate mice") == pytest.approx(0.8)  # 2 of 2 and 2 of 3; "the" does not count
    assert word_f1("mice ate owls", "owls ate mice") == pytest.approx(1 / 3)
    assert word_f1("eowls ate", "owls eat") == word_f1("", "owls") == word_f1("the the", "the owl") == 0.0
    assert word_f1("It was him.", "it was him") == 1.0, "a story of words that every story has"
    assert_linear(lambda text: word_f1(text, "owls ate mice " * 30), lambda n: "owls mice " * (n // 10), 200_000)


def test_the_benchmarks_own_score_of_stories_warns_and_words_are_the_alternative(tmp_path: Path) -> None:
    problem = own(SituationPuzzles).problems("test")[0]
    soup = "".join(sorted(str(problem.answer)))
    by_characters, by_words = SituationPuzzles(), SituationPuzzles(score="words")
    assert [task.grade_replies([(problem, soup)])[0].reward for task in (by_characters, by_words)] == [1.0, 0.0]
    gold = by_words.grade_replies([(problem, by_words.gold(problem))])[0]
    assert (gold.kind, gold.reward) == ("right", 1.0)
    assert by_characters.warnings == (HACKABLE,)
    assert by_words.warnings == ()
    file = tmp_path / "replies.jsonl"
    file.write_text(json.dumps({**OWN_ROWS[SituationPuzzles][0], "response": soup}))
    assert grade_file("arbench:sp", file, tmp_path / "graded.jsonl").warnings == (HACKABLE,)
    with pytest.raises(UserError, match="characters, words"):
        SituationPuzzles(score="letters")


@pytest.mark.parametrize("game", GAMES)
@given(text=st.text() | st.text("Answer: ABCDE0123456789\n"))
def test_no_text_stops_a_grader_or_earns_more_than_the_truth(game: type[ArBench], text: str) -> None:
    task = own(game)
    problem = task.problems("test")[0]
    (verdict,) = task.grade_replies([(problem, text)])
    assert 0.0 <= verdict.reward <= 1.0
    assert verdict.right == (task.extract(text) is not None and task.extract(text) == task.extract(task.gold(problem)))


@pytest.mark.long
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize(
    "text_of",
    [lambda n: "1" * n, lambda n: "Answer: " * (n // 8), lambda n: "Answer:" + "\n" * n, lambda n: "A" * n],
    ids=["digits", "marks", "lines", "letters"],
)
def test_a_megabyte_is_graded_in_linear_time(game: type[ArBench], text_of: Callable[[int], str]) -> None:
    task = own(game)
    problem = task.problems("test")[-1]
    (verdict,) = task.grade_replies([(problem, text_of(1_000_000))])
    assert not verdict.right
    assert_linear(lambda text: task.grade_replies([(problem, text)]), text_of, 400_000)


# -- the game of numbers --------------------------------------------------------------------------------------


def brute_force(secret: str, guess: str) -> tuple[int, int]:
    """Strike out what is in place, then look for each remaining digit of the guess and strike it out too."""
    rest, open_digits, right, wrong = [], [], 0, 0
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            right += 1
        else:
            rest.append(s)
            open_digits.append(g)
    for digit in open_digits:
        if digit in rest:
            rest.remove(digit)
            wrong += 1
    return right, wrong


@pytest.mark.long
def test_feedback_is_exact() -> None:
    rng = np.random.default_rng(0)
    every_guess = [f"{n:04d}" for n in range(10_000)]  # a guess may repeat digits, the secret does not
    for secret in rng.choice(SECRETS, 6):
        assert all(feedback(secret, guess) == brute_force(secret, guess) for guess in every_guess)
    for secret, n in zip(SECRETS, rng.integers(0, 10_000, len(SECRETS)), strict=True):
        assert feedback(secret, every_guess[n]) == brute_force(secret, every_guess[n])
    assert feedback("0123", "0132") == (2, 2)
    assert feedback("0123", "0000") == (1, 0)


def test_who_thinks_wins_through_the_environment() -> None:
    """A player that guesses what fits all replies so far, read from their text, finds every secret."""
    task = GuessingNumbers()
    rng = np.random.default_rng(1)
    rounds = Counter[int]()
    for secret in rng.choice(SECRETS, 12, replace=False):
        problem = task.problem({"answer": secret})
        acts, replies, candidates = (), (), SECRETS
        while True:
            (reply,) = task.environment.reply([Situation(problem, acts, replies, 25 - len(acts))], seed=0)
            if reply.ends:
                break
            if acts:
                words = reply.messages[0].text.split()
                heard = (int(words[0]), int(words[5]))
                candidates = [c for c in candidates if brute_force(c, acts[-1]) == heard]
            acts, replies = (*acts, str(rng.choice(candidates))), (*replies, reply)
        assert acts[-1] == secret
        rounds[len(acts)] += 1
    assert max(rounds) <= 10, rounds


def test_the_secret_ends_the_game_only_when_it_is_the_last_guess() -> None:
    task = GuessingNumbers()
    problem = task.problem({"answer": "8362"})

    def reply(act: str) -> Reply:
        return task.environment.reply([Situation(problem, (act,), (Reply(),), 3)], seed=0)[0]

    assert reply("8362").ends
    assert reply("1234, no: 8362!").ends
    assert not reply("8362? no: 1234").ends
    assert not reply("8 3 6 2").ends


# -- questions ------------------------------------------------------------------------------------------------

NAMES = ("Ada Bell", "Ben Bell", "Dr. Eve Dunn")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Suspect: Ada Bell\nQuestion: Where?", ("Ada Bell", "Where?")),
        ("suspect: ben bell question: Did you see Ada Bell?", ("Ben Bell", "Did you see Ada Bell?")),
        ("I trust Ada Bell.\nSuspect: Dunn\nQuestion: Why?", ("Dr. Eve Dunn", "Why?")),
        ("Dr. Eve Dunn, did Ada Bell lie?", ("Dr. Eve Dunn", "Dr. Eve Dunn, did Ada Bell lie?")),
        ("Suspect: Bell\nQuestion: Which of you?", None),  # two have this name
        ("Suspect: the cook\nQuestion: Ada Bell?", None),
        ("Suspect: Ada Bell\nQuestion: ", None),
        ("Suspect: Dunning\nQuestion: Who?", None),
        ("", None),
    ],
)
def test_question(text: str, asked: tuple[str, str] | None) -> None:
    assert question_in(text, NAMES) == asked


@pytest.mark.parametrize(
    ("said", "word"),
    [("Yes.", "Yes"), ("no", "No"), ("UNKNOWN", "Unknown"), ("I do not know", "Unknown"), ("", "Unknown"),
     ("The answer is: No, never. Yes.", "No")],
)  # fmt: skip
def test_a_referee_has_three_words(said: str, word: str) -> None:
    assert word_in(said) == word


# -- texts ----------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("game", GAMES)
def test_the_benchmarks_own_texts(game: type[ArBench]) -> None:
    said: list[str] = []

    def player(prompt: list[dict[str, str]]) -> str:
        said.append(prompt[0]["content"])
        return "No."

    task = real(game, player=ScriptedPlayer(player), prompts=DATA / "prompts.json")
    theirs = json.loads((DATA / "prompts.json").read_text())[game.kind]
    problem = task.problems("test")[0]
    act = {
        "gn": "0000",
        "sp": "Q: Did it rain?",
        "dc": f"Suspect: {problem.columns.get('names', '?')[0]}\nQuestion: Why?",
    }
    (opening,) = task.environment.reply([Situation(problem, (), (), 25)], seed=0)
    (middle,) = task.environment.reply([Situation(problem, (act[game.kind],), (opening,), 24)], seed=0)
    (last,) = task.environment.reply([Situation(problem, (act[game.kind],), (opening,), 0)], seed=0)
    told = [problem.prompt, *(m.text for r in (opening, middle, last) for m in r.messages), *said]
    assert not any(mark in text for text in told for mark in ("{turn}", "{question}", "{answer}", "{name}", "{left}"))
    assert opening.messages[0].text.startswith(theirs["propose_template"].split("{")[0].strip())
    assert "25 turns" in opening.messages[0].text
    final = {"gn": "final_guess_prompt", "sp": "get_answer_prompt", "dc": "select_murderer_template"}[game.kind]
    assert theirs[final].split("{")[0].strip() in last.messages[-1].text
    if game is not GuessingNumbers:
        assert said
        assert (
            said[0][:60]
            == theirs[{"sp": "system_prompt_with_2shots", "dc": "respond_template"}[game.kind]].strip()[:60]
        )


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        texts_of("gn", tmp_path / "none.json")
    (tmp_path / "odd.json").write_text('{"gn": {"propose_template": 1}}')
    with pytest.raises(UserError, match=r"no text 'propose_template' under 'gn'"):
        texts_of("gn", tmp_path / "odd.json")
    with pytest.raises(UserError, match="under 'sp'"):
        texts_of("sp", tmp_path / "odd.json")


# -- rows that cannot be used ---------------------------------------------------------------------------------


def changed(**cells: Any) -> dict[str, Any]:
    return {**case(0), **cells}


@pytest.mark.parametrize(
    ("game", "row", "complaint"),
    [
        (GuessingNumbers, {}, "four different digits"),
        (GuessingNumbers, {"answer": "1223"}, "four different digits, found '1223'"),
        (GuessingNumbers, {"answer": "12345"}, "four different digits"),
        (GuessingNumbers, {"answer": True}, "four different digits"),
        (SituationPuzzles, {"surface": "a"}, "'bottom' must be text, found None"),
        (SituationPuzzles, {"surface": " ", "bottom": "b"}, "'surface' must be text"),
        (DetectiveCases, changed(label=3), "'label' must be a place from 0 to 2, found 3"),
        (DetectiveCases, changed(label="0"), "'label' must be a place"),
        (DetectiveCases, changed(label=True), "'label' must be a place"),
        (DetectiveCases, changed(suspects=[]), "same people"),
        (DetectiveCases, changed(suspects=None), "'suspects' must be a list"),
        (DetectiveCases, changed(initial_information=None), "'initial_information'"),
        (DetectiveCases, case(0, ("Ann", "Ann")), "different names"),
    ],
)
def test_unusable_rows_are_refused_with_their_place(game: type[ArBench], row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl, line 7: .*{complaint}"):
        game().problem(row, "rows.jsonl, line 7")


def test_files_and_their_mistakes(tmp_path: Path) -> None:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    numbers = GuessingNumbers.from_files({"test": write("n.json", '["0123", "4567"]')})
    assert [(p.id, p.answer) for p in numbers.problems("test")] == [("0", "0123"), ("1", "4567")]
    rows = "\n".join(json.dumps(row) for row in (*OWN_ROWS[SituationPuzzles], OWN_ROWS[SituationPuzzles][0]))
    stories = SituationPuzzles.from_files({"train": write("s.jsonl", rows)})
    assert [p.id for p in stories.problems("train")] == ["0", "1", "2", "0-2"]
    for text, complaint in (("{", "not JSON"), ("{}", "must be a list"), ('["1233"]', r"bad.json, item 0: .*'1233'")):
        with pytest.raises(UserError, match=complaint):
            GuessingNumbers.from_files({"test": write("bad.json", text)})
    with pytest.raises(FileNotFoundError, match="no such data file"):
        GuessingNumbers.from_files({"test": tmp_path / "none.json"})
    with pytest.raises(UserError, match=r"nobody plays the suspects"):
        DetectiveCases().environment  # noqa: B018
