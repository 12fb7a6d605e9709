"""The report and the comparison: what they promise of their numbers, their size and hostile text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from made_run import (
    HOSTILE,
    eval_record,
    made_batch,
    made_run,
    probe_record,
    swap_record,
    write_log,
)
from teamtr.analysis.report import build_report, compare_page, compare_runs, comparison_text, report_page, report_text
from teamtr.analysis.report.conversations import advantages_PG, choose_batches, choose_groups, evenly
from teamtr.analysis.report.page import embedded_json
from teamtr.analysis.report.reading import BatchFile, read_run
from teamtr.analysis.report.sections import shift as shift_section
from teamtr.analysis.report.summary import summarise
from teamtr.cli import app
from teamtr.cli.demo import _write_report
from teamtr.errors import UserError
from teamtr.presets import PRESETS
from teamtr.rollout import trained_returns_PG
from teamtr.session.demo import DemoResult
from teamtr.store import Log, RunFolder
from teamtr.text import counted, visible
from teamtr.theory.advantages import group_advantages

AGENTS = ("left", "right", "speaker")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def unfinished(run: Path, **last: object) -> Path:
    """The run before its last stage was over."""
    records = Log(run / "log.jsonl").read()
    write_log(run, [*records[:-3], *([last] if last else [])])
    return run


@pytest.mark.long
def test_whether_a_run_is_training_is_told_by_its_lock(run: Path) -> None:
    assert build_report(run).data["run"]["state"] == "finished"
    unfinished(run)
    assert build_report(run).data["run"]["state"] == "interrupted"
    with RunFolder.open(run):
        assert build_report(run).data["run"]["state"] == "running"
    assert build_report(run).data["run"]["state"] == "interrupted"
    unfinished(run, kind="stopped", updates=7)
    assert build_report(run).data["run"]["state"] == "stopped"


def headline(data: dict[str, Any], question: str) -> dict[str, Any]:
    return next(told for told in data["headlines"] if told["question"] == question)


@pytest.mark.long
def test_where_nothing_was_kept_staleness_cannot_be_told(run: Path) -> None:
    question = "Did it need fresh rollouts?"
    assert headline(build_report(run).data, question)["headline"] != "cannot be told"
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "outcome": "restored"} if r["kind"] == "update" else r for r in records])
    told = headline(build_report(run).data, question)
    assert (told["headline"], told["tone"]) == ("cannot be told", "plain")
    assert "no update was kept" in told["text"]


def test_one_of_a_thing_is_not_several(tmp_path: Path) -> None:
    made = made_run(tmp_path / "one", stages=1, agents=("only",))
    told = " ".join(each["text"] for each in build_report(made).data["headlines"])
    assert "1 batch is stored" in told
    assert "1 update in" in told
    assert not re.search(r"\b1 (batches|updates|stages|episodes)\b", told)
    assert not re.search(r"\b1 (batches|updates|episodes)\b", report_text(build_report(made).data))
    assert (counted(1, "batch", "batches"), counted(2_000, "batch", "batches")) == ("1 batch", "2,000 batches")


@pytest.mark.long
def test_pass_hat_k_stands_beside_pass_at_k(run: Path) -> None:
    text = report_text(build_report(run).data)
    rows = [line.replace(" ", "") for line in text.splitlines() if line.startswith("| pass")]
    assert rows == ["|pass@4|30.0%|80.0%|", "|pass^4|10.0%|60.0%|"]


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.mark.long
def test_looking_at_a_run_loads_no_torch(run, tmp_path):
    """It takes seconds, and a run can be looked at where none is installed."""
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, peft=None)\n"
        "import teamtr.analysis.report.serve\n"
        "from teamtr.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    other = made_run(tmp_path / "other")
    for arguments in (["report", run], ["report", run, "--format", "md"], ["compare", run, other]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size > 10_000


# -- numbers -------------------------------------------------------------------------------------------------------


def test_the_agents_are_quoted_at_the_top(tmp_path):
    """From the last stored batch: the first words of the first messages. A page that has read none does not quote."""
    batches = [made_batch(AGENTS, seed=0), made_batch((*AGENTS, "a4", "a5"), seed=1, said="a <b>\n" + "long " * 30)]
    run = made_run(tmp_path / "run", agents=AGENTS, stages=1, batches=[batches[0], batches[0], batches[1]])
    report = build_report(run)
    last = report.conversations["stage-0000-step-02.jsonl.gz"]["episodes"][0]
    text = report.data["headlines"][4]["text"]
    quote = "“a <b> long long long long long long lon…”"
    assert text.startswith(f"One of the last: left {quote}, right {quote}, speaker {quote}, a4 {quote}, and 1 more; ")
    assert f"verdict: {last['verdict']}. 3 batches are stored" in text
    assert "a \\<b\\> long" in report_text(report.data)
    assert summarise(read_run(run))["headlines"][4]["text"].startswith("3 batches are stored")


def test_half_a_point_is_rounded_as_the_browser_does(run):
    records = [eval_record(0, 0.125, avg_interval=[0.005, 0.225]), eval_record(1, 0.625, avg_interval=[0.405, 0.685])]
    write_log(run, records)
    text = build_report(run).data["headlines"][1]["text"]
    assert text == "Held-out success went from 13 % (1 to 23) to 63 % (41 to 69) in 1 stage."


def test_the_data_of_a_run_by_hand(run):
    data = build_report(run).data
    assert data["notes"] == []
    assert data["run"]["state"] == "finished"
    assert data["run"]["agents"] == list(AGENTS)
    assert [e["sampled_tokens"] for e in data["evals"]] == [0, 3000, 6000, 9000]
    assert data["evals"][-1]["success"] == pytest.approx(0.7)
    assert len(data["updates"]) == 9
    assert not any(u["outside"] for u in data["updates"])
    assert data["cost"]["overhead"]["naive_tokens"] == 3000
    assert data["cost"]["overhead"]["token_ratio"] == pytest.approx(3.0)
    assert data["cost"]["overhead"]["naive_seconds"] == pytest.approx(15 - 6 * 2 / 3)
    tracking = data["certificates"]["turn_aware"]
    assert tracking["count"] == 6  # the last update of a stage has no later batch
    assert tracking["violations"] == 0
    assert [a["tone"] for a in data["headlines"][:3]] == ["good", "good", "good"]
    assert data["headlines"][1]["headline"] == "+50 points"


@pytest.mark.long
def test_an_update_outside_its_region_is_told(run):
    records = Log(run / "log.jsonl").read()
    records[2]["kl_upper"] = 0.011
    write_log(run, records)
    data = build_report(run).data
    assert [u["outside"] for u in data["updates"]].count(True) == 1
    assert data["headlines"][2]["tone"] == "bad"
    assert data["headlines"][2]["headline"] == "8 of 9 inside"


@pytest.mark.long
def test_staleness_is_measured_between_batches_of_a_stage(tmp_path):
    """Stage start and later batches: the same law by chance (equal batches: no drift), or all contexts changed."""
    same = made_batch(AGENTS, problems=8, group=8)
    data = build_report(made_run(tmp_path / "same", batches=[same])).data
    assert len(data["staleness"]) == 6
    assert all(step["drift"]["total_variation"] == 0.0 for step in data["staleness"])
    assert all(step["moved"]["estimate"] == 0.0 for step in data["staleness"])
    other = made_batch(AGENTS, problems=8, group=8, seed=1)
    data = build_report(made_run(tmp_path / "other", batches=[same, other, other])).data
    gap = (np.array([e.reward for e in other.episodes]) - [e.reward for e in same.episodes]).mean()
    assert data["staleness"][0]["moved"]["estimate"] == pytest.approx(gap)
    assert 0.0 < data["staleness"][0]["drift"]["total_variation"] < 0.5


def test_conversations_hold_advantages_siblings_and_the_environment(tmp_path):
    batch = made_batch(AGENTS, environment=True)
    report = build_report(made_run(tmp_path / "run", batches=[batch], batch_stages=1))
    held = report.conversations["stage-0000-step-00.jsonl.gz"]
    wanted = group_advantages(batch.returns_PG(1.0), a_clip=3.0, eps_norm=1e-6).values_PG
    assert [e["advantage"] for e in held["episodes"]] == pytest.approx(wanted.ravel().tolist(), abs=1e-4)
    first = held["episodes"][0]
    assert [s["who"] for s in first["said"]] == ["world", *AGENTS]
    assert first["said"][0]["environment"]
    assert first["said"][1]["ids"] == batch.episodes[0].turns[0].token_ids.tolist()
    assert first["said"][1]["logprobs"] == pytest.approx(batch.episodes[0].turns[0].sampler_logprobs, abs=1e-3)


def test_conversations_hold_the_advantages_of_punished_returns(tmp_path):
    """As DAPO trains on them; an agent whose limit nobody knows leaves them out."""
    batch = made_batch(AGENTS)
    first, *others = batch.episodes
    cut = replace(first, turns=(replace(first.turns[0], finish="length"), *first.turns[1:]))
    batch = replace(batch, episodes=(cut, *others))
    plan, short = PRESETS["dapo"], dict.fromkeys(AGENTS, 16)
    assert not np.array_equal(trained_returns_PG(batch, plan, short), batch.returns_PG(1.0))
    shown = advantages_PG(batch, plan, short)
    wanted = group_advantages(trained_returns_PG(batch, plan, short), a_clip=np.inf, eps_norm=1e-6).values_PG
    np.testing.assert_array_equal(shown, wanted)
    assert advantages_PG(batch, plan, {}) is None
    assert advantages_PG(batch, PRESETS["teamtr"], {}) is not None
    run = made_run(tmp_path / "run", batches=[batch], batch_stages=1, preset="dapo")
    held = build_report(run).conversations["stage-0000-step-00.jsonl.gz"]
    limits = read_run(run).limits
    wanted = advantages_PG(batch, plan, limits)
    assert [e["advantage"] for e in held["episodes"]] == pytest.approx(wanted.ravel().tolist(), abs=1e-4)


def test_kl_by_token_comes_with_its_conversation(tmp_path):
    batch = made_batch(AGENTS, problems=16, group=4)
    run = made_run(tmp_path / "run", stages=1, batches=[batch])
    probe = probe_record(4)
    probe["token_shift"]["sampled_kl"]["tokens"] = [{"episode": 50, "turn": 1, "kl": [0.5, 0.25, 0.0]}]
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "probe": probe} if r.get("update") == 2 else r for r in records])
    report = build_report(run, most_episodes=32)
    held = report.conversations["stage-0000-step-01.jsonl.gz"]
    found = [(held["problems"][e["problem"]]["id"], e["sibling"], k) for e in held["episodes"]
             for k, said in enumerate(e["said"]) if "kl" in said]  # fmt: skip
    assert found == [("p12", 2, 1)]  # episode 50 is number 2 of problem 12, which is held because it was probed
    (said,) = [said["kl"] for e in held["episodes"] for said in e["said"] if "kl" in said]
    assert said == [0.5, 0.25, 0.0]
    assert not any(
        "kl" in s for e in report.conversations["stage-0000-step-00.jsonl.gz"]["episodes"] for s in e["said"]
    )
    assert "sampled_kl" not in json.dumps(report.data)  # single values travel with conversations, not with the summary


@pytest.mark.parametrize("unit", ["message", "token"])
def test_shifts_are_told_in_radii_where_the_radius_is_per_message(tmp_path, unit):
    run = made_run(tmp_path / "run", stages=1, batches=[made_batch(AGENTS, problems=2, group=4)])
    records = Log(run / "log.jsonl").read()
    probed = [{**r, "probe": probe_record(4), "unit": unit} if r["kind"] == "update" else r for r in records]
    write_log(run, probed)
    *_, table = shift_section.show(build_report(run).data)
    assert {"radii" in row[2] for row in table.rows} == {unit == "message"}


def test_a_swap_in_the_log(run):
    records = Log(run / "log.jsonl").read()
    write_log(run, [*records, swap_record(3), eval_record(4, 0.5), {"kind": "swap", "success": 7, "alignment": [1]}])
    data = build_report(run).data
    assert data["notes"] == []
    first, torn = data["swaps"]
    assert (first["agent"], first["certified"], first["models"]) == ("speaker", False, ["tiny", "wider"])
    assert first["success"]["at_swap"] == {"success": 0.36, "low": 0.3, "high": 0.4}
    assert first["recovery"] == [{"stage": 4, "success": 0.5, "low": 0.45, "high": pytest.approx(0.55)}]
    assert len(first["alignment"]["curve"]) == 6
    assert [item["ok"] for item in first["checklist"]] == [True, False]
    assert (torn["success"], torn["alignment"], torn["shock"]) == ({}, None, None)
    text = report_text(data)
    assert "## Swap" in text
    assert "uncertified" in text
    assert "/somebody" not in text + report_page(build_report(run))


def test_drift_of_free_text_is_told_by_what_was_stated(tmp_path):
    """Nothing repeats word for word; what was stated does, and it moved."""

    def batch(seed: int, share: float):
        rng = np.random.default_rng(seed)
        made = made_batch(AGENTS, problems=8, group=8, seed=seed)
        episodes = []
        for e in made.episodes:
            said = f"After weighing {rng.integers(10**9)} reasons and a few more I say {int(rng.random() < share)}"
            turns = [replace(t, text=said, context_ids=rng.integers(0, 999, 8).astype(np.int32)) for t in e.turns]
            episodes.append(replace(e, turns=tuple(turns)))
        return replace(made, episodes=tuple(episodes))

    run = made_run(tmp_path / "run", stages=1, batches=[batch(0, 0.1), batch(1, 0.9), batch(2, 0.9)])
    right, speaker = build_report(run).data["staleness"]
    assert right["drifts"]["identity"]["repeated"] < 0.1
    assert right["form"] == "statements"
    assert right["drift"]["excess"] > 0.4
    assert right["drift"]["total_variation"] == pytest.approx(0.8, abs=0.15)
    assert speaker["drifts"]["agreement"]["total_variation"] == 0.0  # both earlier agents always said the same


def test_evenly_keeps_both_ends():
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(40, 6) == [0, 8, 16, 23, 31, 39]
    assert evenly(5, 1) == [4]


def test_whole_stages_and_extreme_groups_are_chosen():
    files = [BatchFile(f"{s}-{k}", s, k, Path()) for s in range(40) for k in range(3)]
    chosen = choose_batches(files, 9)
    assert [(f.stage, f.step) for f in chosen] == [(s, k) for s in (0, 20, 39) for k in range(3)]
    batch = made_batch(AGENTS, problems=32, group=4)
    rewards = np.array([e.reward for e in batch.episodes]).reshape(32, 4)
    groups = choose_groups(batch, 24, ["p7", "p9"])
    assert len(groups) == 6
    assert {7, 9, int(rewards.mean(axis=1).argmin()), int(rewards.mean(axis=1).argmax())} <= set(groups)


# -- one file ------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_may_ask_nobody(run):
    page = report_page(build_report(run))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert "connect-src 'none'" in policy[1]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)  # the only one that runs
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1]
    assert "innerHTML" not in script
    assert "eval(" not in script
    outside = set(re.findall(r"https?://[^\s\"'`]+", page)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert not re.search(r"<(link|img|iframe|object|embed)\b", page)


def test_hostile_text_cannot_end_the_data_it_stands_in(tmp_path):
    run = made_run(tmp_path / "run", batches=[made_batch(AGENTS, said=HOSTILE, environment=True)])
    (run / "team.yaml").write_text((run / "team.yaml").read_text().replace("name: made", "name: </title><script>x"))
    records = Log(run / "log.jsonl").read()
    records[0]["name"] = f"</title>{HOSTILE}"
    records[2]["reason"] = HOSTILE
    write_log(run, records)
    page = report_page(build_report(run))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert not set(data) & set("<>&\u2028\u2029\u202e")
    assert json.loads(data)["report"]["updates"][0]["reason"] == HOSTILE
    assert page.count("</script>") == page.count("<script")
    assert "\u202e" not in page
    assert "</title><script>" not in page
    blob = re.search(r'id="batch-0">([^<]*)</script>', page)
    assert blob is not None
    held = json.loads(gzip.decompress(base64.b64decode(blob[1])))
    assert held["problems"][0]["prompt"] == HOSTILE  # kept as it is; the page shows it as text


def test_numbers_that_json_lacks_are_told_as_text():
    assert json.loads(embedded_json({"a": [math.nan, -math.inf, 1.5]})) == {"a": ["nan", "-inf", 1.5]}


def test_hidden_characters_become_visible():
    assert visible("a\u202eb\u2066c\x07d\ud800") == "a⟨U+202E⟩b⟨U+2066⟩c⟨U+0007⟩d⟨U+D800⟩"
    assert visible("a\ufffe\uffff") == "a⟨U+FFFE⟩⟨U+FFFF⟩", "XML cannot hold them"
    assert visible("plain, ünïcode 漢字 👩‍🚀\n") == "plain, ünïcode 漢字 👩‍🚀\n"


def test_markdown_is_escaped(run):
    records = Log(run / "log.jsonl").read()
    records[0] |= {"name": "<script>|`x`\u202e", "agents": ["left|", *AGENTS]}
    write_log(run, records)
    text = report_text(build_report(run).data)
    assert text.startswith("# \\<script\\>\\|\\`x\\`⟨U+202E⟩\n")
    assert "left\\|" in text


@pytest.mark.long
@pytest.mark.slow
def test_a_big_run_stays_small_and_quick(tmp_path):
    """40 stages x 3 agents x 512 episodes, messages of 60 tokens, every update probed."""
    batch = made_batch(AGENTS, problems=32, group=16, tokens=60)
    run = made_run(tmp_path / "run", stages=40, batches=[batch])
    probe = probe_record(64, tokens=60)
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "probe": probe} if r["kind"] == "update" else r for r in records])
    started = time.process_time()
    report = build_report(run)
    page = report_page(report)
    assert time.process_time() - started < 60.0
    assert len(page) < 15e6
    assert report.data["sample"]["stored_batches"] == 120
    assert report.data["sample"]["episodes"] == 18 * 128


def test_long_conversations_leave_room(tmp_path, monkeypatch):
    """300 tokens an episode, room for 18,000 in three batches: 20 episodes of each, in whole groups of four."""
    monkeypatch.setattr("teamtr.analysis.report.static.MOST_TOKENS", 18_000)
    run = made_run(tmp_path / "run", stages=1, batches=[made_batch(AGENTS, problems=8, tokens=100)])
    assert build_report(run).data["sample"]["episodes"] == 60


# -- comparing -----------------------------------------------------------------------------------------------------


def test_a_difference_is_paired_by_held_out_problems_where_the_log_has_them(tmp_path):
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", preset="naive_sequential", gain=0.7)
    rng = np.random.default_rng(0)
    hard = rng.random(40)
    for run, shift in ((a, 0.0), (b, np.tile([0.09, 0.11], 20))):
        own = {"problem_ids": [f"h{k}" for k in range(40)], "success_P": (0.8 * hard + shift).tolist()}
        write_log(run, [*Log(run / "log.jsonl").read(), eval_record(3, 0.5, **own)])
    comparison = compare_runs([a, b])
    (found,) = comparison["differences"]
    assert found["estimate"] == pytest.approx(0.1)
    assert 0.004 < found["high"] - found["low"] < 0.008  # 3.92 x 0.01 / 40^0.5: their difficulty is taken out
    assert (found["pairs"], found["basis"]) == (40, "40 held-out problems")
    assert comparison["settings"] == [{"key": "plan.preset", "values": ["teamtr", "naive_sequential"]}]
    assert "naive\\_sequential" in comparison_text(comparison)
    assert "application/json" in compare_page(comparison)


def evaluated(folder, success):
    """A run whose last evaluation found this of each problem."""
    run = made_run(folder, batches=[made_batch(AGENTS, problems=8)])
    own = {"problem_ids": list(success), "success_P": list(success.values())}
    write_log(run, [*Log(run / "log.jsonl").read(), eval_record(3, float(np.mean([*success.values()])), **own)])
    return run


def test_a_difference_says_how_many_pairs_it_rests_on(tmp_path):
    a = evaluated(tmp_path / "a", {"p": 0.0, "q": 0.5, "r": 0.0})
    b = evaluated(tmp_path / "b", {"q": 1.0, "r": 0.5, "s": 0.0, "t": 0.0})
    comparison = compare_runs([a, b])
    (found,) = comparison["differences"]
    assert (found["estimate"], found["pairs"]) == (pytest.approx(0.5), 2)
    assert found["solved"] == (0.25, 0.75)
    assert found["basis"] == "2 held-out problems that both were asked, of 3 and 4: 25.0 % and 75.0 % of them solved"
    assert "2 held-out problems that both were asked" in comparison_text(comparison)


def test_a_difference_that_cannot_be_paired_is_refused(tmp_path):
    """Training problems that both stored, and intervals of other problems, are no basis: 0.0 % against 11.1 % once had
    a difference of +0.0."""
    a = evaluated(tmp_path / "a", {"p": 0.0, "q": 0.0})
    b = evaluated(tmp_path / "b", {"q": 0.0, "r": 1.0, "s": 0.0})
    c = evaluated(tmp_path / "c", {"x": 1.0})
    old, never = made_run(tmp_path / "old"), made_run(tmp_path / "never", batches=[made_batch(AGENTS, problems=8)])
    write_log(never, [record for record in Log(never / "log.jsonl").read() if record["kind"] != "eval"])
    comparison = compare_runs([a, b, c, old, never])
    assert comparison["differences"] == []
    told = [note for note in comparison["notes"] if "no difference is given" in note]
    assert [note.split(" and a: ")[0] for note in told] == ["b", "c", "old", "never"]
    assert "of 2 and 3 problems, share one problem alone" in told[0]
    assert "of 2 and 1 problems, share no problem" in told[1]
    assert "does not say which problems were solved" in told[2]
    assert "never evaluated" in told[3]
    assert "no difference is given" in comparison_text(comparison)


def test_comparing_needs_two_runs(run):
    with pytest.raises(UserError, match="two run folders"):
        compare_runs([run])


def test_order_sensitivity_across_runs(tmp_path):
    a = made_run(tmp_path / "a")
    b = made_run(tmp_path / "b", agents=("speaker", "right", "left"), gain=0.3)
    reverse = (a / "team.yaml").read_text().replace("preset: teamtr", "preset: teamtr, order: reverse")
    (b / "team.yaml").write_text(reverse)
    order = compare_runs([a, b])["order"]
    assert order["spread"] == pytest.approx(0.2)
    assert set(order["means"]) == {"left > right > speaker", "speaker > right > left"}
    (b / "team.yaml").write_text(reverse.replace("order: reverse", "order: reverse, radius_nats_per_message: 9"))
    assert compare_runs([a, b])["order"] is None, "the radius may be why"


# -- the commands --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_report_command(run, tmp_path):
    line = json.loads(invoke("report", run, "--json").stdout)
    assert line["path"] == str(run / "report.html")
    assert line["bytes"] == (run / "report.html").stat().st_size
    assert json.loads(invoke("report", run, "--format", "json").stdout)["run"]["name"] == "made"
    invoke("report", run, "--format", "md", "--out", tmp_path / "x.md")
    assert (tmp_path / "x.md").read_text().startswith("# made")
    invoke("report", run, "--format", "pdf", code=2)
    invoke("report", tmp_path / "nowhere", code=2)
    invoke("view", tmp_path / "nowhere", code=2)
    invoke("view", run, "--host", "0.0.0.0", code=2)


def test_compare_command(run, tmp_path):
    other = made_run(tmp_path / "other", seed=5)
    found = json.loads(invoke("compare", run, other, "--json", "--out", tmp_path / "c.html").stdout)
    assert found["settings"] == [{"key": "seed", "values": ["0", "5"]}]
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    invoke("compare", run, code=2)


def test_the_last_line_of_the_demo_names_the_report(tmp_path, monkeypatch):
    def trained(team_file, folder, watch, stop):
        made_run(folder)
        return DemoResult(preset="teamtr", seed=0, radius=0.01)

    monkeypatch.setattr("teamtr.session.demo.train_demo", trained)
    result = invoke("demo", "--task", "roles", "--out", tmp_path)
    target = tmp_path / "teamtr-demo.html"
    assert result.stderr.strip().splitlines()[-1] == f"report: {target}  (open it in a browser)"
    assert target.read_text().startswith("<!doctype html>")


def test_a_demo_never_fails_because_of_its_report(run, tmp_path):
    assert "no report was written" in _write_report(run, tmp_path / "no" / "such" / "folder.html")
    assert "no report was written" in _write_report(tmp_path / "no run", tmp_path / "x.html")
