"""Nothing foreign steers a terminal: replies, data, errors of a person's own code and other people's run folders."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import teamtr.cli
from made_run import made_run, update_record
from teamtr.cli import app
from teamtr.cli.complete import agents_of_run
from teamtr.cli.progress import TrainingScreen
from teamtr.store.log import encode
from teamtr.text import on_terminal

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b1A\rfine\x08\x7f\u202e\u2066"

OWN = """
    import warnings
    from teamtr.tasks import Task
    from teamtr.types import Problem, Verdict

    ESCAPES = {escapes!r}

    class Hostile(Task):
        warnings = ("odd " + ESCAPES,)

        def __init__(self, raises=""):
            problems = [Problem(f"p{{k}}" + ESCAPES, f"{{k}} " + ESCAPES, "A") for k in range(4)]
            super().__init__({{"train": problems[:2], "test": problems[2:]}})
            if raises == "made":
                raise ValueError("not made " + ESCAPES)
            self.raises = raises

        def grade(self, episodes):
            warnings.warn("a warning " + ESCAPES)
            warnings.warn("another " + ESCAPES, RuntimeWarning)
            self.failures["failed " + ESCAPES] += 1
            if self.raises == "graded":
                raise RuntimeError("not graded " + ESCAPES)
            return [Verdict("right" if "A" in answer else "wrong", float(len(answer))) for _, answer, _ in episodes]

        def labels(self, problem):
            return {{"size" + ESCAPES: "of " + ESCAPES}}
"""
TEAM = """
    name: small
    task: {{name: "python:{own}:Hostile", options: {{raises: "{raises}"}}}}
    tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
    team: {{model: tiny, agents: [{{name: a, max_tokens: 2}}, {{name: b, max_tokens: 2}}]}}
    plan: {{stages: 1, problems: 2, group_size: 2, radius_nats_per_message: 0.05}}
    learner: {{minibatches: 1}}
    eval: {{every: 1, samples: 2}}
"""


def team_file(folder: Path, raises: str = "") -> Path:
    own = folder / "own.py"
    own.write_text(textwrap.dedent(OWN.format(escapes=ESCAPES)))
    file = folder / "team.yaml"
    file.write_text(textwrap.dedent(TEAM.format(own=own, raises=raises)))
    return file


def invoke(*arguments: object, code: int = 0) -> str:
    """All that the command wrote."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.replace("\t", " ").split("\n"))


@pytest.mark.long
def test_a_task_that_speaks_in_escape_sequences_through_every_command(tmp_path: Path) -> None:
    file, run = team_file(tmp_path), tmp_path / "run"
    said = {
        "check": invoke("check", file),
        "train": invoke("train", file, "--out", run),
        "eval": invoke("eval", run),
        "eval --json": invoke("eval", run, "--json"),
        "eval --team": invoke("eval", "--team", file, "--out", tmp_path / "evals"),
        "report": invoke("report", run),
        "report --format md": invoke("report", run, "--format", "md"),
        "compare": invoke("compare", run, run),
        "swap": invoke("swap", run, "--agent", "a", "--with", "tiny", "--no-align"),
    }
    assert {name for name, text in said.items() if not is_harmless(text)} == set()
    for command in ("check", "train", "eval", "swap"):
        assert "⟨U+001B⟩" in said[command], f"{command} shows what was said"
    last = json.loads(said["eval --json"].splitlines()[-1])
    assert f"failed {ESCAPES}" in last["grader_failures"], "data stay as they are"


@pytest.mark.long
@pytest.mark.parametrize("raises", ["made", "graded"])
def test_errors_of_own_code_are_harmless(
    tmp_path: Path, raises: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that nobody foresaw, which end with a traceback."""
    monkeypatch.setattr(sys, "argv", ["teamtr", "check", str(team_file(tmp_path, raises))])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there
    with pytest.raises(SystemExit) as left:
        teamtr.cli.main()
    told = "".join(capsys.readouterr())
    assert left.value.code
    assert f"not {raises} ⟨U+001B⟩]0;owned" in told
    assert is_harmless(told)


def test_rows_of_stored_replies(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"id": "p", "problem": "1+1", "answer": "2"}) + "\n")
    rows.write_text(json.dumps({"id": ESCAPES, "response": ESCAPES}) + "\n")
    told = invoke("grade", "math", "--responses", rows, "--out", tmp_path / "out", "--data", problems, code=2)
    assert is_harmless(told)


@pytest.mark.long
def test_run_folders_of_others(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    hostile = update_record(10, 3, 0, ESCAPES, outcome=ESCAPES, reason=ESCAPES, unit=ESCAPES)
    with open(run / "log.jsonl", "ab") as log:
        log.write(encode(hostile, "record") + b"\n" + encode({"kind": ESCAPES}, "record") + b"\n")
    for command in (["report", run], ["report", run, "--format", "md"], ["report", run, "--format", "json"]):
        assert is_harmless(invoke(*command))
    assert is_harmless(invoke("compare", run, run))
    text = (run / "team.yaml").read_text().replace("name: left", f"name: {json.dumps(ESCAPES)}")
    (run / "team.yaml").write_text(text)
    assert is_harmless(invoke("report", run))

    class Context:
        params: dict[str, Any] = {"run": str(run)}  # noqa: RUF012 (typer's own is no dataclass either)
        args: tuple[str, ...] = ()

    assert agents_of_run(Context(), "") == ["right", "speaker"]  # type: ignore[arg-type]


def test_the_live_line_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with TrainingScreen() as screen:
        screen.console = Console(stderr=True, force_terminal=False, width=200)
        screen.agents = {ESCAPES: update_record(1, 0, 0, ESCAPES)}
        screen.console.print(screen._table("", ""))
        list(screen.watch([{"kind": "tracker", "text": ESCAPES}]))
    told = capsys.readouterr().err
    assert "owned" in told
    assert is_harmless(told)


def test_only_one_module_of_the_commands_writes() -> None:
    """So that nothing can be written that did not pass ``on_terminal``."""
    folder = Path(teamtr.cli.__file__).parent
    found = []
    for module in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("sys")), attr=name)):
                    found.append((module.name, name))
                case ast.Call(func=ast.Name("print")) | ast.Call(func=ast.Attribute(attr="echo" | "secho")):
                    found.append((module.name, "print"))
                case ast.Call(func=ast.Attribute(attr="print"), args=[shown, *_]):
                    assert "on_terminal" in ast.unparse(shown), f"{module.name}: {ast.unparse(node)}"
    assert found == []


def test_text_for_a_terminal() -> None:
    assert on_terminal("a\r\nb\tc\n") == "a\nb\tc\n"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0xD800, 0xFEFF):
        character = chr(code)
        assert character in "\n\t" or character not in on_terminal(f"a{character}b")
