"""PAPER.md names only what exists, and leaves nothing of the paper out."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "PAPER.md"
PAPER = ROOT.parent / "shared" / "paper" / "teamtr.tex"

FUNCTION = re.compile(r"`(teamtr(?:\.\w+)*):(\w+(?:\.\w+)*)(?:\[(\w+)\])?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")
LABEL = re.compile(r"`((?:app:)?(?:eq|lem|thm|prop|cor|def|alg|tab|fig|rem):[\w-]+)`")
TEX_LABEL = re.compile(r"\\label\{((?:app:)?(?:eq|lem|thm|prop|cor|def|alg|tab|fig|rem):[^}]+)\}")
HEADER = ["label", "what it says", "function", "shown by", "status"]
STATUSES = {"done", "part", "open"}
ALGORITHM_LINES = 11


@dataclass(frozen=True)
class Row:
    label: str
    says: str
    function: str
    shown_by: str
    status: str


def cells(line: str) -> list[str]:
    """The cells of one table line; a bar inside a formula is written as an escaped bar."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def map_rows() -> list[Row]:
    """Every row of every five-column table that opens with our header."""
    rows: list[Row] = []
    inside = False
    for line in MAP.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
        elif cells(line) == HEADER:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            assert len(cells(line)) == len(HEADER), f"PAPER.md: not five cells in: {line}"
            rows.append(Row(*cells(line)))
    return rows


def resolve(module: str, path: str, key: str | None) -> object:
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found if key is None else found[key]  # type: ignore[index]


def names_in(source: Path) -> set[str]:
    """``name`` of every function and ``Class::name`` of every method in a test file."""
    names: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}::{sub.name}" for sub in node.body if isinstance(sub, ast.FunctionDef)}
    return names


def test_every_function_named_exists() -> None:
    named = FUNCTION.findall(MAP.read_text(encoding="utf-8"))
    assert named, "PAPER.md names no function: the pattern or the page is broken"
    missing = []
    for module, path, key in sorted(set(named)):
        try:
            resolve(module, path, key or None)
        except (ImportError, AttributeError, KeyError) as error:
            missing.append(f"{module}:{path}{f'[{key}]' if key else ''} ({error})")
    assert not missing, "PAPER.md names functions that do not exist:\n" + "\n".join(missing)


@pytest.mark.long
def test_every_test_named_exists() -> None:
    named = TEST.findall(MAP.read_text(encoding="utf-8"))
    assert named, "PAPER.md names no test: the pattern or the page is broken"
    missing = []
    for file, name in sorted(set(named)):
        source = ROOT / file
        if not source.is_file() or (name and name.removeprefix("::") not in names_in(source)):
            missing.append(file + name)
    assert not missing, "PAPER.md names tests that do not exist:\n" + "\n".join(missing)


def test_nothing_that_looks_like_a_reference_escapes_the_checks() -> None:
    """A misspelt reference must not pass merely because the patterns do not see it."""
    escaped = []
    for row in map_rows():
        for cell, pattern in ((row.function, FUNCTION), (row.shown_by, TEST)):
            rest = pattern.sub("", cell)
            if "teamtr." in rest or "tests/" in rest:
                escaped.append(f"{row.label}: {cell}")
    assert not escaped, "references in PAPER.md that no check reads:\n" + "\n".join(escaped)


def test_status_agrees_with_what_is_named() -> None:
    wrong = []
    for row in map_rows():
        has_function, has_test = bool(FUNCTION.search(row.function)), bool(TEST.search(row.shown_by))
        if row.status not in STATUSES:
            wrong.append(f"{row.label}: status {row.status!r} is none of {sorted(STATUSES)}")
        elif row.status == "done" and not (has_function and has_test):
            wrong.append(f"{row.label}: done needs a function and a test")
        elif row.status == "part" and not (has_function or has_test):
            wrong.append(f"{row.label}: part needs a function or a test")
        elif row.status == "open" and has_test:
            wrong.append(f"{row.label}: open, yet a test shows it")
    assert not wrong, "PAPER.md:\n" + "\n".join(wrong)


def test_the_count_on_the_page_is_the_count_of_its_rows() -> None:
    count = Counter(row.status for row in map_rows())
    line = f"Rows: {count['done']} done, {count['part']} part, {count['open']} open."
    assert line in MAP.read_text(encoding="utf-8").splitlines(), f"PAPER.md should say: {line}"


def test_every_line_of_the_algorithm_is_listed() -> None:
    listed = [row.label for row in map_rows() if row.label.startswith("`alg:teamtr` line")]
    assert listed == [f"`alg:teamtr` line {k}" for k in range(1, ALGORITHM_LINES + 1)]


def test_labels_of_the_paper_are_listed_once_and_in_order() -> None:
    if not PAPER.is_file():
        pytest.skip(f"the paper's source is not at {PAPER}: cannot check that every label is listed")
    source = re.sub(r"(?<!\\)%.*", "", PAPER.read_text(encoding="utf-8"))
    in_paper = TEX_LABEL.findall(source)
    listed = [
        found.group(1)
        for row in map_rows()
        if (found := LABEL.match(row.label)) and not row.label.startswith("`alg:teamtr` line")
    ]
    assert sorted(set(in_paper) - set(listed)) == [], "labels of the paper that PAPER.md does not list"
    assert sorted(set(listed) - set(in_paper)) == [], "labels in PAPER.md that the paper does not have"
    assert listed == in_paper, "PAPER.md lists a label twice or out of the paper's order"
