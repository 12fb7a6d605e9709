"""AutoLogi: replies read and graded as the benchmark's own evaluator does, on its data where it is at hand."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_growth import assert_linear
from teamtr.errors import UserError
from teamtr.literal import DEEPEST, LONGEST, read_literal, write_literal
from teamtr.tasks.benchmarks.autologi import AutoLogi, stated_in
from teamtr.tasks.data.rows import DataError, Row
from teamtr.types import Problem

DATA = Path(os.environ.get("TEAMTR_DATA", Path(__file__).parents[3] / "shared" / "data")) / "autologi"

INPUTS_CHECK = """
def inputs_check(inputs):
    if not isinstance(inputs, dict) or set(inputs) != {"tea", "guests"}:
        return False
    if not isinstance(inputs["guests"], set) or len(inputs["guests"]) != 2:
        return False
    return inputs["tea"] in ("green", "black") and inputs["guests"] <= {"Ada", "Ben", "Cem"}
"""
CONSTRAINTS = """
def no_ben_with_green(inputs):
    return not (inputs["tea"] == "green" and "Ben" in inputs["guests"])

def ada_comes(inputs):
    return inputs["guests"] & {"Ada"}

constraint_list = [no_ben_with_green, ada_comes]
"""
TRAVERSE = """
from itertools import combinations

def count_valid_arrangements():
    valid = total = 0
    for tea in ("green", "black"):
        for guests in combinations(["Ben", "Cem", "Ada"], 2):
            arrangement = {"tea": tea, "guests": set(guests)}
            if inputs_check(arrangement):
                total += 1
                valid += verify_function(arrangement, inputs_check, constraint_list)
    return valid, total
