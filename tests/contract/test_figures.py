"""Figures from logs: the plotted numbers by hand, every figure drawn, and what is missing told with its remedy."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from made_run import changed, eval_record, made_run, probed, swapped, update_record, write_log
from teamtr.analysis.figures import FIGURES, FORMS, Drawing, Lacking, Panel, Run, Series, hang, read_runs
from teamtr.analysis.figures.catalogue import NOT_FROM_LOGS
from teamtr.analysis.figures.paint import csv_text, painted
from teamtr.cli import app
from teamtr.errors import UserError

ROOT = Path(__file__).parents[2]
DRAW = {figure.name: figure.draw for figure in FIGURES}


def of_size(folder: Path, agents: tuple[str, ...], gap: float = 0.02) -> Path:
    """A team of these agents: of another task than code, which takes three only."""
    made = probed(made_run(folder, agents=agents), gap)
    (made / "team.yaml").write_text((made / "team.yaml").read_text().replace("name: code", "name: sums"))
    return made


def panel(drawing: Drawing, title: str) -> Panel:
    return next(panel for panel in drawing.panels if panel.title.startswith(title))


# --- numbers by hand -------------------------------------------------------------------------------------------


def test_a_learning_curve_is_the_evaluations_with_their_intervals(tmp_path: Path) -> None:
    drawing = DRAW["learning-curves"](read_runs([made_run(tmp_path / "one")]))
    (series,) = panel(drawing, "by sampled tokens").series
    assert series.x == (0, 3000, 6000, 9000)
    assert series.y == pytest.approx((20.0, 36.6667, 53.3333, 70.0), abs=1e-3)
    assert series.low == pytest.approx([y - 5 for y in series.y])
    assert panel(drawing, "by stage").series[0].x == (0, 1, 2, 3)


def test_seeds_of_one_team_file_become_a_band_and_other_settings_do_not(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / f"s{seed}", seed=seed, gain=0.4 + 0.1 * seed, name=f"n{seed}") for seed in (0, 1)]
    other = made_run(tmp_path / "naive", preset="naive_sequential")
    again = made_run(tmp_path / "again", seed=1, gain=0.1)
    drawing = DRAW["learning-curves"](read_runs([*folders, other, again]))
    series = panel(drawing, "by stage").series
    assert [s.label for s in series] == ["s0 (2 seeds)", "naive", "again"], "the same seed twice is no second seed"
    finals = np.array([60.0, 70.0])
    assert series[0].y[-1] == pytest.approx(65.0)
    assert series[0].high is not None
    assert series[0].high[-1] - series[0].y[-1] == pytest.approx(finals.std(ddof=1))


def test_the_region_counts_what_lies_outside_in_radii(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update":
            record["kl_upper"] = {1: 0.03, 2: float("inf"), 3: 0.01}.get(record["update"], 0.005)
            record["outcome"] = "restored" if record["update"] == 9 else "accepted"
        return record

    drawing = DRAW["region"](read_runs([changed(made_run(tmp_path / "run"), change)]))
    (shares,) = panel(drawing, "distribution").series
    assert shares.label == "run: 25.0 % outside", "two of eight kept: one at three radii, one infinite"
    assert shares.x == pytest.approx((0.5,) * 5 + (1.0, 3.0))
    assert shares.y == pytest.approx([100 * k / 7 for k in range(1, 8)])
    assert "1 kept updates have no finite bound" in drawing.notes[0]


def test_certificates_add_up_over_stages_and_stand_against_gains(tmp_path: Path) -> None:
    drawing = DRAW["certificate"](read_runs([probed(made_run(tmp_path / "run"))]))
    measured, certified = panel(drawing, "cumulative").series
    assert measured.y == pytest.approx((0.02, 0.04, 0.06))
    assert certified.y == pytest.approx((0.005, 0.015, 0.03))
    (stages,) = panel(drawing, "stages").series
    assert stages.x == pytest.approx((0.005, 0.01, 0.015))
    assert stages.y == (0.02,) * 3
    assert stages.label == "run: rank correlation unknown, certificate above the gain in 0 %"
    assert panel(drawing, "stages").diagonal
    (points,) = panel(drawing, "turn aware").series
    assert points.x == pytest.approx([0.001 * k for k in (1, 2, 4, 5, 7, 8)]), "the last of a stage is not measured"
    assert points.y == (0.01,) * 6
    assert panel(drawing, "turn aware").diagonal
    assert not panel(drawing, "single step").diagonal, "the paper's bound is in other units"
    assert drawing.notes == ()


def test_updates_from_stale_batches_are_counted_once(tmp_path: Path) -> None:
    """Not once for each kind of certificate: they have none."""
    drawing = DRAW["certificate"](read_runs([probed(made_run(tmp_path / "naive", reused=True))]))
    assert drawing.notes == ("naive: 6 of 9 kept updates have no certificate: batch was stale",)


def test_stale_gaps_by_step_and_stage_also_where_rollouts_are_reused(tmp_path: Path) -> None:
    fresh = probed(made_run(tmp_path / "fresh"))
    naive = probed(made_run(tmp_path / "naive", preset="naive_sequential"), -0.02)
    drawing = DRAW["stale-gap"](read_runs([fresh, naive]))
    second, third, *reused = panel(drawing, "gap").series
    assert (second.label, third.label) == ("fresh, i = 2", "fresh, i = 3")
    assert second.y == pytest.approx((0.02,) * 3)
    assert third.y == pytest.approx((0.04,) * 3)
    assert third.low == pytest.approx((0.04 - 0.02306,) * 3)
    assert third.high == pytest.approx((0.04 + 0.02306,) * 3)
    assert [s.label for s in reused] == ["naive, i = 2", "naive, i = 3"]
    assert reused[1].y == pytest.approx((-0.04,) * 3)
    total, noise, reused_total, _ = panel(drawing, "Delta").series
    assert total.y == reused_total.y == pytest.approx((0.06,) * 3), "sizes add up, whatever the sign"
    assert noise.y == pytest.approx((2 * 0.01 * np.sqrt(2 / np.pi),) * 3, rel=1e-3)


def test_weights_and_drift_by_step(tmp_path: Path) -> None:
    runs = read_runs([probed(made_run(tmp_path / "run"))])
    (share,) = panel(DRAW["weights"](runs), "effective").series
    assert (share.x, share.y) == ((2.0, 3.0), pytest.approx((80.0, 70.0)))
    second, third = panel(DRAW["drift"](runs), "by importance").series
    assert second.y == pytest.approx((0.05,) * 3)
    assert third.high == pytest.approx((0.12,) * 3), "two standard errors"


def test_tokens_inside_and_outside_the_region(tmp_path: Path) -> None:
    def outside(record: dict[str, Any]) -> dict[str, Any]:
        return record | ({"kl_upper": 0.05} if record.get("update") == 5 else {})

    runs = read_runs([probed(made_run(tmp_path / "in")), changed(probed(made_run(tmp_path / "out")), outside)])
    inside, beyond = DRAW["token-shift"](runs).panels
    assert inside.title.startswith("inside: in, update 1 (left), 0.8 radii")
    assert beyond.title.startswith("outside: out, update 5 (right), 5 radii")
    assert inside.names == ("1", "2", "other")
    assert inside.series[0].y == (0.1, 0.3, 0.01)
    only = DRAW["token-shift"](runs[:1])
    assert "plan.preset: no_trust_region" in only.notes[0]


def test_order_compares_runs_that_differ_in_nothing_else(tmp_path: Path) -> None:
    plain = made_run(tmp_path / "plain", gain=0.4)
    reverse = made_run(tmp_path / "reverse", agents=("left", "right", "speaker"), gain=0.5, preset="reverse_order")
    order = {"left": 2, "right": 1, "speaker": 0}
    changed(reverse, lambda r: r | {"step": order[r["agent"]]} if r["kind"] == "update" else r)
    loose = made_run(tmp_path / "loose", preset="no_trust_region")
    drawing = DRAW["order"](read_runs([plain, reverse, loose]))
    mean, single = drawing.panels[0].series
    assert drawing.panels[0].names == ("left > right > speaker", "speaker > right > left")
    assert mean.y == pytest.approx((60.0, 70.0))
    assert len(single.x) == 2
    assert drawing.notes == ("loose is left out: it differs from plain in more than the order",)


def test_growth_with_the_team(tmp_path: Path) -> None:
    names = ("left", "right", "speaker", "fourth")
    folders = [of_size(tmp_path / f"n{n}", names[:n]) for n in (2, 3, 4)]
    drawing = DRAW["scaling"](read_runs(folders))
    gap = panel(drawing, "stale gap")
    assert gap.series[0].x == (2.0, 3.0, 4.0)
    assert gap.series[0].y == pytest.approx((0.02, 0.06, 0.12)), "0.02 times 1, 1 + 2 and 1 + 2 + 3"
    slope = float(re.search(r"n\^([0-9.]+)", gap.title)[1])
    assert slope == pytest.approx(np.polyfit(np.log([2, 3, 4]), np.log([0.02, 0.06, 0.12]), 1)[0], abs=0.01)
    assert "[" not in gap.title, "one run of each size tells nothing of chance"


def test_an_exponent_is_that_of_the_means_of_all_runs(tmp_path: Path) -> None:
    """Sizes need not have equally many runs; none of them may be left out of the fit."""
    gaps = {2: (0.02, 0.04, 0.06), 3: (0.02, 0.03), 4: (0.02, 0.01)}
    names = ("left", "right", "speaker", "fourth")
    folders = [
        of_size(tmp_path / f"n{n}-{k}", names[:n], gap) for n, several in gaps.items() for k, gap in enumerate(several)
    ]
    gap = panel(DRAW["scaling"](read_runs(folders)), "stale gap")
    means = [0.04 * 1, 0.025 * 3, 0.015 * 6]
    assert gap.series[0].y == pytest.approx(means)
    found = re.search(r"n\^(-?[0-9.]+) \[(-?[0-9.]+), (-?[0-9.]+)\]", gap.title)
    exponent, low, high = map(float, found.groups())
    assert exponent == pytest.approx(np.polyfit(np.log([2, 3, 4]), np.log(means), 1)[0], abs=0.006)
    assert low < exponent < high


def test_a_swap_shows_its_shock_and_the_recovery(tmp_path: Path) -> None:
    drawing = DRAW["swap"](read_runs([swapped(tmp_path / "run", "direct")]))
    curve, dots = panel(drawing, "recovery").series
    assert curve.x == (0, 1, 2, 3)
    assert (dots.x, dots.y) == ((1.0, 1.0), (50.0, 25.0))
    assert panel(drawing, "swap shock").series[0].y == (25.0,)
    assert drawing.notes == ()


def test_accounting_beside_naive_training(tmp_path: Path) -> None:
    drawing = DRAW["accounting"](read_runs([made_run(tmp_path / "run")]))
    sampled, naive = panel(drawing, "sampled").series
    assert sampled.y == pytest.approx((0.009,))
    assert naive.y == pytest.approx((0.003,))
    everything, rollouts = panel(drawing, "prompts too").series
    assert everything.y == pytest.approx((0.009 + 3 * 0.009,)), "9,000 prompt tokens of each of three agents"
    assert rollouts.y == pytest.approx((0.9,))
    assert {s.label: s.y[0] for s in panel(drawing, "time").series} == pytest.approx({"sample": 0.1, "train": 0.15})
    assert drawing.notes == ("run: 3.00 times the tokens of naive sequential training",)


# --- drawn and written -------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Enough for every figure but the one of sizes, whose teams cannot play the same task as the others."""
    reverse = changed(
        probed(made_run(tmp_path / "reverse", preset="reverse_order")),
        lambda r: r | {"step": 2 - r["step"]} if r["kind"] == "update" else r,
    )
    return read_runs([probed(made_run(tmp_path / "plain")), reverse, swapped(tmp_path / "swapped", "aligned")])


