"""The comparison with other projects: no cell without a source, no source that nothing cites."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
PROJECTS = {"TRL": "T", "verl": "V", "PettingLLMs": "P", "inspect_ai": "I"}


def rows(text: str) -> list[list[str]]:
    """Cells of the tables of features; their heads and rules left out."""
    tables = [line.strip("|").split("|") for line in text.split("## Sources")[0].splitlines() if line.startswith("|")]
    return [
        [c.strip() for c in cells] for cells in tables if len(cells) == 6 and cells[0].strip() not in ("feature", "---")
    ]


def unsourced(text: str) -> list[str]:
    """Cells that cite neither a source of their own project nor a page of ours."""
    defined = set(re.findall(r"^- ([TVPI]\d+): ", text, flags=re.M))
    wrong = []
    for feature, ours, *theirs in rows(text):
        if not re.search(r"\]\([\w-]+\.md", ours):
            wrong.append(f"{feature}: TeamTR")
        for (project, letter), cell in zip(PROJECTS.items(), theirs, strict=True):
            cited = set(re.findall(r"\b[TVPI]\d+\b", cell))
            own = {source for source in cited if source.startswith(letter)}
            if cited != own or not cited <= defined or not (cited or "](" in cell):
                wrong.append(f"{feature}: {project}")
    return wrong


def test_every_cell_has_a_source() -> None:
    assert len(rows(PAGE)) >= 20
    assert unsourced(PAGE) == []


def test_the_check_of_sources_sees_what_is_wrong() -> None:
    head = "| feature | TeamTR | TRL | verl | PettingLLMs | inspect_ai |\n|---|---|---|---|---|---|\n"
    row = "| Tools | yes | yes (T3) | yes (T3) | no | yes (I9) |\n"
    text = f"{head}{row}## Sources\n- T3: a\n"
    assert unsourced(text) == ["Tools: TeamTR", "Tools: verl", "Tools: PettingLLMs", "Tools: inspect_ai"]


def test_every_source_is_cited_and_every_project_has_a_version() -> None:
    table, sources = PAGE.split("## Sources")
    defined = re.findall(r"^- ([TVPI]\d+): \S", sources, flags=re.M)
    assert len(defined) == len(set(defined))
    assert sorted(defined) == sorted(set(re.findall(r"\b[TVPI]\d+\b", table)))
    for project in PROJECTS:
        assert re.search(rf"^\| {project} \| [\d.]+(dev\d*)?: [\w/-]+, commit [0-9a-f]{{7}} of ", table, flags=re.M)