"""
ROW = {
    "idx": 7,
    "question": "A party.",
    "logi_constraints": "(1) Ben drinks no green tea. (2) Ada comes.",
    "input_format": "inputs is a dictionary with the keys tea and guests",
    "example": "{'tea': 'green', 'guests': {'Ada', 'Ben'}}",
    "lang": "en",
    "group_id": 3,
    "code": {"Inputs_Check_code": INPUTS_CHECK, "Constraint_List_code": CONSTRAINTS, "Traverse_code": TRAVERSE},
}


@pytest.fixture(scope="module")
def task() -> Iterator[AutoLogi]:
    made = AutoLogi(workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    return read("prompt_example_verifiers.json")[0]


def read(name: str) -> list[Any]:
    file = DATA / name
    if not file.is_file():
        pytest.skip(f"{file} is not here: set TEAMTR_DATA to the folder with the benchmarks' data")
    text = file.read_text(encoding="utf-8")
    return [json.loads(text)] if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def fenced(answer: str) -> str:
    return f"So:\n```python\n{answer}\n```\nDone."


def kinds(task: AutoLogi, problem: Problem, replies: list[str]) -> list[str]:
    return [verdict.kind for verdict in task.grade_replies([(problem, reply) for reply in replies])]


def test_a_puzzle_of_our_own(task: AutoLogi) -> None:
    problem = task.problem(ROW)
    right = "{'tea': 'green', 'guests': {'Ada', 'Cem'}}"
    said = {
        fenced(right): "right",
        right: "right",
        f"<think>{fenced('[1]')}</think>{fenced(right)}": "right",
        f"{fenced(right)}<think>\n</think>None of them.": "unparsed",
        fenced(f"inputs = {right}"): "right",
        fenced(f"// the party\n{right}"): "right",
        fenced('{"guests": {"Cem", "Ada"}, "tea": "black"}  # any order'): "right",
        fenced("{'tea': 'green', 'guests': {'Ada', 'Ben'}}"): "wrong",  # a constraint
        fenced("{'tea': 'black', 'guests': {'Cem', 'Ben'}}"): "wrong",  # returns an empty set
        fenced("{'tea': 'green', 'guests': ['Ada', 'Cem']}"): "wrong",  # a list is no set
        fenced("{'tea': 'green'}"): "wrong",
        fenced("[]"): "wrong",
        fenced("{'tea': {}, 'guests': {'Ada', 'Cem'}}"): "wrong",  # the check raises: unhashable
        fenced(right) + fenced("{}"): "wrong",  # the last counts
        fenced("{'tea': 'green', 'guests': {'Ada', 'Cem'"): "unparsed",
        "Ada and Cem, with green tea.": "unparsed",
        "": "unparsed",
    }
    assert dict(zip(said, kinds(task, problem, list(said)), strict=True)) == said
    assert task.failures == {}
    [verdict] = task.grade_replies([(problem, fenced(right))])
    assert verdict.reward == 1.0
    assert verdict.extracted == "{'guests': {'Ada', 'Cem'}, 'tea': 'green'}" == task.extract(right)


def test_gold_and_wrong_answers_of_our_own_puzzle(task: AutoLogi) -> None:
    problem = task.problem(ROW)
    assert kinds(task, problem, [task.gold(problem)]) == ["right"]
    assert {"a constraint broken", "unknown names"} <= check_wrong_answers(task, problem)


def check_wrong_answers(task: AutoLogi, problem: Problem) -> set[str]:
    wrong = task.wrong(problem, np.random.default_rng(0))
    given = kinds(task, problem, [answer.reply for answer in wrong])
    assert set(given) <= {"wrong", "unparsed"}, list(zip(wrong, given, strict=True))
    names = {answer.kind for answer in wrong}
    assert len(names) == len(wrong) >= 5
    return names


def test_votes_are_counted_by_value(task: AutoLogi) -> None:
    same = ["{'a': {1, 2}, 'b': [3]}", '{"b": [3],\n "a": {2, 1}}', "```\ninputs = {'b': [3], 'a': {2, 1, 2}}\n```"]
    assert len({task.extract(text) for text in same}) == 1
    assert task.extract("{'a': {1, 2}, 'b': (3,)}") != task.extract(same[0])
    assert task.extract("[]") != task.extract("{}") != task.extract("```\nset()\n```")


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("```\n{1}\n```", "{1}\n"),
        ("```json\n[1]\n``` and ```python\n[2]\n```", "[2]\n"),
        ("{'a': {'b': 1}} then [2]", "{'a': {'b': 1}}"),
        ("{1} {2} {3", "{2}"),
        ("[1] and [[2], 3]", "[[2]"),
        ("``` {1} ```", "{1}"),
        ("```\nNone\n```", ""),  # one word alone is taken for the name of a language
        ("nothing", None),
    ],
)
def test_where_an_answer_is_looked_for(text: str, stated: str | None) -> None:
    assert stated_in(text) == stated


@pytest.mark.parametrize(
    "text",
    [
        "{'a': true, 'b': [false, null]}",  # neither language: null is no name in a literal, single quotes not JSON
        "{'a': 'http://x'}",  # a comment, for the benchmark
        "1 + 1",
        "{'a': f'{1}'}",
        "{'a': __import__('os')}",
        "[x for x in ()]",
        "print(True)",
        "'a'.upper()",
        "1e999",
        "{'a': " * 60 + "1" + "}" * 60,
    ],
)
def test_what_is_no_answer(task: AutoLogi, text: str) -> None:
    assert task.extract(fenced(text)) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": true, "b": "x"}', {"a": True, "b": "x"}),
        ('{"a": null}', {"a": None}),
        ("inputs = {'a': {1}}", {"a": {1}}),
        ("inputs = \n\n  [1, (2,)]", [1, (2,)]),
        ("{'a': 'untrue'}", {"a": "unTrue"}),  # as the benchmark has it, also within a text
        ("{'m': set(), 'n': -1.5e3, 'o': 'a' 'b', 'p': None}", {"m": set(), "n": -1500.0, "o": "ab", "p": None}),
        ("{'甲': {'最佳'}}", {"甲": {"最佳"}}),
    ],
)
def test_what_an_answer_says(task: AutoLogi, text: str, value: Any) -> None:
    said = task.extract(fenced(text))
    assert said is not None
    assert ast.literal_eval(said) == value


LITERALS = [
    "{'a': {1, 2}, \"b\": [True, None, -1.5e3, 'x' 'y']}",
    *("set()", "1, 2", "(1,)", "()", "{}", "[set(), (), '''a\nb''']", "0x1F", "1_000", "# c\n[1]  # d\n", "  [1]"),
    *("\n [1]", "'\\u4e2d'", "r'\\d'", "b'x'", "[1,]", "{1: 2,}", ".5", "5.", "1e5", "u'x'", "- -1", "-1", "[-1, +2]"),
    *("'a'[0]", "f'x'", "set(1)", "{[]}", "(((1)))", "9" * 5000, "'a", "[1 2]", "x", "-'a'", "01", "\x00", "'a\\\nb'"),
    *(
        "[1\\\n, 2]",
        "not 1",
        "True",
        "Truex",
        "10e",
        "a=1",
        "[1}",
        "]",
        "",
        " ",
        "{1: 2, 3}",
        "{**{}}",
        "[*[]]",
        "1if 1",
    ),
]


@pytest.mark.parametrize("text", LITERALS)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_literals_are_read_as_python_reads_them(text: str) -> None:
    try:
        expected = repr(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError):
        with pytest.raises(ValueError):
            read_literal(text)
    else:
        assert repr(read_literal(text)) == expected
        assert read_literal(write_literal(read_literal(text))) == read_literal(text)


@pytest.mark.long
@pytest.mark.parametrize(
    "text_of",
    [
        lambda n: "(" * n,
        lambda n: "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        lambda n: "-" * (n - 1) + "1",
        lambda n: "1" + "+1" * (n // 2 - 1),
        lambda n: "'a'" + "[0]" * (n // 3 - 1),
        lambda n: "not " * (n // 4 - 1) + "1",
        lambda n: "set()" + "()" * (n // 2 - 3),
        lambda n: '"""' + "\\" * (n - 3),
        lambda n: "1_" * (n // 2),
        lambda n: "0x" + "f" * (n - 2),
        lambda n: "[" + "1," * n + "]",
        lambda n: "[" + "1," * (n // 2 - 1),
    ],
)
def test_a_literal_cannot_exhaust_the_reader(text_of: Callable[[int], str]) -> None:
    with pytest.raises(ValueError):
        read_literal(text_of(LONGEST))

    def read(text: str) -> None:
        with contextlib.suppress(ValueError):
            read_literal(text)

    assert_linear(read, text_of, LONGEST)


