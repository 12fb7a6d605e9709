"""Texts and files made to hang, crash or fill the memory: each gets its verdict, or an error that says where."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cost_growth import assert_linear
from made_run import made_run
from teamtr.analysis.report import build_report, report_page, report_text
from teamtr.bounded_json import NotJson, is_deeper, read_json
from teamtr.chat.tools import normalise_calls
from teamtr.config import ConfigError, load_team_file, loads
from teamtr.config.source import DEEPEST, LONGEST
from teamtr.grading import WorkerPool
from teamtr.grading.math.deepscaler import judge as deepscaler_judge
from teamtr.grading.math.rules import GSM8K, RULES
from teamtr.grading.math.text import clean, quick_same
from teamtr.session.history import History
from teamtr.session.inputs import Inputs
from teamtr.store import Log, StoreError, batch_name, read_episodes
from teamtr.store.log import decode, encode
from teamtr.tasks.benchmarks.arbench.endpoint import _content
from teamtr.tasks.benchmarks.autologi import _answer_in, stated_in
from teamtr.tasks.benchmarks.math import Gsm8k, Math
from teamtr.tasks.benchmarks.planbench import PlanBench
from teamtr.tasks.data.replies import grade_file
from teamtr.tasks.data.rows import DataError, read_rows

DEEP = "[" * 2000 + "]" * 2000
LONG_NUMBER = "9" * 5000


def in_a_child(program: str, *arguments: object, memory_mb: int | None = None) -> str:
    """What a program prints, in a process that is killed when it hangs and cannot take more memory than that."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({memory_mb} << 20,) * 2)\n" if memory_mb else ""
    ran = subprocess.run(
        [sys.executable, "-c", limit + textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


# -- AutoLogi's reader ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text_of",
    [
        lambda n: "```" + "\n" * n,
        lambda n: "```\n" + "\n" * n + "x",
        lambda n: "``` " * (n // 4),
        lambda n: "{" + "//" * (n // 2) + "}",
        lambda n: "{" * (n // 2) + "}" * (n // 2),
        lambda n: "```\n[" + "1" * (n - 10) + "x]\n```",
        lambda n: "```\n" + "'''\\" * (n // 4) + "\n```",
    ],
)
def test_a_reply_to_autologi_is_read_in_linear_time(text_of: Callable[[int], str]) -> None:
    assert_linear(_answer_in, text_of, 48_000)


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("```\n[1]\n```", "[1]\n"),
        ("```python\n[1]\n```", "[1]\n"),
        ("```  python  \n\n  [1]```", "  [1]"),
        ("```\n\nword\n[1]```", "[1]"),
        ("```\nword```", "word"),
        ("````\n[1]````", "[1]"),
        ("```[1]```", "[1]"),
        ("```\n[1]``` ```\n[2]```", "[2]"),
        ("```\n[1]``` ```\n[2]", "[1]"),
        ("```x y\n{2}```", "{2}"),
    ],
)
def test_the_last_block_is_the_one_that_the_evaluators_pattern_finds(text: str, stated: str) -> None:
    assert stated_in(text) == stated


def test_comments_go_with_their_line_break() -> None:
    answer = _answer_in("```\n[1, // one\n2, // two // more\n3] \n// end```")
    assert answer is None
    answer = _answer_in("```\n[1, // one\n2, // two // more\n3]\n```")
    assert answer is not None
    assert answer.value == [1, 2, 3]


# -- team files -----------------------------------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_that_multiply_are_refused() -> None:
    assert len(BOMB) < 385
    with pytest.raises(ConfigError, match=r"team\.yaml:1:1: aliases make more than \d+ values of this file"):
        loads(BOMB, "team.yaml")
    shared = "a: &a {x: 1, y: [2]}\n" + "".join(f"b{i}: *a\n" for i in range(30))
    with pytest.raises(ConfigError) as refused:
        loads(shared, "team.yaml")
    assert "aliases" not in str(refused.value), "what is shared thirty times over is not much"


@pytest.mark.parametrize(
    "text",
    [DEEP, "{a: " * 2000, "- " * 2000 + "x", "? " * 2000, "".join(f"{' ' * i}a:\n" for i in range(200))],
    ids=["flow", "mappings", "block", "keys", "lines"],
)
def test_levels_without_end_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"team\.yaml:\d+:\d+: not valid YAML: .*{DEEPEST} deep inside each other"):
        loads(text, "team.yaml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"seed: {LONG_NUMBER}", "more than 300 digits"),
        (f"seed: 0x{LONG_NUMBER}", "more than 300 digits"),
        ('name: "\\ud800"', "half of a surrogate pair"),
        ('"\\ud800": 1', "half of a surrogate pair"),
        ('name: "\\UFFFFFFFF"', "not valid YAML"),
        ("x" * (LONGEST + 1), f"longer than {LONGEST} characters"),
    ],
)
def test_what_no_team_file_holds_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loads(text, "team.yaml")


@pytest.mark.long
def test_thousands_of_mistakes_on_one_line_are_told_in_a_few_words() -> None:
    with pytest.raises(ConfigError) as refused:
        loads("{" + ",".join(f"zork{i}: 1" for i in range(1000)) + "}", "team.yaml")
    assert len(str(refused.value)) < 100_000
    assert "mistakes more" in str(refused.value)
    assert len(refused.value.mistakes) > 1000


def test_an_override_is_read_within_the_same_bounds() -> None:
    for value in (DEEP, BOMB.replace("\n", " "), LONG_NUMBER):
        with pytest.raises(ConfigError, match="override"):
            loads("name: x", overrides=[f"seed={value}"])
    for key in ("plan." * 2000 + "x", f"team.agents.{LONG_NUMBER}.name"):
        with pytest.raises(ConfigError, match="override"):
            loads("team: {agents: [{name: a}]}", overrides=[f"{key}=1"])


def test_a_file_without_end_is_no_team_file() -> None:
    with pytest.raises(ConfigError, match="no team file is"):
        load_team_file("/dev/zero")


# -- JSON: rows, logs, frames, answers ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (DEEP, "nested deeper than 100"),
        (LONG_NUMBER, "more than 300 digits: store it as text|more than 300 digits; found .*: store it as text"),
        ('"\\ud83d"', "half of a surrogate pair stands alone.*write the character itself"),
    ],
)
def test_rows_beyond_the_bounds_are_refused_with_their_place(
    tmp_path: Path, suffix: str, value: str, complaint: str
) -> None:
    file = tmp_path / f"rows.{suffix}"
    row = f'{{"question": "q", "answer": {value}}}'
    file.write_text(row if suffix == "jsonl" else f"[{row}]")
    with pytest.raises(DataError, match=complaint) as refused:
        list(read_rows(file))
    assert str(file) in str(refused.value)
    assert ("line 1" in str(refused.value)) == (suffix == "jsonl")