@pytest.mark.long
def test_every_figure_has_panels_with_labels_and_says_what_is_good(runs: list[Run]) -> None:
    for figure in FIGURES:
        if figure.name == "scaling":
            continue
        drawing = figure.draw(runs)
        assert drawing.panels
        assert drawing.good
        for shown in drawing.panels:
            assert shown.series
            assert shown.x_label
            assert shown.y_label
            assert all(series.x for series in shown.series)


@pytest.mark.long
def test_figures_are_drawn_with_axes_caption_and_their_numbers(runs: list[Run], tmp_path: Path) -> None:
    """One of each kind of drawing: bands, steps, error bars with a diagonal, bars with names, a logarithm."""
    out = tmp_path / "figures"
    gallery = hang(runs, out, ["learning-curves", "region", "certificate", "weights", "token-shift"])
    assert gallery.lacking == ()
    page, text = (out / "index.html").read_text(), (out / "index.md").read_text()
    for figure, drawing in gallery.drawn:
        words = " ".join(ElementTree.parse(out / f"{figure.name}.svg").getroot().itertext())
        for shown in drawing.panels:
            assert shown.x_label in words
            assert shown.y_label in words
        told = " ".join(words.split())
        assert drawing.caption[:40] in told
        assert "Good: " in told
        rows = list(csv.DictReader((out / f"{figure.name}.csv").open()))
        points = [row for row in rows if row["x"]]
        assert len(points) == sum(len(series.x) for shown in drawing.panels for series in shown.series) > 0
        first = drawing.panels[0].series[0]
        assert (float(points[0]["x"]), float(points[0]["y"])) == (first.x[0], first.y[0])
        assert f'<img src="{figure.name}.svg"' in page
        assert f"]({figure.name}.svg)" in text