@pytest.mark.long
@pytest.mark.parametrize(
    "text_of",
    [
        lambda n: "```\n" * (n // 4),
        lambda n: "{" * n,
        lambda n: "[" * n,
        lambda n: "}" * n,
        lambda n: "```" + " " * n,
        lambda n: "{" * 9 + "[" * n,
    ],
)
def test_a_long_reply_is_read_in_linear_time(task: AutoLogi, text_of: Callable[[int], str]) -> None:
    assert task.extract(text_of(500_000)) is None
    assert_linear(task.extract, text_of, 400_000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "constraints", "kind"),
    [
        ("def inputs_check(inputs): return True", "constraint_list = [missing]", "crash"),
        ("def inputs_check(inputs): return True", "constraint_list = []", "right"),
        ("def inputs_check(inputs): return True", "", "crash"),
        ("inputs_check = 1", "constraint_list = []", "crash"),
        ("def inputs_check(inputs):\n    while True: pass", "constraint_list = []", "timeout"),
        ("def inputs_check(inputs):\n    print('True')", "constraint_list = []", "wrong"),
        ("import os\nos._exit(0)", "", "crash"),
        ("def inputs_check(inputs): return True", "constraint_list = [lambda inputs: 1 / 0]", "wrong"),
        ("def inputs_check(inputs):\n    print('checking')\n    return True", "constraint_list = []", "right"),
        ("def inputs_check(inputs): return True", "(" * 5000, "crash"),
    ],
)
def test_verifiers_that_fail(check: str, constraints: str, kind: str) -> None:
    task = AutoLogi(seconds=0.3 if kind == "timeout" else 10.0)
    problem = task.problem({**ROW, "code": {"Inputs_Check_code": check, "Constraint_List_code": constraints}})
    assert kinds(task, problem, ["[1]", "[2]"]) == [kind, kind]
    assert task.failures == ({kind: 2} if kind in ("crash", "timeout") else {})
    task.close()


def test_gold_that_cannot_be_found(task: AutoLogi) -> None:
    for traverse, complaint in (
        (None, "without 'Traverse_code'"),
        ("def count_valid_arrangements(): return 0, 0", "comes by no arrangement that holds"),
        ("count_valid_arrangements = None", r"ended in a crash \(TypeError"),
        ("def count_valid_arrangements():\n    _seen['right'] = 'print(1)'", "no literal can tell"),
        ("def count_valid_arrangements():\n    global _seen\n    _seen = 1", "comes by no arrangement"),
    ):
        problem = task.problem({**ROW, "code": {**ROW["code"], "Traverse_code": traverse}})
        with pytest.raises(UserError, match=complaint):
            task.gold(problem)