def test_a_row_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teamtr.tasks.data.rows.LONGEST_LINE", 1000)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "q", "answer": "1"}\n' + '{"question": "' + "q" * 2000)
    with pytest.raises(DataError, match="line 2: a row of more than 1000 bytes"):
        list(read_rows(file))


def test_a_reply_that_was_cut_in_the_middle_of_a_character_is_graded(tmp_path: Path) -> None:
    replies = tmp_path / "replies.jsonl"
    replies.write_text('{"answer": "7", "response": "\\\\boxed{7} \\ud83d"}\n')
    assert grade_file("math", replies, tmp_path / "out.jsonl").verdicts == {"right": 1}
    assert "\\ud83d" in (tmp_path / "out.jsonl").read_text(), "it goes out as it came in"


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 100_000, "[" + '"' * 100_000, "[" * 100_000, '"\\' * 50_000, '{"a":' * 50_000, "9" * 100_000]
)
def test_json_is_read_in_linear_time(text: str) -> None:
    def read(text: str) -> None:
        with pytest.raises(NotJson):
            read_json(text, strict=True, half_characters=False)

    assert_linear(read, lambda n: text[:n], len(text))


def test_depth_is_that_of_brackets_outside_of_text() -> None:
    assert read_json('["' + "[" * 500 + '"]') == ["[" * 500]
    deepest = read_json("[" * 100 + "]" * 100)
    assert not is_deeper(deepest, 100)
    assert is_deeper([deepest], 100)
    with pytest.raises(NotJson, match="deeper than 100"):
        read_json("[" * 101 + "]" * 101)


def line(value: str) -> bytes:
    return f'{{"kind": "x", "value": {value}}}'.encode()


@pytest.mark.parametrize(
    "value",
    [
        "[" * 1010 + '{"$float": "nan"}' + "]" * 1010,
        DEEP,
        LONG_NUMBER,
        '{"$int": "0x' + "f" * 5000 + '"}',
        '{"$int": "many"}',
        '{"$float": "x"}',
        '{"$str": "zz"}',
        '"\\ud800"',
    ],
    ids=["marks", "deep", "digits", "hex", "int", "float", "str", "half"],
)
def test_a_line_of_a_log_is_damaged_or_read(tmp_path: Path, value: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(value) + b'\n{"kind": "y"}\n')
    with pytest.raises(StoreError, match=r"log\.jsonl, line 1 is damaged"):
        Log(path).read()


