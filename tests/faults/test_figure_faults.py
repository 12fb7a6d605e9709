"""Whatever a log or a folder's name holds, a figure is drawn without it or not at all, and the others are drawn."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from made_run import changed, made_run, probed, swapped
from teamtr.analysis.figures import FIGURES, Drawing, Panel, Run, Series, hang, read_runs
from teamtr.analysis.figures.paint import painted
from teamtr.cli import app
from teamtr.text import visible

DRAW = {figure.name: figure.draw for figure in FIGURES}


def panel(drawing: Drawing, title: str) -> Panel:
    return next(panel for panel in drawing.panels if panel.title.startswith(title))


NAMES = ("a\x01b", "_base", "w" * 100, "a\u202eb", "=1+1", "@SUM(A1)", "b\udcff", "c\uffff", "a\nb")


@pytest.mark.long
def test_names_of_folders_cannot_harm_a_figure_or_a_table(tmp_path: Path) -> None:
    gallery = hang(
        read_runs([made_run(tmp_path / name) for name in NAMES]), tmp_path / "out", ["learning-curves", "accounting"]
    )
    assert gallery.lacking == ()
    wanted = [" ".join(visible(name).split()) for name in NAMES]
    for figure, most in (("learning-curves", 80), ("accounting", 40)):  # ticks are cut shorter than keys
        svg = (tmp_path / "out" / f"{figure}.svg").read_text()
        words = {" ".join(word.split()) for word in ElementTree.fromstring(svg).itertext()}
        assert {name if len(name) <= most else f"{name[: most - 1]}…" for name in wanted} <= words
        assert "\u202e" not in svg
    rows = list(csv.reader((tmp_path / "out" / "learning-curves.csv").open(newline="")))
    assert {row[1] for row in rows[1:]} == {f"'{name}" if name[0] in "=@" else name for name in wanted}
    assert "\u202e" not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.long
def test_names_in_a_log_cannot_harm_a_figure_either(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        return record | ({"agent": "\x01\u202eleft"} if record.get("agent") == "left" else {})

    gallery = hang(read_runs([changed(probed(made_run(tmp_path / "run")), change)]), tmp_path / "out", ["token-shift"])
    assert "\x01" in gallery.drawn[0][1].panels[0].title, "else this proves nothing"
    words = " ".join(ElementTree.parse(tmp_path / "out" / "token-shift.svg").getroot().itertext())
    assert "⟨U+0001⟩⟨U+202E⟩left" in words


def test_a_legend_says_how_many_it_leaves_out() -> None:
    series = tuple(Series(f"_{k}", (0.0,), (1.0,)) for k in range(15))
    svg = painted("Title", Drawing((Panel("p", "x", "y", series, (("", 0.0), ("level", 1.0))),), "Caption.", "high"))
    words = [word.strip() for word in ElementTree.fromstring(svg).itertext() if word.strip()]
    assert [f"_{k}" in words for k in range(15)] == [True] * 11 + [False] * 4
    assert "… and 5 more" in words


@pytest.mark.parametrize("wrong", [None, "x", [], {}, {"deep": 1}], ids=repr)
def test_damaged_records_cost_a_figure_only_what_they_held(tmp_path: Path, wrong: Any) -> None:
    """A stage without its number, an update without its own, and rows that are no numbers."""
    damaged = probed(made_run(tmp_path / "run"))

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "stage" and record["stage"] == 1:
            record["stage"] = wrong
        if record.get("update") == 2:
            record["update"] = wrong
        if record.get("update") == 1:
            record["probe"]["token_shift"]["moved_R"] = [0.1, wrong, 0.01]
        if record.get("update") == 3:
            record["probe"]["token_shift"]["stretched"] = {"moved_R": [wrong] * 3, "times": wrong, "kl": wrong}
        return record

    runs = read_runs([changed(damaged, change)])
    sums, zeta, shift = (DRAW[name](runs) for name in ("certificate", "zeta", "token-shift"))
    assert panel(sums, "cumulative").series[0].x == (1.0, 3.0)
    assert panel(sums, "cumulative").series[0].y == pytest.approx((0.02, 0.04))
    assert "run: 1 records of stages do not say which, and are left out of the sums" in sums.notes
    assert panel(zeta, "normalization").series[0].x == (1, 3, 4, 5, 6, 7, 8, 9)
    assert "1 of 9 kept updates lack normalization or their number" in zeta.notes[0]
    assert shift.panels[0].title.startswith("inside: run, update 3 (speaker)"), "the first whose rows can be read"
    assert len(shift.panels) == 1


def test_what_is_not_known_is_left_out_and_told_not_drawn_as_nothing(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record.get("update") == 2:
            del record["zeta_ratio"]
        if record["kind"] == "swap":
            record |= {"shock": None, "stage": None}
        if record.get("update") == 3:
            del record["probe"]["weights"]["total_variation_error"]
            record["probe"]["token_shift"]["stretched"] = {"moved_R": [1.0, 2.0, 3.0]}
        if record["kind"] == "update" and record["update"] != 3:
            record["probe"].pop("token_shift")
        return record

    runs = read_runs([changed(probed(swapped(tmp_path / "run", "direct")), change)])
    zeta = DRAW["zeta"](runs)
    assert panel(zeta, "clipped ratios").series[0].x == (1, 3, 4, 5, 6, 7, 8, 9)
    assert len(panel(zeta, "normalization").series[0].x) == 9
    assert zeta.notes[0].startswith("run: 1 of 9 kept updates lack clipped ratios")
    swap = DRAW["swap"](runs)
    assert [shown.title for shown in swap.panels] == ["recovery"]
    assert [series.label for series in swap.panels[0].series] == ["run (direct)"]
    assert [note.partition(": ")[2][:44] for note in swap.notes] == [
        "the record of the swap does not say its stag",
        "the record of the swap holds no shock",
    ]
    second, third = panel(DRAW["drift"](runs), "by importance").series
    assert second.low is not None
    assert third.low is None
    assert DRAW["token-shift"](runs).panels[1].title == "the same step, an unknown number of times as long (KL unknown)"


@pytest.mark.long
def test_an_error_that_nobody_foresaw_costs_one_figure_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runs: Sequence[Run]) -> Drawing:
        raise KeyError("what\x1b[2J")

    figures = tuple(replace(figure, draw=broken) if figure.name == "region" else figure for figure in FIGURES)
    monkeypatch.setattr("teamtr.analysis.figures.gallery.FIGURES", figures)
    arguments = ["figures", str(made_run(tmp_path / "run")), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--only", "region", "--only", "zeta"])
    assert done.exit_code == 0, done.output
    assert "region: not drawn: the logs hold what this figure cannot read (KeyError: 'what" in done.output
    assert "\x1b" not in done.output
    assert (tmp_path / "out" / "zeta.svg").exists()
    assert "KeyError" in (tmp_path / "out" / "index.html").read_text()


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["figures", str(made_run(tmp_path / "run")), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "teamtr[plot]" in done.output
