"""GSM8K: the official rule, reproduced for every labelled solution, and every gold answer of both files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.grading.math.gsm8k import gsm8k_answer
from teamtr.tasks.benchmarks.math import Gsm8k
from teamtr.types import Problem

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no GSM8K data in {DATA.parent}: set TEAMTR_DATA")


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def check_every_row(task: Gsm8k, problems: list[Problem]) -> None:
    rng = np.random.default_rng(0)
    gold = task.grade_replies([(problem, task.gold(problem)) for problem in problems])
    assert all(verdict.right for verdict in gold)
    replies = [(problem, answer) for problem in problems for answer in task.wrong(problem, rng)]
    verdicts = task.grade_replies([(problem, answer.reply) for problem, answer in replies])
    assert [(answer, p.answer) for (p, answer), v in zip(replies, verdicts, strict=True) if v.right] == []
    assert len({answer.kind for _, answer in replies}) >= 5
    task.close()


@needs_data
@pytest.mark.parametrize("grader", ["official", "default"])
def test_every_labelled_solution(grader: str) -> None:
    task = Gsm8k(grader=grader)
    labelled = [
        (task.problem({"question": row["question"], "ground_truth": row["ground_truth"]}), solution)
        for row in rows("golden_example_model_solutions.jsonl")
        for solution in row.values()
        if isinstance(solution, dict)
    ]
    assert len(labelled) >= 1300
    verdicts = task.grade_replies([(problem, solution["solution"]) for problem, solution in labelled])
    assert [v.right for v in verdicts] == [solution["is_correct"] for _, solution in labelled]
    task.close()


@pytest.mark.long
@needs_data
@pytest.mark.parametrize(
    ("file", "count", "grader"),
    [
        ("test.jsonl", 1319, "official"),
        ("test.jsonl", 1319, "default"),
        ("train.jsonl", 7473, "official"),
        pytest.param("train.jsonl", 7473, "default", marks=pytest.mark.slow),
    ],
)
def test_every_row(file: str, count: int, grader: str) -> None:
    task = Gsm8k(grader=grader)
    problems = [task.problem(row) for row in rows(file)]
    assert len(problems) == count
    assert all(problem.answer == gsm8k_answer(row["answer"]) for problem, row in zip(problems, rows(file), strict=True))
    check_every_row(task, problems)


@pytest.mark.parametrize(
    ("reply", "official", "default"),
    [
        ("... #### 1,200", "right", "right"),
        ("#### 1200\n#### 7", "right", "right"),  # the first
        ("#### 7\n#### 1200", "wrong", "wrong"),
        ("#### 1200.", "wrong", "wrong"),  # compared as text
        ("#### 1200 dollars", "right", "right"),
        ("so\nA: 1200", "right", "right"),
        ("A: 1/5", "wrong", "wrong"),
        ("#### $1200", "unparsed", "right"),  # the official rule finds nothing, so that we read on
        (r"\boxed{1200}", "unparsed", "right"),
        ("The answer is 1,200 dollars.", "unparsed", "right"),
        ("1200", "unparsed", "right"),
        ("I guess that it must be 1200 or so", "unparsed", "unparsed"),
        ("", "unparsed", "unparsed"),
    ],
)
def test_the_official_rule_goes_first(reply: str, official: str, default: str) -> None:
    row = {"question": "How much?", "answer": "12 * 100 = <<12*100=1200>>1,200\n#### 1,200"}
    for grader, kind in (("official", official), ("default", default)):
        task = Gsm8k(grader=grader)
        assert [v.kind for v in task.grade_replies([(task.problem(row), reply)])] == [kind]
        task.close()
