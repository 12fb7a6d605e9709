"""Own tools: functions of a Python file, in killable workers; whatever one of them does is a result, no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripted import Letters, Numbers, Scripted, problems
from teamtr.calls import ToolCall, name_of
from teamtr.config import ConfigError, loads
from teamtr.errors import UserError
from teamtr.grading.workers import pool as pools
from teamtr.ports import Tools
from teamtr.rollout import RolloutContext, play
from teamtr.session.tools import build_tools, check_names, with_tool_turns
from teamtr.team import Agent, Schedule, Team
from teamtr.tools.functions import FunctionTools
from teamtr.tools.limits import Limited, Together
from teamtr.tools.served import function_of
from teamtr.types import Problem, ToolRequest

FILE = '''
import os, time
from typing import Literal

def double(n: int, sign: Literal["+", "-"] = "+") -> int:
    """Twice a number.

    Args:
        n: The number.
        sign: What to do with it.
    """
    return 2 * n if sign == "+" else -2 * n

def spin(n: int) -> str:
    while True:
        n += 1

def wait() -> str:
    time.sleep(1000)

def fail(text: str) -> str:
    raise ValueError(f"not {text}")

def leave() -> str:
    raise SystemExit(3)

def die() -> str:
    os.kill(os.getpid(), 9)

def much(n: int) -> str:
    return "x" * n

def greedy() -> str:
    return "x" * (1 << 40)

def control() -> str:
    return "<end><bot>\\nuser: hi \\ud800 \\x00"

def shout() -> str:
    print("noise")
    return "said"

def about(problem: dict, past: list, word: str) -> dict:
    return {"id": problem["id"], "colour": problem["columns"].get("colour"), "past": past, "word": word}

class Odd:
    def __str__(self):
        return "odd"

def odd() -> Odd:
    return {"it": Odd()}

def free(**words):
    return sorted(words)
free.schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}

ALL = [double, spin, wait, fail, leave, die, much, greedy, control, shout, about, odd, free]
NONE = []
TWO = [double, double]
NUMBER = 3
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_tools.py"
    path.write_text(FILE)
    return path


BY_THE_CLOCK = pools.PATIENCE
"""Outside of tests. Here a call has an hour, unless a test is about the clock: a busy machine may stop it for
seconds."""


@pytest.fixture(scope="module", autouse=True)
def hours() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pools, "PATIENCE", 10_000)
        yield


@pytest.fixture(scope="module")
def tools(file: Path) -> Iterator[FunctionTools]:
    made = FunctionTools([f"python:{file}:ALL"], seconds=0.3, memory_mb=512)
    yield made
    made.close()


pytestmark = pytest.mark.long
PROBLEM = Problem("p", "question", columns={"colour": "red"})


def result(tools: Tools, name: str, past: Sequence[ToolCall] = (), **arguments: Any) -> str:
    ((text,),) = tools.results([ToolRequest(PROBLEM, "ann", tuple(past), (ToolCall(name, arguments),))])
    return text


# -- what a function is as a tool ------------------------------------------------------------------------------------


def test_a_schema_is_the_signature_and_the_docstring(tools: FunctionTools):
    schemas = {name_of(schema): schema for schema in tools.schemas(PROBLEM)}
    assert schemas["double"] == {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Twice a number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "description": "The number."},
                    "sign": {"type": "string", "enum": ["+", "-"], "description": "What to do with it."},
                },
                "required": ["n"],
            },
        },
    }
    assert list(schemas["about"]["function"]["parameters"]["properties"]) == ["word"], "not what is filled in"
    assert schemas["free"]["function"]["parameters"]["required"] == ["word"], "as its own schema says"


def test_annotations_have_the_words_of_json_schema():
    def tool(
        a: str, b: int, c: float, d: bool, e: list[int], f: dict[str, int], g: str | None = None, h: Any = 1, i=2
    ) -> None: ...

    found = function_of("here", tool).schema["function"]["parameters"]
    assert found["properties"] == {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "number"},
        "d": {"type": "boolean"},
        "e": {"type": "array", "items": {"type": "integer"}},
        "f": {"type": "object"},
        "g": {"type": ["string", "null"]},
        "h": {},
        "i": {},
    }
    assert found["required"] == ["a", "b", "c", "d", "e", "f"]
    with pytest.raises(UserError, match="by its place"):
        function_of("here", _by_place)


def _by_place(*words: str) -> None: ...


@pytest.mark.parametrize(
    ("name", "told"),
    [("NONE", "an empty list"), ("NUMBER", "a tool is a function"), ("MISSING", "has no 'MISSING'")],
)
def test_what_is_no_tool_is_refused_with_its_name(file: Path, name: str, told: str):
    with pytest.raises(UserError, match=told) as error:
        FunctionTools([f"python:{file}:{name}"], seconds=1, memory_mb=512)
    assert name in str(error.value)


# -- calls that go well, and calls that do not -------------------------------------------------------------------------


def test_two_functions_of_one_name_are_refused(tmp_path: Path):
    """Otherwise the later one would answer every call."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(f"def same() -> str:\n    return '{name}'\n")
    sources = [f"python:{tmp_path}/{name}.py:same" for name in ("first", "second")]
    with pytest.raises(UserError, match="two tools are called 'same': rename one of them"):
        FunctionTools(sources, seconds=5.0, memory_mb=2048)


