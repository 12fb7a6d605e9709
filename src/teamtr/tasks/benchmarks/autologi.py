"""AutoLogi: arrange things so that every constraint holds. Any arrangement that the puzzle's own code accepts is right.

Replies are parsed as by the benchmark's own evaluator: the last fenced block, else the last complete ``{...}``, else
the last ``[...]``. ``//`` comments are removed and ``true`` and ``false`` written as in Python. The rest is a Python
literal (so that sets are possible), else what follows the first ``=``, or JSON if there is no ``=``. Then
``inputs_check`` and every function of ``constraint_list`` must return true for it.

The puzzle's code runs in a sandbox, with the answer passed as data. We differ from the evaluator in three points, each
on rows that no reply could get right or that say nothing about the reply: what a verifier prints does not count against
an answer; a returned value that is truthy but not plain data is not accepted; replies are read after their reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from teamtr.bounded_json import read_json
from teamtr.errors import UserError
from teamtr.grading.sandbox.client import MIB, Limits, Program, Sandbox, Verification
from teamtr.grading.thinking import after_thinking
from teamtr.grading.workers.pool import Result
from teamtr.literal import LONGEST, read_literal, write_literal
from teamtr.settings.section import key
from teamtr.settings.values import Above0, Positive
from teamtr.tasks.base import Benchmark, WrongAnswer
from teamtr.tasks.benchmarks.zebralogic import last_object
from teamtr.tasks.config import BenchmarkConfig
from teamtr.tasks.data.rows import DataError
from teamtr.tasks.data.split import digest, name_of
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Verdict

CHECKS = ("inputs_check", "constraint_list")
TO_SEARCH = Limits(seconds=60.0, memory_bytes=4096 * MIB)
"""Limits for finding a solution among all arrangements, once per puzzle whose gold answer is needed."""

_FENCE = "```"
_LANGUAGE_LINE = re.compile(r"\s*+\w++(\s*+)")
_EMPTY_LINES = re.compile(r"(\s*+)")

PROMPTS = {
    "en": """\
{question}

Find an arrangement for which all of the following hold: {logi_constraints}

Think step by step. End with your arrangement in a fenced block, as a Python literal called inputs, of this form:
{input_format}

An example of the form (it need not satisfy the constraints):
```
{example}
```""",
    "cn": """\
{question}

请找出一个满足以下全部条件的方案：{logi_constraints}

请逐步思考。最后请在代码块中以 Python 字面量给出你的方案（称为 inputs），格式如下：
{input_format}

格式示例（不一定满足上述条件）：
```
{example}
```""",
}

_SEARCH = """
class _Enough(BaseException):
    pass

_seen = {}

def verify_function(inputs, inputs_check, constraint_list):
    allowed = bool(inputs_check(inputs))
    holds = allowed and all(constraint(inputs) for constraint in constraint_list)
    if allowed:
        _seen.setdefault("right" if holds else "wrong", repr(inputs))
        if len(_seen) == 2:
            raise _Enough
    return holds
"""
_REPORT = """
def _search():
    try:
        count_valid_arrangements()
    except _Enough:
        pass
    return _seen
