"""Your own data as you have it: every format gives the same problems, and what cannot be used is told clearly."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from called import invoke
from teamtr.api.rewards import RewardTask
from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.session.build import build
from teamtr.session.checks import doubts
from teamtr.tasks import DataTask, Task, TaskContext
from teamtr.tasks.benchmarks.math import Math
from teamtr.tasks.data.rows import DataError, read_rows
from teamtr.tasks.registry import benchmark, build_task
from teamtr.types import Problem, Verdict

ROWS = [{"question": f'What is "{k}", and\nwhy?', "answer": str(k), "level": f"l{k}"} for k in range(12)]


def as_jsonl(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def as_csv(file: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return file


def as_json(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text(json.dumps(rows))
    return file


def as_tsv(file: Path, rows: list[dict[str, Any]]) -> Path:
    return as_csv(file, rows, "\t")


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def as_folder(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.mkdir()
    as_jsonl(file / "part-1.jsonl", rows[:5])
    as_csv(file / "part-2.csv", rows[5:])
    (file / "README.md").write_text("what this is")
    return file


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "d.json": as_json,
    "d.csv": as_csv,
    "d.tsv": as_tsv,
    "d.parquet": as_parquet,
    "folder": as_folder,
}


def from_team_file(folder: Path, task: str) -> Any:
    """The task that a team file in this folder describes."""
    text = f"name: t\ntask: {{name: data, {task}}}\nteam: {{model: tiny, agents: [{{name: a}}]}}\n"
    section = loads(text, "team.yaml").anchored(folder).task
    return build_task(section, TaskContext(0, ("a",)))


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_problems(name: str, tmp_path: Path):
    one = DataTask(as_jsonl(tmp_path / "d.jsonl", ROWS))
    WRITERS[name](tmp_path / name, ROWS)
    other = from_team_file(tmp_path, f"path: {name}")
    for split in ("train", "test"):
        assert other.problems(split) == one.problems(split)
    assert one.problems("train")[0].columns.keys() == {"answer", "level"}


def test_two_sources_are_two_splits(tmp_path: Path):
    as_jsonl(tmp_path / "a.jsonl", ROWS[:8])
    as_csv(tmp_path / "b.csv", ROWS[8:])
    task = from_team_file(tmp_path, "train: a.jsonl, test: b.csv")
    assert [p.answer for p in task.problems("train")] == [row["answer"] for row in ROWS[:8]]
    assert [p.answer for p in task.problems("test")] == [row["answer"] for row in ROWS[8:]]
    alone = from_team_file(tmp_path, "train: a.jsonl")
    with pytest.raises(UserError, match="no split 'test'"):
        alone.problems("test")
    with pytest.raises(UserError, match=r"task\.path is shared out into train and test; give it, or"):
        from_team_file(tmp_path, "path: a.jsonl, test: b.csv")
    with pytest.raises(UserError, match=r"task\.held_out is a share of task\.path, which is not given"):
        from_team_file(tmp_path, "train: a.jsonl, held_out: 0.5")


def test_a_folder_with_a_file_to_train_on_and_one_to_test_on(tmp_path: Path):
    (tmp_path / "data").mkdir()
    as_jsonl(tmp_path / "data" / "train.jsonl", ROWS[:8])
    as_csv(tmp_path / "data" / "test.csv", ROWS[8:])
    task = DataTask(tmp_path / "data")
    assert [len(task.problems(split)) for split in ("train", "test")] == [8, 4]
    assert from_team_file(tmp_path, "path: data").problems("test") == task.problems("test")
    (warning,) = set(from_team_file(tmp_path, "path: data, held_out: 0.5").warnings) - set(task.warnings)
    assert re.fullmatch(r"task\.held_out: 0\.5 changes nothing: .*data holds a file to train on and one to .*", warning)
    with pytest.raises(DataError, match="files to train on and to test on: name one of them"):
        list(read_rows(tmp_path / "data"))
    as_jsonl(tmp_path / "data" / "dev.jsonl", ROWS[:1])
    with pytest.raises(DataError, match=r"not clear which .*dev\.jsonl, test\.csv, train\.jsonl.*task\.train and"):
        DataTask(tmp_path / "data")


def test_a_data_set_of_the_hub_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Any, ...]] = []
    hub = ModuleType("datasets")
    hub.load_dataset = lambda name, configuration, split: asked.append((name, configuration, split)) or ROWS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = from_team_file(tmp_path, "train: owner/name:main:train, test: owner/name:test")
    assert asked == [("owner/name", "main", "train"), ("owner/name", None, "test")]
    assert len(task.problems("train")) == len(task.problems("test")) == 12
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'teamtr\[hub\]'"):
        from_team_file(tmp_path, "path: owner/name:train")


@pytest.mark.long
def test_a_task_may_have_nothing_held_out(tmp_path: Path):
    as_csv(tmp_path / "d.csv", ROWS)
    text = "name: t\ntask: {name: data, train: d.csv}\nteam: {model: tabular, max_tokens: 2, agents: [{name: a}]}\n"
    (tmp_path / "team.yaml").write_text(text + "plan: {radius_nats_per_message: 0.1}\n")
    assert "12 to train on, 0 held out" in invoke("check", tmp_path / "team.yaml", "eval.every=0").stdout
    told = invoke("check", tmp_path / "team.yaml", code=2).stderr
    assert "data has no split 'test': use one of ['train']; give task.test, or set eval.every: 0" in told


# -- columns --------------------------------------------------------------------------------------------------


def test_columns_get_other_names_also_from_within(tmp_path: Path):
    row = {"text": "q", "reward_model": {"ground_truth": "7", "style": "rule"}, "difficulty": 3}
    as_jsonl(tmp_path / "d.jsonl", [row])
    columns = "columns: {question: text, answer: reward_model.ground_truth, level: difficulty}"
    (problem,) = from_team_file(tmp_path, f"train: d.jsonl, {columns}").problems("train")
    assert (problem.prompt, problem.answer) == ("q", "7")
    assert problem.columns == {"answer": "7", "level": 3, "reward_model": row["reward_model"]}
    with pytest.raises(DataError, match=r"line 1: task\.columns: no column 'reward\.gold'; found \['difficulty'"):
        from_team_file(tmp_path, "train: d.jsonl, columns: {answer: reward.gold}")


# -- chat format ----------------------------------------------------------------------------------------------


def said(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_messages_in_chat_format(tmp_path: Path):
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "2+2?"}]
    rows: list[dict[str, Any]] = [
        {"messages": said(("system", "be brief"), ("user", "1+1?"), ("assistant", "2"))},
        {"messages": said(("user", parts), ("assistant", "4"))},
    ]
    task = DataTask(as_jsonl(tmp_path / "d.jsonl", rows), held_out=0, grader="number")
    assert [(p.prompt, p.answer) for p in task.problems("train")] == [("1+1?", "2"), ("what is 2+2?", "4")]
    assert task.warnings == ("the system prompts of 1 rows are left out: give agents a system_prompt",)
    assert [v.kind for v in task.grade_replies([(task.problems("train")[0], "it is 2")])] == ["right"]
    assert [p.columns for p in task.problems("train")] == [{"answer": "2"}, {"answer": "4"}], "for reward functions"
    asked = [{"prompt": said(("user", "1+1?")), "answer": "2"}]
    (problem,) = DataTask(as_jsonl(tmp_path / "p.jsonl", asked), held_out=0).problems("train")
    assert (problem.prompt, problem.answer) == ("1+1?", "2"), "a column goes before what the assistant says"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (said(("user", "a"), ("assistant", "b"), ("user", "c")), "line 1: its prompt has 2 user messages; give one"),
        (said(("system", "a")), "has 0 user messages"),
        (said(("user", "a"), ("tool", "b")), "its messages are of user, tool: give one of the user"),
        (said(("user", 3)), "message 1: its content must be text, found 3"),
        (said(("user", "q")), "the assistant's message must be text or a number, found None"),
        (said(("user", [{"type": "image_url", "image_url": {"url": "x"}}])), "of type 'image_url': teams of language"),
    ],
)
def test_messages_that_are_no_question(messages: Any, complaint: str, tmp_path: Path):
    with pytest.raises(DataError, match=complaint):
        DataTask(as_jsonl(tmp_path / "d.jsonl", [{"messages": messages}]), held_out=0)


# -- what cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("image", "cats/1.PNG"),
        ("images", ["a.jpg"]),
        ("picture", "data:image/png;base64,AAAA"),
        ("photo", {"bytes": "AAAA", "path": "x"}),
        ("content", [{"type": "input_audio", "input_audio": {}}]),
    ],
)
def test_images_are_refused(column: str, value: Any, tmp_path: Path):
    rows = [{"question": "what is it?", "answer": "a cat", column: value}]
    with pytest.raises(
        DataError, match=rf"line 1, column '{column}': .*: teams of language models are given text alone"
    ):
        DataTask(as_jsonl(tmp_path / "d.jsonl", rows), held_out=0)
    assert DataTask(as_jsonl(tmp_path / "t.jsonl", [{**rows[0], column: "a text"}]), held_out=0).problems("train")


def test_images_in_parquet_are_refused(tmp_path: Path):
    rows = [{"question": "what is it?", "answer": "a cat", "image": {"bytes": b"\x89PNG", "path": None}}]
    with pytest.raises(DataError, match=r"row 1, column 'image': an image: teams of language models"):
        DataTask(as_parquet(tmp_path / "d.parquet", rows), held_out=0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"question,answer\nq,1,2\n", "line 2: 3 cells, and the first line names 2 columns: put cells"),
        (b"question;answer\nq;1\n", "line 1: separated by ';': save it with commas"),
        (b"question,question\nq,1\n", "line 1: two columns are called 'question'"),
        (b"question,\nq,1\n", "line 1: a column has no name"),
        (b'question,answer\n"q,1\n', "line 2: not csv .*save it as .jsonl, or mend it"),
        (b"question,answer\n\xff,1\n", "not UTF-8"),
        (b"", "d.csv: empty"),
        (b"question,answer\n", "d.csv: empty"),
    ],
)
def test_csv_that_cannot_be_read(content: bytes, complaint: str, tmp_path: Path):
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        DataTask(tmp_path / "d.csv", held_out=0)


# -- stored replies -------------------------------------------------------------------------------------------


def graded(folder: Path, replies: list[dict[str, Any]], *arguments: str, code: int = 0) -> Any:
    as_jsonl(folder / "replies.jsonl", replies)
    where = ["--responses", str(folder / "replies.jsonl"), "--out", str(folder / "out.jsonl")]
    result = invoke("grade", "data", *arguments, *where, code=code)
    rows = [] if code else (folder / "out.jsonl").read_text().splitlines()
    return result, [(row["verdict"], row["reward"]) for row in map(json.loads, rows)]


@pytest.mark.long
def test_grade_knows_data(tmp_path: Path):
    problems = [{"id": "x", "question": "1+1?", "gold": "2"}, {"id": "y", "question": "2+2?", "gold": "4"}]
    as_csv(tmp_path / "d.csv", problems)
    replies = [{"id": "x", "response": "it is 2"}, {"id": "y", "response": "5"}, {"id": "y", "response": "none"}]
    data = ("--data", str(tmp_path / "d.csv"), "--grader", "number")
    _, rows = graded(tmp_path, replies, "task.answer=gold", *data)
    assert rows == [("right", 1.0), ("wrong", 0.0), ("unparsed", 0.0)]
    own = [{"question": "1+1?", "answer": "2", "response": "#### 2"}, {"question": "?", "answer": "a", "response": "a"}]
    _, rows = graded(tmp_path, own, r"task.pattern='#### (\d+)'", "--grader", "regex")
    assert rows == [("right", 1.0), ("unparsed", 0.0)]


@pytest.mark.long
def test_grade_takes_functions_and_shows_what_they_print(tmp_path: Path):
    reward = "def short(completions, level, **_):\n    print('so many:', len(completions))\n"
    (tmp_path / "r.py").write_text(reward + "    return [l / len(c) for c, l in zip(completions, level)]\n")
    replies = [{"question": "q", "answer": "yes", "level": 3, "response": "yes"}]
    rewards = f"task.rewards=[{{function: 'python:{tmp_path}/r.py:short', weight: 0.5}}]"
    result, rows = graded(tmp_path, replies, rewards, "--grader", "exact")
    assert rows == [("right", 1.5)]
    assert "reward: so many: 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["plan.stages=3"], "settings are the task's, such as task.answer=gold"),
        (["task.path=x"], "the data is given with --data"),
        (["task.anwser=x"], 'did you mean "answer"'),
        (["--grader", "regex"], "needs task.pattern"),
        (["--grader", "exact", "--data", "none.csv"], "there is no such data file"),
    ],
)
def test_what_grade_is_told_wrong(arguments: list[str], complaint: str, tmp_path: Path):
    result, _ = graded(tmp_path, [{"id": "x", "response": "a"}], *arguments, code=2)
    assert complaint in result.stderr


# -- names of problems ----------------------------------------------------------------------------------------


class Echo(Task):
    """A user's own task."""

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        return [Verdict("wrong", 0.0) for _ in episodes]


