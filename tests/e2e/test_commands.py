"""The commands as a person or a script uses them: output, exit codes, resuming, refusing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.cli.common import emit
from teamtr.store import RunFolder

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
plan: {stages: 2, problems: 2, group_size: 8, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 4}
"""


@pytest.fixture
def team_file(tmp_path: Path) -> Path:
    path = tmp_path / "team.yaml"
    path.write_text(TEAM)
    return path


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def last_json(result) -> dict:
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_train_then_eval_then_train_again(team_file, tmp_path):
    folder = tmp_path / "run"
    first = last_json(invoke("train", team_file, "--out", folder, "--json"))
    assert first["status"] == "finished"
    assert first["updates"] == 6
    assert first["tokens"] > 0
    again = last_json(invoke("train", team_file, "--out", folder, "--json"))
    assert again["updates"] == 6, "a finished run has nothing left to do"
    more = last_json(invoke("train", team_file, "plan.stages=3", "--out", folder, "--json"))
    assert more["updates"] == 9, "more stages go on where the run ended"

    report = last_json(invoke("eval", folder, "--samples", 4, "--json"))
    assert report["samples"] == 4
    assert 0 <= report["avg_interval"][0] <= report["avg_at_k"] <= report["avg_interval"][1] <= 1
    assert report["pass_at_k"]["1"] == pytest.approx(report["avg_at_k"])
    assert report["pass_at_k"]["4"] >= report["pass_at_k"]["1"]
    assert report["consensus_on_correct"] is not None
    assert report["updates"] == 9

    store = RunFolder.read(folder)
    assert len([r for r in store.log.read() if r["kind"] == "update"]) == 9
    assert "radius_nats_per_message: 0.05" in store.team_file.read_text()
    assert len(list(store.episodes.iterdir())) == 9
    assert len(store.checkpoints.numbers()) == 2


def test_the_log_accounts_for_every_agent_and_phase(team_file, tmp_path):
    folder = tmp_path / "run"
    invoke("train", team_file, "--out", folder)
    account = RunFolder.read(folder).checkpoints.latest().progress["account"]
    assert account["episodes"] == 6 * 2 * 8, "six batches of two problems x eight"
    for name in ("left", "right", "speaker"):
        assert set(account["tokens"][name]) == {"sampled", "prompt", "scored", "trained"}
        assert set(account["seconds"][name]) == {"sample", "score", "train", "gate"}
        assert all(v > 0 for v in account["tokens"][name].values())
    sampled = 0
    for file in sorted((folder / "episodes").iterdir()):
        from teamtr.store import read_episodes

        sampled += sum(len(t.token_ids) for e in read_episodes(file).episodes for t in e.turns)
    assert sampled == sum(account["tokens"][n]["sampled"] for n in ("left", "right", "speaker"))


def test_another_team_file_is_refused(team_file, tmp_path):
    folder = tmp_path / "run"
    invoke("train", team_file, "--out", folder)
    result = invoke("train", team_file, "plan.radius_nats_per_message=0.02", "--out", folder, code=3)
    assert "plan.radius_nats_per_message" in result.stderr
    assert "other settings" in result.stderr


def test_a_run_that_never_began_binds_nobody(team_file, tmp_path):
    """A first try with a wrong model leaves a folder; the corrected command may use it."""
    invoke("train", team_file, "team.model=./nowhere", "--out", tmp_path / "run", code=2)
    invoke("train", team_file, "plan.stages=1", "--out", tmp_path / "run")


def test_deleting_the_episodes_does_not_stop_a_run_that_samples_anew(team_file, tmp_path):
    import shutil

    folder = tmp_path / "run"
    invoke("train", team_file, "plan.stages=1", "--out", folder)
    shutil.rmtree(folder / "episodes")
    assert last_json(invoke("train", team_file, "--out", folder, "--json"))["updates"] == 6


def test_a_reward_that_always_fails_is_told(tmp_path):
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({"question": f"q{i}", "answer": "1"}) for i in range(8)))
    (tmp_path / "r.py").write_text("def f(prompts, completions, **columns):\n    return [1 / 0]\n")
    (tmp_path / "t.yaml").write_text(
        "name: bad\ntask: {name: data, path: q.jsonl, held_out: 0.3, grader: 'python:r.py:f'}\n"
        "tiny: {layers: 1, width: 16, heads: 2}\nteam: {model: tiny, max_tokens: 2, agents: [{name: a}]}\n"
    )
    assert "ZeroDivisionError" in invoke("check", tmp_path / "t.yaml").stderr


