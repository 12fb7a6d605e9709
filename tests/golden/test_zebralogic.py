"""ZebraLogic: replies graded as the benchmark's own evaluator grades them, for every row, and on hostile text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_growth import assert_linear
from teamtr.errors import UserError
from teamtr.tasks.benchmarks.zebralogic import ZebraLogic, last_object, size_group, table_in
from teamtr.tasks.data.rows import Row, read_rows

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data")) / "zebralogic"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no ZebraLogic data in {DATA}; set TEAMTR_DATA")

ATTRIBUTES = {
    "Name": ["Ada", "Bo", "Cleo", "Dan", "Eve", "Flo"],
    "Drink": ["tea", "milk", "water", "root beer", "coffee", "juice"],
    "Pet": ["cat", "dog", "fish", "bird", "horse", "rabbit"],
}


def street(houses: int, attributes: int, seed: int = 0) -> dict[str, Any]:
    """A row whose solution is drawn at random; its clues do not matter to the grader."""
    rng = np.random.default_rng(seed)
    columns = [list(map(str, rng.permutation(values)[:houses])) for values in list(ATTRIBUTES.values())[:attributes]]
    header = ["House", *list(ATTRIBUTES)[:attributes]]
    rows = [[str(k + 1), *(column[k] for column in columns)] for k in range(houses)]
    return {
        "id": f"street-{houses}x{attributes}-{seed}",
        "size": f"{houses}*{attributes}",
        "puzzle": f"There are {houses} houses.",
        "solution": {"header": header, "rows": rows},
    }


TASK = ZebraLogic()
PROBLEM = TASK.problem(street(2, 2, seed=3))
CELLS = PROBLEM.answer


def said(table: dict[str, dict[str, Any]], before: str = "", after: str = "") -> str:
    return before + json.dumps({"reasoning": "because", "solution": table}) + after


def kind_of(reply: str) -> str:
    (verdict,) = TASK.grade_replies([(PROBLEM, reply)])
    return verdict.kind


# The rules


def test_the_last_complete_object_counts() -> None:
    other = {house: dict.fromkeys(cells, "x") for house, cells in CELLS.items()}
    assert kind_of(said(CELLS, before=said(other) + "\n")) == "right"
    assert kind_of(said(CELLS, after="\n" + said(other))) == "wrong"
    assert kind_of(said(CELLS, after="\n{not json}")) == "unparsed"  # no going back to an earlier one
    assert kind_of(said(CELLS, after="\n{ and so on")) == "right"  # one that is never closed is not complete
    assert kind_of(said(CELLS, before="In a set {x | x > 0 the ")) == "unparsed"  # nothing is at top level after it
    assert kind_of(said(CELLS, before="} ")) == "right"


def test_two_values_for_one_key_are_no_answer() -> None:
    """The benchmark takes the last: a reply could state several tables, or every value of a cell."""
    assert table_in('{"solution": {"House 1": {"Name": "bob"}}}') == {"House 1": {"Name": "bob"}}
    assert table_in('{"solution": {"House 1": {"Name": "ann", "Name": "bob"}}}') is None
    assert table_in('{"solution": {"House 1": {"Name": "ann"}, "House 1": {"Name": "bob"}}}') is None
    assert table_in('{"solution": {}, "solution": {"House 1": {"Name": "bob"}}}') is None


def test_braces_count_in_quotes_too() -> None:
    assert kind_of('{"reasoning": "a brace {", "solution": ' + json.dumps(CELLS) + "}") == "unparsed"
    assert kind_of('{"reasoning": "a pair {}", "solution": ' + json.dumps(CELLS) + "}") == "right"


def test_line_breaks_in_quotes_are_taken_out() -> None:
    assert kind_of('{"reasoning": "one\ntwo", "solution": ' + json.dumps(CELLS, indent=2) + "}") == "right"
    assert kind_of('{"reasoning": "one\ttwo", "solution": ' + json.dumps(CELLS) + "}") == "unparsed"
    name = CELLS["House 1"]["Name"]
    assert kind_of(said(CELLS).replace(name, f"{name[:1]}\n{name[1:]}")) == "right"


def test_case_and_outer_blanks_do_not_matter_and_lists_give_their_first() -> None:
    shouted = {house: {name: f" {value.upper()}\t" for name, value in cells.items()} for house, cells in CELLS.items()}
    listed = {house: {name: [value, "x"] for name, value in cells.items()} for house, cells in CELLS.items()}
    assert kind_of(said(shouted)) == kind_of(said(listed)) == "right"
    inner = {house: {name: value[:1] + " " + value[1:] for name, value in c.items()} for house, c in CELLS.items()}
    assert kind_of(said(inner)) == "wrong"


def test_houses_and_attributes_go_by_their_exact_names() -> None:
    assert kind_of(said({house.lower(): cells for house, cells in CELLS.items()})) == "wrong"
    assert kind_of(said({**CELLS, "House 9": {"Name": "Zoe"}})) == "right"  # only the solution's cells are looked at


def test_numbers_are_compared_as_written() -> None:
    row = {"puzzle": "p", "solution": {"header": ["House", "Floor"], "rows": [["1", "3"], ["2", "4"]]}}
    problem = TASK.problem(row)
    right, wrong = ({"House 1": {"Floor": 3}, "House 2": {"Floor": last}} for last in (4, 4.5))
    verdicts = TASK.grade_replies([(problem, said(right)), (problem, said(wrong))])
    assert [v.kind for v in verdicts] == ["right", "wrong"]


def test_what_comes_before_the_end_of_thinking_is_not_read() -> None:
    other = {house: dict.fromkeys(cells, "x") for house, cells in CELLS.items()}
    assert kind_of("<think>{ hm " + said(other) + "</think>" + said(CELLS)) == "right"
    assert kind_of(said(CELLS) + "</think> I give up.") == "unparsed"


@pytest.mark.parametrize("reply", ["", "no", "{}", '{"solution": []}', '{"solution": "a"}', "[1]", '{"answer": {}}'])
def test_no_table_is_unparsed(reply: str) -> None:
    assert kind_of(reply) == "unparsed"


def test_partial_credit_is_the_share_of_cells() -> None:
    house = {**CELLS["House 1"], "Name": "nobody"}
    reply = said({**CELLS, "House 1": house})
    (whole,) = TASK.grade_replies([(PROBLEM, reply)])
    (share,) = ZebraLogic(partial=True).grade_replies([(PROBLEM, reply)])
    assert (whole.kind, whole.reward, share.kind, share.reward) == ("wrong", 0.0, "wrong", 0.75)
    assert TASK.cell_accuracy(PROBLEM, reply) == 0.75
    assert TASK.cell_accuracy(PROBLEM, said({"House 2": {"Drink": CELLS["House 2"]["Drink"]}})) == 0.25
    assert TASK.cell_accuracy(PROBLEM, TASK.gold(PROBLEM)) == 1
    assert TASK.cell_accuracy(PROBLEM, "no") == 0


def test_equal_tables_are_one_vote() -> None:
    turned = {house: dict(reversed(cells.items())) for house, cells in reversed(CELLS.items())}
    assert TASK.extract(said(CELLS)) == TASK.extract("So:\n" + said(turned)) is not None
    assert TASK.extract(said(CELLS)) != TASK.extract(said({**CELLS, "House 1": {}}))


# Hostile text


@pytest.mark.long
@pytest.mark.parametrize(
    "text_of",
    [
        lambda n: "{" * n,
        lambda n: "}" * n,
        lambda n: "{}" * (n // 2),
        lambda n: "{" * (n // 2) + "}" * (n // 2),
        lambda n: '{"a":' * (n // 6) + "1" + "}" * (n // 6),
        lambda n: '{"solution":' + "[" * (n // 2) + "]" * (n // 2) + "}",
        lambda n: '{"solution": {"House 1": {"Name": ' + "9" * n + "}}}",
        lambda n: "</think>" * (n // 8),
    ],
    ids=["open", "closed", "empty", "nested", "nested keys", "nested lists", "a huge number", "tags"],
)
def test_a_megabyte_of_anything_earns_nothing_in_linear_time(text_of: Callable[[int], str]) -> None:
    assert kind_of(text_of(1_000_000)) == "unparsed"
    assert_linear(kind_of, text_of, 400_000)


@given(st.text(alphabet='{}[]":, \n\\solutionHe1House') | st.text())
def test_no_text_breaks_the_grader(text: str) -> None:
    (verdict,) = TASK.grade_replies([(PROBLEM, text)])
    assert not verdict.right
    found = last_object(text)
    assert found is None or (found in text and found[0] == "{" and found.count("{") == found.count("}"))


# Rows


def test_sizes_are_grouped_as_the_benchmark_groups_them() -> None:
    groups = {
        "small": ["2*2", "2*3", "2*4", "2*5", "2*6", "3*2", "3*3", "4*2"],
        "medium": ["3*4", "3*5", "3*6", "4*3", "4*4", "5*2", "6*2"],
        "large": ["4*5", "4*6", "5*3", "5*4", "6*3"],
        "xlarge": ["5*5", "5*6", "6*4", "6*5", "6*6"],
    }
    for group, sizes in groups.items():
        for size in sizes:
            assert size_group(*map(int, size.split("*"))) == group, size
    assert TASK.labels(TASK.problem(street(3, 3))) == {"size": "3*3", "group": "small"}


def test_the_prompt_shows_puzzle_and_form_or_is_the_rows_own(tmp_path: Path) -> None:
    row = street(2, 2) | {"puzzle": "Clues with {json_template} inside."}
    prompt = TASK.problem(row).prompt
    assert "Clues with {json_template} inside." in prompt
    assert '"House 2": {\n            "Name": "___",\n            "Drink": "___"\n        }' in prompt
    assert TASK.problem(row | {"prompt": "mine"}).prompt == "mine"
    (tmp_path / "prompt.txt").write_text("<{puzzle}|{json_template}>", encoding="utf-8")
    assert ZebraLogic(template=tmp_path / "prompt.txt").problem(row).prompt.startswith("<Clues with")
    (tmp_path / "prompt.txt").write_text("{puzzle}", encoding="utf-8")
    with pytest.raises(UserError, match=r"must contain \{json_template\}"):
        ZebraLogic(template=tmp_path / "prompt.txt")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"puzzle": None}, "'puzzle' must be text"),
        ({"solution": {"rows": []}}, "begins with House"),
        ({"solution": {"header": ["House", "Name"], "rows": [["1"]]}}, "must have 2 cells"),
        ({"solution": {"header": ["House", "Name"], "rows": [["1", "___"], ["2", "___"]]}}, "blanked out"),
        ({"solution": {"header": ["House", "Name"], "rows": [["1", "Bo"], ["2", "bo "]]}}, "all different"),
        ({"size": "3*3"}, "but the solution has 2 houses of 2"),
    ],
)
def test_a_row_that_states_no_puzzle_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=r"^file, line 7: .*") as error:
        TASK.problem(street(2, 2) | change, where="file, line 7")
    assert complaint in str(error.value)


def test_a_puzzle_keeps_its_side_of_the_split() -> None:
    rows = [Row(f"row {k}", street(2, 2, seed=k)) for k in range(200)]
    task, more = ZebraLogic.from_rows(rows[:100]), ZebraLogic.from_rows(rows)
    sides = {split: {p.id for p in task.problems(split)} for split in ("train", "test")}
    assert not sides["train"] & sides["test"]
    assert len(sides["train"] | sides["test"]) == 100
    assert 8 <= len(sides["test"]) <= 32  # a fifth: binomial(100, 0.2) within three standard deviations
    assert sides["test"] <= {p.id for p in more.problems("test")}
    assert len(ZebraLogic.from_rows(rows, held_out=1).problems("test")) == 200


# The gold and the wrong


def check(task: ZebraLogic, rows: list[Row]) -> None:
    problems = [task.problem(row.cells, row.where) for row in rows]
    golds = task.grade_replies([(problem, task.gold(problem)) for problem in problems])
    assert all(verdict.right for verdict in golds)
    rng = np.random.default_rng(0)
    for problem in problems:
        wrong = task.wrong(problem, rng)
        assert len({answer.kind for answer in wrong}) >= 5
        verdicts = task.grade_replies([(problem, answer.reply) for answer in wrong])
        taken = [a.kind for a, v in zip(wrong, verdicts, strict=True) if v.right or v.reward]
        assert not taken, (problem.id, taken)


def test_gold_is_right_and_wrong_is_wrong_on_streets_of_our_own() -> None:
    sizes = [(houses, attributes) for houses in range(2, 7) for attributes in range(1, 4)]
    check(TASK, [Row("", street(h, a, seed)) for h, a in sizes for seed in range(3)])


@pytest.mark.long
@needs_data
def test_gold_is_right_and_wrong_is_wrong_for_every_row() -> None:
    rows = list(read_rows(DATA / "zebralogic_grid_1000.jsonl"))
    assert len(rows) == 1000
    check(ZebraLogic(template=DATA / "prompt_template.txt"), rows)


@pytest.mark.long
@needs_data
def test_agreement_with_the_official_evaluator() -> None:
    puzzles = {row.cells["id"]: row.cells for row in read_rows(DATA / "zebralogic_grid_1000.jsonl")}
    rows = [row.cells for row in read_rows(DATA / "golden_llama3.1-405b_sambanova.jsonl")]
    verdicts = TASK.grade_replies([(TASK.problem(puzzles[row["id"]]), row["output"]) for row in rows])
    differ = [row["id"] for row, v in zip(rows, verdicts, strict=True) if v.right != row["official_correct"]]
    assert not differ
    assert {row["official_correct"] for row in rows} == {True, False}
    assert all(table_in(row["output"]) for row in rows)