@pytest.mark.parametrize("names", [["a", "a", "a-2", "a"], ["a-2", "a", "a"]])
def test_no_two_problems_have_one_id_even_if_a_row_has_the_name_that_another_would_get(
    names: list[str], tmp_path: Path
):
    rows = [{"prompt": f"What is {k}?", "id": name, "answer": str(k)} for k, name in enumerate(names)]
    solution = {"header": ["House", "Name"], "rows": [["1", "ann"], ["2", "bob"]]}
    puzzles = [{**row, "puzzle": "p", "solution": solution} for row in rows]
    of_rows = RewardTask(len, rows, rows[:1]).problems("train")
    of_file = Math(train=as_jsonl(tmp_path / "d.jsonl", rows)).problems("train")
    of_puzzles = benchmark("zebralogic", as_jsonl(tmp_path / "z.jsonl", puzzles), held_out=1).problems("test")
    of_user = Echo({"test": [Problem(name, row["prompt"], None) for name, row in zip(names, rows, strict=True)]})
    for problems in (of_rows, of_file, of_puzzles, of_user.problems("test")):
        assert [problem.prompt.partition("\n")[0] for problem in problems] == [row["prompt"] for row in rows]
        assert len({problem.id for problem in problems}) == len(rows)


def test_an_id_that_is_empty_is_none():
    rows = [{"prompt": f"p{k}", "id": None} for k in range(2)]
    ids = [problem.id for problem in RewardTask(len, rows, rows[:1]).problems("train")]
    assert len(set(ids)) == 2
    assert not any("None" in ident for ident in ids)


