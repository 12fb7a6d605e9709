"""Mathematics: the paper's verifier mirrored to the row, our own rule beside it, the gold answer of every row."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.grading.math.deepscaler import mathd_normalise
from teamtr.grading.math.rules import RULES, MathGrader
from teamtr.tasks.benchmarks.math import Aime24, Aime25, Dapo, DeepScaleR, Math, Math500
from teamtr.tasks.data.overlap import folded
from teamtr.tasks.data.rows import DataError, read_rows
from teamtr.types import Problem

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "math500").is_dir(), reason=f"no math data in {DATA}: set TEAMTR_DATA to the benchmarks' folder"
)

EVALUATION = [DATA / "math500/math500.jsonl", DATA / "aime24/aime24.jsonl", DATA / "aime25/aime25.jsonl"]


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def boxed(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


@pytest.fixture(scope="module")
def mirror() -> Iterator[MathGrader]:
    with MathGrader(RULES["deepscaler"], seconds_per_item=10) as grader:
        yield grader


@pytest.fixture(scope="module")
def ours() -> Iterator[MathGrader]:
    with MathGrader(RULES["default"], seconds_per_item=10) as grader:
        yield grader


# The golden files


@pytest.mark.long
@needs_data
def test_the_mirror_agrees_with_every_labelled_pair(mirror: MathGrader) -> None:
    pairs = rows("math500/golden_deepscaler_grader_pairs.jsonl")
    assert len(pairs) >= 500
    for pair in pairs:
        assert (mathd_normalise(pair["given"]) == mathd_normalise(pair["ground_truth"])) is pair["mathd"], pair
    verdicts = mirror.grade([(boxed(pair["given"]), pair["ground_truth"]) for pair in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.right is not pair["correct"]] == []
    assert {verdict.kind for verdict in verdicts} == {"right", "wrong"}


@needs_data
def test_our_rule_differs_from_it_nowhere_on_the_labelled_pairs(ours: MathGrader) -> None:
    pairs = rows("math500/golden_deepscaler_grader_pairs.jsonl")
    verdicts = ours.grade([(boxed(pair["given"]), pair["ground_truth"]) for pair in pairs])
    differ = {
        (pair["given"], pair["ground_truth"])
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if verdict.right is not pair["correct"]
    }
    assert differ == set()


@pytest.mark.long
@needs_data
def test_agreement_with_another_grader_on_whole_replies(mirror: MathGrader, ours: MathGrader) -> None:
    labelled = [
        (reply, row["gt"], score)
        for row in rows("math500/golden_qwen25math_100x8.jsonl")
        for reply, score in zip(row["code"], row["score"], strict=True)
    ]
    assert len(labelled) >= 300
    for grader in (mirror, ours):
        verdicts = grader.grade([(reply, truth) for reply, truth, _ in labelled])
        assert [v.right for v in verdicts] == [score for _, _, score in labelled]


def documented_differences() -> list[tuple[str, str, str, str]]:
    """(answer, truth, the verifier's verdict, ours) as the documentation has them."""
    table = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \| (right|wrong) \| (right|wrong) \|", (ROOT / "docs/graders.md").read_text(), re.M
    )
    assert len(table) >= 20
    return table


@pytest.mark.long
def test_the_documented_differences_are_true(mirror: MathGrader, ours: MathGrader) -> None:
    table = documented_differences()
    pairs = [(boxed(given), truth) for given, truth, _, _ in table]
    assert [v.kind for v in mirror.grade(pairs)] == [verdict for _, _, verdict, _ in table]
    assert [v.kind for v in ours.grade(pairs)] == [verdict for _, _, _, verdict in table]
    assert all(theirs != our for _, _, theirs, our in table)


# Every row


def check_every_row(task: Math, problems: list[Problem]) -> None:
    """Gold is right, and six kinds of wrong answer are not."""
    rng = np.random.default_rng(0)
    gold = task.grade_replies([(problem, task.gold(problem)) for problem in problems])
    assert [problem.answer for problem, verdict in zip(problems, gold, strict=True) if not verdict.right] == []
    replies = [(problem, answer) for problem in problems for answer in task.wrong(problem, rng)]
    assert len({answer.kind for _, answer in replies}) >= 5
    verdicts = task.grade_replies([(problem, answer.reply) for problem, answer in replies])
    taken = [(answer, problem.answer) for (problem, answer), v in zip(replies, verdicts, strict=True) if v.right]
    assert taken == []
    assert not task.failures
    assert sum(task.verdicts.values()) == len(problems) + len(replies)
    task.close()


