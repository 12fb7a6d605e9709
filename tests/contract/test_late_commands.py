"""``teamtr --help`` reads the signature of no command, and a command that is called has all of its own."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.cli.common import JsonFlag, Overrides
from teamtr.cli.late import LateApp, LateCommand


def is_read(command: LateCommand) -> bool:
    return "params" in vars(command)


def test_the_list_of_commands_reads_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    group = get_command(app)
    monkeypatch.setattr("typer.main.get_command", lambda _: group)
    told = CliRunner().invoke(app, ["--help"], prog_name="teamtr")
    assert told.exit_code == 0
    commands = {name: command for name, command in group.commands.items() if name != "lab"}
    assert all(name in told.output for name in commands)
    assert all(isinstance(command, LateCommand) for command in commands.values())
    assert not any(map(is_read, commands.values()))
    assert {parameter.name for parameter in commands["check"].params} == {"team_file", "overrides", "as_json"}
    assert [name for name, command in commands.items() if is_read(command)] == ["check"]


def test_a_command_is_what_typer_makes_of_its_function() -> None:
    def greet(name: str, overrides: Overrides = None, times: int = 1, as_json: JsonFlag = False) -> None:
        """Say hello.

        More about it.
        """
        typer.echo(f"{name} {overrides} {times} {as_json}")

    def other() -> None:
        """Another command."""

    told = []
    for made in (LateApp(), typer.Typer()):
        made.command()(greet)
        made.command("else")(other)
        for words in (["--help"], ["greet", "--help"], ["greet", "you", "a=1", "--times", "2"], ["greet"], ["gret"]):
            result = CliRunner().invoke(made, words)
            told.append((words, result.exit_code, result.output))
    assert told[:5] == told[5:]
    assert told[2][1:] == (0, "you ['a=1'] 2 False\n")