"""


@task("autologi")
class AutoLogi(Benchmark):
    """Rows have ``code`` (``Inputs_Check_code``, ``Constraint_List_code`` and, to find gold answers,
    ``Traverse_code``), ``prompt`` or its parts (``question``, ``logi_constraints``, ``input_format``, ``example``),
    and optionally ``idx``, ``lang`` (en, cn) and ``group_id``.

    Args:
        splits: the problems of each split.
        seconds: limit for one verification. The benchmark's own limit is 20, most of which is spent starting Python.
        workers: number of concurrent verifications.
    """

    class Config(BenchmarkConfig):
        """Logic puzzles, verified by their own code in a sandbox."""

        seconds: Above0 = key(5.0, "Seconds of processor time for one verification; by the clock ten times that.")
        workers: Positive = key(1, "Verification processes.")

    samples = 64
    grades_early = True

    def __init__(
        self,
        splits: Mapping[str, Sequence[Problem]] | None = None,
        *,
        seconds: float = 5.0,
        workers: int = 1,
    ) -> None:
        super().__init__(splits)
        self._sandbox = Sandbox(workers, Limits(seconds))  # its processes start when first used
        self._arrangements: dict[str, _Arrangements] = {}

    def side(self, problem: Problem) -> str:
        """A puzzle is held out together with all its variants (the same ``group_id``)."""
        return _family(problem)

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        try:
            return _problem(row)
        except _RowError as error:
            raise DataError(f"{where}: {error}" if where else str(error)) from None

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        answers = [_answer_in(text) for _, text in replies]
        jobs = [
            Verification(_verifier(problem), write_literal(answer.value), CHECKS)
            for (problem, _), answer in zip(replies, answers, strict=True)
            if answer is not None
        ]
        results = iter(self._sandbox.verify(jobs))
        return [Verdict("unparsed", 0.0) if a is None else self._verdict(a, next(results)) for a in answers]

    def extract(self, text: str) -> str | None:
        answer = _answer_in(text)
        return None if answer is None else answer.text

    def gold(self, problem: Problem) -> str:
        return _reply(self._found(problem).right)

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        found = self._found(problem)
        stranger = f"nobody-{int(rng.integers(10**6))}"
        answers = [
            WrongAnswer("unknown names", _reply(write_literal(_renamed(read_literal(found.right), stranger)))),
            WrongAnswer("another kind of thing", _reply(repr(stranger))),
            WrongAnswer("cut off", _reply(found.right).rstrip("`\n")[:-1].replace("```", "")),
            WrongAnswer("a program", _reply("print(True)")),
            WrongAnswer("taken back", _reply(found.right) + "\n\nNo, that was wrong:\n" + _reply("[None]")),
            WrongAnswer("no arrangement", "No arrangement satisfies all of them."),
        ]
        if found.wrong is not None:
            answers.append(WrongAnswer("a constraint broken", _reply(found.wrong)))
        return answers

    def labels(self, problem: Problem) -> dict[str, str]:
        return {"language": problem.columns["lang"]}

    def close(self) -> None:
        self._sandbox.close()

    def _verdict(self, answer: _Answer, result: Result) -> Verdict:
        if result.kind != "ok":
            self.failures[result.kind] += 1
            return Verdict(result.kind, 0.0, answer.text)
        return Verdict("right", 1.0, answer.text) if result.value is True else Verdict("wrong", 0.0, answer.text)

    def _found(self, problem: Problem) -> _Arrangements:
        """A solution and, if there is one, an arrangement of the right form that is not a solution: the first of each
        in the puzzle's own enumeration."""
        code = problem.columns["code"]
        if not code["Traverse_code"]:
            raise UserError(f"{self.name} {problem.id}: without 'Traverse_code' no gold answer can be found")
        source = "\n".join((_verifier(problem), _SEARCH, code["Traverse_code"], _REPORT))
        if source not in self._arrangements:
            [result] = self._sandbox.run([Program(source, "_search", [[]])], TO_SEARCH)
            self._arrangements[source] = _arrangements(result, f"{self.name} {problem.id}")
        return self._arrangements[source]


@dataclass(frozen=True)
class _Answer:
    """The answer in a reply: its value, and a text that equal values share."""

    value: Any
    text: str


@dataclass(frozen=True)
class _Arrangements:
    """Literals: an arrangement that satisfies all constraints, and one of the right form that does not, if any."""

    right: str
    wrong: str | None


class _RowError(UserError):
    """A row that states no puzzle."""


def _answer_in(text: str) -> _Answer | None:
    """The arrangement that a reply states; None if it states none. Never raises, whatever the text."""
    stated = stated_in(after_thinking(text))
    if stated is None or len(stated) > LONGEST:
        return None
    try:
        value = _read(_without_comments(stated))
        return _Answer(value, write_literal(value, sort_keys=True))
    except ValueError:
        return None


def stated_in(text: str) -> str | None:
    """The last fenced block, else the last ``{...}`` inside no other, else the last ``[...]``; None without any."""
    fenced = _last_fenced(text)
    if fenced is not None:
        return fenced
    braced = last_object(text)
    return braced if braced is not None else _last_list(text)


def _last_fenced(text: str) -> str | None:
    """The last block between two fences, the first of which ends its line, with or without the name of a language.

    Not by regular expression: the evaluator's backtracks over every split of the white space after a fence.
    """
    last, end = None, 0
    while (fence := text.find(_FENCE, end)) >= 0:
        start = _start_of_block(text, fence + len(_FENCE))
        if start is None:
            end = fence + 1
            continue
        closing = text.find(_FENCE, start)
        if closing < 0:
            break
        last, end = text[start:closing], closing + len(_FENCE)
    return last