@needs_data
@pytest.mark.parametrize("grader", ["default", "deepscaler"])
@pytest.mark.parametrize(
    ("kind", "file", "count"),
    [
        (Aime24, "aime24/aime24.jsonl", 30),
        (Aime24, "aime24/aime24_qwen25math.jsonl", 30),
        (Aime25, "aime25/aime25.jsonl", 30),
        (Aime25, "aime25/aime25_areal.jsonl", 30),
        (Aime25, "aime25/aime25_oneshotrlvr.jsonl", 30),
    ],
)
def test_every_row_of_aime(kind: type[Math], file: str, count: int, grader: str) -> None:
    task = kind(DATA / file, grader=grader)
    problems = list(task.problems("test"))
    assert (len(problems), task.samples) == (count, 64)
    check_every_row(task, problems)


@pytest.mark.long
@needs_data
def test_every_row_of_math500() -> None:
    task = Math500(DATA / "math500/math500.jsonl")
    problems = list(task.problems("test"))
    assert (len(problems), task.samples) == (500, 4)
    assert len({task.labels(problem)["subject"] for problem in problems}) == 7
    assert {task.labels(problem)["level"] for problem in problems} == set("12345")
    check_every_row(task, problems)


@pytest.mark.long
@needs_data
@pytest.mark.parametrize("file", ["deepscaler_aime_component", "deepscaler_math_component", "dsr_sub_1209"])
def test_some_rows_of_deepscaler(file: str, tmp_path: Path) -> None:
    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in rows(f"deepscaler/{file}.jsonl")[::12]))
    task = DeepScaleR(some)
    check_every_row(task, list(task.problems("train")))


TRAINING_SETS = [
    (DeepScaleR, "deepscaler/deepscaler_aime_component.jsonl", 975),
    (DeepScaleR, "deepscaler/deepscaler_math_component.jsonl", 7474),
    (DeepScaleR, "deepscaler/dsr_sub_1209.jsonl", 1209),
    (Dapo, "dapo/dapo_math_17k.parquet", 17917),
]


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file", "count"), TRAINING_SETS)
def test_every_row_of_the_training_sets(kind: type[Math], file: str, count: int) -> None:
    """As they stand, repetitions and all, but for the rows that have no answer, or one that fits in no box."""
    task = kind()
    problems = []
    unusable = 0
    for row in read_rows(DATA / file):
        try:
            problem = task.problem(row.cells, row.where)
        except DataError:
            unusable += 1
            continue
        if problem.answer.count("{") == problem.answer.count("}"):
            problems.append(problem)
        else:
            unusable += 1
    assert len(problems) + unusable == count
    assert unusable <= 4
    check_every_row(task, problems)


@needs_data
@pytest.mark.slow
def test_every_row_of_math500_by_the_mirror() -> None:
    task = Math500(DATA / "math500/math500.jsonl", grader="deepscaler", seconds_per_item=20)
    check_every_row(task, list(task.problems("test")))


@needs_data
@pytest.mark.slow
def test_every_row_of_dapo_by_its_own_rule() -> None:
    task = Dapo(DATA / "dapo/dapo_math_17k.parquet", grader="dapo")
    check_every_row(task, list(task.problems("train")))


# Overlap


@pytest.mark.long
@needs_data
def test_six_problems_of_deepscaler_are_in_math500_and_are_left_out() -> None:
    task = DeepScaleR(DATA / "deepscaler/deepscaler_aime_component.jsonl", against=EVALUATION)
    assert (len(task.overlap.exact), len(task.overlap.near)) == (6, 2)
    assert len(task.problems("train")) == 975 - 8
    assert any("6 word for word (6 problems), 2 nearly (2)" in warning for warning in task.warnings)
    asked = {folded(row["problem"]) for row in rows("math500/math500.jsonl")}
    assert not asked & {folded(problem.columns["problem"]) for problem in task.problems("train")}


@pytest.mark.long
@needs_data
def test_seven_problems_of_dapo_are_in_math500() -> None:
    asked = {folded(row["problem"]) for row in rows("math500/math500.jsonl")}
    prompts = [row.cells["prompt"][0]["content"] for row in read_rows(DATA / "dapo/dapo_math_17k.parquet")]
    assert len({folded(prompt) for prompt in prompts} & asked) == 7
    assert not {folded(row["problem"]) for row in rows("aime24/aime24.jsonl") + rows("aime25/aime25.jsonl")} & {
        folded(prompt) for prompt in prompts
    }


@needs_data
@pytest.mark.slow
def test_dapo_leaves_out_overlap_doubtful_answers_and_repetitions() -> None:
    task = Dapo(DATA / "dapo/dapo_math_17k.parquet", against=EVALUATION)
    assert len(set(task.overlap.exact.values())) == 7
    # Eleven prompts carry two answers as they stand; a twelfth does up to the blanks at its ends.
    assert any(warning.startswith("dapo: 12 problems stand there with two different") for warning in task.warnings)
    asked = {folded(row["problem"]) for row in rows("math500/math500.jsonl")}
    kept = [problem.columns["problem"] for problem in task.problems("train")]
    assert len(set(kept)) == len(kept) > 17_000
    assert not asked & {folded(text) for text in kept}
