"""Makes problems of rows: finds the columns of question and answer, renames columns, and sets private text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teamtr.grading import last_number
from teamtr.tasks.data.chat import is_chat, read_chat
from teamtr.tasks.data.rows import DataError, Row, image_refusal, read_rows
from teamtr.tasks.data.split import OwnNames, digest
from teamtr.text import shown
from teamtr.types import Problem

QUESTION_KEYS = ("prompt", "question", "problem", "messages")
ANSWER_KEYS = ("answer", "solution", "target")


@dataclass
class ProblemReader:
    """Makes problems of rows.

    ``columns`` renames columns before anything else is read, as NEW: COLUMN, where COLUMN may name a field of a nested
    column (``reward_model.ground_truth``). ``without_system`` counts questions in chat format whose system prompt was
    left out.
    """

    question: str | None = None
    answer: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, str] = field(default_factory=dict)
    needs_answer: bool = True
    needs_number: bool = False
    without_system: int = 0
    _names: OwnNames = field(default_factory=OwnNames)

    def problems(self, source: str | Path) -> Iterator[Problem]:
        """The problems of a file, a folder or a hub dataset; the first row decides which columns are used."""
        rows = [self._renamed(row) for row in read_rows(source)]
        if not rows:
            raise DataError(f"{source}: empty; it needs at least one row with a question and an answer")
        question, answer = self._chosen(rows[0])
        return (self._problem(row, question, answer) for row in rows)

    def problem(self, row: Row) -> Problem:
        """The problem of a single row, which decides by itself which columns are used."""
        row = self._renamed(row)
        return self._problem(row, *self._chosen(row))

    def _renamed(self, row: Row) -> Row:
        for column, value in row.cells.items():
            if refused := image_refusal(column, value):
                raise DataError(f"{row.where}, column {column!r}: {refused}")
        if not self.columns:
            return row
        cells = dict(row.cells)
        found = {new: _field(row, path) for new, path in self.columns.items()}
        for path in self.columns.values():
            cells.pop(path, None)
        return Row(row.where, {**cells, **found})

    def _chosen(self, row: Row) -> tuple[str, str | None]:
        """The columns of question and answer; no answer column if none is needed or the question's chat has it."""
        question = _column(row, self.question, "question", QUESTION_KEYS)
        given = self.answer is not None or any(key in row.cells for key in ANSWER_KEYS)
        brought = is_chat(row.cells[question])
        if given or (self.needs_answer and not brought):
            return question, _column(row, self.answer, "answer", ANSWER_KEYS)
        return question, None

    def _problem(self, row: Row, question: str, answer: str | None) -> Problem:
        text, reply = _cell(row, question), None
        if is_chat(text):
            text, reply, has_system = read_chat(text, row.where)
            self.without_system += has_system
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{row.where}: {question!r} must be text, found {shown(text)}")
        right = reply if answer is None else _cell(row, answer)
        # Without this column, a reward function would not get the answer that is part of the conversation.
        brought = {"answer": reply} if answer is None and reply is not None else {}
        if self.needs_answer and not isinstance(right, str | int | float):
            which = repr(answer) if answer is not None else "the assistant's message"
            raise DataError(f"{row.where}: {which} must be text or a number, found {shown(right)}")
        if self.needs_number and last_number(str(right)) is None:
            raise DataError(f"{row.where}: grader 'number': no number in the answer {shown(right)}")
        return Problem(
            id=self._names.own(digest(text)),
            prompt=text,
            answer=right,
            private={
                agent: str(value) for agent, column in self.private.items() if (value := _cell(row, column)) is not None
            },
            columns={**brought, **{key: value for key, value in row.cells.items() if key != question}},
        )


def _field(row: Row, path: str) -> Any:
    """The column of this name, or else the field of a nested column."""
    if path in row.cells:
        return row.cells[path]
    found: Any = row.cells
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            raise DataError(
                f"{row.where}: task.columns: no column {path!r}; found {sorted(row.cells)}: name one of them, or a "
                "field of one with a dot"
            )
        found = found[key]
    return found


def _column(row: Row, given: str | None, role: str, usual: Sequence[str]) -> str:
    """The column for this role: the one given, or the first usual one that the row has."""
    found = sorted(row.cells)
    if given is not None and given not in row.cells:
        raise DataError(f"{row.where}: no column {given!r}; found {found}: set task.{role} to one of them")
    for column in usual if given is None else (given,):
        if column in row.cells:
            return column
    raise DataError(
        f"{row.where}: no {role}: none of {list(usual)} among the columns {found}: set task.{role} to one of them"
    )


def _cell(row: Row, column: str) -> Any:
    if column not in row.cells:
        raise DataError(f"{row.where}: no {column!r}; found {sorted(row.cells)}: every row needs it")
    return row.cells[column]