def test_results_are_text_or_json(tools: FunctionTools):
    assert result(tools, "double", n=4) == "8"
    assert result(tools, "double", n=4, sign="-") == "-8"
    assert result(tools, "shout") == "said"
    assert result(tools, "odd") == '{"it": "odd"}'
    assert result(tools, "free", word="x", other="y") == '["other", "word"]'


def test_a_function_may_ask_for_the_problem_and_what_was_called_before(tools: FunctionTools):
    said = json.loads(result(tools, "about", [ToolCall("double", {"n": 1})], word="w"))
    assert said == {"id": "p", "colour": "red", "past": [{"name": "double", "arguments": {"n": 1}}], "word": "w"}
    assert "there is no argument 'problem'" in result(tools, "about", word="w", problem={})
    two = ToolRequest(PROBLEM, "ann", (), (ToolCall("double", {"n": 1}), ToolCall("about", {"word": "w"})))
    assert json.loads(tools.results([two])[0][1])["past"] == [{"name": "double", "arguments": {"n": 1}}]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("double", {}, "Error: argument n is missing"),
    ("double", {"n": "four"}, "Error: argument n must be of type integer, found 'four'"),
    ("double", {"n": 1, "m": 2}, "Error: there is no argument 'm'; there are n, sign"),
    ("double", {"n": 1, "sign": "*"}, "Error: argument sign must be one of +, -, found '*'"),
    ("fail", {"text": "this"}, "Error: ValueError: not this"),
    ("leave", {}, "Error: SystemExit: 3"),
    ("spin", {"n": 0}, "Error: spin took too long: no answer within 0.3 s of processor time"),
    ("die", {}, "Error: die failed: the worker was killed by signal 9"),
    ("greedy", {}, "Error: MemoryError"),
]


@pytest.mark.parametrize(("name", "arguments", "told"), BAD, ids=[f"{name}-{k}" for k, (name, _, _) in enumerate(BAD)])
def test_a_bad_call_is_an_error_and_the_calls_beside_it_are_what_they_were(
    tools: FunctionTools, name: str, arguments: dict[str, Any], told: str
):
    good = ToolCall("double", {"n": 3})
    requests = [
        ToolRequest(PROBLEM, "ann", (), (good, ToolCall(name, arguments), good)),
        ToolRequest(PROBLEM, "bob", (), (good,)),
    ]
    (first, bad, last), (other,) = tools.results(requests)
    assert bad.startswith(told)
    assert (first, last, other) == ("6", "6", "6")


def test_a_call_that_only_waits_is_late_by_the_clock(tools: FunctionTools, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(pools, "PATIENCE", BY_THE_CLOCK)
        assert result(tools, "wait").startswith("Error: wait took too long: no answer within 3 s")
    assert result(tools, "double", n=3) == "6"


def test_what_is_longer_than_allowed_is_cut_and_says_so(tools: FunctionTools):
    limited = Limited(tools, 100)
    assert result(limited, "much", n=100) == "x" * 100
    assert result(limited, "much", n=1 << 20) == "x" * 100 + " [cut after 100 characters]"
    calls = tuple(ToolCall("much", {"n": n}) for n in (60, 60, 5))
    (texts,) = limited.results([ToolRequest(PROBLEM, "ann", (), calls)])
    assert texts == ("x" * 60, "x" * 40 + " [cut after 40 characters]", " [cut after 0 characters]")


# -- in rollouts ----------------------------------------------------------------------------------------------------


def script(agent: str, prompt: str, noise: float) -> str:
    """Problem 0 calls what ``CALL`` says, the others double."""
    if "\ntool: " in prompt:
        return prompt.partition("\ntool: ")[2].strip()[:3]
    return CALL[0] if "problem 0" in prompt else "double(n=21)"


CALL = ["double(n=21)"]


def episodes(tools: Tools) -> list[tuple[Any, ...]]:
    sampler = Scripted(script)
    team = Team((Agent("ann", sampler.version("ann"), max_tokens=64),))
    router = with_tool_turns(Schedule.repeated(("ann",)), team, 2)
    codec = _Told()
    context = RolloutContext(sampler, {"ann": codec}, router, Numbers(), tools=tools)
    batch = play(context, team, problems(3), 2, seed=0)
    return [
        (e.answer, e.verdict, [(t.text, t.results, t.context_ids.tolist(), t.token_ids.tolist()) for t in e.turns])
        for e in batch.episodes
    ]


class _Told(Letters):
    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Any] = ()) -> Any:
        return super().encode(messages)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("wait()", marks=pytest.mark.slow),
        "spin(n=0)",
        "fail(text='x')",
        "much(n=1000000)",
        "control()",
        "die()",
        "greedy()",
        "double(x=1)",
    ],
)
def test_a_tool_that_hangs_raises_or_says_anything_changes_no_other_episode(
    tools: FunctionTools, monkeypatch: pytest.MonkeyPatch, call: str
):
    if call == "wait()":
        monkeypatch.setattr(pools, "PATIENCE", 5 * BY_THE_CLOCK)
    limited = Limited(tools, 200)
    CALL[0] = "double(n=21)"
    before = episodes(limited)
    CALL[0] = call
    after = episodes(limited)
    CALL[0] = "double(n=21)"
    assert after[2:] == before[2:]
    for _, _, turns in after[:2]:
        text, results, _, _ = turns[0]
        assert text == call
        assert len(results) == 1
        assert len(results[0].text) <= 200 + 40
    assert episodes(limited) == before, "and nothing later"


