"""The report, the live page and the comparison: what they promise of their numbers, their size and their doors."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import math
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from made_run import HOSTILE, eval_record, made_batch, made_run, update_record, write_log
from teamtr.cli import app
from teamtr.cli.demo import _write_report
from teamtr.demo import DemoResult
from teamtr.errors import Misuse
from teamtr.report import build_report, compare_page, compare_runs, comparison_text, report_page, report_text
from teamtr.report.conversations import choose_batches, choose_groups, evenly
from teamtr.report.page import embedded_json
from teamtr.report.reading import BatchFile, LogTail, read_run
from teamtr.report.serve import Library, LiveServer
from teamtr.report.text import visible
from teamtr.store import Log
from teamtr.theory.advantages import group_advantages

AGENTS = ("left", "right", "speaker")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


# -- numbers -------------------------------------------------------------------------------------------------------


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
    assert [a["tone"] for a in data["glance"][:2]] == ["good", "good"]
    assert data["glance"][0]["headline"] == "+50 points"


def test_an_update_outside_its_region_is_told(run):
    records = Log(run / "log.jsonl").read()
    records[2]["kl_upper"] = 0.011
    write_log(run, records)
    data = build_report(run).data
    assert [u["outside"] for u in data["updates"]].count(True) == 1
    assert data["glance"][1]["tone"] == "bad"
    assert data["glance"][1]["headline"] == "8 of 9 inside"


def test_weights_of_a_stale_run_come_from_its_commit(tmp_path):
    weights = np.log([1.0, 1.0, 1.0, 11.0]).tolist()
    run = made_run(tmp_path / "run", preset="naive_sequential", progress={"log_weights": weights})
    data = build_report(run).data
    assert data["weights"]["effective_share"] == pytest.approx(14.0**2 / (4 * 124))
    assert data["glance"][2]["tone"] == "bad"
    assert data["run"]["fresh"] is False


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
    assert visible("plain, ünïcode 漢字 👩‍🚀\n") == "plain, ünïcode 漢字 👩‍🚀\n"


def test_markdown_is_escaped(run):
    records = Log(run / "log.jsonl").read()
    records[0] |= {"name": "<script>|`x`\u202e", "agents": ["left|", *AGENTS]}
    write_log(run, records)
    text = report_text(build_report(run).data)
    assert text.startswith("# \\<script\\>\\|\\`x\\`⟨U+202E⟩\n")
    assert "left\\|" in text


def test_a_big_run_stays_small_and_quick(tmp_path):
    """40 stages x 3 agents x 512 episodes, messages of 60 tokens."""
    batch = made_batch(AGENTS, problems=32, group=16, tokens=60)
    run = made_run(tmp_path / "run", stages=40, batches=[batch])
    started = time.perf_counter()
    report = build_report(run)
    page = report_page(report)
    assert time.perf_counter() - started < 60.0
    assert len(page) < 15e6
    assert report.data["sample"]["stored_batches"] == 120
    assert report.data["sample"]["episodes"] == 18 * 128


def test_long_conversations_leave_room(tmp_path, monkeypatch):
    """300 tokens an episode, room for 18,000 in three batches: 20 episodes of each, in whole groups of four."""
    monkeypatch.setattr("teamtr.report.static.MOST_TOKENS", 18_000)
    run = made_run(tmp_path / "run", stages=1, batches=[made_batch(AGENTS, problems=8, tokens=100)])
    assert build_report(run).data["sample"]["episodes"] == 60


# -- comparing -----------------------------------------------------------------------------------------------------


def test_a_difference_is_paired_by_held_out_problems_where_the_log_has_them(tmp_path):
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b", preset="naive_sequential", gain=0.7)
    rng = np.random.default_rng(0)
    hard = rng.random(40)
    for run, shift in ((a, 0.0), (b, 0.1)):
        own = {"problem_ids": [f"h{k}" for k in range(40)], "success_P": (0.8 * hard + shift).tolist()}
        write_log(run, [*Log(run / "log.jsonl").read(), eval_record(3, 0.5, **own)])
    comparison = compare_runs([a, b])
    (found,) = comparison["differences"]
    assert found["estimate"] == pytest.approx(0.1)
    assert found["high"] - found["low"] < 1e-9  # the difficulty of problems is taken out
    assert found["basis"] == "paired, held-out problems"
    assert comparison["settings"] == [{"key": "plan.preset", "values": ["teamtr", "naive_sequential"]}]
    assert "naive\\_sequential" in comparison_text(comparison)
    assert "application/json" in compare_page(comparison)


def test_a_difference_falls_back_to_stored_problems_and_then_to_intervals(tmp_path):
    first, second = made_batch(AGENTS, problems=8), made_batch(AGENTS, problems=8, seed=1)
    a, b = made_run(tmp_path / "a", batches=[first]), made_run(tmp_path / "b", batches=[second])
    (found,) = compare_runs([a, b])["differences"]
    gap = (np.array([e.reward for e in second.episodes]) - [e.reward for e in first.episodes]).mean()
    assert found["estimate"] == pytest.approx(gap)
    assert found["basis"] == "paired, training problems of stage 2"
    c = made_run(tmp_path / "c", batches=[], gain=0.6)
    (found,) = compare_runs([a, c])["differences"]
    assert found["estimate"] == pytest.approx(0.1)
    assert found["high"] - found["estimate"] == pytest.approx(math.hypot(0.05, 0.05))
    assert found["basis"].startswith("not paired")


def test_comparing_needs_two_runs(run):
    with pytest.raises(Misuse, match="two run folders"):
        compare_runs([run])


def test_order_sensitivity_across_runs(tmp_path):
    a = made_run(tmp_path / "a")
    b = made_run(tmp_path / "b", agents=("speaker", "right", "left"), gain=0.3)
    order = compare_runs([a, b])["order"]
    assert order["spread"] == pytest.approx(0.2)
    assert set(order["means"]) == {"left > right > speaker", "speaker > right > left"}


# -- the commands --------------------------------------------------------------------------------------------------


def test_report_command(run, tmp_path):
    line = json.loads(invoke("report", run, "--json").stdout)
    assert line["path"] == str(run / "report.html")
    assert line["bytes"] == (run / "report.html").stat().st_size
    assert json.loads(invoke("report", run, "--format", "json").stdout)["run"]["name"] == "made"
    invoke("report", run, "--format", "md", "--out", tmp_path / "x.md")
    assert (tmp_path / "x.md").read_text().startswith("# made")
    invoke("report", run, "--format", "pdf", code=2)
    invoke("report", tmp_path / "nowhere", code=1)
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

    monkeypatch.setattr("teamtr.demo.train_demo", trained)
    result = invoke("demo", "--task", "roles", "--out", tmp_path)
    target = tmp_path / "teamtr-demo.html"
    assert result.stderr.strip().splitlines()[-1] == f"report: {target}  (open it in a browser)"
    assert target.read_text().startswith("<!doctype html>")


def test_a_demo_never_fails_because_of_its_report(run, tmp_path):
    assert "no report was written" in _write_report(run, tmp_path / "no" / "such" / "folder.html")
    assert "no report was written" in _write_report(tmp_path / "no run", tmp_path / "x.html")


# -- the live page -------------------------------------------------------------------------------------------------


@contextmanager
def serving(*folders: Path):
    with LiveServer(Library(folders)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: LiveServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_the_token_every_route_answers_403(run):
    with serving(run) as server:
        key = server.library.names()[0]["key"]
        routes = ["", "api/runs", f"api/run/{key}", f"api/batch/{key}/stage-0000-step-00.jsonl.gz", "nonsense"]
        for prefix in ("/", "//", "/wrong/", f"/{server.token[:-1]}/", f"/{server.token}x/", f"/x/{server.token}/"):
            for route in routes:
                assert get(server, prefix + route)[0] == 403, prefix + route
        for path in ("/favicon.ico", "/robots.txt", f"/{server.token}", "*", f"/?token={server.token}"):
            assert get(server, path)[0] == 403, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert get(server, f"/{server.token}/", method)[0] == 403, method
        assert get(server, f"/{server.token}/")[0] == 200


def test_a_foreign_host_header_is_refused(run):
    with serving(run) as server:
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert get(server, f"/{server.token}/", host=host)[0] == 403, host
        assert get(server, f"/{server.token}/", host=f"localhost:{server.server_port}")[0] == 200


def test_other_machines_are_let_in_only_when_told():
    with pytest.raises(Misuse, match="--allow-remote"):
        LiveServer(Library([]), host="0.0.0.0")
    with LiveServer(Library([]), host="0.0.0.0", allow_remote=True) as server:
        assert server.server_address[0] == "0.0.0.0"


def test_path_tricks_reach_nothing(tmp_path):
    """200 of them, as a run's key and as a batch's name; beside the runs lies a secret."""
    secret = tmp_path / "secret"
    secret.write_text("TOPSECRET")
    run = made_run(tmp_path / "runs" / "run")
    (run / "episodes" / "stage-0009-step-00.jsonl.gz").symlink_to(secret)
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    ups = ["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "....//", "..;/", "%252e%252e%252f", "..%c0%af"]
    ends = ["secret", "secret%00", "secret%00.jsonl.gz", "./secret"]
    tricks = [up * depth + end for up in ups for depth in (1, 2, 3, 5) for end in ends]
    tricks += [f"%2f{str(secret)[1:]}", str(secret), f"file:{secret}", "~", "~root", ".", "..", "%00", "link", "run"]
    tricks += [f"stage-0000-step-00.jsonl.gz{end}" for end in ("/", "%00", "/..", "%20", "?x=/secret", "#", ".bak")]
    tricks += ["stage-0009-step-00.jsonl.gz", "log.jsonl", "team.yaml", ".lock", "../log.jsonl", "..%2flog.jsonl"]
    tricks += [
        "\u2215secret",
        "．．／secret",
        "CON",
        "nul",
        "a" * 5000,
        "%",
        "%zz",
        "[",
        "{}",
        "*",
        "%2a",
        "|id",
        ";id",
        "$(id)",
    ]
    tricks += ["`id`", "%0d%0aX: y", "link/secret", "link%2fsecret"]
    assert len(tricks) >= 200
    with serving(tmp_path / "runs") as server:
        (entry,) = server.library.names()
        for trick in tricks:
            quoted = "".join(c if c.isascii() and c != " " else quote(c) for c in trick)
            for path in (f"api/run/{quoted}", f"api/batch/{entry['key']}/{quoted}", f"api/batch/{quoted}/x", quoted):
                status, body = get(server, f"/{server.token}/{path}")
                fine = path.endswith("stage-0000-step-00.jsonl.gz?x=/secret") or "jsonl.gz#" in path
                assert status in (400, 403, 404, 414) or (fine and status == 200), (path, status)
                assert b"TOPSECRET" not in body


def test_the_live_page_follows_a_growing_log(tmp_path):
    run = made_run(tmp_path / "run", stages=1)
    with serving(run) as server:
        (entry,) = json.loads(get(server, f"/{server.token}/api/runs")[1])["runs"]
        ask = f"/{server.token}/api/run/{entry['key']}?stamp="
        first = json.loads(get(server, ask)[1])
        assert len(first["report"]["updates"]) == 3
        again = json.loads(get(server, ask + first["stamp"])[1])
        assert again == {"unchanged": True, "stamp": first["stamp"]}
        with open(run / "log.jsonl", "ab") as file:
            line = json.dumps(update_record(4, 1, 0, "left")).encode()
            file.write(line[:50])
            file.flush()
            torn = json.loads(get(server, ask + first["stamp"])[1])
            assert len(torn["report"]["updates"]) == 3
            assert "torn" in torn["report"]["notes"][0]
            file.write(line[50:] + b"\n")
        grown = json.loads(get(server, ask + torn["stamp"])[1])
        assert len(grown["report"]["updates"]) == 4
        name = grown["report"]["batches"][0]["name"]
        batch = json.loads(get(server, f"/{server.token}/api/batch/{entry['key']}/{name}")[1])
        assert len(batch["episodes"]) == 16


def test_a_log_that_was_cut_back_is_read_again(run):
    tail = LogTail(run / "log.jsonl")
    assert tail.poll()
    assert len(tail.records) == 17
    assert not tail.poll()
    Log(run / "log.jsonl").rewind(lambda record: record["kind"] != "stage")
    assert tail.poll()
    assert [r["kind"] for r in tail.records] == ["start", "eval", "update", "update", "update"]


def test_looking_takes_no_lock_and_writes_nothing(run):
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    read_run(run)
    with serving(run) as server:
        key = server.library.names()[0]["key"]
        get(server, f"/{server.token}/api/run/{key}")
        get(server, f"/{server.token}/api/batch/{key}/stage-0000-step-00.jsonl.gz")
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before