@pytest.mark.long
def test_the_same_numbers_give_the_same_bytes_and_names_are_no_formulas(tmp_path: Path) -> None:
    runs = read_runs([made_run(tmp_path / "a$b$ <i>&'\"\\alpha_{")])
    drawing = DRAW["learning-curves"](runs)
    first = painted("Title", drawing)
    for form in FORMS:
        assert painted("Title", drawing, form) == painted("Title", drawing, form)
    assert "a$b$ <i>&'\"\\alpha_{" in " ".join(ElementTree.fromstring(first).itertext())
    assert b"<i>" not in first
    assert "by sampled tokens,a$b$" not in csv_text(drawing).splitlines()[1], "a quote in a name is quoted"
    hang(runs, tmp_path / "out", ["learning-curves"])
    assert "<i>" not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.long
def test_panels_stand_in_rows_both_axes_may_be_logarithmic_and_a_dashed_line_has_the_color_of_its_points() -> None:
    points = Series.of("measured", [(1.0, 1.0), (1000.0, 10.0)], "points")
    line = Series("predicted", (1.0, 1000.0), (1.0, 9.0), kind="dashed", like=0)
    drawing = Drawing((Panel("a", "x", "y", (points, line), logarithmic="xy"),) * 3, "Caption.", "near")
    sizes = []
    for across in (0, 2):
        svg = painted("Title", replace(drawing, across=across)).decode()
        assert len(re.findall(r"stroke-dasharray: 3\.[^\"]*stroke: #2166ac", svg)) == 2 * 3, "and in the legend"
        assert "#b2182b" not in svg
        shown = ElementTree.fromstring(svg)
        assert {"1", "10", "1000"} <= set(shown.itertext()), "plain numbers, no powers of ten"
        sizes.append([float(shown.attrib[name].removesuffix("pt")) for name in ("width", "height")])
    (wide, low), (narrow, high) = sizes
    assert narrow == pytest.approx(wide * 2 / 3)
    assert high > 1.8 * low