def test_a_folder_in_use_is_refused(team_file, tmp_path):
    with RunFolder.open(tmp_path / "run"):
        result = invoke("train", team_file, "--out", tmp_path / "run", code=3)
    assert f"process {os.getpid()}" in result.stderr


def test_a_wrong_key_is_named_with_its_place(team_file):
    team_file.write_text(TEAM.replace("group_size", "group_sise"))
    result = invoke("check", team_file, code=2)
    assert 'unknown key "group_sise"' in result.stderr
    assert "group_size" in result.stderr
    line = TEAM.splitlines().index(next(x for x in TEAM.splitlines() if "group_size" in x)) + 1
    assert f"team.yaml:{line}:" in result.stderr


def test_a_missing_model_is_named(team_file):
    result = invoke("check", team_file, "team.model=./nowhere", code=2)
    assert "nowhere" in result.stderr
    assert "no such folder" in result.stderr


def test_check_measures_the_floor(team_file):
    found = last_json(invoke("check", team_file, "--json"))
    assert found["ok"]
    assert {f["agent"] for f in found["floors"]} == {"left", "right", "speaker"}
    assert all(f["noise_floor"] < 1e-8 for f in found["floors"]), "float32 sees a radius of 0.05"


def test_a_radius_that_drowns_in_rounding_is_refused(team_file, tmp_path, monkeypatch):
    """Scoring as coarse as bf16 makes a large model's: the floor is measured, named, and training does not start."""
    from teamtr.engines.torch.policy import TransformerPolicy

    features = TransformerPolicy.features
    monkeypatch.setattr(
        TransformerPolicy, "features", lambda self, p, m: (lambda h: h + 6.0 * (h * 1e6).frac())(features(self, p, m))
    )
    result = invoke("check", team_file, code=3)
    assert "cannot be seen" in result.stderr
    assert "noise floor" in result.stderr
    assert "learner.precision" in result.stderr
    invoke("train", team_file, "--out", tmp_path / "run", code=3)
    assert not RunFolder.read(tmp_path / "run").checkpoints.numbers(), "nothing was begun"
    invoke("train", team_file, "plan.preset=no_trust_region", "--out", tmp_path / "free")


def test_json_also_says_what_went_wrong(tmp_path):
    failed = last_json(invoke("train", tmp_path / "none.yaml", "--json", code=2))
    assert failed["exit_code"] == 2
    assert "none.yaml" in failed["error"]


def test_json_has_no_word_for_nan(capsys):
    emit({"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": 2}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.0, None], "c": {"d": 2}}


def test_probes_are_logged_and_change_nothing(team_file, tmp_path):
    logs = {}
    for every in (0, 1):
        invoke("train", team_file, f"diagnostics.every={every}", "store.episodes=false", "--out", tmp_path / str(every))
        log = (tmp_path / str(every) / "log.jsonl").read_text()
        logs[every] = [r for r in map(json.loads, log.splitlines()) if r["kind"] == "update"]
    kept = ("agent", "outcome", "kl_full", "surrogate", "version_after", "reward")
    assert [[r[k] for k in kept] for r in logs[0]] == [[r[k] for k in kept] for r in logs[1]]
    assert all(r["probe"] is None for r in logs[0])
    probed = [r for r in logs[1] if r["probe"]]
    assert len(probed) == sum(r["outcome"].startswith("accepted") for r in logs[1]) > 0
    assert all(sum(r["probe"]["token_shift"]["after_R"]) == pytest.approx(1.0, abs=1e-4) for r in probed)
    assert all(("gap" in r["probe"]) == (r["step"] > 0) for r in probed)


def test_plan_prints_what_is_needed(team_file):
    planned = last_json(invoke("plan", team_file, "--rehearse", "--json"))
    assert planned["fits"]
    assert planned["total_gb"] == pytest.approx(sum(item["gb"] for item in planned["items"]))
    assert set(planned["rehearsed"]["micro_batch"]) == {"left", "right", "speaker"}


