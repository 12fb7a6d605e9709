"""The report on where rollouts came from: did the run need fresh ones, and what would the other choice have cost?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from made_run import HOSTILE, SHARES, changed, chosen, made_batch, made_run, probed, rollout_record, update_record
from teamtr.analysis.diagnostics.reuse import bias_of_redrawing, decisions, tokens_by_choice
from teamtr.analysis.report import build_report, reading, report_page, report_text
from teamtr.analysis.report.parts import Chart, Grid, Table
from teamtr.analysis.report.reading import read_run
from teamtr.analysis.report.section import shown
from teamtr.analysis.report.serve import Library
from teamtr.cli.progress import TrainingScreen
from teamtr.trackers import point

PRESETS = {"fresh": "teamtr", "naive": "naive_sequential"}
"""Of the made plans that are not called as their preset is."""
AGENTS = ("left", "right", "speaker")
ALL_BATCHES = 3 * (1000 + 1100 + 1200)


def run_of(folder: Path, plan: str, **given: Any) -> Path:
    made = made_run(folder / plan, preset=PRESETS.get(plan, plan), reused=plan != "fresh", batches=(), **given)
    return chosen(made, plan)


def answer(data: dict[str, Any]) -> dict[str, Any]:
    (found,) = [a for a in data["headlines"] if a["question"] == "Did it need fresh rollouts?"]
    return found


def parts_of(data: dict[str, Any]) -> dict[str, Any]:
    """The charts and tables of the section, by title."""
    (section,) = [section for section in shown(data) if section.key == "staleness"]
    flat = [one for part in section.parts for one in (part.parts if isinstance(part, Grid) else [part])]
    return {part.title: part for part in flat if isinstance(part, Chart | Table)}


# -- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "spent"),
    [
        ("fresh", ALL_BATCHES),
        ("naive", ALL_BATCHES // 3),
        ("reweighted", ALL_BATCHES // 3),
        ("auto", 2 * ALL_BATCHES // 3),
        ("partial", ALL_BATCHES // 3 + 3 * 200),
    ],
)
def test_tokens_of_every_choice_by_hand(tmp_path, plan, spent):
    """Of a run that always samples "always" is what it spent, of one that never does within a stage "never" is."""
    data = build_report(run_of(tmp_path, plan)).data
    assert data["rollouts"]["tokens"] == {"spent": spent, "always": ALL_BATCHES, "never": ALL_BATCHES // 3}


def test_every_decision_is_in_the_data(tmp_path):
    told = build_report(run_of(tmp_path, "partial")).data["rollouts"]
    assert [(d["stage"], d["step"], d["agent"]) for d in told["decisions"]] == [
        (stage, step, agent) for stage in range(3) for step, agent in enumerate(AGENTS)
    ]
    assert [d["action"] for d in told["decisions"]] == ["sample", "reuse", "redraw"] * 3
    assert [d["worn"] for d in told["decisions"]] == [False, False, True] * 3
    logged = [rollout_record("partial", step, stage) for stage in range(3) for step in range(3)]
    for key in ("reason", "share", "needed", "cut"):
        assert [d[key] for d in told["decisions"]] == [record[key] for record in logged]
    assert told["actions"] == {"sample": 3, "reuse": 3, "redraw": 3}
    assert (told["mean_share"], told["smallest_share"]) == (pytest.approx(sum(SHARES) / 2), min(SHARES))
    assert (told["largest_cut"], told["mean_kept"]) == (0.02, 0.75)


def test_the_bias_of_redrawing_is_the_mean_over_redraws_with_students_interval(tmp_path):
    told = build_report(run_of(tmp_path, "partial")).data["rollouts"]["bias"]
    half = 4.302653 * 0.1 / math.sqrt(3)  # estimates 0, 0.1 and 0.2; two degrees of freedom
    assert told["estimate"] == pytest.approx(0.1)
    assert (told["lower"], told["upper"]) == (pytest.approx(0.1 - half, rel=1e-5), pytest.approx(0.1 + half, rel=1e-5))
    assert (told["redraws"], told["told"]) == (3, False)
    updates = [
        update_record(k + 1, k, 1, "a", rollouts={"action": "redraw", "partly": {"kept": 1.0, "bias": bias}})
        for k, bias in enumerate([{"estimate": x, "lower": -1.0, "upper": 1.0} for x in (0.1, 0.1, 0.1, 0.1, 0.2)])
    ]
    assert bias_of_redrawing(decisions(updates)).told
    assert not bias_of_redrawing(decisions(updates[:4])).told  # equal by chance, and too few
    alone = bias_of_redrawing(decisions(updates[:1]))
    assert (alone.lower, alone.upper, alone.redraws) == (-1.0, 1.0, 1)
    assert bias_of_redrawing([]) is None


def test_worn_is_below_what_the_plan_needs_or_below_a_half(tmp_path):
    def worn(share: float, needed: float | None) -> bool:
        record = update_record(1, 0, 1, "a", rollouts={"action": "reuse", "share": share, "needed": needed})
        return decisions([record])[0].worn

    assert [worn(0.6, 0.7), worn(0.8, 0.7), worn(0.4, 0.3)] == [True, False, False]
    assert [worn(0.49, None), worn(0.51, None), worn(0.49, 0.0)] == [True, False, True]


def test_a_share_is_at_most_one_whatever_rounding_says():
    def share(value: float) -> float | None:
        return decisions([update_record(1, 0, 1, "a", rollouts={"action": "reuse", "share": value})])[0].share

    assert [share(1.0 + 1e-12), share(-1e-12), share(1.1), share(0.5)] == [1.0, 0.0, None, 0.5]


def test_of_a_thinned_log_the_ratios_hold(tmp_path, monkeypatch):
    """The update that is held before each stage has nothing before it to tell its tokens."""
    run = run_of(tmp_path, "partial", stages=60)
    everything = tokens_by_choice(decisions(read_run(run).updates))
    monkeypatch.setattr(reading, "HELD_BYTES", (run / "log.jsonl").stat().st_size // 3)
    held = decisions(read_run(run).updates)
    part = tokens_by_choice(held)
    assert 3 < len(held) < 100
    assert part.always / part.never == everything.always / everything.never == 3.0
    assert part.spent / part.never == pytest.approx(everything.spent / everything.never, rel=0.01)


def test_damaged_decisions_are_passed_over(tmp_path):
    damaged = [
        7,
        [],
        {"action": ["x"], "reason": None, "share": "much", "needed": math.nan, "cut": -math.inf, "partly": 3},
        {"action": HOSTILE, "reason": HOSTILE, "share": 10**200, "partly": {"kept": {}, "bias": {"estimate": 1}}},
        {"action": "redraw", "reason": "r", "share": 1e300, "partly": {"kept": 0.5, "bias": [1, 2, 3]}},
    ]

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update":
            record["rollouts"] = damaged[record["update"] % len(damaged)]
        return record

    report = build_report(changed(run_of(tmp_path, "partial"), change))
    assert len(report.data["rollouts"]["decisions"]) == 6  # of nine
    assert (report.data["rollouts"]["shares"], report.data["rollouts"]["bias"]) == (0, None)
    assert "<script>window.pwned" not in report_page(report) + report_text(report.data).replace("\\<", "")


# -- what is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "headline", "tone", "words"),
    [
        (
            "naive",
            "somewhat",
            "plain",
            "they cost success on average where their mean worth is below 95 %",
        ),
        ("reweighted", "hardly", "good", "Reweighted, old rollouts were worth 75 % of new ones on average and 60 %"),
        ("auto", "somewhat", "plain", "(ESS/B): too little before 3 of 6 later updates. "),
        ("partial", "somewhat", "plain", "(ESS/B): too little before 3 of 6 later updates. "),
    ],
)
def test_a_plan_that_reuses_rollouts_is_answered_by_their_shares(tmp_path, plan, headline, tone, words):
    found = answer(build_report(run_of(tmp_path, plan)).data)
    assert (found["headline"], found["tone"]) == (headline, tone)
    assert words in found["text"]


def test_the_other_choice_is_told_in_tokens(tmp_path):
    def cost(plan: str) -> str:
        text = answer(build_report(run_of(tmp_path, plan)).data)["text"]
        return text[text.index("Sampling") :]

    always = "before every update would have taken about 9,900 tokens"
    never = "only when a stage begins would have taken 3,300 tokens"
    assert cost("fresh") == f"Sampling {never} (0.333 times as many)."
    assert cost("naive") == f"Sampling {always} (3 times as many)."
    assert cost("auto") == f"Sampling {always} (1.5 times as many). Sampling {never} (0.5 times as many)."


def test_worn_out_rollouts_that_were_used_are_bad_news(tmp_path):
    def worth(share: float, one_in: int) -> dict[str, Any]:
        def change(record: dict[str, Any]) -> dict[str, Any]:
            if record["kind"] == "update" and record["step"] and record["update"] % one_in == 0:
                record["rollouts"] |= {"share": share}
            return record

        run = changed(run_of(tmp_path / f"{share}-{one_in}", "naive", stages=12), change)
        return answer(build_report(run).data)

    found = {given: worth(*given) for given in ((0.2, 1), (0.2, 2), (0.6, 1), (0.96, 1))}
    told = [(a["headline"], a["tone"]) for a in found.values()]
    assert told == [("yes", "bad"), ("somewhat", "bad"), ("somewhat", "plain"), ("hardly", "good")]
    assert "before 12 of 24 later updates, which learned from them all the same." in found[0.2, 2]["text"]


def test_a_bias_of_redrawing_is_bad_news(tmp_path):
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update" and record["rollouts"]["partly"]:
            bias = {"estimate": 0.1 + 0.01 * record["stage"], "lower": 0.0, "upper": 0.3}
            record["rollouts"]["partly"] |= {"bias": bias}
        return record

    data = build_report(changed(run_of(tmp_path, "partial", stages=6), change)).data
    assert answer(data)["tone"] == "bad"
    assert "Redrawing them is biased: redrawn less new reward +0.125 (" in answer(data)["text"]


def test_a_fresh_run_is_answered_by_its_probes_with_the_cost(tmp_path):
    found = answer(build_report(probed(run_of(tmp_path, "fresh"))).data)
    assert found["headline"] == "somewhat"
    assert "of 6 probed updates rollouts of the team that began the stage" in found["text"]
    assert "only when a stage begins would have taken 3,300 tokens" in found["text"]


def test_a_stale_run_tells_what_its_probes_say_too(tmp_path):
    text = answer(build_report(probed(run_of(tmp_path, "naive"))).data)["text"]
    assert "60 % at least" in text
    assert "By probes they misjudge 3 of 6 updates" in text


def test_what_a_plan_spends_beyond_naive_training_is_called_by_its_name(tmp_path):
    def cost(plan: str) -> str:
        return build_report(run_of(tmp_path, plan)).data["headlines"][-1]["text"]

    assert "Sampling anew before every update took 3.00 times the tokens of naive" in cost("fresh")
    assert "Sampling within stages took 1.18 times the tokens of naive" in cost("partial")


@pytest.mark.parametrize("preset", ["teamtr", "naive_sequential"])
def test_an_older_log_is_not_measured(tmp_path, preset):
    data = build_report(made_run(tmp_path / "run", preset=preset, batches=())).data
    assert data["rollouts"] is None
    assert answer(data)["headline"] == "not measured"
    assert "Sampling" not in answer(data)["text"]
    assert parts_of(data) == {}


def test_redrawn_batches_do_not_tell_how_far_the_team_moved(tmp_path):
    """They are the same words for the most part, so that they would say that nothing moved."""
    run = made_run(tmp_path / "run", preset="partial", stages=1, batches=[made_batch(AGENTS, seed=s) for s in range(3)])
    assert [step["step"] for step in build_report(run).data["staleness"]] == [1, 2]
    assert [step["step"] for step in build_report(chosen(run, "partial")).data["staleness"]] == [1]


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_every_decision_is_drawn(tmp_path):
    chart = parts_of(build_report(run_of(tmp_path, "partial")).data)["What the rollouts were still worth"]
    points = {(s.kind, s.color): list(zip(s.x, s.y, strict=True)) for s in chart.series}
    assert points["dots", "faint"] == [(1, 1.0), (4, 1.0), (7, 1.0)]
    assert points["dots", "agent-1"] == [(2, 0.9), (5, 0.9), (8, 0.9)]
    assert points["dots", "agent-2"] == points["crosses", "exact"] == [(3, 0.6), (6, 0.6), (9, 0.6)]
    assert chart.levels == [(0.7, "")]
    assert chart.series[-1].tips[0] == (
        "update 3: speaker, stage 0, step 2\n"
        "redrawn in part: worth 60% of new ones, needed 70% (the least that the plan allows)\n"
        "ESS / B 60.0 %, needed 70.0 %\n"
        "truncation cut 2.0 % of the weights\n"
        "75.0 % of the tokens stayed\n"
        "redrawn − new reward 0 (-0.3 to +0.3)\n"
        "200 tokens sampled, all new 1,000"
    )


def test_a_level_that_varies_is_a_line(tmp_path):
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update" and record["step"]:
            record["rollouts"]["needed"] = 0.3 + 0.1 * record["stage"]
        return record

    run = changed(run_of(tmp_path, "auto"), change)
    chart = parts_of(build_report(run).data)["What the rollouts were still worth"]
    (needed,) = [s for s in chart.series if s.kind == "line"]
    assert list(needed.y) == pytest.approx([0.3, 0.3, 0.4, 0.4, 0.5, 0.5])
    assert chart.levels == []


def test_tokens_reasons_and_bias_are_shown(tmp_path):
    parts = parts_of(build_report(run_of(tmp_path, "partial")).data)
    tokens = {s.label: s.y for s in parts["Tokens sampled, and by the other choices"].series}
    assert tokens["this run"] == [1000, 1000, 1200, 2300, 2300, 2500, 3700, 3700, 3900]
    assert tokens["before every update"] == [1000, 2000, 3000, 4100, 5200, 6300, 7500, 8700, 9900]
    assert tokens["when a stage begins"] == [1000, 1000, 1000, 2100, 2100, 2100, 3300, 3300, 3300]
    assert parts["Decisions by their reason"].rows[-1] == (
        "redrawn in part: worth 60% of new ones, needed 70% (the least that the plan allows)",
        "3",
        "60.0 %",
        "60.0 %",
        "200",
    )
    bias = parts["Bias of redrawing"]
    assert [list(s.y) for s in bias.series] == [pytest.approx([0.0, 0.1, 0.2])]
    assert bias.series[0].low == pytest.approx([-0.3, -0.2, -0.1])
    assert bias.levels == [(0.0, "")]


def test_reasons_that_differ_in_numbers_are_one(tmp_path):
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update" and record["step"]:
            record["rollouts"]["reason"] = (
                f"worth {record['update']}% of new ones (sampling costs 0.{record['update']})"
            )
        return record

    run = changed(run_of(tmp_path, "reweighted"), change)
    table = parts_of(build_report(run).data)["Decisions by their reason"]
    assert [row[:2] for row in table.rows] == [
        ("reused: worth …% of new ones (sampling costs …)", "6"),
        ("sampled anew: a stage begins", "3"),
    ]


def test_a_fresh_run_shows_its_decisions_and_tokens_alone(tmp_path):
    parts = parts_of(build_report(run_of(tmp_path, "fresh")).data)
    assert list(parts) == ["Tokens sampled, and by the other choices", "Decisions by their reason"]
    assert parts["Decisions by their reason"].header == ("rollouts, and why", "updates", "tokens each")


@pytest.mark.long
def test_a_run_of_any_length_has_charts_of_one_size(tmp_path, monkeypatch):
    """Also one whose rollouts are always worn out."""
    monkeypatch.setattr("teamtr.analysis.report.parts.MOST_DOTS", 20)
    monkeypatch.setattr("teamtr.analysis.report.parts.MOST_CORNERS", 20)

    def size(stages: int) -> int:
        data = build_report(run_of(tmp_path / str(stages), "partial", stages=stages)).data
        return len(json.dumps([section.as_plain() for section in shown(data) if section.key == "staleness"]))

    assert size(80) < 1.1 * size(40)


def test_every_form_shows_it(tmp_path):
    run = run_of(tmp_path, "partial")
    text = report_text(build_report(run).data)
    assert "| speaker | 3       | 60.0 % | 60.0 %   | 0      | 3       | 0       |" in text
    assert "| before every update | 9,900  | 2.54 ×          |" in text
    assert "| mean | 3       | +0.1          | -0.148 to +0.348 |" in text
    library = Library([run])
    live = library.summary(library.names()[0]["key"], "")
    assert live["report"]["rollouts"]["tokens"]["spent"] == 3900
    (section,) = [section for section in live["sections"] if section["key"] == "staleness"]
    charts = [part for grid in section["parts"] if grid["part"] == "grid" for part in grid["parts"]]
    assert [chart["title"] for chart in charts][:3] == [
        "What the rollouts were still worth",
        "Tokens sampled, and by the other choices",
        "Bias of redrawing",
    ]


# -- while it trains --------------------------------------------------------------------------------------------------


def test_trackers_get_the_numbers_of_a_decision() -> None:
    def values(plan: str, step: int) -> dict[str, float]:
        found = point(update_record(1, 1, step, "left", rollouts=rollout_record(plan, step, 1)))
        assert found is not None
        return {key: value for key, value in found.values.items() if "rollout" in key or "redraw" in key}

    assert values("fresh", 1) == {"left/new_rollouts": 1.0}
    assert values("naive", 1) == {"left/new_rollouts": 0.0, "left/rollout_share": 0.9}
    assert values("partial", 2) == {
        "left/new_rollouts": 0.0,
        "left/rollout_share": 0.6,
        "left/redraw_kept": 0.75,
        "left/redraw_bias": 0.1,
    }


def test_the_terminal_tells_where_rollouts_came_from(capsys) -> None:
    records = [
        update_record(k + 1, 1, step, agent, rollouts=rollout_record("partial", step))
        for k, (step, agent) in enumerate(enumerate(AGENTS))
    ]
    older = update_record(4, 2, 0, "older")
    with TrainingScreen() as screen:
        screen.console = Console(stderr=True, force_terminal=False, width=200)
        list(screen.watch([*records, older]))
        screen.console.print(screen._table("", ""))
    lines = capsys.readouterr().err.splitlines()
    plain, table = lines[:4], lines[4:]
    for line, told in zip(
        plain, ["  new       success", "  old 90 %  success", "  redrawn   success", ""], strict=True
    ):
        assert told in line
    assert "rollouts" in table[0]
    assert ["new" in table[1], "old 90 %" in table[2], "redrawn" in table[3]] == [True, True, True]
    assert "new" not in plain[3]