def test_empty_ids_do_not_put_all_problems_into_one_split(tmp_path: Path):
    solution = {"header": ["House", "Name"], "rows": [["1", "ann"], ["2", "bob"]]}
    rows = [{"id": None, "puzzle": f"puzzle {k}", "solution": solution} for k in range(12)]
    task = benchmark("zebralogic", as_jsonl(tmp_path / "z.jsonl", rows), held_out=0.5)
    assert task.problems("train")
    assert task.problems("test")
    assert len({problem.id for split in ("train", "test") for problem in task.problems(split)}) == len(rows)


def test_questions_that_differ_in_what_is_private_are_different_questions(tmp_path: Path):
    rows = [{"question": "Which?", "answer": str(k), "hint": f"number {k}"} for k in (1, 2)]
    assert DataTask(as_jsonl(tmp_path / "d.jsonl", rows), held_out=0, private={"a": "hint"}).warnings == ()
    [warning] = DataTask(tmp_path / "d.jsonl", held_out=0).warnings
    assert "one question, 2 different answers" in warning


# -- nothing held out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
def test_a_share_of_few_rows_that_holds_out_nothing_is_refused_if_it_is_to_be_evaluated(every: int, tmp_path: Path):
    solution = {"header": ["House", "Name"], "rows": [["1", "ann"], ["2", "bob"]]}
    as_jsonl(tmp_path / "z.jsonl", [{"puzzle": f"puzzle {k}", "solution": solution} for k in range(3)])
    text = (
        "name: t\ntask: {name: zebralogic, path: z.jsonl, held_out: 0.01}\n"
        f"team: {{model: tabular, max_tokens: 2, agents: [{{name: a}}]}}\neval: {{every: {every}}}\n"
    )
    session = build(loads(text, "team.yaml").anchored(tmp_path))
    assert len(session.task.problems("train")) == 3
    if every:
        with pytest.raises(UserError, match=r"no held-out problem to evaluate on: raise task\.held_out"):
            doubts(session)
    else:
        doubts(session)