def test_recipes_and_init(tmp_path):
    listed = invoke("recipes").stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(last_json(invoke("recipes", "--json"))["recipes"])
    path = tmp_path / "sub" / "team.yaml"
    invoke("init", path, "--recipe", "roles")
    assert last_json(invoke("recipes", "roles", "--json"))["team_file"] == path.read_text()
    assert "a5" in path.read_text()
    path.write_text("mine")
    assert "exists" in invoke("init", path, code=2).stderr
    assert path.read_text() == "mine"
    assert "code-exchange" in invoke("init", tmp_path / "x.yaml", "--recipe", "nonesuch", code=2).stderr


@pytest.mark.parametrize("command", [[], ["demo"], ["train"], ["eval"], ["check"], ["recipes"], ["init"]])
def test_help_teaches(command):
    text = invoke(*command, "--help").stdout
    assert len(text.splitlines()) > 8


def test_demo_json_has_the_promised_line(tmp_path):
    result = invoke("demo", "--task", "roles", "--agents", 2, "--stages", 2, "--compare", "naive_sequential", "--json")
    line = last_json(result)
    for part in (line, line["compare"]):
        assert {"initial", "final", "updates", "accepted", "out_of_region", "tokens", "seconds"} <= set(part)
        assert part["updates"] == 4
        assert part["out_of_region"] == 0
        assert "regressing" in part
    assert line["compare"]["tokens"] < line["tokens"], "stale rollouts are sampled once a stage"


def test_lab_verify_ends_with_the_promised_line(tmp_path):
    line = last_json(invoke("lab", "verify", "--teams", 100, "--json", "--figure", tmp_path / "v.png"))
    assert line["teams"] == 100
    assert {"thm:single", "thm:stage", "lem:chainrule", "ours:turn_aware"} <= set(line["checks"])
    for name, check in line["checks"].items():
        assert {"tested", "violations", "median_ratio", "p99_ratio"} <= set(check), name
        assert check["violations"] == 0, name
    assert (tmp_path / "v.png").stat().st_size > 10_000


def test_lab_roles_and_tightness(tmp_path):
    line = last_json(invoke("lab", "roles", "--largest", 4, "--json", "--figure", tmp_path / "r.png"))
    assert line["n"] == [2, 3, 4]
    assert min(line["fresh"]) > 0.99 > max(line["stale"])
    assert (tmp_path / "r.png").exists()
    result = invoke("lab", "tightness", "--teams", 20, "--json", "--figure", tmp_path / "t.png")
    rows = last_json(result)["rows"]
    assert all(sum(row["violated"].values()) == 0 for row in rows)
    assert all(row["certified"]["paper"] == 0.0 for row in rows)
    assert all(row["certified"]["by_kl"] == 1.0 for row in rows if row["turns"] == 1)


def run_cli(*arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "teamtr.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def wait_for_updates(folder: Path, count: int, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        log = folder / "log.jsonl"
        if log.exists() and sum('"kind":"update"' in line for line in log.read_text().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError("the run never got that far")


def test_ctrl_c_once_saves_and_the_same_command_goes_on(team_file, tmp_path):
    folder = tmp_path / "run"
    process = run_cli("train", team_file, "plan.stages=400", "--out", folder, "--json")
    wait_for_updates(folder, 2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    line = json.loads(stdout.strip().splitlines()[-1])
    assert line["status"] == "stopped"
    updates = line["updates"]
    assert RunFolder.read(folder).checkpoints.latest().number == updates
    assert "stage" in stderr
    assert "KL" in stderr, "plain progress lines without a terminal"
    finish = updates // 3 + 2
    again = last_json(invoke("train", team_file, f"plan.stages={finish}", "--out", folder, "--json"))
    assert again["updates"] == 3 * finish


def test_ctrl_c_twice_stops_at_once_and_stays_resumable(team_file, tmp_path):
    folder = tmp_path / "run"
    process = run_cli("train", team_file, "plan.stages=400", "plan.problems=64", "--out", folder)
    wait_for_updates(folder, 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit.number >= 1
    stages = commit.number // 3 + 1
    again = last_json(
        invoke("train", team_file, f"plan.stages={stages}", "plan.problems=64", "--out", folder, "--json")
    )
    assert again["updates"] == 3 * stages