def test_prompts(task: AutoLogi) -> None:
    given = task.problem({**ROW, "prompt": "As the benchmark asks."})
    assert (given.prompt, given.id, task.labels(given)) == ("As the benchmark asks.", "7", {"language": "en"})
    english, chinese = (task.problem({**ROW, "lang": lang}).prompt for lang in ("en", "cn"))
    for part in ("question", "logi_constraints", "input_format", "example"):
        assert ROW[part] in english
        assert ROW[part] in chinese
    assert "Think step by step" in english
    assert "请逐步思考" in chinese
    assert ROW["example"] in str(stated_in(english)), "the form is shown as it will be read"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"code": None}, "data.jsonl, line 3: 'code' must hold the verifier's source"),
        ({"code": {"Inputs_Check_code": "x"}}, "Constraint_List_code"),
        ({"question": None}, "'question' is None"),
        ({"lang": "fr"}, "'lang' among"),
    ],
)
def test_rows_that_state_no_puzzle(task: AutoLogi, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=re.escape(complaint)):
        task.problem({**ROW, **change}, "data.jsonl, line 3")


def test_puzzles_of_a_group_are_held_out_together() -> None:
    rows = [Row(f"line {i}", {**ROW, "idx": i, "group_id": i // 4}) for i in range(200)]
    task = AutoLogi.from_rows(rows, held_out=0.3)
    groups = {s: {p.columns["group_id"] for p in task.problems(s)} for s in ("train", "test")}
    assert not groups["train"] & groups["test"]
    assert len(task.problems("train")) + len(task.problems("test")) == 200
    assert 0.1 < len(task.problems("test")) / 200 < 0.5
    assert len(AutoLogi.from_rows(rows, held_out=1).problems("test")) == 200


def plainly(code: dict[str, str], answers: list[str]) -> list[str]:
    """What the benchmark's evaluator would say: the code with the answer put in, run by a plain interpreter."""
    program = f"""{code["Inputs_Check_code"]}
{code["Constraint_List_code"]}
def holds(inputs):
    return bool(inputs_check(inputs)) and all(bool(constraint(inputs)) for constraint in constraint_list)
def graded(make):
    try:
        return "right" if holds(make()) else "wrong"
    except Exception:
        return "wrong"
print([{", ".join(f"graded(lambda: {answer})" for answer in answers)}])
"""
    ran = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True, timeout=60)
    return list(ast.literal_eval(ran.stdout))


def enumeration(answers: list[str]) -> str:
    """A Traverse_code that tries these."""
    tried = f"verify_function(inputs, inputs_check, constraint_list) for inputs in [{', '.join(answers)}]"
    return f"def count_valid_arrangements():\n    return sum({tried}), {len(answers)}\n"


def check_row(task: AutoLogi, row: dict[str, Any], legal: list[str], illegal: list[str]) -> list[str]:
    """Every answer is graded as a plain interpreter does, the gold answer is right and the wrong ones are not."""
    problem = task.problem(row)
    expected = plainly(row["code"], legal + illegal)
    assert kinds(task, problem, [fenced(answer) for answer in legal + illegal]) == expected
    assert 0 < expected.count("right") < len(legal)
    assert set(expected[len(legal) :]) == {"wrong"}
    assert kinds(task, problem, [task.gold(problem)]) == ["right"]
    assert "a constraint broken" in check_wrong_answers(task, problem)
    return expected


@pytest.mark.parametrize("index", [0, 1])
def test_the_benchmarks_own_verifiers(task: AutoLogi, examples: dict[str, Any], index: int) -> None:
    """English and Chinese, on every choice there is and on some that are none."""
    example = examples["verify_examples"][index]
    lists = re.findall(r"\[(?:\"[^\"]*\", ?)+\"[^\"]*\"\]", example["inputs_format"])
    women, men = (ast.literal_eval(found) for found in lists)
    pairs = [(f, m) for f in combinations(women, 2) for m in combinations(men, 3)]
    legal = [repr({"female": set(f), "male": set(m)}) for f, m in pairs]
    illegal = [
        repr({"female": list(pairs[0][0]), "male": list(pairs[0][1])}),
        repr({"female": set(women), "male": set(pairs[0][1])}),
        repr({"female": set(pairs[0][0])}),
        repr({"female": {("x",)}, "male": None}),
        *("[]", "{}", "None,", "{1, 2}", "'female'"),
    ]
    row = {
        "idx": index,
        "lang": example["lang"],
        "question": example["problem"],
        "logi_constraints": "see above",
        "input_format": example["inputs_format"],
        "example": example["inputs_example"],
        "code": {**example["code"], "Traverse_code": enumeration(legal)},
    }
    check_row(task, row, legal, illegal)
    # The example as the benchmark prints it, in a block and alone.
    shown = [example["inputs_example"], fenced(example["inputs_example"])]
    assert kinds(task, task.problem(row), shown) == plainly(row["code"], [example["inputs_example"]]) * 2


@pytest.mark.long
@pytest.mark.parametrize("lang", ["en", "cn"])
def test_the_benchmarks_own_constraints_and_enumeration(task: AutoLogi, examples: dict[str, Any], lang: str) -> None:
    """Five constraints on the order of seven things, tried in all orders."""
    [constraints] = [e["code"] for e in examples["add_examples"] if e["source"].endswith(lang)]
    things = sorted(set(re.findall(r"index\(\"([^\"]+)\"\)", constraints)))
    check = f"def inputs_check(inputs):\n    return isinstance(inputs, list) and sorted(inputs) == {things}"
    traverse = examples["traverse_examples"][0 if lang == "en" else 2]["Traverse_code"]
    named = re.search(r"goods = (\[.*?\])", traverse)
    assert named is not None
    traverse = traverse.replace(named[1], repr(things))  # in English, the two examples spell them in different ways
    code = {"Inputs_Check_code": check, "Constraint_List_code": constraints, "Traverse_code": traverse}
    orders = [repr(list(order)) for order in permutations(things)]
    expected = plainly(code, orders)
    right = [order for order, kind in zip(orders, expected, strict=True) if kind == "right"]
    wrong = [order for order, kind in zip(orders, expected, strict=True) if kind == "wrong"]
    row = {"idx": lang, "prompt": "Arrange the goods.", "lang": lang, "code": code}
    check_row(task, row, right + wrong[::100], ["[]", "{}", repr(set(things)), repr(things * 2), repr(things[:-1])])
    assert task.extract(task.gold(task.problem(row))) in right


@pytest.mark.slow
def test_the_benchmarks_largest_enumeration(task: AutoLogi, examples: dict[str, Any]) -> None:
    """Seven patients, four doctors: hundreds of thousands of arrangements are made before the first is tried."""
    check = "def inputs_check(inputs):\n    return sum(map(len, inputs.values())) == 7"
    constraints = "constraint_list = [lambda inputs: all(len(s) < 3 for s in inputs.values())]"
    for example in examples["traverse_examples"][1::2]:
        code = {"Inputs_Check_code": check, "Constraint_List_code": constraints, **example}
        problem = task.problem({"idx": 1, "prompt": "Who sees whom?", "code": code})
        assert kinds(task, problem, [task.gold(problem)]) == ["right"]


def reference(text: str) -> Any:
    """The rules of the benchmark's evaluator, told again without bounds; raises where it finds nothing."""
    if blocks := re.findall(r"```(?:\s*[\w]+)?\s*\n(.*?)```", text, re.DOTALL):
        stated = blocks[-1]
    else:
        depth, start, last = 0, 0, None
        for place, character in enumerate(text):
            if character == "{":
                start = place if depth == 0 else start
                depth += 1
            elif character == "}" and depth:
                depth -= 1
                last = text[start : place + 1] if depth == 0 else last
        stated = last if last is not None else re.findall(r"\[.*?\]", text, re.DOTALL)[-1]
    stated = re.sub(r"//.*?\n", "", stated)
    try:
        return ast.literal_eval(stated.replace("true", "True").replace("false", "False"))
    except (SyntaxError, ValueError, TypeError):
        return ast.literal_eval(stated.split("=", 1)[1].strip()) if "=" in stated else json.loads(stated)


def test_every_stored_reply_is_read_as_the_evaluator_reads_it(task: AutoLogi) -> None:
    """Replies that passed the verifier (sft, chosen) and that did not (rejected), in Chinese."""
    passed = [row["conversations"][-1]["value"] for row in read("train_cn_72b_sft_first100.jsonl")]
    pairs = read("train_cn_72b_dpo_first100.jsonl")
    passed += [row["chosen"]["value"] for row in pairs]
    assert len(passed) == 200
    assert [text for text in passed if task.extract(text) is None] == []
    for text in passed + [row["rejected"]["value"] for row in pairs]:
        try:
            expected = reference(text)
        except (SyntaxError, ValueError, TypeError, IndexError):
            assert task.extract(text) is None
        else:
            said = task.extract(text)
            assert said is not None
            assert repr(ast.literal_eval(said)) == repr(ast.literal_eval(write_literal(expected, sort_keys=True)))


def test_the_form_shown_in_every_stored_prompt_can_be_read() -> None:
    for row in read("train_cn_72b_sft_first100.jsonl"):
        stated = stated_in(row["conversations"][0]["value"])
        assert stated is not None
        assert read_literal(stated) is not None
