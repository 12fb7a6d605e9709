"""ZebraLogic: who lives where, and with what. The answer is a JSON table, graded cell by cell.

Graded as by the benchmark's own evaluator: in the last complete ``{...}`` at top level (braces in quotes count too,
line breaks are removed), the key ``solution`` holds a table ``House k`` -> attribute -> value. A cell is right if it
equals the solution up to case and outer blanks; of a list, its first item counts. A puzzle is right if every cell is. A
reply without such an object is ``unparsed`` and earns nothing; a wrong table earns something only with ``partial``.
Cell accuracy is reported as well (``cell_accuracy``). Of two values for one key, the benchmark takes the last; here
such an object is not an answer, because it would state both.

Sizes are ``houses*attributes``; the benchmark groups them by the number of possible tables, (houses!) ** attributes:
below a thousand small, below a million medium, below ten billion large, otherwise xlarge.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from teamtr.bounded_json import NotJson, read_json
from teamtr.errors import UserError
from teamtr.grading.thinking import after_thinking
from teamtr.settings.paths import Anchor
from teamtr.settings.section import key, unset
from teamtr.settings.values import Flag, NonEmpty
from teamtr.tasks.base import Benchmark, WrongAnswer
from teamtr.tasks.config import BenchmarkConfig
from teamtr.tasks.data.rows import DataError
from teamtr.tasks.data.split import digest, name_of
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Problem, Verdict

Table = dict[str, dict[str, str]]
"""House -> attribute -> value."""

_GROUPS = (("small", 10**3), ("medium", 10**6), ("large", 10**10))
_PLACEHOLDERS = ("{puzzle}", "{json_template}")

PROMPT = """\
{puzzle}

Find out what belongs to each house. Every clue holds, and there is exactly one solution.

Think it through; then end with one JSON object of this form, each ___ filled in with one of the values listed above \
and nothing left out:

{json_template}
"""


@task("zebralogic")
class ZebraLogic(Benchmark):
    """Rows have ``puzzle``, ``solution`` (``{"header": ["House", ...], "rows": [["1", ...], ...]}``) and optionally
    ``id``, ``size`` and ``prompt``.

    Args:
        splits: the problems of each split.
        partial: the reward is the share of cells that are right, instead of 1 or 0 for the whole puzzle. Verdicts stay
            the same.
        template: a file with the prompt and the placeholders {puzzle} and {json_template}; by default our prompt.
    """

    class Config(BenchmarkConfig):
        """Grid puzzles, answered with a table."""

        partial: Flag = key(False, "Reward the share of right cells, not only the whole table.")
        template: NonEmpty | None = unset("A file with the prompt, relative to the team file; default: our prompt.")

        def anchored(self, anchor: Anchor) -> Self:
            template = None if self.template is None else anchor.path(self.template)
            return super().anchored(anchor).model_copy(update={"template": template})

    samples = 64

    def __init__(
        self,
        splits: Mapping[str, Sequence[Problem]] | None = None,
        *,
        partial: bool = False,
        template: Path | str | None = None,
    ) -> None:
        super().__init__(splits)
        self._partial = partial
        self._template = PROMPT if template is None else _read_template(Path(template))

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        try:
            return _problem(row, self._template)
        except _RowError as error:
            raise DataError(f"{where}: {error}" if where else str(error)) from None

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [self._verdict(problem, text) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        table = table_in(text)
        return None if table is None else json.dumps(table, sort_keys=True)

    def gold(self, problem: Problem) -> str:
        return _reply(problem.answer)

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        solution: Table = problem.answer
        houses = list(solution)
        house = houses[int(rng.integers(len(houses)))]
        other = houses[(houses.index(house) + 1) % len(houses)]
        attribute = list(solution[house])[int(rng.integers(len(solution[house])))]
        one_cell = {**solution, house: {**solution[house], attribute: "none of them"}}
        swapped_cells = {
            **solution,
            house: {**solution[house], attribute: solution[other][attribute]},
            other: {**solution[other], attribute: solution[house][attribute]},
        }
        swapped_houses = {**solution, house: solution[other], other: solution[house]}
        blank = {name: dict.fromkeys(cells, "___") for name, cells in solution.items()}
        gold = _reply(solution)
        return [
            WrongAnswer("one cell wrong", _reply(one_cell)),
            WrongAnswer("two cells exchanged", _reply(swapped_cells)),
            WrongAnswer("two houses exchanged", _reply(swapped_houses)),
            WrongAnswer("a house missing", _reply({name: solution[name] for name in houses if name != house})),
            WrongAnswer("a cell missing", _reply({**solution, house: _without(solution[house], attribute)})),
            WrongAnswer("the form not filled in", _reply(blank)),
            WrongAnswer("taken back", gold + "\n\nNo, that was wrong:\n" + _reply(one_cell)),
            WrongAnswer("cut off", gold.rstrip().removesuffix("}")),
            WrongAnswer("no table", "The clues contradict each other."),
        ]

    def labels(self, problem: Problem) -> dict[str, str]:
        houses, attributes = _shape(problem.answer)
        return {"size": f"{houses}*{attributes}", "group": size_group(houses, attributes)}

    def measures(self, problem: Problem, reply: str) -> dict[str, float]:
        return {"cell_accuracy": self.cell_accuracy(problem, reply)}

    def cell_accuracy(self, problem: Problem, reply: str) -> float:
        """The share of the solution's cells that the reply has right; 0 if it has no table."""
        said = table_in(reply)
        return 0.0 if said is None else _share_right(problem.answer, said)

    def _verdict(self, problem: Problem, text: str) -> Verdict:
        said = table_in(text)
        if said is None:
            return Verdict("unparsed", 0.0)
        share = _share_right(problem.answer, said)
        extracted = json.dumps(said, sort_keys=True)
        if share == 1:
            return Verdict("right", 1.0, extracted)
        return Verdict("wrong", share if self._partial else 0.0, extracted)