def test_what_is_written_can_be_read_back() -> None:
    nested: object = 1
    for _ in range(98):
        nested = [nested]
    assert decode(encode(nested, "x")) == nested
    with pytest.raises(StoreError, match="nested deeper"):
        encode([nested], "x")
    assert decode(encode(10**300, "x")) == 10**300
    with pytest.raises(StoreError, match="store it as text"):
        encode(10**400, "x")


GRADERS = """
    import json, os, sys

    def speaks(said):
        def grade(items):
            for item in items:
                if item["bad"]:
                    frame = said.encode()
                    for fd in range(3, 64):  # whoever runs in a worker can find its channel
                        try:
                            os.write(fd, len(frame).to_bytes(8, "big") + frame)
                        except OSError:
                            continue
                yield 1
        return grade
"""


GIVING = """
    import json

    def one_by_one():
        return lambda items: (json.loads(item["value"]) for item in items)

    def all_at_once():
        return lambda items: [json.loads(item["value"]) for item in items]
"""


@pytest.mark.parametrize(
    "said", [DEEP, LONG_NUMBER, "7", '{"values": 7}', '{"values": [1, 2, 3, 4, 5, 6]}', '{"error": {}}', "{", "\udcff"]
)
def test_whatever_a_worker_says_is_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    (tmp_path / "speaking.py").write_text(textwrap.dedent(GRADERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(seconds_per_item=20) as pool:
        setup = {"said": said.encode("utf-8", "replace").decode() if said != "\udcff" else "\x80"}
        results = pool.submit("speaking:speaks", [{"bad": False}, {"bad": True}, {"bad": False}], setup)
        assert len(results) == 3
        assert results[0].value == 1
        assert {result.kind for result in results} <= {"ok", "crash"}
        assert "crash" in {result.kind for result in results}


@pytest.mark.parametrize("value", ["[" * 200 + "]" * 200, "1" + "0" * 1000])
def test_a_value_beyond_the_bounds_spoils_its_own_item_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The worker itself has signed it, unlike what a grader writes to the channel."""
    (tmp_path / "giving.py").write_text(textwrap.dedent(GIVING))
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(seconds_per_item=20) as pool:
        items = [{"value": "1"}, {"value": value}, {"value": "3"}]
        for name in ("one_by_one", "all_at_once"):
            results = pool.submit(f"giving:{name}", items)
            assert [result.kind for result in results] == ["ok", "crash", "ok"]
            assert [results[0].value, results[2].value] == [1, 3]
            assert "cannot be read" in results[1].message


@pytest.mark.parametrize("held", [7, {}, {"rows": 7}, {"earlier": {"a": 7}, "newest": []}])
def test_what_a_commit_holds_in_the_place_of_inputs_and_updates_is_named(held: Any) -> None:
    with pytest.raises(StoreError, match="does not say what the run learns from"):
        Inputs.of_record(held)
    with pytest.raises(StoreError, match="does not hold the updates before it"):
        History().take_state(held, None)


def test_an_answer_of_an_endpoint_that_ends_in_half_a_character_is_one() -> None:
    assert _content(b'{"choices": [{"message": {"content": "yes \\ud83d"}}]}') == "yes \ufffd"


# -- episodes -------------------------------------------------------------------------------------------------


def bomb(path: Path, megabytes: int) -> Path:
    """A gzip file of members that unpack to a thousand times their size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    member = gzip.compress(bytes(1 << 20), compresslevel=9)
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(member)
    return path


@pytest.mark.long
def test_a_small_file_that_unpacks_to_gigabytes_is_refused_with_little_memory(tmp_path: Path) -> None:
    path = bomb(tmp_path / batch_name(0, 0), 6000)
    assert path.stat().st_size < 7 << 20
    said = in_a_child(
        """
        import resource, sys
        from pathlib import Path
        from teamtr.store import StoreError, read_episodes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            read_episodes(Path(sys.argv[1]))
        except StoreError as error:
            print(error)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
        """,
        path,
    )
    message, megabytes = said.strip().rsplit("\n", 1)
    assert str(path) in message
    assert "bytes" in message
    assert int(megabytes) < 1500


@pytest.mark.parametrize("unpacked", [b"\n" * 10**7, b" " * 10**7 + b"\n"])
def test_a_ratio_that_no_batch_has_is_told(tmp_path: Path, unpacked: bytes) -> None:
    path = tmp_path / batch_name(0, 0)
    path.write_bytes(gzip.compress(unpacked, compresslevel=9))
    with pytest.raises(StoreError, match=r"restore .* from a copy"):
        read_episodes(path)


def stored(tmp_path: Path, **changes: object) -> Path:
    header = {"kind": "teamtr-episodes", "format": 1, "group_size": 1}
    header["problems"] = [{"id": "p", "prompt": "q", "answer": None, "private": {}, "columns": {}}]
    turn = {"agent": "a", "round": 0, "context_ids": [1], "token_ids": [2], "sampler_logprobs": [-0.5]}
    turn |= {"finish": "stop", "agent_version": "v", "text": "t"}
    episode = {"problem_id": "p", "group_index": 0, "answer": "t", "team_version": "v", "replies": []}
    episode |= {"verdict": {"kind": "right", "reward": 1.0, "extracted": None}}
    for body in (header, turn, episode):
        body |= {key: value for key, value in changes.items() if key in body}
    path = tmp_path / batch_name(0, 0)
    lines = [json.dumps(header), json.dumps({**episode, "turns": [turn]})]
    path.write_bytes(gzip.compress("\n".join(lines).replace('"DEEP"', DEEP).encode()))
    return path


def test_the_file_that_the_next_test_damages_is_whole(tmp_path: Path) -> None:
    assert read_episodes(stored(tmp_path)).episodes[0].turns[0].text == "t"


@pytest.mark.parametrize(
    "changes",
    [
        {"context_ids": [2**40]},
        {"context_ids": [2**31]},
        {"context_ids": [True, 1]},
        {"context_ids": ["7"]},
        {"context_ids": [1.5]},
        {"context_ids": "DEEP"},
        {"context_ids": {"a": 1}},
        {"token_ids": [[1], [2]]},
        {"text": 7},
        {"answer": ["t"]},
        {"agent": None},
        {"round": "0"},
        {"finish": "never"},
        {"finish": ["stop"]},
        {"verdict": {"kind": "fine", "reward": 1.0, "extracted": None}},
        {"verdict": {"kind": "right", "reward": "1", "extracted": None}},
        {"group_size": "1"},
        {"group_size": 10**18},
        {"problems": [{"id": 1, "prompt": "q", "answer": None, "private": {}, "columns": {}}]},
        {"problems": [{"id": "p", "prompt": "q", "answer": None, "private": [], "columns": {}}]},
        {"problems": 7},
        {"replies": [{"messages": [{"author": 1, "text": "t", "tool_calls": []}], "ends": False}]},
        {"replies": 7},
        {"kind": [1]},
    ],
    ids=str,
)
def test_episodes_of_another_form_are_refused_by_name(tmp_path: Path, changes: dict[str, object]) -> None:
    path = stored(tmp_path, **changes)
    with pytest.raises(StoreError, match=r"stage-0000-step-00\.jsonl\.gz"):
        read_episodes(path)


# -- run folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", stages=1)


def everything(run: Path) -> str:
    """All that a report says, in both of its forms."""
    report = build_report(run)
    return (
        report_page(report) + report_text(report.data) + json.dumps([dict(report.data), *report.conversations.values()])
    )


@pytest.mark.parametrize("text", [BOMB, DEEP, "- " * 2000, f"seed: {LONG_NUMBER}", 'name: "\\UFFFFFFFF"', "\0"])
def test_a_report_of_a_run_with_a_hostile_team_file(run: Path, text: str) -> None:
    (run / "team.yaml").write_text(text)
    assert "team file is not understood" in everything(run)


@pytest.mark.long
def test_nothing_outside_of_the_run_folder_is_shown(run: Path, tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    outside = tmp_path / "outside"
    other = made_run(outside, stages=1, name=secret)
    (outside / "secret.txt").write_text(secret)
    (outside / "log.jsonl").write_text(json.dumps({"kind": "start", "name": secret, "agents": [secret]}) + "\n")

    def linked(name: str, target: Path) -> None:
        path = run / name
        aside = run.parent / "aside"
        aside.mkdir(exist_ok=True)
        path.rename(aside / name.replace("/", "-"))
        path.symlink_to(target)

    assert secret not in everything(run)
    for name, target in (
        ("team.yaml", outside / "secret.txt"),
        ("log.jsonl", outside / "log.jsonl"),
        ("episodes", other / "episodes"),
        ("checkpoints/commits/000001/team.json", outside / "secret.txt"),
    ):
        linked(name, target)
        shown = everything(run)
        assert secret not in shown, name
    assert "put behind a link" in shown
    assert "none that is a plain file" in shown


def test_folders_on_the_way_may_be_no_links_either(run: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", stages=1, progress={"secret": "correct-horse"})
    for name in ("checkpoints/commits", "checkpoints"):
        (run / name).rename(tmp_path / name.replace("/", "-"))
        (run / name).symlink_to(other / name)
        assert "No checkpoint can be read" in everything(run)
        (run / name).unlink()
        (tmp_path / name.replace("/", "-")).rename(run / name)


def test_a_report_of_a_folder_behind_a_link_is_that_of_the_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert len(build_report(tmp_path / "latest").data["updates"]) == len(build_report(run).data["updates"]) > 0


@pytest.mark.long
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run: Path) -> None:
    for name in ("log.jsonl", "team.yaml"):
        (run / name).unlink()
        os.mkfifo(run / name)
    said = in_a_child(
        "import sys; from teamtr.analysis.report import build_report; print(*build_report(sys.argv[1]).data['notes'])",
        run,
    )
    assert said.count("none that is a plain file") == 2


@pytest.mark.long
def test_a_batch_that_unpacks_to_gigabytes_is_left_out_of_a_report(run: Path) -> None:
    file = min((run / "episodes").iterdir())
    file.unlink()
    bomb(file, 300)
    assert f"{file.name}" in " ".join(build_report(run).data["notes"])


# -- mathematics and other replies ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "text_of",
    [
        lambda n: "{" * (n // 2) + "}" * (n // 2),
        lambda n: " " * n + "x",
        lambda n: "1,000 (" * (n // 7),
        lambda n: r"\text{" + "9" * n,
    ],
    ids=["braces", "blanks", "thousands", "text"],
)
def test_an_answer_is_cleaned_in_linear_time(text_of: Callable[[int], str]) -> None:
    assert_linear(clean, text_of, 40_000)


def test_an_announcement_of_a_thousand_formulas_is_read_in_linear_time() -> None:
    judge = RULES["default"].judge
    assert_linear(lambda text: judge(text, "7"), lambda n: "answer: " + r"\(" * (n // 2), 3_900)


@pytest.mark.parametrize("rule", ["default", "last_number", "deepscaler", "dapo"])
def test_numbers_of_thousands_of_digits_are_wrong_answers(rule: str) -> None:
    for reply in (rf"\boxed{{{LONG_NUMBER[:1900]}}}", f"Answer: {LONG_NUMBER}", f"#### {LONG_NUMBER}", LONG_NUMBER):
        assert not RULES[rule].judge(reply, "7").right
    assert quick_same("7", LONG_NUMBER) is not True


def test_a_number_of_thousands_of_digits_can_be_voted_for() -> None:
    task = Gsm8k()
    assert task.extract(f"#### {LONG_NUMBER}") == LONG_NUMBER
    assert not GSM8K.judge(f"#### {LONG_NUMBER}", "7").right
    task.close()


def test_matrices_inside_matrices_do_not_multiply() -> None:
    """Each entry is set as wide as the widest: of four matrices inside each other, ten thousand million characters."""
    inner = "1"
    for _ in range(6):
        inner = r"\begin{array}" + "{c}" + "1&" * 60 + inner + r"\end{array}"
    said = in_a_child(
        "import sys; from teamtr.grading.math.deepscaler import judge; print(judge(sys.argv[1], '7'))",
        inner,
        memory_mb=4096,
    )
    assert said.strip() == "False"
    assert (
        deepscaler_judge(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4\end{pmatrix}")
        is True
    )


def test_an_answer_that_nobody_can_state_is_refused_with_its_row() -> None:
    task = Math()
    with pytest.raises(DataError, match="line 3: the answer has 5000 characters"):
        task.problem({"problem": "q", "answer": LONG_NUMBER}, "data.jsonl, line 3")
    task.close()


def test_a_clause_that_can_be_parted_in_many_ways_is_no_fact() -> None:
    query = f"initial conditions I have that, the {' is on top of the' * 2000} x. my goal is to have that x."
    with pytest.raises(DataError, match="which is no fact"):
        PlanBench().problem({"query": query})


def test_calls_and_answers_share_one_reader() -> None:
    [call] = normalise_calls('a(x=[1, \'é\', {"k": -2.5e3}], y="\\u00e9\\ud83d\\ude00", z=null)').calls
    assert call.arguments == {"x": [1, "é", {"k": -2500.0}], "y": "é😀", "z": None}
    for text in ("a(x={1, 2})", "a(x=(1, 2))", "a(x=b'1')", "a(x={1: 2})", "a(x='a' 'b')", f"a(x={LONG_NUMBER})"):
        assert normalise_calls(text).calls == (), text
    assert normalise_calls('a(x="\\ud800")').rejected[0].reason == "half of a surrogate pair stands alone"