def test_a_series_with_columns_of_different_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Series("x", (1.0,), (1.0, 2.0))


# --- what is missing -----------------------------------------------------------------------------------------------


def test_what_is_missing_is_told_with_what_to_set(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    write_log(folder, [{"kind": "start", "name": "run", "agents": ["left"]}, eval_record(0, 0.2)])
    told = {}
    for name, draw in DRAW.items():
        try:
            draw(read_runs([folder]))
        except Lacking as why:
            told[name] = why
    drawable = {"learning-curves", "coordination", "drift"}
    assert set(DRAW) - set(told) <= drawable
    assert "diagnostics.every" in told["stale-gap"].remedy
    assert "diagnostics.every" in told["token-shift"].remedy
    assert "plan.order" in told["order"].remedy
    assert "teamtr swap" in told["swap"].remedy
    write_log(folder, [{"kind": "start"}, update_record(1, 0, 0, "left")])
    with pytest.raises(Lacking, match=r"eval\.every"):
        DRAW["learning-curves"](read_runs([folder]))


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    folder, out = made_run(tmp_path / "run"), tmp_path / "figures"
    only = ["--only", "learning-curves", "--only", "swap"]
    done = CliRunner().invoke(app, ["figures", str(folder), "--out", str(out), *only, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["drawn"] == ["learning-curves"]
    assert answer["lacking"]["swap"]["what"] == "no agent was replaced in these runs"
    assert sorted(p.name for p in out.iterdir()) == [
        "index.html",
        "index.md",
        "learning-curves.csv",
        "learning-curves.svg",
    ]
    more = ["--format", "pdf", "--format", "png", "--format", "svg", "--json"]
    also = CliRunner().invoke(app, ["figures", str(folder), "--out", str(tmp_path / "also"), *only, *more])
    assert json.loads(also.stdout.strip().splitlines()[-1])["formats"] == ["svg", "pdf", "png"]
    begins = {"svg": b"<?xml", "pdf": b"%PDF-", "png": b"\x89PNG\r\n"}
    for form, magic in begins.items():
        assert (tmp_path / "also" / f"learning-curves.{form}").read_bytes().startswith(magic)
    unknown = CliRunner().invoke(app, ["figures", str(folder), "--out", str(out), "--format", "jpg"])
    assert unknown.exit_code == 2
    assert "--format is svg, pdf, png, not 'jpg'" in unknown.stderr
    none = CliRunner().invoke(app, ["figures", str(folder), "--out", str(out), "--only", "swap"])
    assert none.exit_code == 1
    wrong = CliRunner().invoke(app, ["figures", str(folder), "--out", str(out), "--only", "learning-curve"])
    assert wrong.exit_code == 2
    nowhere = CliRunner().invoke(app, ["figures", str(tmp_path / "no"), "--out", str(out)])
    assert nowhere.exit_code == 2
    with pytest.raises(UserError, match=r'did you mean "learning-curves"'):
        hang([], out, ["learning-curve"])


# --- the catalogue ----------------------------------------------------------------------------------------------


def test_every_figure_and_table_of_the_paper_is_answered(tmp_path: Path) -> None:
    paper = ROOT.parent / "shared" / "paper" / "teamtr.tex"
    if not paper.exists():
        pytest.skip("the paper's source is not beside the repository")
    labels = set(re.findall(r"\\label\{((?:fig|tab):[^}]+)\}", paper.read_text()))
    answered = {label for figure in FIGURES for label in figure.paper}
    assert labels - answered == set(NOT_FROM_LOGS)
    assert answered <= labels


def test_the_docs_list_every_figure() -> None:
    page = (ROOT / "docs" / "figures.md").read_text()
    for figure in FIGURES:
        labels = ", ".join(f"`{label}`" for label in figure.paper)
        assert f"| {labels} | `{figure.name}.svg` | {figure.needs} |" in page
    for label, why in NOT_FROM_LOGS.items():
        assert f"| `{label}` | not from these logs | {why} |" in page