def table_in(text: str) -> Table | None:
    """The table that a reply states, every value in lower case and stripped; None if it states none. Never raises, and
    takes time linear in the text."""
    stated = last_object(after_thinking(text))
    if stated is None:
        return None
    try:
        answer = read_json(stated.replace("\n", ""), strict=True)
    except NotJson:
        return None
    solution = answer.get("solution") if isinstance(answer, dict) else None
    if not isinstance(solution, dict):
        return None
    return {
        house: {attribute: cell for attribute, value in cells.items() if (cell := _cell(value)) is not None}
        for house, cells in solution.items()
        if isinstance(cells, dict)
    }


def last_object(text: str) -> str | None:
    """The last complete ``{...}`` that is inside no other.

    Braces in quotes count too, as in the benchmark; a brace that is never closed hides everything after it.
    """
    depth, start = 0, 0
    last = None
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            if depth == 0:
                start = match.start()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                last = (start, match.end())
    return None if last is None else text[slice(*last)]


def size_group(houses: int, attributes: int) -> str:
    tables = math.factorial(houses) ** attributes
    return next((group for group, limit in _GROUPS if tables < limit), "xlarge")


class _RowError(UserError):
    """A row that states no puzzle."""


def _problem(row: Mapping[str, Any], template: str) -> Problem:
    puzzle, solution = row.get("puzzle"), _solution(row.get("solution"))
    if not isinstance(puzzle, str) or not puzzle.strip():
        raise _RowError(f"'puzzle' must be text, found {shown(puzzle)}")
    houses, attributes = _shape(solution)
    size = row.get("size")
    if size not in (None, f"{houses}*{attributes}"):
        raise _RowError(f"'size' is {shown(size)}, but the solution has {houses} houses of {attributes} attributes")
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        form = {name: dict.fromkeys(cells, "___") for name, cells in solution.items()}
        # In one pass: a puzzle that happens to contain a placeholder keeps it.
        filled = {"{puzzle}": puzzle, "{json_template}": json.dumps({"reasoning": "___", "solution": form}, indent=4)}
        prompt = re.sub("|".join(map(re.escape, _PLACEHOLDERS)), lambda found: filled[found[0]], template)
    return Problem(id=name_of(row, ("id",), digest(puzzle)), prompt=prompt, answer=solution)


def _solution(given: Any) -> Table:
    header = given.get("header") if isinstance(given, Mapping) else None
    rows = given.get("rows") if isinstance(given, Mapping) else None
    if not isinstance(header, list) or not isinstance(rows, list) or header[:1] != ["House"] or len(header) < 2:
        raise _RowError(f"'solution' must have a 'header' that begins with House, and 'rows'; found {shown(given)}")
    if not rows or any(not isinstance(cells, list) or len(cells) != len(header) for cells in rows):
        raise _RowError(f"each of the 'rows' of 'solution' must have {len(header)} cells; found {shown(rows)}")
    if any(cell == "___" for cells in rows for cell in cells):
        raise _RowError("the solution is blanked out (___): the benchmark gives solutions in its gated set only")
    if len(rows) < 2 or any(len(set(map(_cell, column))) < len(rows) for column in zip(*rows, strict=True)):
        raise _RowError(f"there must be two houses or more, all different in every column; found {shown(rows)}")
    return {
        f"House {number}": dict(zip(map(str, header[1:]), map(str, cells[1:]), strict=True))
        for number, cells in enumerate(rows, start=1)
    }


def _shape(solution: Table) -> tuple[int, int]:
    return len(solution), len(next(iter(solution.values())))


def _cell(value: Any) -> str | None:
    """A value as it is compared: text or a number as written, in lower case; None for anything else."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).lower().strip()


def _share_right(solution: Table, said: Table) -> float:
    cells = [
        said.get(house, {}).get(attribute) == _cell(value)
        for house, attributes in solution.items()
        for attribute, value in attributes.items()
    ]
    return sum(cells) / len(cells)


def _reply(table: Table) -> str:
    return json.dumps({"reasoning": "By elimination.", "solution": table}, indent=4)


def _without(cells: Mapping[str, str], attribute: str) -> dict[str, str]:
    return {name: value for name, value in cells.items() if name != attribute}


def _read_template(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot read the prompt template ({error})") from None
    missing = [placeholder for placeholder in _PLACEHOLDERS if placeholder not in text]
    if missing:
        raise UserError(f"{file}: a prompt template must contain {missing[0]}")
    return text
