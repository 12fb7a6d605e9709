"""Runs ``teamtr`` commands in this process, as typed on the command line."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from teamtr.cli import app


def invoke(*arguments: object, code: int = 0) -> Any:
    """The result of a command with the expected exit code. Exceptions other than SystemExit are raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def last_json(result: Any) -> dict[str, Any]:
    return json.loads(result.stdout.strip().splitlines()[-1])
