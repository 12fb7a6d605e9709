"""Tools of an MCP server over stdio: a server that dies, hangs or talks nonsense is an error, and is started anew."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted import Numbers
from teamtr.calls import ToolCall, name_of
from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.session.tools import build_tools
from teamtr.tools.mcp import McpTools, Server
from teamtr.types import Problem, ToolRequest

pytest.importorskip("mcp")
SCRIPT = Path(__file__).parents[1] / "mcp_server.py"
SMALL = Server("small", sys.executable, (str(SCRIPT),))
PROBLEM = Problem("p", "question")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def tools() -> Iterator[McpTools]:
    with McpTools(SMALL, seconds=60.0) as made:
        yield made


def results(tools: McpTools, *calls: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    (texts,) = tools.results([ToolRequest(PROBLEM, "ann", (), tuple(ToolCall(*call) for call in calls))])
    return texts


def gone(pid: str) -> bool:
    """Now, or as soon as a busy machine comes to it; what is never ended is still there after a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_its_tools_have_the_servers_schemas(tools: McpTools):
    schemas = {name_of(schema): schema["function"] for schema in tools.schemas(PROBLEM)}
    assert set(schemas) == {"double", "refuse", "hang", "die", "garble", "who"}
    assert schemas["double"]["description"] == "Twice a number."
    assert schemas["double"]["parameters"]["required"] == ["n"]
    assert schemas["double"]["parameters"]["properties"]["n"]["type"] == "integer"


def test_calls_are_answered_and_what_the_server_refuses_is_an_error(tools: McpTools):
    good, wrong, refused = results(tools, ("double", {"n": 4}), ("double", {"n": "x"}), ("refuse", {"word": "that"}))
    assert good == "8"
    assert wrong.startswith("Error: ")
    assert refused.startswith("Error: ")
    assert "refuse" in refused


@pytest.mark.parametrize(("name", "told"), [("hang", "Error: hang took too long: "), ("die", "Error: ")])
def test_a_server_that_hangs_or_dies_is_an_error_and_is_started_anew(tools: McpTools, name: str, told: str):
    (before,) = results(tools, ("who", {}))
    tools.seconds = 0.5 if name == "hang" else 60.0
    (bad,) = results(tools, (name, {}))
    tools.seconds = 60.0
    after, good = results(tools, ("who", {}), ("double", {"n": 5}))
    assert bad.startswith(told)
    assert before != after, "another process"
    assert good == "10"
    assert gone(before)


def test_a_server_that_says_garbage_is_an_answer_or_an_error_and_never_more(tools: McpTools):
    bad, good = results(tools, ("garble", {}), ("double", {"n": 6}))
    assert bad == "after garbage" or bad.startswith("Error: ")
    assert good == "12" or good.startswith("Error: "), "at the latest the next call has a server that works"
    assert results(tools, ("double", {"n": 7})) == ("14",)


@pytest.mark.parametrize(
    "server",
    [
        Server("none", "no-such-program-anywhere"),
        Server("mute", sys.executable, ("-c", "raise SystemExit('no')")),
        Server("mad", sys.executable, ("-c", "print('hello'); print('{]')")),
    ],
    ids=lambda server: server.name,
)
def test_a_server_that_does_not_start_is_a_mistake_that_names_it(server: Server):
    with pytest.raises(UserError, match=f"the server '{server.name}' does not start"):
        McpTools(server, seconds=60.0)


def test_it_ends_with_its_owner():
    with McpTools(SMALL, seconds=60.0) as made:
        (pid,) = results(made, ("who", {}))
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        results(made, ("who", {}))


def test_a_team_file_names_servers_and_files_in_their_arguments_are_made_absolute():
    text = f"""
name: x
task: {{name: data, path: rows.jsonl, grader: exact}}
team: {{model: tiny, agents: [{{name: a}}]}}
tools: {{mcp: [{{name: small, command: {sys.executable}, args: [mcp_server.py, --quiet]}}]}}
"""
    team_file = loads(text, "x").anchored(SCRIPT.parent)
    assert team_file.tools.mcp[0].args == (str(SCRIPT), "--quiet")
    tools = build_tools(team_file, Numbers())
    assert tools is not None
    assert tools.results([ToolRequest(PROBLEM, "a", (), (ToolCall("double", {"n": 2}),))]) == [("4",)]