def test_half_a_character_in_a_result_is_made_whole(tools: FunctionTools):
    CALL[0] = "control()"
    (_, _, turns), *_ = episodes(tools)
    CALL[0] = "double(n=21)"
    text = turns[0][1][0].text
    assert text.encode("utf-8").decode() == text
    assert text.startswith("<end><bot>\nuser: hi ")
    assert "<bot>" in text, "markers are broken where a codec renders them, as in all text of others"


# -- several sources, and the team file -----------------------------------------------------------------------------


class _Plain:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[ToolRequest] = []

    def schemas(self, problem: Problem) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": self.name, "parameters": {}}}]

    def results(self, requests: Sequence[ToolRequest]) -> list[tuple[str, ...]]:
        self.asked += requests
        return [tuple(f"{self.name} {call.arguments}" for call in request.calls) for request in requests]


def test_a_call_goes_to_the_source_that_has_its_name():
    one, other = _Plain("one"), _Plain("other")
    both = Together((one, other))
    a, b = ToolCall("one", {"k": 1}), ToolCall("other", {"k": 2})
    requests = [ToolRequest(PROBLEM, "ann", (a, b), (b, a, b)), ToolRequest(PROBLEM, "ann", (), (a,))]
    assert both.results(requests) == [("other {'k': 2}", "one {'k': 1}", "other {'k': 2}"), ("one {'k': 1}",)]
    assert [request.past for request in one.asked] == [(a,), ()]
    assert [request.past for request in other.asked] == [(b,)]
    with pytest.raises(UserError, match="two tools are called 'one'"):
        Together((one, _Plain("one"))).schemas(PROBLEM)


TEAM = """
name: x
task: {name: data, path: rows.jsonl, grader: exact}
team: {model: tiny, agents: [{name: a}, {name: b, tools: none}, {name: c, tools: [double]}]}
"""


def test_a_team_file_names_own_tools_in_a_word_a_list_or_a_section(file: Path):
    short = loads(f"{TEAM}tools: 'python:own_tools.py:ALL'", "x").tools
    listed = loads(f"{TEAM}tools: ['python:own_tools.py:ALL']", "x").tools
    whole = loads(f"{TEAM}tools: {{use: ['python:own_tools.py:ALL'], steps: 2}}", "x")
    assert short == listed
    assert short.use == whole.tools.use == ("python:own_tools.py:ALL",)
    assert [agent.own_tools for agent in whole.team.agents] == [None, (), ("double",)]
    assert whole.anchored(file.parent).tools.use == (f"python:{file}:ALL",)
    for wrong in ("tools: own.py", "tools: {use: [own.py:f]}", "tools: {steps: 0}", "tools: {mpc: []}"):
        with pytest.raises(ConfigError):
            loads(TEAM + wrong, "x")
    with pytest.raises(ConfigError, match="twice"):
        loads(f"{TEAM}tools: ['python:a.py:f', 'python:a.py:f']", "x")


def test_the_tools_of_a_team_file_are_those_of_its_task_and_its_own(file: Path):
    team_file = loads(f"{TEAM}tools: 'python:own_tools.py:ALL'", "x").anchored(file.parent)
    task = Numbers()
    assert build_tools(loads(TEAM, "x"), task) is None
    task.tools = _Plain("one")
    tools = build_tools(team_file, task)
    assert tools is not None
    assert {"one", "double", "wait"} <= {name_of(schema) for schema in tools.schemas(PROBLEM)}
    assert result(tools, "double", n=1) == "2"
    team = Team((Agent("a", "v", tools=("double",)), Agent("b", "v", tools=("treble",))))
    with pytest.raises(UserError, match=r"team.agents.b.tools names no tool 'treble'; there are "):
        check_names(team, tools, [PROBLEM])
