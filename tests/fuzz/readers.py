"""The readers that the fuzzer knows: all that reads a model's words, or a file that somebody else may have made."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.driver import Reader
from teamtr.analysis.diagnostics.contexts import statement
from teamtr.analysis.report.reading import read_run
from teamtr.bounded_json import NotJson, read_json
from teamtr.chat.message_filter import MessageFilter
from teamtr.chat.thinking import without_thinking
from teamtr.chat.tools import normalise_calls
from teamtr.config import ConfigError, loads, recipe_text, recipes
from teamtr.config.source import read
from teamtr.errors import TeamTRError
from teamtr.grading.answers import exact_match, last_number, number_match
from teamtr.grading.math.rules import GSM8K_OR_STATED, RULES, Rule
from teamtr.grading.math.same import same_answer
from teamtr.grading.math.text import clean, numeral
from teamtr.grading.workers.channel import Channel, GarbledError
from teamtr.grading.workers.worker import HEADER_BYTES
from teamtr.literal import NotALiteral, read_literal, write_literal
from teamtr.serving.client_tools import ClientTools
from teamtr.serving.conversation import chat_of, problem_of
from teamtr.serving.request import BadRequest, read_request
from teamtr.store import StoreError, read_episodes
from teamtr.store.log import Log
from teamtr.tasks.base import Benchmark
from teamtr.tasks.benchmarks.arbench import DetectiveCases, GuessingNumbers, SituationPuzzles
from teamtr.tasks.benchmarks.arbench.detective import letter_in, question_in
from teamtr.tasks.benchmarks.arbench.endpoint import _content, _Passing
from teamtr.tasks.benchmarks.arbench.numbers import guess_in
from teamtr.tasks.benchmarks.arbench.puzzles import story_in, word_in
from teamtr.tasks.benchmarks.autologi import AutoLogi, _answer_in
from teamtr.tasks.benchmarks.gym import Gym
from teamtr.tasks.benchmarks.math import Math, _canonical
from teamtr.tasks.benchmarks.planbench import PlanBench
from teamtr.tasks.benchmarks.planbench.blocks import _BLOCKSWORLD_PDDL, BLOCKSWORLD
from teamtr.tasks.benchmarks.planbench.strips import PddlError, read_domain, read_problem
from teamtr.tasks.benchmarks.zebralogic import ZebraLogic
from teamtr.tasks.data.rows import DataError, read_rows
from teamtr.team.router import Addressed

LINES = ("\n", " ", "\t", "\r", "\f", "\u2028", "\u00a0", "\n" * 20_000)
HALVES = ("\ud800", "\udc00", "\\ud800", "\x00", "\u202e", "٣", "é", "中")
DIGITS = ("0", "1", "-", "+", ".", "e", "9" * 20, "9" * 5000, "1e999", "_", ",", "/", "%")
BRACKETS = ("(", ")", "[", "]", "{", "}", "[[", "{{", "<", ">", "'", '"', "'''", '"""', "\\", "`", "```")
THINKING = ("<think>", "</think>", "<thinking>", "</THINKING>", "<", "think")
JSON = (
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    '"a"',
    '"a":',
    "null",
    "true",
    "NaN",
    "Infinity",
    *DIGITS,
    "\\",
    *HALVES,
    " ",
)
FENCES = ("```", "```\n", "```python\n", "```json", "`", "````")
PYTHON = (*JSON, "'", "(", ")", "True", "None", "set()", "b'", "r'", "u'", "'''", "#", "//", "\\\n", "0x", "1_0", "=")
LATEX = (
    *(
        r"\boxed{",
        r"\fbox{",
        r"\frac",
        r"\sqrt",
        r"\text{",
        r"\left(",
        r"\right)",
        "{",
        "}",
        "^",
        "_",
        "$",
        "$$",
        r"\(",
    ),
    *(
        r"\)",
        r"\[",
        r"\]",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\begin{array}",
        "&",
        r"\\",
        r"\pm",
        r"\infty",
        r"\cup",
    ),
    *(
        r"\phantom",
        r"\circ",
        r"^\circ",
        r"\vec",
        r"\mathbf",
        r"\sin",
        r"\log",
        r"\binom",
        "!",
        "=",
        r"\approx",
        "|",
        "x",
    ),
    *(
        "1,000",
        ",",
        r"{,}",
        r"\!",
        r"\,",
        " ",
        "  ",
        "degrees",
        "cm",
        " or ",
        "and",
        "Answer:",
        "answer is",
        "####",
        "答案是",
    ),
)
CALLS = (
    "<tool_call>",
    "</tool_call>",
    "<function_call>",
    "a(x=",
    "a(",
    ")",
    "add(a=1)",
    *FENCES,
    "```tool_call\n",
    *JSON,
)
YAML = (
    *(
        "a:",
        "- ",
        "? ",
        ": ",
        "&a",
        "*a",
        "&a ",
        "*a ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "|",
        ">",
        "'",
        '"',
        "#",
        "!!int",
        "!",
        "%",
    ),
    *(
        "---",
        "...",
        "<<:",
        "\\x",
        "\\U",
        "~",
        "null",
        "0x",
        "\t",
        "\n",
        "\n  ",
        "\n- ",
        "\n  - ",
        "  ",
        "=",
        "@",
        "name: ",
    ),
    *("plan:", "\nplan: {", "\nteam:\n  agents:\n", "stages", "zork: 1\n", *DIGITS, *HALVES),
)

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n" for before, after in itertools.pairwise("abcdefghi")
)
DEEP = "[" * 2000 + "]" * 2000
DEEP_OBJECT = '{"a":' * 2000 + "1" + "}" * 2000
JSON_SEEDS = (
    *('{"a": [1, 2.5, null, true, "x"]}', DEEP, DEEP_OBJECT, f'{{"n": {"9" * 5000}}}', '{"t": "\\ud800"}'),
    *('{"x": NaN, "y": -Infinity, "z": 1e999}', '"' + '\\"' * 3000, "[" + '"' * 3000),
)
LITERALS = (
    *("{'a': {1, 2}, \"b\": [True, None, -1.5e3, 'x' 'y']}", "set()", "1, 2", "[set(), (), '''a\nb''']", "'\\u4e2d'"),
    *("{" * 50 + "}" * 50, "{1:" * 50 + "1" + "}" * 50, "9" * 5000, "1" * 5000 + "x", "-" * 5000, "'''" * 3000),
)


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """For the files that inputs are put into; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="teamtr-fuzz-")


def _folder() -> Path:
    return Path(_kept().name)


def _file(name: str) -> Any:
    def prepare(text: str) -> Path:
        path = _folder() / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    return prepare


def _packed(text: str) -> Path:
    path = _folder() / "stage-0000-step-00.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode("utf-8", "surrogatepass"), compresslevel=1))
    return path


def _run_folder(text: str) -> Path:
    folder = _folder() / "run"
    folder.mkdir(exist_ok=True)
    for name in ("log.jsonl", "team.yaml"):
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


def _frame(text: str) -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    body = text.encode("utf-8", "surrogatepass")
    theirs.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)
    return Channel(ours, 1 << 20), theirs


def _receive(given: tuple[Channel, socket.socket]) -> None:
    channel, theirs = given
    try:
        channel.receive(time.monotonic() + 60)
    finally:
        channel.close()
        theirs.close()


def _of_rule(rule: Rule, truths: tuple[str, ...]) -> Any:
    def judge(text: str) -> None:
        said = rule.judge(text, truths[len(text) % len(truths)]).extracted
        if said is not None:
            _canonical(said)

    return judge


def _literal(text: str) -> None:
    value = read_literal(text)
    assert read_literal(write_literal(value)) == value


def _of_benchmark(task: Benchmark, row: dict[str, Any]) -> Any:
    """Grades without workers: what happens to a reply in this process."""
    problem = task.problem(row)

    def grade(text: str) -> None:
        [verdict] = task.grade_replies([(problem, text)])
        assert verdict.kind in ("right", "wrong", "unparsed")
        task.extract(text)
        task.measures(problem, text)

    return grade


def _detective(text: str) -> None:
    letter_in(text)
    question_in(text, ("Ada Lovelace", "Ben Lovelace", "Cy (the) Young"))


def _answers(text: str) -> None:
    last_number(text)
    number_match(text, "7")
    exact_match(text, "seven")


def _filter(text: str) -> None:
    for think, tools in (("strip", "canonical"), ("forbid", "off")):
        MessageFilter(think=think, tools=tools, inside=bool(len(text) % 2))(text)  # type: ignore[arg-type]


def _calls(text: str) -> None:
    for names in (None, ["add"]):
        normalise_calls(text, names)
        normalise_calls(f"add(x={text})", names)


def _mentions(text: str) -> None:
    Addressed.planned(("a", "b", "c.d"), turns=4)._named(SPOKEN(text))


class SPOKEN:
    """All that a router looks at in a turn."""

    def __init__(self, text: str) -> None:
        self.agent, self.text = "a", text


def _override(text: str) -> None:
    loads("name: x\ntask: {name: code}\nteam: {model: tiny, agents: [{name: left}]}", overrides=[text])


def _rows_of_benchmarks(text: str) -> None:
    cells = read_json(text)
    if not isinstance(cells, dict):
        return
    for task in _tasks():
        try:
            task.problem(cells, "data.jsonl, line 1")
        except DataError:
            continue


@cache
def _tasks() -> tuple[Benchmark, ...]:
    made: list[Benchmark] = [ZebraLogic(), AutoLogi(), PlanBench(), Math(), Gym.__new__(Gym)]
    made[-1]._family = "chain_sum"  # type: ignore[attr-defined]  # its pool is not needed to read a row
    return (*made, GuessingNumbers(), SituationPuzzles(), DetectiveCases())


def _pddl(text: str) -> None:
    read_problem(text, BLOCKSWORLD.domain)


def _domain(text: str) -> None:
    read_domain(text)


def _plan(text: str) -> None:
    PlanBench().problem({"query": text})


ZEBRA = {
    "puzzle": "Who?",
    "solution": {"header": ["House", "Name", "Pet"], "rows": [["1", "Ada", "cat"], ["2", "Ben", "dog"]]},
}
PROBLEM = (
    "(define (problem p) (:domain blocksworld-4ops) (:objects a b) (:init (handempty) (ontable a) (ontable b) "
    "(clear a) (clear b)) (:goal (and (on a b))))"
)
QUERY = (
    "As initial conditions I have that, the red block is clear, the blue block is clear, the hand is empty, the red "
    "block is on the table and the blue block is on the table. My goal is to have that the red block is on top of the "
    "blue block."
)
CODE = {"Inputs_Check_code": "def inputs_check(inputs): return True", "Constraint_List_code": "constraint_list = []"}
ROWS = (
    json.dumps({**ZEBRA, "answer": "0123", "question": "q", "code": CODE, "problem_pddl": PROBLEM, "metadata": {}}),
    json.dumps({"problem": "1+1?", "answer": "2", "surface": "s", "bottom": "b", "prompt": "p", "code": CODE}),
    json.dumps(
        {
            "initial_information": {
                "victim": dict.fromkeys(("name", "introduction", "cause_of_death", "murder_weapon"), "x"),
                "suspect": [{"name": "Ada", "introduction": "x"}, {"name": "Ben", "introduction": "x"}],
                "time": "t",
                "location": "l",
            },
            "suspects": [{"name": n, "story": "s", "task": "t"} for n in ("Ada", "Ben")],
            "label": 1,
            "query": QUERY,
        }
    ),
)
ROW_FRAGMENTS = (*JSON, *(f'"{key}":' for key in ("answer", "solution", "rows", "header", "code", "label", "suspects")))
EPISODES = (
    '{"format":1,"group_size":1,"kind":"teamtr-episodes","problems":[{"answer":null,"columns":{},'
    '"id":"p","private":{},"prompt":"q"}]}\n{"answer":"a","group_index":0,"problem_id":"p","replies":[{"ends":false,'
    '"messages":[{"author":"e","text":"t","tool_calls":[]}]}],"team_version":"v","turns":[{"agent":"left","agent_version":'
    '"v","context_ids":[1,2],"finish":"stop","round":0,"sampler_logprobs":[-0.5],"text":"t","token_ids":[3]}],"verdict":'
    '{"extracted":null,"kind":"right","reward":1.0}}\n'
)
LOG = (
    '{"kind":"start","name":"made","agents":["left"]}\n{"kind":"update","kl":{"$float":"nan"},"seed":{"$int":"0xff"}}\n'
)
LOG_FRAGMENTS = (*JSON, "\n", '{"$float":', '{"$int":"0x', '{"$str":"', '"$x":', '"kind":"update"', "{}\n", "[]\n")


REQUESTS = (
    '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
    '{"model": "m", "messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user", '
    '"content": "Team: x\\nright: y"}, {"role": "assistant", "content": "z"}, {"role": "user", "content": "q"}], '
    '"n": 2, "stop": ["a", "b"], "stream": true, "stream_options": {"include_usage": true}, "private": {"right": "p"}}',
    '{"model": "m", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}], '
    '"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"id": "c", "type": '
    '"function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": '
    '"User: x"}]}',
)


def _request(body: bytes) -> object:
    """What the server does with a body before anything is sampled."""
    request = read_request(read_json(body, longest=1 << 20, deepest=32, strict=True, half_characters=False))
    ClientTools.of("left", request.offered)
    return problem_of(request.messages, request.private, ("left", "right")), chat_of(request.messages, "be brief")


def readers() -> list[Reader]:
    """All of them, in the order of docs/guarantees.md."""
    truths = (r"\frac{1}{2}", "7", "(1,2)", "x^2+1", r"\text{east}")
    math = (
        *(
            r"so it is \boxed{\frac{1}{2}}",
            "Answer: 7",
            "#### 1,234",
            "A: 12",
            r"\boxed{(1,2)}",
            "答案是 7",
            "$x^2+1$ meters",
        ),
        *(
            r"\boxed{" + " " * 1900 + "}",
            "answer: " + r"\(" * 1900,
            r"\boxed{" + r"1\text{ cm}" * 170 + "}",
            "#### " + "9" * 5000,
        ),
        *(
            r"\boxed{" + "1,000 " * 300 + "}",
            "$" * 5000,
            r"\boxed{" * 2000,
            "answer: " * 2000,
            r"\boxed{" + "{" * 900 + "}" * 900 + "}",
        ),
        r"\boxed{" + (r"\begin{array}" + "1&" * 60) * 4 + r"\end{array}" * 4 + "}",
    )
    words = (
        "x",
        " ",
        ".",
        "the ",
        "A",
        "E",
        "Answer:",
        "suspect:",
        "Question:",
        "Ada Lovelace",
        "0123",
        "yes",
        *THINKING,
    )
    plan = (
        "[PLAN]",
        "[plan end]",
        "### plan:",
        "stack the red block on top of the blue block\n",
        "pick up the red block\n",
    )
    in_process = {
        "message filter": Reader(
            "filter",
            "messages: thinking, tool calls",
            _filter,
            (
                "<think>a</think>b",
                '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
                "<think>" * 2000,
                "```" * 3000,
            ),
            (*THINKING, *CALLS, *LINES[:4]),
        ),
        "calls": Reader(
            "calls",
            "tool calls",
            _calls,
            (
                'add(a=1, b="x")',
                "[add(a=1), add(b={'k': [1]})]",
                '{"tool_calls": [{"name": "a"}]}',
                *JSON_SEEDS,
                *LITERALS,
            ),
            CALLS,
        ),
        "thinking": Reader(
            "thinking", "reasoning tags", without_thinking, ("<think>a</think>b", "</think>"), (*THINKING, "x")
        ),
        "mentions": Reader(
            "mentions",
            "who is addressed",
            _mentions,
            ("@b go on", "@c.d-x"),
            ("@", "@a", "@b", "@c.d", "-", "x", "@b-"),
        ),
        "literal": Reader("literal", "Python literals", _literal, LITERALS, PYTHON, (NotALiteral,)),
        "json": Reader("json", "JSON", read_json, JSON_SEEDS, JSON, (NotJson,)),
        "autologi": Reader(
            "autologi",
            "AutoLogi's replies",
            _answer_in,
            (
                "```\n{'tea': {'Ada'}}\n```",
                "```" + "\n" * 20_000,
                "{" + "//" * 10_000 + "}",
                "inputs = [1]",
                *LITERALS,
                *("```\n" + text + "\n```" for text in LITERALS),
            ),
            (*PYTHON, *FENCES, *LINES, *THINKING, "//"),
        ),
        "zebralogic": Reader(
            "zebralogic",
            "ZebraLogic's replies",
            _of_benchmark(ZebraLogic(), ZEBRA),
            ('{"solution": {"House 1": {"Name": "Ada", "Pet": "cat"}}}', *JSON_SEEDS),
            (*JSON, '"solution":', '"House 1":', *THINKING),
        ),
        "planbench": Reader(
            "planbench",
            "PlanBench's replies",
            _of_benchmark(PlanBench(), {"problem_pddl": PROBLEM}),
            (
                "[PLAN]\npick up the red block\nstack the red block on top of the blue block\n[PLAN END]",
                "(pick-up a)\n(stack a b)",
            ),
            (*plan, "(stack a b)", "(", ")", "a", "-", "*", "\n", "stack", "red block", *THINKING),
        ),
        "numbers": Reader("numbers", "AR-Bench, numbers", guess_in, ("Guess: 0123", "1234" * 2000), (*DIGITS, *words)),
        "puzzles": Reader(
            "puzzles",
            "AR-Bench, puzzles",
            lambda text: (story_in(text), word_in(text)),
            ("Answer: a dream", " " * 9000, "yes"),
            words,
        ),
        "detective": Reader(
            "detective",
            "AR-Bench, detective",
            _detective,
            ("Suspect: Ada Lovelace\nQuestion: where?", "Answer: A"),
            words,
        ),
        "player": Reader(
            "player",
            "answers of an endpoint",
            _content,
            ('{"choices": [{"message": {"content": "\\ud83d"}}]}', *JSON_SEEDS),
            (*JSON, '"choices":', '"message":', '"content":'),
            (_Passing,),
            prepare=lambda text: text.encode("utf-8", "surrogatepass"),
        ),
        "request": Reader(
            "request",
            "requests to the server",
            _request,
            (*REQUESTS, *JSON_SEEDS),
            (*JSON, '"model":', '"messages":', '"role":', '"user"', '"content":', '"stop":', "User:", "right:"),
            (NotJson, BadRequest),
            prepare=lambda text: text.encode("utf-8", "surrogatepass"),
        ),
        "answers": Reader(
            "answers",
            "numbers and exact answers",
            _answers,
            ("it is 1,234.50", "50 %", "1e400", "1/0", "CO2 " * 2000),
            (*DIGITS, "x", " ", "−", "\\%", "(", ")", "e5", "1,234"),
        ),
        "statements": Reader(
            "statements", "statements for diagnostics", statement, (r"\boxed{7}", r"\boxed{" * 2000), LATEX
        ),
        "gym": Reader(
            "gym",
            "reasoning-gym's replies",
            Gym.extract.__get__(Gym.__new__(Gym)),
            ("<answer>7</answer>", "<answer>" * 2000),
            ("<answer>", "</answer>", *words),
        ),
        **{
            f"math {name}": Reader(
                f"math-{name}", f"mathematics, rule {name}", _of_rule(rule, truths), math, (*LATEX, *DIGITS, *THINKING)
            )
            for name, rule in {**RULES, "gsm8k": GSM8K_OR_STATED}.items()
        },
        "numerals": Reader("numerals", "numbers in LaTeX", lambda text: numeral(clean(text)), math, (*LATEX, *DIGITS)),
        "same": Reader(
            "math-same",
            "comparing formulas",
            lambda text: same_answer(text, r"\frac{x+1}{2}"),
            (r"\frac{x}{2}+\frac12", r"\begin{pmatrix}1&2\end{pmatrix}", r"(-\infty, 3]"),
            (*LATEX, *DIGITS),
            killable=True,
        ),
    }
    files = {
        "team file": Reader(
            "team-file",
            "team files",
            loads,
            (
                recipe_text(next(iter(recipes()))),
                BOMB,
                DEEP,
                "- " * 2000,
                "seed: " + "9" * 5000,
                'name: "\\ud800"',
                'name: "\\UFFFFFFFF"',
            ),
            YAML,
            (ConfigError,),
        ),
        "yaml": Reader("yaml", "YAML", read, ("a: [1, {b: c}]\nd: &x 1\ne: *x\n", BOMB, DEEP), YAML),
        "override": Reader(
            "override",
            "overrides",
            _override,
            ("plan.stages=10", "team.agents.left.model=tiny", "seed=" + DEEP),
            ("plan.", "team.", "agents.", "stages", "=", ".", *YAML),
            (ConfigError,),
        ),
        "jsonl": Reader(
            "jsonl",
            "rows of .jsonl",
            lambda file: list(read_rows(file)),
            ('{"question": "q", "answer": 1}\n', *JSON_SEEDS),
            (*JSON, "\n", "{}\n"),
            (DataError,),
            prepare=_file("rows.jsonl"),
        ),
        "rows json": Reader(
            "rows-json",
            "rows of .json",
            lambda file: list(read_rows(file)),
            ('[{"question": "q", "answer": 1}]', *JSON_SEEDS),
            (*JSON, "{},"),
            (DataError,),
            prepare=_file("rows.json"),
        ),
        "rows": Reader(
            "rows", "rows of benchmarks", _rows_of_benchmarks, (*ROWS, *JSON_SEEDS), ROW_FRAGMENTS, (NotJson, DataError)
        ),
        "pddl": Reader(
            "pddl",
            "PDDL problems",
            _pddl,
            (PROBLEM, "(" * 3000 + ")" * 3000),
            ("(", ")", "and", "(on a b)", ":goal", ";", "?x", "-", " ", "a"),
            (PddlError,),
        ),
        "domain": Reader(
            "domain",
            "PDDL domains",
            _domain,
            (_BLOCKSWORLD_PDDL, "(" * 3000 + ")" * 3000),
            ("(", ")", "and", "not", "(on ?x ?y)", ":action", ":effect", ";", "?x", "-", " ", "a", "define", "domain"),
            (PddlError,),
        ),
        "query": Reader(
            "query",
            "PlanBench's questions",
            _plan,
            (QUERY, QUERY.replace("clear", " is on top of the" * 500)),
            (
                "the red block",
                " is on top of the ",
                " and ",
                ", ",
                "initial conditions I have that,",
                "my goal is to have that",
            ),
            (DataError, PddlError),
        ),
        "log": Reader(
            "log",
            "logs",
            lambda path: Log(path, writable=False).read(),
            (LOG, *JSON_SEEDS, DEEP + "\n{}\n"),
            LOG_FRAGMENTS,
            (StoreError,),
            prepare=_file("log.jsonl"),
        ),
        "episodes": Reader(
            "episodes",
            "episodes",
            read_episodes,
            (EPISODES, *JSON_SEEDS, EPISODES.replace("[1,2]", DEEP), EPISODES.replace("[3]", "[99999999999]")),
            (*LOG_FRAGMENTS, '"turns":', '"verdict":', "[1,2]", '"finish":"stop"'),
            (StoreError,),
            prepare=_packed,
        ),
        "run folder": Reader(
            "run-folder",
            "run folders",
            read_run,
            (LOG, BOMB, DEEP),
            (*LOG_FRAGMENTS, *YAML),
            (TeamTRError,),
            prepare=_run_folder,
        ),
        "frame": Reader(
            "frame",
            "answers of a worker",
            _receive,
            ('{"values": [1, "x"]}', *JSON_SEEDS),
            (*JSON, '"values":', '"error":'),
            (GarbledError,),
            prepare=_frame,
        ),
    }
    return [*in_process.values(), *files.values()]
