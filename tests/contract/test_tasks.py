"""Tasks: every grader accepts its gold answer, splits hold out what they say, format examples leak nothing."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from teamtr.errors import UserError
from teamtr.grading import GraderError, exact_match, last_number, number_match
from teamtr.tasks import CodeExchange, DataTask, Roles
from teamtr.tasks.data.task import DataError
from teamtr.types import Problem, Verdict


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def independence_p(pairs: list[tuple[str, str]]) -> float:
    """The p-value of a chi-square test that the two members of a pair are independent."""
    firsts, seconds = (sorted({pair[i] for pair in pairs}) for i in (0, 1))
    counts = Counter(pairs)
    return float(chi2_contingency([[counts[a, b] for b in seconds] for a in firsts]).pvalue)


# Code exchange


def test_code_gold_answer_is_right_and_partial_credit_is_the_share_of_positions() -> None:
    task = CodeExchange("ABCD", half_length=2)
    problem = next(p for p in task.problems("train") if p.answer[0] != "D")
    code = problem.answer
    one_off = "D" + code[1:]
    said = [code, f" {code.lower()}\n", one_off, code[:3], "???", "", code + "A"]
    assert task.grade([(problem, text, []) for text in said]) == [
        Verdict("right", 1.0, code),
        Verdict("right", 1.0, code),
        Verdict("wrong", 0.75, one_off),
        Verdict("unparsed", 0.0),  # not a code: a half, say
        Verdict("unparsed", 0.0),
        Verdict("unparsed", 0.0),
        Verdict("unparsed", 0.0),
    ]
    assert CodeExchange("ABCD", 2, partial_credit=False).grade([(problem, one_off, [])])[0].reward == 0.0


@pytest.mark.parametrize(
    ("symbols", "half_length", "held_out", "test_per_half"),
    [("ABCD", 1, 0.25, 1), ("ABCD", 2, 0.25, 4), ("AB", 1, 0.25, 1), ("ABCDEFGH", 2, 0.1, 6)],
)
def test_code_split_holds_out_combinations_of_seen_halves(
    symbols: str, half_length: int, held_out: float, test_per_half: int
) -> None:
    task = CodeExchange(symbols, half_length, seed=3, held_out=held_out)
    train, test = task.problems("train"), task.problems("test")
    halves = len(symbols) ** half_length
    assert len({p.answer for p in [*train, *test]}) == len(train) + len(test) == halves**2
    assert len({p.id for p in [*train, *test]}) == halves**2
    for agent in ("left", "right"):
        assert set(Counter(p.private[agent] for p in test).values()) == {test_per_half}
        assert set(Counter(p.private[agent] for p in train).values()) == {halves - test_per_half}
    assert all(p.private["left"] + p.private["right"] == p.answer for p in train)
    assert all("speaker" not in p.private and p.prompt == "" for p in train)


def test_code_split_depends_on_the_seed_alone() -> None:
    def ids(seed: int) -> list[str]:
        return [p.id for p in CodeExchange(seed=seed).problems("test")]

    assert ids(1) == ids(1)
    assert len({tuple(sorted(ids(seed))) for seed in range(20)}) > 5


def test_code_space_too_large_is_sampled_and_says_so() -> None:
    task = CodeExchange("ABCD", half_length=4)
    codes = [p.answer for split in ("train", "test") for p in task.problems(split)]
    assert len(set(codes)) == len(codes) == 4096
    assert "4096 of the 65536" in task.warnings[0]
    for split in ("train", "test"):
        for position in range(8):
            assert {p.answer[position] for p in task.problems(split)} == set("ABCD")
    # A binomial of 4096 draws with chance 1/4, three standard deviations of 28.
    assert abs(len(task.problems("test")) - 1024) < 84
    assert not CodeExchange("ABCD", half_length=3).warnings


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"symbols": "A"}, "two symbols"),
        ({"symbols": "Aa"}, "case"),
        ({"symbols": "A "}, "blank"),
        ({"half_length": 0}, "half_length"),
        ({"half_length": 9}, "262144 halves"),
        ({"held_out": 0.0}, "held_out"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_code_refuses_impossible_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CodeExchange(**settings)


def test_unknown_split_names_the_known_ones(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"question": "q", "answer": "a"}])
    for task in (CodeExchange(), Roles(), DataTask(data, held_out=0)):
        with pytest.raises(ValueError, match=r"'dev'.*train"):
            task.problems("dev")


def test_code_format_examples_have_the_form_and_none_of_the_content() -> None:
    task = CodeExchange("ABCD", half_length=1)
    examples = task.format_examples(np.random.default_rng(0), 6000)
    assert Counter(agent for agent, *_ in examples) == {"left": 2000, "right": 2000, "speaker": 2000}
    spoken = [(p, before, text) for agent, p, before, text in examples if agent == "speaker"]
    assert all(len(text) == 2 and set(text) <= set("ABCD") for _, _, text in spoken)
    assert all([author for author, _ in before] == ["left", "right"] for _, before, _ in spoken)
    for agent in ("left", "right"):
        said = [(p.private[agent], text) for name, p, _, text in examples if name == agent]
        assert all(len(text) == 1 for _, text in said)
        assert independence_p(said) > 1e-3
        # The test has the power to see a leak: one message in ten that tells the truth.
        leaky = [(half, half if i % 10 == 0 else text) for i, (half, text) in enumerate(said)]
        assert independence_p(leaky) < 1e-6
    for position in (0, 1):
        assert independence_p([(p.answer[position], text[position]) for p, _, text in spoken]) > 1e-3
        assert independence_p([(before[position][1], text[position]) for _, before, text in spoken]) > 1e-3
        assert chisquare(list(Counter(text[position] for *_, text in spoken).values())).pvalue > 1e-3
        heard = [(p.answer[position], before[position][1]) for p, before, _ in spoken]
        assert independence_p(heard) > 1e-3


# Roles


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        (["0", "1", "0"], Verdict("right", 1.0, "010")),
        ([" 1 ", "0\n", "0"], Verdict("right", 1.0, "100")),
        (["0", "0", "0"], Verdict("wrong", 0.0, "000")),
        (["1", "1", "0"], Verdict("wrong", 0.0, "110")),
        (["1", "", "0"], Verdict("unparsed", 0.0)),
        (["1", "11", "0"], Verdict("unparsed", 0.0)),
        (["1", "1", "1", "0", "1", "0"], Verdict("right", 1.0, "010")),  # two rounds: the last one counts
    ],
)
def test_roles_verdicts(texts: list[str], verdict: Verdict) -> None:
    task = Roles(agents=3)
    assert task.grade([(task.problems("train")[0], "ignored", texts)]) == [verdict]


def test_where_one_word_volunteers_all_else_abstains() -> None:
    class Yes(Roles):
        VOLUNTEER, ABSTAIN = "Yes", None

    task = Yes(agents=3)
    for texts, right in [
        (["Yes", "No", "I would"], True),
        (["", "Yes", "yes"], True),
        (["Yes", "Yes", ""], False),
        (["Yes ", "No", ""], False),  # the law of the word counts the word alone
    ]:
        assert task.grade([(task.problems("train")[0], "", texts)])[0].right is right, texts


def test_roles_problems() -> None:
    task = Roles(agents=5)
    assert task.agents == ("a1", "a2", "a3", "a4", "a5")
    assert {p.prompt for p in task.problems("train")} == {"go?"}
    assert [p.id for p in task.problems("test")] == [f"r{k}" for k in range(64, 80)]
    tagged = Roles(agents=2, tags=3, train=6, test=3)
    assert [p.prompt for p in tagged.problems("test")] == ["go a?", "go b?", "go c?"]
    with pytest.raises(ValueError, match=r"each of its 5 agents, got 2"):
        task.grade([(task.problems("train")[0], "", ["1", "0"])])
    for wrong in ({"agents": 1}, {"tags": 27}, {"train": 0}, {"volunteer_share": 1.0}):
        with pytest.raises(ValueError):
            Roles(**wrong)


def test_roles_format_examples_do_not_assign_roles() -> None:
    task = Roles(agents=5, tags=4)
    examples = task.format_examples(np.random.default_rng(1), 5000)
    assert all(not before for _, _, before, _ in examples)
    assert independence_p([(agent, text) for agent, _, _, text in examples]) > 1e-3
    assert independence_p([(p.prompt, text) for _, p, _, text in examples]) > 1e-3
    ones = sum(text == "1" for *_, text in examples)
    assert abs(ones - 2500) < 4 * np.sqrt(1250)
    rare = Roles(agents=5, volunteer_share=0.1).format_examples(np.random.default_rng(1), 5000)
    assert abs(sum(text == "1" for *_, text in rare) - 500) < 4 * np.sqrt(450)


# String graders


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 7.", "7"),
        ("x=-3", "-3"),
        ("5-3", "3"),
        ("from 10\u201320", "20"),
        ("\u22127", "-7"),
        ("that is $1,234.50.", "2469/2"),
        ("1,2", "2"),
        ("-.5", "-1/2"),
        ("025", "25"),
        ("2e-3", "1/500"),
        ("3/4 of it", "3/4"),
        ("so 1 1/2 cups", "3/2"),
        ("-2 3/4", "-11/4"),
        ("1,000 1/2", "2001/2"),
        ("-5 9/4", "9/4"),
        ("7  1/2", "1/2"),
        ("12 1/2%", "25/2%"),
        ("50 %", "50%"),
        ("5 kg of CO2", "5"),
        ("see v1.2", None),
        ("none", None),
        ("", None),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else str(found)) == number


@pytest.mark.parametrize(
    ("text", "answer", "same"),
    [
        ("0.50", "1/2", True),
        ("so 1,000", "1000.0", True),
        ("1.5", "1 1/2", True),
        ("1/2", "1 1/2", False),
        ("0.1", "0.10000001", False),
        ("50%", "50", False),
        ("50", "50%", False),
        ("50%", "50 %", True),
        ("１２．５％", "1/8", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("50%", "0.5%", False),
        ("50", "0.5", False),
        ("12", "answer: none", False),
    ],
)
def test_number_match(text: str, answer: str, same: bool) -> None:
    assert number_match(text, answer) is same


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_written_number_is_read_back(numerator: int, denominator: int) -> None:
    for text, value in [
        (f"= {numerator}/{denominator}", Fraction(numerator, denominator)),
        (f"= {numerator:,}", Fraction(numerator)),
        (f"= {numerator / 100:.2f}!", Fraction(numerator, 100)),
    ]:
        found = last_number(text)
        assert found is not None
        assert found.value == value


def test_exact_match_folds_case_and_white_space_only() -> None:
    assert exact_match("  New\n York ", "new york")
    assert not exact_match("newyork", "new york")
    assert not exact_match("new york.", "new york")


# Your own data


def test_data_graders_accept_the_gold_answer(tmp_path: Path) -> None:
    rows = [{"question": f"{k}+{k}?", "answer": 2 * k, "level": "easy"} for k in range(1, 41)]
    path = write_jsonl(tmp_path / "sums.jsonl", rows)
    exact = DataTask(path, held_out=0.2, grader="exact")
    number = DataTask(path, held_out=0.2, grader="number")
    regex = DataTask(path, held_out=0.2, grader="regex", pattern=r"#### (\S+)")
    problems = exact.problems("train")
    for task, form in ((exact, "{}"), (number, "I think 5, no, {}.00."), (regex, "#### 5 or #### {}")):
        assert all(v.right and v.reward == 1.0 for v in task.grade([(p, form.format(p.answer), []) for p in problems]))
        assert not any(v.right for v in task.grade([(p, form.format(99), []) for p in problems]))
        assert [v.kind for v in task.grade([(problems[0], " ", [])])] == ["unparsed"]
    assert number.grade([(problems[0], "1/2", [])])[0].extracted == "1/2"
    assert problems[0].columns == {"answer": problems[0].answer, "level": "easy"}
    regex.close()


def test_data_graders_read_what_follows_the_thinking(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"{k}?", "answer": "7"}) for k in range(2)))
    for settings in ({"grader": "exact"}, {"grader": "number"}, {"grader": "regex", "pattern": r"^(\d+)$"}):
        task = DataTask(file, held_out=0, **settings)
        problem = task.problems("train")[0]
        replies = ["7", "<think>8</think>7", "<think>7</think>8", "8</think>7", "<think>\n7\n</think>\nnone"]
        verdicts = task.grade([(problem, reply, ()) for reply in replies])
        assert [verdict.right for verdict in verdicts] == [True, True, False, True, False], settings
        assert task.extract("<think>8</think>7") == "7"
        task.close()


def test_data_split_is_stable_when_rows_are_added(tmp_path: Path) -> None:
    def test_ids(count: int) -> set[str]:
        rows = [{"prompt": f"question {k}", "target": "x"} for k in range(count)]
        task = DataTask(write_jsonl(tmp_path / "d.jsonl", rows), held_out=0.2)
        train, test = ({p.id for p in task.problems(s)} for s in ("train", "test"))
        assert len(train) + len(test) == count
        assert not train & test
        return test

    few, many = test_ids(200), test_ids(1000)
    assert few <= many
    assert abs(len(many) - 200) < 4 * np.sqrt(1000 * 0.2 * 0.8)


def test_data_keys_are_found_or_given(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl", [{"problem": "p", "solution": "s", "answer": "a", "hint": "h", "gone": None}]
    )
    found = DataTask(path, held_out=0).problems("train")[0]
    assert (found.prompt, found.answer) == ("p", "a")
    given_keys = DataTask(path, held_out=0, question="hint", answer="solution", private={"x": "problem", "y": "gone"})
    problem = given_keys.problems("train")[0]
    assert (problem.prompt, problem.answer, problem.private) == ("h", "s", {"x": "p"})


def test_data_parquet_equals_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": f"q{k}", "answer": k, "tags": ["a", "b"]} for k in range(50)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    one = DataTask(write_jsonl(tmp_path / "d.jsonl", rows))
    other = DataTask(tmp_path / "d.parquet")
    assert one.problems("train") == other.problems("train")
    assert one.problems("test") == other.problems("test")

    odd = [{"question": "q", "answer": "a", "day": datetime.date(2024, 1, 2), "price": decimal.Decimal("1.50")}]
    parquet.write_table(pyarrow.Table.from_pylist(odd), tmp_path / "odd.parquet")
    columns = DataTask(tmp_path / "odd.parquet", held_out=0).problems("train")[0].columns
    assert (columns["day"], columns["price"]) == ("2024-01-02", "1.50")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"bad\.parquet: not a parquet file"):
        DataTask(tmp_path / "bad.parquet")


def test_data_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"teamtr\[parquet\]"):
        DataTask(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", r"d\.jsonl: empty"),
        ("\n \n", r"d\.jsonl: empty"),
        ('{"question": "q", "answer": 1}\n{"question": \n', r"line 2, column \d+: not JSON.*one whole JSON object"),
        ("[1, 2]\n", r"line 1: a row must be a JSON object, found \[1, 2\]"),
        ('{"q": "x", "answer": 1}\n', r"line 1: no question: .*\['answer', 'q'\].*set task\.question"),
        ('{"question": "x", "a": 1}\n', r"line 1: no answer: .*set task\.answer"),
        ('{"question": "q", "answer": 1}\n\n{"answer": 1}\n', r"line 3: no 'question'; found \['answer'\]"),
        ('{"question": ["q"], "answer": 1}\n', r"line 1: 'question' must be text, found \['q'\]"),
        ('{"question": "q", "answer": null}\n', r"line 1: 'answer' must be text or a number, found None"),
        (b'{"question": "\xff"}\n', r"line 1: not UTF-8"),
    ],
)
def test_data_errors_name_the_place_and_the_remedy(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint):
        DataTask(path)


@pytest.mark.parametrize("held_out", [0.001, 0.5, 0.999])
def test_a_small_file_never_leaves_a_split_empty(tmp_path: Path, held_out: float) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": f"q{i}", "answer": "x"} for i in range(4)])
    task = DataTask(path, held_out=held_out)
    assert len(task.problems("train")) + len(task.problems("test")) == 4
    assert task.problems("train")
    assert task.problems("test")


def test_votes_are_counted_by_answer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": f"q{i}", "answer": "7"} for i in range(4)])
    extract = DataTask(path, grader="number").extract
    assert extract("So it is 7") == extract("= 7.0") != extract("I think 3")
    assert extract("no idea") is None
    assert extract("50%") == extract("0.5") == extract("1/2") != extract("50")


def test_votes_on_a_pattern_are_counted_by_its_group(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": f"q{i}", "answer": "7"} for i in range(4)])
    task = DataTask(path, grader="regex", pattern=r"#### (\S+)")
    try:
        assert task.extract("I add. #### Ab") == task.extract("<think>#### 3</think>So #### ab") == "ab"
        assert task.extract("no idea") is None
    finally:
        task.close()


def test_data_settings_are_checked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": "q", "answer": "many"}])
    reward = tmp_path / "r.py"
    reward.write_text("def f(prompts, completions, level): ...\n")

    def refused(complaint: str, error: type[Exception] = ValueError, **settings: Any) -> None:
        with pytest.raises(error, match=complaint):
            DataTask(**{"path": path, "held_out": 0.0, **settings})

    refused("either one data file", path=None)
    refused("either one data file", split_files={"train": path})
    refused("no such data file", DataError, path=tmp_path / "none.jsonl")
    refused(r"\.jsonl .* or \.parquet", path=reward)
    refused("at least two different questions", held_out=0.5)
    refused("held_out", held_out=1.0)
    refused(r"no column 'nope'; found \['answer', 'question'\]", question="nope")
    refused("no 'nope'", private={"a": "nope"})
    refused("no number in the answer 'many'", grader="number")
    refused("no grader 'exactly': use one of exact", grader="exactly")
    refused("a pattern goes with", grader="regex")
    refused("a pattern goes with", pattern="(x)")
    refused("2 groups", grader="regex", pattern="(x)(y)")
    refused("not a regular expression", grader="regex", pattern="(x")
    refused(r"python:path/to/file\.py:function", grader="python:r.py")
    refused("there is no file", UserError, grader="python:absent.py:f")
    refused(r"r\.py has no function 'g'; it has \['f'\]", GraderError, grader=f"python:{reward}:g")
    refused(
        "argument: 'level'; let it name these columns, or give them .* with task.columns",
        GraderError,
        grader=f"python:{reward}:f",
    )


def test_data_warns_of_two_answers_and_of_leaks(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "b"}, {"question": "r", "answer": "c"}]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    test = write_jsonl(tmp_path / "test.jsonl", rows[2:])
    task = DataTask(split_files={"train": train, "test": test})
    assert len(task.warnings) == 2
    assert "2 different answers ['a', 'b']: 'q'" in task.warnings[0]
    assert "several splits ['test', 'train']: 'r'" in task.warnings[1]
    assert len({p.id for split in ("train", "test") for p in task.problems(split)}) == 4


@pytest.mark.long
def test_a_game_is_found_without_the_benchmarks_and_their_graders() -> None:
    program = (
        "import sys; from teamtr.tasks.registry import task_class, task_names; found = task_class('sums').__name__; "
        "early = [m for m in sys.modules if m.startswith(('teamtr.tasks.benchmarks', 'teamtr.grading.math'))]; "
        "sys.exit((found, early, 'gsm8k' in task_names()) != ('Sums', [], True))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_task_that_takes_the_name_of_a_built_in_one_is_refused_though_it_is_found_first() -> None:
    program = (
        "from teamtr.errors import UserError; from teamtr.tasks import Task; "
        "from teamtr.tasks.registry import task, task_class; task('gsm8k')(type('Mine', (Task,), {}))\n"
        "try: print(task_class('gsm8k'))\nexcept UserError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True).stdout
    assert "two tasks are called 'gsm8k'" in told


@pytest.mark.long
def test_tasks_load_without_torch() -> None:
    """A grader's worker and a data check must start fast."""
    program = "import sys, teamtr.tasks, teamtr.evaluation.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_task_grades_in_order() -> None:
    task = CodeExchange()
    problems: list[Problem] = list(task.problems("test"))
    nothing: list[str] = []
    swapped = [(p, q.answer, nothing) for p, q in zip(problems, [*problems[1:], problems[0]], strict=True)]
    assert not any(v.right for v in task.grade(swapped))
    assert all(v.right for v in task.grade([(p, p.answer, []) for p in problems]))
