"""Sections of the report: one file adds one, to every form of the report; what they say is text, whatever it holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from made_run import HOSTILE, hostile_parts, made_run
from teamtr.analysis.report import build_report, report_page, report_text
from teamtr.analysis.report.parts import (
    MOST_CORNERS,
    MOST_DOTS,
    Axis,
    Chart,
    Part,
    as_plain,
    band,
    dots,
    line,
)
from teamtr.analysis.report.reading import read_run
from teamtr.analysis.report.section import Section, register, sections, shown
from teamtr.analysis.report.serve import Library
from teamtr.analysis.report.summary import summarise
from teamtr.analysis.report.words import clock, num, percent, signed
from teamtr.errors import UserError

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src" / "teamtr" / "analysis" / "report" / "assets"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def page_data(page: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_one_file_adds_a_section_to_every_form(run, new_section):
    report = build_report(run)
    assert report.data["lengths"][:2] == [
        {"stage": 0, "agent": "left", "tokens": 3.0},
        {"stage": 0, "agent": "right", "tokens": 3.0},
    ]
    text = report_text(report.data)
    assert text.index("## Staleness") < text.index("## Message lengths") < text.index("## Accounting")
    assert "**Tokens of a message** (tokens, over stage)" in text
    assert re.search(r"\| speaker +\| 3 +\| 3 +\| 3 +\| 3 +\| 3 ", text)
    held = page_data(report_page(report))
    (section,) = [s for s in held["sections"] if s["key"] == "lengths"]
    assert section["parts"][0]["series"][2]["label"] == "speaker"
    library = Library([run])
    answer = library.summary(library.names()[0]["key"], "")
    (section,) = [s for s in answer["sections"] if s["key"] == "lengths"]
    assert section["parts"][0]["text"] == "No stored conversations were read."


def test_the_section_of_the_docs_is_the_one_that_is_tested():
    (shown_in_docs,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "report.md").read_text(), re.M | re.S)
    source = (ROOT / "tests" / "new_section.py").read_text()
    assert shown_in_docs == source[source.index("from teamtr") :]


def test_the_docs_list_every_section_and_question_in_the_order_of_the_page(run):
    text = (ROOT / "docs" / "report.md").read_text()
    table = text[text.index("| section | question |") :].split("\n\n")[0]
    listed = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]]
    data = summarise(read_run(run))
    assert listed == [(s.title, s.answer(data).question if s.answer else "") for s in sections()]
    assert [a["question"] for a in data["headlines"]] == [question for _, question in listed if question]


def test_a_second_section_of_one_name_is_refused(new_section):
    with pytest.raises(UserError, match="two sections have the key 'lengths'"):
        register(Section("lengths", "Other lengths", 1))
    for key in ("top", "a key", ""):
        with pytest.raises(UserError, match="a section's key"):
            register(Section(key, "Title", 1))


def test_what_two_sections_compute_cannot_have_one_name(run, new_section):
    register(Section("other", "Other", 1, compute=lambda run: {"lengths": []}))
    with pytest.raises(UserError, match="section 'lengths' computes 'lengths'"):
        build_report(run)


def test_a_section_with_nothing_to_show_is_left_out(run, new_section):
    register(Section("silent", "Silent", 1))
    assert "silent" not in [section.key for section in shown(build_report(run).data)]


def test_every_section_shows_something_of_a_run_and_plain_values_alone(run):
    json.dumps([section.as_plain() for section in shown(build_report(run).data)], allow_nan=False)
    lacking = {"shift", "swap", "critic", "rewards"}
    assert {section.key for section in shown(build_report(run).data)} == {s.key for s in sections()} - lacking


def test_the_page_draws_every_kind_of_part():
    """Text has a branch for each, checked by the types; the script has a function for each, checked here."""
    script = (ASSETS / "parts.js").read_text()
    drawn = set(re.findall(r"^  (\w+)(?:: |\()", script[script.index("const PARTS") :], re.M))
    assert drawn == {kind.__name__.lower() for kind in Part.__args__}


def test_the_scripts_of_sections_are_there():
    for section in sections():
        if section.script:
            assert f"OWN.{section.key} = " in (ASSETS / section.script).read_text()
    named = {section.script for section in sections() if section.script}
    assert {path.name for path in ASSETS.glob("*.js")} == named | {
        "dom.js",
        "charts.js",
        "parts.js",
        "opening.js",
        "main.js",
    }


def test_hostile_text_in_any_part_is_escaped(run, new_section):
    register(Section("hostile", HOSTILE, 1, HOSTILE, show=lambda data: hostile_parts()))
    report = build_report(run)
    page = report_page(report)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert not set(data) & set("<>&\u2028\u2029\u202e")
    section = report_text(report.data).split("## Learning")[0]
    assert "\\<script\\>window.pwned" in section
    assert not re.search(r"(?<!\\)<(?!/?script)", re.sub(r"^```.*?^```", "", section, flags=re.M | re.S))
    assert not set(section) & set("\u202e\u2028\x07")


# -- series ---------------------------------------------------------------------------------------------------------


def test_what_is_no_number_is_not_drawn():
    rows = [{"x": 1, "y": 2.0}, {"x": None, "y": 1}, {"x": 2, "y": float("nan")}, {"x": 3, "y": "4"}, {"x": 4, "y": 5}]
    assert (list(dots(rows, "x", "y").x), list(line(rows, "x", "y").y)) == ([1, 4], [2.0, 5])
    assert dots(rows, "x", "y", low=lambda row: float("inf")).low == [None, None]
    ends = [{"x": 0, "low": 1, "high": 2}, {"x": 1, "low": None, "high": 2}, {"x": 2, "low": 1, "high": None}]
    assert (band(ends, "x", "low", "high").x, Chart("", Axis(""), Axis(""), [dots([], "x", "y")]).empty) == ([0], True)


def test_a_long_run_gives_no_longer_series_and_loses_no_peak():
    rows = [{"x": k, "y": 0.0, "keep": k == 7} for k in range(10_000)]
    rows[4321]["y"], rows[8765]["y"] = 9.0, -9.0
    asked: list[int] = []
    marked = dots(rows, "x", "y", tip=lambda row: str(asked.append(row["x"])), keep="keep")
    assert len(marked.x) <= MOST_DOTS + 2
    assert {0, 7, 9_999} <= set(marked.x)
    assert asked == list(marked.x)  # what is not drawn is not put into words
    drawn = line(rows, "x", "y")
    assert len(drawn.x) <= MOST_CORNERS
    assert (max(drawn.y), min(drawn.y)) == (9.0, -9.0)
    assert list(drawn.x) == sorted(drawn.x)


def test_a_run_of_any_length_has_charts_of_one_size(tmp_path, monkeypatch):
    """Twice as many updates beyond what can be drawn add less than a tenth."""
    monkeypatch.setattr("teamtr.analysis.report.parts.MOST_DOTS", 20)
    monkeypatch.setattr("teamtr.analysis.report.parts.MOST_CORNERS", 20)

    def size(stages: int) -> int:
        data = summarise(read_run(made_run(tmp_path / str(stages), stages=stages, batches=[])))
        return len(json.dumps([as_plain(section.parts) for section in shown(data)]))

    assert size(80) < 1.1 * size(40)


# -- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_in_words():
    assert [num(x) for x in (None, 0, 3.0, 1234567, 0.3125, 0.00012345, 1.5e6 + 0.5, -12.345, 999.96, "nan")] == [
        "–", "0", "3", "1,234,567", "0.313", "1.23e−4", "1.5e6", "-12.3", "1,000", "nan",
    ]  # fmt: skip
    assert [percent(x) for x in (0.125, 1.0, None)] == ["13 %", "100 %", "–"]
    assert [signed(x) for x in (0.5, -0.5, 0, None)] == ["+0.5", "-0.5", "0", "–"]
    assert [clock(x) for x in (None, 0.71, 9, 59.6, 75, 3661)] == [
        "an unknown time", "0.7 s", "9 s", "60 s", "1 min 15 s", "1 h 1 min",
    ]  # fmt: skip