# -- rows of a Python program, which are read as those of a file are ------------------------------------------


def test_the_assistants_message_is_the_answer_of_a_row_that_has_no_other():
    heard: list[Any] = []

    def reward(completions: list[str], answer: list[str]) -> list[float]:
        heard.extend(answer)
        return [0.0] * len(completions)

    asked = {"role": "user", "content": "q"}
    rows = [
        {"prompt": [{"role": "system", "content": "s"}, asked, {"role": "assistant", "content": "chat"}]},
        {"prompt": [asked, {"role": "assistant", "content": "chat"}], "answer": "column"},
    ]
    task = RewardTask(reward, rows, rows[:1])
    problems = task.problems("train")
    assert [problem.answer for problem in problems] == ["chat", "column"]
    task.grade([(problem, "", ()) for problem in problems])
    assert heard == ["chat", "column"]
    assert task.warnings == ("the system prompts of 2 rows are left out: give agents a system_prompt",)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("image", "data:image/png;base64,abc", "row 1, column 'image': an image: teams of language models"),
        ("completions", "theirs", "rename its column 'completions'"),
    ],
)
def test_a_column_that_agents_or_rewards_would_never_see_is_refused(column: str, value: str, said: str):
    with pytest.raises(UserError, match=said):
        RewardTask(len, [{"prompt": "p"}, {"prompt": "q", column: value}])
