"""The math tasks: what is read from rows, what the prompts ask for, what training must not see."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from teamtr.errors import UserError
from teamtr.grading.math.rules import RULES
from teamtr.tasks.benchmarks.math import Aime24, Aime25, Dapo, DeepScaleR, Gsm8k, Math, Math500
from teamtr.tasks.data.overlap import find_overlap, folded
from teamtr.tasks.data.rows import DataError, read_rows

SUMS = [{"problem": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(1, 41)]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Rows


def test_rows_of_every_form_are_read() -> None:
    task = Math()
    for row in [
        {"problem": "p", "answer": "7"},
        {"question": "p", "answer": 7},
        {"prompt": "p", "ground_truth": "7"},
        {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "7"}},
        {"question": "p", "answer": "3 + 4 = 7\n#### 7"},
        {"problem": "p", "answer": r"It is \boxed{7}."},
        {"problem": "p", "answer": "$7$"},
        {
            "prompt": r"p Let's think step by step and output the final answer within \boxed{}.",
            "answer": "7",
        },
    ]:
        problem = task.problem(row)
        assert (problem.answer, problem.columns["problem"]) == ("7", "p")
        assert problem.prompt == "p\n\n" + RULES["default"].instruction
        assert task.grade_replies([(problem, r"\boxed{7}")])[0].right
    bare = task.problem({"answer": "025", "response": "..."})
    assert (bare.prompt, bare.answer) == ("", "025")
    assert [v.kind for v in task.grade_replies([(bare, r"\boxed{25}"), (bare, r"\boxed{26}")])] == ["right", "wrong"]
    for row in ({}, {"answer": None}, {"answer": " "}, {"answer": ["7"]}, {"answer": True}):
        with pytest.raises(DataError, match=r"data\.jsonl, line 3: no answer"):
            task.problem(row, "data.jsonl, line 3")
    task.close()


def test_a_row_keeps_its_id_and_its_columns(tmp_path: Path) -> None:
    rows = [
        {"id": "I-1", "problem": "a", "answer": "1", "year": 2024},
        {"unique_id": "x/2", "problem": "b", "answer": "2"},
    ]
    rows += [
        {"problem": "c", "answer": "3"},
        {"problem": "c", "answer": "3"},
        {"id": "I-1", "problem": "d", "answer": "4"},
    ]
    problems = Aime24(write(tmp_path / "a.jsonl", rows)).problems("test")
    ids = [problem.id for problem in problems]
    assert ids[:2] == ["I-1", "x/2"]
    assert len(set(ids)) == 5
    assert ids[4] == "I-1-2"
    assert problems[0].columns["year"] == 2024


def test_every_task_says_what_it_is() -> None:
    kinds = (Math, Aime24, Aime25, Math500, Gsm8k, DeepScaleR, Dapo)
    assert [kind.name for kind in kinds] == ["math", "aime24", "aime25", "math500", "gsm8k", "deepscaler", "dapo"]
    assert [kind.samples for kind in kinds] == [1, 64, 64, 4, 1, 1, 1]
    assert Math500().labels(Math500().problem({"answer": "1", "subject": "Algebra", "level": 3})) == {
        "subject": "Algebra",
        "level": "3",
    }


@pytest.mark.parametrize("kind", [Math, Aime24, Math500, Gsm8k, Dapo])
def test_the_prompt_asks_for_what_the_grader_reads(kind: type[Math]) -> None:
    for grader in kind.rules:
        task = kind(grader=grader)
        problem = task.problem({"problem": "What is 3 + 4?", "answer": "7"})
        asked = problem.prompt.removeprefix("What is 3 + 4?\n\n")
        marker = next(marker for marker in ("\\boxed{}", "Answer:", "####") if marker in asked)
        assert marker.removesuffix("{}") in task.gold(problem)
        assert task.grade_replies([(problem, task.gold(problem))])[0].right
        wrong = task.wrong(problem, np.random.default_rng(1))
        assert len({answer.kind for answer in wrong}) >= 5
        verdicts = task.grade_replies([(problem, answer.reply) for answer in wrong])
        assert not any(verdict.right or verdict.reward for verdict in verdicts)
        task.close()


def test_votes_are_counted_by_answer() -> None:
    extract = Math().extract
    assert extract(r"\boxed{\frac12}") == extract("Answer: 0.5") == extract(r"\boxed{1/2}") != extract(r"\boxed{2}")
    assert extract(r"\boxed{x + 1}") == extract("$x+1$")
    assert extract(r"\boxed{50\%}") == extract(r"\boxed{0.5}"), "right for the same truths"
    assert extract(r"\boxed{500\%}") != extract(r"\boxed{5}"), "if the truth is 5, only one is right"
    assert extract("I would rather not say it") is None
    assert Gsm8k().extract("#### 1,200") == Gsm8k().extract("A: 1200")


def test_settings_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SUMS)
    for settings, complaint in [
        ({"grader": "best"}, "no grader 'best': use one of default, last_number, deepscaler, dapo"),
        ({"path": path, "test": path}, "either one path, or train and test"),
        ({"path": path, "held_out": 1.5}, "held_out"),
    ]:
        with pytest.raises(UserError, match=complaint):
            Math(**settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"aime24 has no split 'train': use one of \['test'\]"):
        Aime24(path).problems("train")
    with pytest.raises(DataError, match=r"line 1: no problem: none of .* is text among \['answer'\]"):
        Math(write(tmp_path / "b.jsonl", [{"answer": "1"}]))


# Splits, and what training must not see


def test_one_file_is_shared_out_by_text(tmp_path: Path) -> None:
    task = Math(write(tmp_path / "a.jsonl", SUMS), held_out=0.3)
    train, test = ({p.prompt for p in task.problems(split)} for split in ("train", "test"))
    assert len(train) + len(test) == 40
    assert 5 <= len(test) <= 20
    assert not train & test
    more = Math(write(tmp_path / "b.jsonl", [*SUMS[::-1], {"problem": "What is 1?", "answer": "1"}]), held_out=0.3)
    assert test <= {p.prompt for p in more.problems("test")}
    assert len(Aime24(tmp_path / "a.jsonl").problems("test")) == 40
    assert len(Dapo(tmp_path / "a.jsonl").problems("train")) == 40


def test_training_leaves_out_what_is_doubtful_repeated_or_evaluated(tmp_path: Path) -> None:
    rows = [
        *SUMS[:10],
        SUMS[0],  # a repetition
        {"problem": "What is odd?", "answer": "1"},
        {"problem": "What is odd?", "answer": "3"},  # two answers
        {"problem": "What is padded?", "answer": "07"},
        {"problem": "What is padded?", "answer": "7"},  # one answer, written twice
        {"problem": "What is nothing?", "answer": None},
        {"problem": "What is open?", "answer": "\\frac{1}{2"},
    ]
    train = write(tmp_path / "train.jsonl", rows)
    test = write(tmp_path / "test.jsonl", [{"problem": "WHAT is $3$ + 3 ?", "answer": "6"}])
    other = write(tmp_path / "other.json", [{"question": "What is 5 + 5?", "answer": "10"}])
    task = DeepScaleR(train=train, test=test, against=[other])
    kept = {problem.columns["problem"] for problem in task.problems("train")}
    assert kept == {row["problem"] for row in SUMS[:10]} - {"What is 3 + 3?", "What is 5 + 5?"} | {"What is padded?"}
    assert len(task.problems("train")) == 9
    assert len(task.problems("test")) == 1
    assert task.warnings == (
        "deepscaler: 2 rows have no usable answer and were left out",
        "deepscaler: 1 problems stand there with two different answers and were left out",
        "deepscaler: 2 rows repeat a problem and were left out",
        "deepscaler: 2 training rows repeat evaluation problems: 2 word for word (2 problems), 0 nearly (0); "
        "they were left out",
    )


def test_overlap_word_for_word_and_nearly() -> None:
    story = (
        "Anna has {} apples and gives {} of them to her brother, who eats two and returns the rest to her on the next "
        "day, when she buys as many again as she has. How many are left?"
    )
    evaluation = [story.format(17, 5), "What is the derivative of $x^2$?"]
    training = [
        story.format("$17$", "$5$").upper().replace(".", ";"),
        story.format(18, 5),
        "What is the integral of $x^2$?",
        "Bert has 17 pears.",
        "",
    ]
    overlap = find_overlap(training, evaluation)
    assert overlap.exact == {0: 0}
    assert overlap.near == {1: 0}
    assert overlap.rows == {0, 1}
    assert "1 word for word (1 problems), 1 nearly (1)" in str(overlap)
    assert folded("A_b-2 Ä!") == "ab2ä"
    assert find_overlap(training, []).rows == set()


# Files and the hub


def test_a_json_list_equals_jsonl(tmp_path: Path) -> None:
    one, other = (Math500(write(tmp_path / name, SUMS)).problems("test") for name in ("a.jsonl", "a.json"))
    assert one == other
    for content, complaint in [
        ('{"problem": 1}', r"a\.json: a \.json file must hold a list"),
        ("[{},\n 3]", r"a\.json, item 2: a row must be a JSON object, found 3"),
        ("[{}", r"a\.json, line 1, column \d+: not JSON"),
    ]:
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=complaint):
            list(read_rows(tmp_path / "a.json"))


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, str | None]] = []

    def load_dataset(name: str, configuration: str | None, split: str | None) -> Any:
        asked.append((name, configuration, split))
        if name == "nobody/nothing":
            raise ConnectionError("Couldn't reach the Hub")
        loaded = {"test": [{"question": "q", "answer": "#### 4"}], "train": [{"question": "r", "answer": "#### 5"}]}
        return loaded if split is None else loaded[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = Gsm8k(train="openai/gsm8k:main:train", test="openai/gsm8k:main:test")
    assert [p.answer for split in ("train", "test") for p in task.problems(split)] == ["5", "4"]
    assert asked[0] == ("openai/gsm8k", "main", "train")
    assert [row.where for row in read_rows("openai/gsm8k:test")] == ["openai/gsm8k:test, row 1"]
    with pytest.raises(DataError, match=r"has the splits \['test', 'train'\]: name one, as in openai/gsm8k:test"):
        Gsm8k("openai/gsm8k")
    with pytest.raises(DataError, match=r"nobody/nothing: not a local file.*ConnectionError.*give its file"):
        Gsm8k("nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"no such file.*teamtr\[hub\]"):
        Gsm8k("openai/gsm8k")
    with pytest.raises(FileNotFoundError, match="no such data file"):
        Gsm8k("openai/gsm8k.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "mine.jsonl", SUMS)
    assert len(list(read_rows("data/mine.jsonl"))) == 40, "a local file goes first"