def _start_of_block(text: str, at: int) -> int | None:
    """The position after the last line break in the white space that follows a fence and its language, or None."""
    for header in (_LANGUAGE_LINE.match(text, at), _EMPTY_LINES.match(text, at)):
        if header is not None and "\n" in header[1]:
            return header.start(1) + header[1].rindex("\n") + 1
    return None


def _without_comments(text: str) -> str:
    """The text without ``//`` comments, each removed with its line break."""
    *lines, rest = text.split("\n")
    return "".join(line.partition("//")[0] if "//" in line else f"{line}\n" for line in lines) + rest


def _last_list(text: str) -> str | None:
    """The last text from an opening bracket to the next closing one. Not by regular expression, to take linear time."""
    last, end = None, 0
    while (start := text.find("[", end)) >= 0 and (end := text.find("]", start) + 1) > 0:
        last = text[start:end]
    return last


def _read(stated: str) -> Any:
    try:
        return read_literal(stated.replace("true", "True").replace("false", "False"))
    except ValueError:
        if "=" in stated:
            return read_literal(stated.split("=", 1)[1].strip())
        return read_json(stated)


def _problem(row: Mapping[str, Any]) -> Problem:
    lang = str(row.get("lang", "en"))
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        prompt = _prompt(row, lang)
    columns = {"code": _code(row.get("code")), "lang": lang, "group_id": row.get("group_id")}
    return Problem(id=name_of(row, ("id", "idx"), digest(prompt)), prompt=prompt, columns=columns)


def _prompt(row: Mapping[str, Any], lang: str) -> str:
    if lang not in PROMPTS:
        raise _RowError(f"a row without a 'prompt' must have a 'lang' among {sorted(PROMPTS)}, found {shown(lang)}")
    parts = {}
    for name in ("question", "logi_constraints", "input_format", "example"):
        part = row.get(name)
        if part is None or not str(part).strip():
            raise _RowError(f"a row needs a 'prompt', or all its parts; {name!r} is {shown(part)}")
        parts[name] = part if isinstance(part, str) else repr(part)
    return PROMPTS[lang].format(**parts)


def _code(given: Any) -> dict[str, str]:
    code = given if isinstance(given, Mapping) else {}
    needed = ("Inputs_Check_code", "Constraint_List_code")
    for name in needed:
        if not isinstance(code.get(name), str):
            raise _RowError(f"'code' must hold the verifier's source, {' and '.join(needed)}; found {shown(given)}")
    traverse = code.get("Traverse_code")
    return {**{name: code[name] for name in needed}, "Traverse_code": traverse if isinstance(traverse, str) else ""}


def _verifier(problem: Problem) -> str:
    code = problem.columns["code"]
    return f"{code['Inputs_Check_code']}\n{code['Constraint_List_code']}"


def _family(problem: Problem) -> str:
    """A key that all variants of a puzzle share."""
    group = problem.columns["group_id"]
    return problem.id if group is None else f"{problem.columns['lang']} {group}"


def _arrangements(result: Result, where: str) -> _Arrangements:
    if result.kind != "ok":
        raise UserError(f"{where}: its 'Traverse_code' ended in a {result.kind} ({result.message}): no gold answer")
    [seen] = result.value
    if not isinstance(seen, dict) or "right" not in seen:
        raise UserError(f"{where}: its 'Traverse_code' comes by no arrangement that holds: no gold answer")
    try:
        literals = {name: write_literal(read_literal(text)) for name, text in seen.items()}
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: its 'Traverse_code' tries arrangements that no literal can tell ({error})") from None
    return _Arrangements(literals["right"], literals.get("wrong"))


def _reply(literal: str) -> str:
    return f"By elimination:\n\n```\n{literal}\n```\n"


def _renamed(value: Any, name: str) -> Any:
    """The same structure, with a new name in place of every value."""
    match value:
        case dict():
            return {key: _renamed(item, name) for key, item in value.items()}
        case list():
            return [_renamed(item, f"{name}-{place}") for place, item in enumerate(value)]
        case tuple():
            return tuple(_renamed(item, f"{name}-{place}") for place, item in enumerate(value))
        case set():
            return {f"{name}-{place}" for place in range(len(value))}
    return name
