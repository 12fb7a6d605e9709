"""``teamtr reproduce``: every recipe can be planned; a small table is trained, goes on, and bears what fails in it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.errors import UserError
from teamtr.presets import PRESETS
from teamtr.reproduce import RECIPES, SCALES, Setting, cells_of, estimate, find
from teamtr.reproduce.cost import _of_run
from teamtr.reproduce.result import _points_above
from teamtr.sweep import cells, problems
from teamtr.sweep import measures as of
from teamtr.sweep.table import Value, rows

SMALL = [
    "task.symbols=AB", "task.held_out=0.5", "plan.stages=2", "plan.problems=2", "plan.group_size=4",
    "tiny.width=16", "tiny.heads=2", "tiny.warmup_steps=10", "eval.samples=2",
]  # fmt: skip


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *arguments])


@pytest.mark.long
def test_all_recipes_are_listed_in_one_line_of_json():
    listed = json.loads(call("--list", "--json").stdout)
    assert len(listed) >= 12
    assert {"name", "title", "paper", "teams"} <= set(listed[0])
    assert [one["name"] for one in listed] == list(RECIPES)
    assert all(one["name"] in call("--list").stdout for one in listed)


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "scale", [pytest.param(scale, marks=[pytest.mark.slow] * (scale == "small")) for scale in SCALES]
)
def test_every_recipe_can_be_planned(name, scale):
    """Its team files are read, and nothing is trained."""
    recipe = find(name)
    model, newcomer = ("some/Model-3B-Instruct", "some/Other-8B") if scale != "tiny" else (None, None)
    found = estimate(recipe, Setting(scale, model, newcomer=newcomer))
    before = any(variant.replacement for variant in recipe.variants) * (2 if scale == "tiny" else 1)
    assert found.runs == (len(recipe.variants) + before) * (1 if scale == "tiny" else 3)
    assert 0 < found.updates < found.rollouts < found.tokens
    assert (found.hours is None) == (scale == "tiny")


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_what_a_plan_spends_is_estimated_with_its_matched_sizes_and_without_frozen_agents(scale):
    recipe, setting = find("main-results"), Setting(scale)
    found = {}
    for variant in (variant for variant in recipe.variants if variant.method is None):
        file = setting.team_file(recipe, variant, 0)
        own, _ = file.budgets()
        found[variant.name] = _of_run(file)
        if own is not None:
            assert (found[variant.name].updates, found[variant.name].rollouts) == (own.updates, own.rollouts)
    assert found["auto"].rollouts == found["teamtr"].rollouts, "it may sample before every update"


def test_tables_are_whole():
    """Every line has its team and a measure for every column; every number of the paper has a place."""
    for recipe in RECIPES.values():
        names = {variant.name for variant in recipe.variants}
        assert len(names) == len(recipe.variants)
        for line in recipe.lines:
            assert line.variant in names
            assert set(line.measures) == set(recipe.columns)
            assert set(line.paper) <= set(recipe.columns)
        assert {line.variant for line in recipe.lines} == names, "no team is trained for nothing"
    assert len(find("ablation").lines) == 14
    chosen = {change for recipe in RECIPES.values() for v in recipe.variants for change in v.changes}
    assert {c.removeprefix("plan.preset=") for c in chosen if c.startswith("plan.preset=")} <= set(PRESETS)


def test_the_papers_protocol_is_the_default_at_its_scale():
    recipe = find("ablation")
    file = Setting("paper").team_file(recipe, recipe.variants[0], 2)
    assert (file.sampling.temperature, file.team.max_tokens, len(file.team.agents)) == (0.8, 32768, 3)
    assert (file.plan.plan().radii.nats, file.plan.stages, file.eval.samples, file.seed) == (0.01, 30, 64, 2)
    assert list(Setting("paper").seed_numbers) == [0, 1, 2]
    tenth = next(v for v in recipe.variants if v.radius == 0.1)
    assert Setting("paper").team_file(recipe, tenth, 0).plan.plan().radii.nats == pytest.approx(0.001)
    teams = [Setting("paper").team_file(find("scaling"), v, 0) for v in find("scaling").variants]
    assert [len(team.team.agents) for team in teams] == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 8, 8]
    other = Setting("paper", "a/B-1B", "math500", 1, ("plan.stages=3",)).team_file(recipe, recipe.variants[0], 0)
    assert (other.team.model, other.plan.stages, other.eval.samples) == ("a/B-1B", 3, 4)


@pytest.mark.long
def test_what_is_asked_for_wrongly_is_told():
    assert "did you mean" in call("ablatoin", "--dry-run").output
    assert "which table?" in call().output
    assert "--scale is tiny, small, paper" in call("ablation", "--scale", "huge").output
    assert "needs a model" in call("ablation", "--scale", "small", "--dry-run").output
    assert "has its own model" in call("ablation", "--model", "x", "--dry-run").output
    assert "no team has 'nothing'" in call("ablation", "--only", "nothing", "--dry-run").output
    assert "--newcomer MODEL" in call("protocol", "--scale", "paper", "--dry-run").output
    with pytest.raises(UserError, match="there is no recipe"):
        find("nothing at all")


def test_measures_by_hand():
    probe = {"stage": 1, "step": 1, "weights": {"total_variation": 0.25, "p99": 3.0}, "gap": {"estimate": -0.5}}
    probe["shift"] = {"moved_R": [1.0, 2.0, 3.0], "flipped": 0.5}
    first = {**probe, "stage": 0, "weights": {"total_variation": 9.0, "p99": 1.0}, "gap": None, "shift": None}
    later = {**probe, "step": 2, "weights": {"total_variation": 0.5, "p99": 5.0}}
    data = {
        "evals": [{"success": 0.25}, {"success": 0.75}, {"success": 0.5}],
        "probes": {"by_stage": {0: {"total": 7.0}, 1: {"total": 0.125}}},
        "stability": {"deviation": 0.02},
        "coordination": [{"consensus": 0.5}, {"consensus": 0.25}],
        "cost": {"tokens": {"a": {"prompt": 3e6, "sampled": 1e6}}, "episodes": 500, "overhead": {"seconds": 8.0}},
        "certificates": {"turn_aware": {"violation_rate": 0.1}},
        "zeta": {"proxy": {"p90": 0.3}},
        "kl_subsamples": [{"share": 0.25, "near_flip_rate": 0.055, "p90_in_radii": 0.2}],
    }
    kept = [{"kl_full": 0.01, "radius": 0.02}, {"kl_full": 0.03, "radius": 0.02}]
    run: Any = SimpleNamespace(data=data, probes=[first, probe, later], kept=kept, updates=kept)
    assert (of.success(run), of.success_before(run), of.regressions(run)) == (50.0, 25.0, 50.0)
    assert (of.stale_gap(run), of.stability(run), of.coordination(run)) == (0.125, 2.0, 25.0)
    assert of.drift(run) == 0.75, "of the last probed stage alone"
    assert (of.millions_of_tokens(run), of.thousands_of_rollouts(run), of.seconds_of_an_update(run)) == (4.0, 0.5, 4.0)
    assert (of.outside(run), of.kl_quantile(1.0)(run)) == (50.0, 1.5)
    assert (of.certificate("violation_rate", 100.0)(run), of.zeta("proxy", "p90")(run)) == (10.0, 0.3)
    assert (of.subsample(0.25, of.FLIPS)(run), of.subsample(0.25, "p90_in_radii")(run)) == (pytest.approx(5.5), 0.2)
    assert of.subsample(0.5, of.FLIPS)(run) is None
    assert (of.weights(2, "p99")(run), of.weights(3, "p99")(run), of.weights(4, "p99")(run)) == (2.0, 5.0, None)
    assert (of.gap_at(2)(run), of.moved(slice(1, 3))(run), of.flipped(run)) == (0.5, 2.5, 50.0)


def test_values_as_they_are_printed():
    assert [Value(v, None, 1).text() for v in (0.0421, 3.14159, 71.06, 4582.3)] == ["0.042", "3.14", "71.1", "4,582"]
    assert Value(71.06, 2.84, 3).text() == "71.1 ± 2.8"
    assert Value(7.06, 2.84, 3, (4.21, 9.1)).text() == "7.1 ± 2.8 (4.2 to 9.1)"


def test_lines_are_compared_problem_by_problem():
    seeds = [{"a": 1.0, "b": 0.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0}]
    others = [{"c": 0.0, "b": 0.5, "a": 0.5}]
    apart = problems.difference(seeds, others)
    assert apart is not None
    assert apart.value == pytest.approx((0.5 + 0.0 + 0.5) / 3), "of a, b and c, each the mean of its seeds"
    sure = problems.interval(seeds)
    assert sure is not None
    assert sure.low <= 2 / 3 <= sure.high
    assert problems.interval([{}]) is None
    assert problems.difference(seeds, []) is None
    assert problems.difference(seeds, [{"z": 1.0}]) is None, "no problem that both have"


def test_lines_whose_seeds_hold_out_different_problems_are_compared_by_seed():
    own = {0: {"a": 1.0, "b": 1.0}, 1: {"b": 0.0, "c": 1.0}, 2: {"d": 1.0}}
    others = {0: {"a": 0.0, "b": 0.0}, 1: {"b": 0.0, "c": 0.5}}
    apart = _points_above(own, others)
    assert apart is not None
    assert apart.mean == pytest.approx(100 * ((1 + 1) / 2 + (0 + 0.5) / 2) / 2)
    assert apart.seeds == 2, "of seed 2 there is nothing to compare with"
    same = _points_above({0: {"a": 1.0}, 1: {"a": 0.0}}, {0: {"a": 0.0}})
    assert same is not None
    assert (same.mean, same.seeds) == (50.0, 2), "on the same problems seeds may differ in number"
    assert _points_above(own, {}) is None


def test_seconds_that_were_not_recorded_are_not_zero():
    answers = {"avg_at_k": 0.5, "tokens_per_answer": 12, "seconds_per_answer": None}
    assert {name: told(answers) for name, told in of.ANSWERED.items()} == {
        of.ACCURACY: 50.0,
        of.TOKENS: 12.0,
        of.SECONDS: None,
    }


def in_this_process(work, items, workers, **others):
    return ((item, work(item)) for item in items)


@pytest.mark.long
def test_a_run_that_ended_before_its_last_evaluation_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "beside", in_this_process)
    arguments = ["compute", *SMALL, "eval.every=5", "--out", str(tmp_path), "--only", "naive", "--json"]
    assert call(*arguments).exit_code == 0
    log = tmp_path / "runs" / "naive-sequential-seed0" / "log.jsonl"
    whole = log.read_text().splitlines(keepends=True)
    assert [json.loads(line)["kind"] for line in whole].count("eval") == 2
    assert json.loads(whole[-1])["kind"] == "eval"
    log.write_text("".join(whole[:-1]))
    cut = call(*arguments, "--finished")
    assert json.loads(cut.stdout)["lines"][0]["values"]["rollouts, K"] is None, "nor is it in a table"
    assert call(*arguments).exit_code == 0
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["kind"], last["problem_ids"]) == ("eval", json.loads(whole[-1])["problem_ids"])


@pytest.mark.long
def test_a_table_is_trained_goes_on_and_bears_what_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "beside", in_this_process)
    out = tmp_path / "made"
    out.mkdir()
    (out / "runs").mkdir()
    (out / "runs" / "joint-update-seed0").write_text("in the way")
    arguments = ["compute", *SMALL, "--out", str(out), "--only", "naive", "--only", "joint", "--json"]
    done = call(*arguments)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    naive, joint = found["lines"]
    assert naive["values"]["rollouts, K"]["mean"] == pytest.approx(2 * 2 * 4 / 1000)
    assert (joint["values"]["rollouts, K"], naive["paper"]["rollouts, K"]) == (None, "44.3")
    assert len(found["failed"]) == 1
    assert "joint-update, seed 0" in found["failed"][0]
    log = out / "runs" / "naive-sequential-seed0" / "log.jsonl"
    before = log.read_bytes()
    (out / "runs" / "joint-update-seed0").unlink()
    unfinished = call(*arguments, "--finished")
    assert unfinished.exit_code == 0, "nothing is trained, so nothing fails"
    assert json.loads(unfinished.stdout)["lines"] == found["lines"]
    again = call(*arguments)
    assert again.exit_code == 0, again.output
    assert log.read_bytes() == before, "what is trained is not trained again"
    assert json.loads(again.stdout)["lines"][0] == naive
    elsewhere = call(*arguments, "learner.micro_batch=3")
    assert log.read_bytes() == before, "nor on a machine with less memory"
    assert elsewhere.exit_code == 0
    assert json.loads(again.stdout)["lines"][1]["values"]["rollouts, K"]["seeds"] == 1
    table, page = (out / "table.md").read_text(), (out / "index.html").read_text()
    assert "| naive sequential |" in table
    assert "teamtr reproduce compute" in table
    assert "naive sequential" in page
    assert "142.5" in page
    assert (out / "table.csv").read_text().count("\n") == 1 + 2 * 4
    assert (out / "figures" / "accounting.svg").exists()


@pytest.mark.slow
def test_an_agent_is_replaced_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "beside", in_this_process)
    done = call("plugin-upgrade", *SMALL, "--out", str(tmp_path), "--only", "direct", "--json")
    assert done.exit_code == 0, done.output
    (line,) = json.loads(done.stdout)["lines"]
    assert line["name"] == "direct swap"
    assert all(line["values"][column]["seeds"] == 1 for column in ("before, %", "shock", "final accuracy, %"))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "team-seed0", "newcomer-seed0", "direct-swap-seed0", "direct-swap-seed0-newcomer",
    }  # fmt: skip
    again = call("plugin-upgrade", *SMALL, "--out", str(tmp_path), "--only", "direct", "--json")
    assert json.loads(again.stdout)["lines"] == [line]


@pytest.mark.long
def test_a_method_stands_beside_a_trained_team(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "beside", in_this_process)
    arguments = [
        "main-results",
        *SMALL,
        "--out",
        str(tmp_path),
        "--only",
        "self-consistency",
        "--only",
        "joint",
        "--only",
        "as-written",
        "--json",
    ]
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    asked, team, joint = json.loads(done.stdout)["lines"]
    assert (asked["name"], team["name"], joint["name"]) == ("self-consistency", "the team as written", "joint")
    assert asked["values"]["tokens per answer"]["mean"] > joint["values"]["tokens per answer"]["mean"] / 3
    assert asked["values"]["sampled to train, M"] is None
    assert joint["values"]["sampled to train, M"]["mean"] > 0
    accuracy = joint["values"]["accuracy, %"]
    assert 0.0 <= accuracy["interval"][0] <= accuracy["mean"] <= accuracy["interval"][1] <= 100.0
    apart = joint["values"]["points above the team as written"]
    assert apart["mean"] == pytest.approx(accuracy["mean"] - team["values"]["accuracy, %"]["mean"])
    assert apart["interval"][0] <= apart["mean"] <= apart["interval"][1]
    assert team["values"]["points above the team as written"] is None
    stored = (tmp_path / "runs" / "self-consistency-seed0" / "answers.json").read_bytes()
    assert json.loads(call(*arguments).stdout)["lines"] == [asked, team, joint]
    assert (tmp_path / "runs" / "self-consistency-seed0" / "answers.json").read_bytes() == stored


@pytest.mark.slow
def test_the_whole_ablation_of_tiny_models(tmp_path):
    able = ["tiny.width=64", "tiny.warmup_steps=150", "plan.problems=4", "plan.group_size=16"]  # now and then right
    done = call("ablation", *SMALL, *able, "--out", str(tmp_path), "--workers", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["lines"]) == 14
    assert all(line["values"]["accuracy, %"] is not None for line in found["lines"])
    assert all(line["values"]["stale gap"] is not None for line in found["lines"])
    assert found["failed"] == []


def test_lines_stand_under_their_part():
    recipe = find("degeneracy")
    assert [cell.folder.name for cell in cells_of(recipe, Setting(seeds=2), Path("out"))] == [
        "n3-seed0", "n3-seed1", "n5-seed0", "n5-seed1",
    ]  # fmt: skip
    lines = tuple(
        SimpleNamespace(name=l.name, part=l.part, values=dict.fromkeys(recipe.columns), paper=dict(l.paper))
        for l in recipe.lines
    )
    found: Any = SimpleNamespace(columns=recipe.columns, lines=lines)
    shown = rows(found)
    assert shown[0] == ["", *(name for column in recipe.columns for name in (column, "the paper"))]
    assert [row[0] for row in shown[1:]] == [
        "n = 3", "step 2", "step 3", "n = 5", "step 2", "step 3", "step 4", "step 5",
    ]  # fmt: skip
    assert shown[2][1:3] == ["-", "0.42 ± 0.03"]
