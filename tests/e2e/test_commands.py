"""The commands as a person or a script uses them: output, exit codes, resuming, refusing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from called import invoke, last_json
from made_run import eval_record, made_run, write_log
from taught import teaching_for_real
from teamtr.cli import main
from teamtr.cli.common import emit, errors
from teamtr.cli.words import estimate_line
from teamtr.config import load_team_file
from teamtr.session.build import build
from teamtr.session.estimate import Scoring, estimate
from teamtr.session.forecast import Where, forecast
from teamtr.session.trial import try_out
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A run that did its two stages, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "team.yaml").write_text(TEAM)
    with teaching_for_real():
        result = invoke("train", folder / "team.yaml", "--out", folder / "run", "--json")
    assert len(result.stdout.splitlines()) == 1, "stdout belongs to --json"
    return folder / "run", result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.long
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
    assert report["pass_hat_k"]["1"] == pytest.approx(report["avg_at_k"])
    assert report["pass_hat_k"]["4"] <= report["pass_hat_k"]["1"]
    assert report["consensus_on_correct"] is not None
    assert report["updates"] == 9

    store = RunFolder.read(folder)
    assert len([r for r in store.log.read() if r["kind"] == "update"]) == 9
    assert "radius_nats_per_message: 0.05" in store.team_file.read_text()
    assert len(list(store.episodes.iterdir())) == 9
    assert store.checkpoints.numbers() == sorted({more["best"]["updates"], 8, 9}), "the two latest, and the best"


@pytest.mark.long
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


@pytest.mark.long
def test_training_tells_what_goes_on(finished):
    """Without a terminal: the warm-up, a line per update, and at the end where the run is and what to do next."""
    folder, told = finished
    # On a busy machine loading takes long enough to be told first.
    first, *lines = [line for line in told.splitlines() if not line.startswith("loading models")]
    assert re.fullmatch(r"teaching the tiny base the form of messages \(40 steps, about \d+ s\)", first)
    updates = [r for r in RunFolder.read(folder).log.read() if r["kind"] == "update"]
    shown = [line for line in lines if " KL " in line]
    assert len(shown) == len(updates) == 6
    for line, record in zip(shown, updates, strict=True):
        words = (f"stage   {record['stage'] + 1}/2", record["agent"], record["outcome"])
        figures = (f"KL {record['kl_upper']:.4f} of 0.05", f"success {100 * record['success']:.0f} %")
        own = record["health"]["agents"][record["agent"]]
        health = (f"length {own['mean']:.0f} (p95 {own['p95']:.0f})  cut {100 * own['cut']:.0f} %", "no signal ")
        assert all(word in line for word in (*words, *figures, *health)), line
    assert lines[-1] == f"run folder: {folder}; next: teamtr report {folder}"


@pytest.mark.long
def test_fewer_stages_than_are_done_are_refused(finished, team_file, tmp_path):
    from teamtr.config import load_team_file
    from teamtr.session.train import train

    folder, _ = finished
    before = contents(folder)
    refused = invoke("train", team_file, "plan.stages=1", "--out", folder, code=2).stderr
    assert "plan.stages is 1, but the run in" in refused
    assert "has done 2 stages: set plan.stages to 2 or more to resume it, or choose a new folder" in refused
    assert "teaching" not in refused
    assert contents(folder) == before

    done: list[str] = []
    for record in train(load_team_file(team_file), tmp_path / "half", stop=lambda: done.count("update") == 4):
        done.append(record["kind"])
    refused = invoke("train", team_file, "plan.stages=1", "--out", tmp_path / "half", code=2).stderr
    assert "has done 1 stage and 1 of 3 updates of the next: set plan.stages to 2 or more" in refused
    assert last_json(invoke("train", team_file, "--out", tmp_path / "half", "--json"))["updates"] == 6


@pytest.mark.long
def test_a_finished_run_says_so(finished, team_file):
    folder, _ = finished
    told = invoke("train", team_file, "--out", folder).stderr
    assert "this run has finished all 2 stages; raise plan.stages to continue\n" in told
    assert told.endswith(f"run folder: {folder}; next: teamtr report {folder}\n")


def test_a_folder_that_is_no_run_is_not_trained_in(team_file, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "ideas.txt").write_text("mine")
    for folder, there in ((tmp_path / "notes", "ideas.txt"), (tmp_path, "team.yaml")):
        refused = invoke("train", team_file, "--out", folder, code=2).stderr
        assert f"{folder} is neither empty nor a run folder" in refused
        assert there in refused
        assert "choose a new or an empty folder" in refused
    assert contents(tmp_path) == {"team.yaml": TEAM.encode(), "notes/ideas.txt": b"mine"}


MISSING = {
    "train": ["train", "PATH"],
    "sweep": ["sweep", "PATH", "plan.stages=1,2"],
    "check": ["check", "PATH"],
    "plan": ["plan", "PATH"],
    "eval": ["eval", "PATH"],
    "eval --team": ["eval", "--team", "PATH"],
    "report": ["report", "PATH"],
    "view": ["view", "PATH"],
    "serve": ["serve", "PATH", "--port", "0"],
    "compare": ["compare", "PATH", "PATH"],
    "figures": ["figures", "PATH", "--out", "figures"],
    "swap": ["swap", "PATH", "--agent", "a", "--with", "tiny"],
    "export": ["export", "PATH", "exported"],
    "compat": ["compat", "tiny", "PATH"],
    "compat --strings": ["compat", "tiny", "tiny", "--strings", "PATH"],
    "compat --run": ["compat", "tiny", "tiny", "--run", "PATH"],
    "grade": ["grade", "math500", "--responses", "PATH", "--out", "graded.jsonl"],
}


@pytest.mark.parametrize("command", MISSING)
def test_a_missing_path_is_wrong_usage(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "missing"
    told = invoke(*(missing if part == "PATH" else part for part in MISSING[command]), code=2).stderr
    assert told.startswith("error: ")
    assert str(missing) in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [["eval"], ["serve", "--port", "0"], ["swap", "--agent", "left", "--with", "tiny"], ["export", "exported"]],
)
def test_a_run_that_never_began_is_no_run_yet(command, team_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *options = command
    told = invoke(name, tmp_path, *options, code=2).stderr
    assert "holds no checkpoint yet; train first" in told
    assert "teaching" not in told


def test_a_comparison_is_plain_text_unless_markdown_is_asked_for(tmp_path):
    ids = [f"h{k}" for k in range(20)]
    for name, preset in (("a_b", "teamtr"), ("c_d", "naive_sequential")):
        run = made_run(tmp_path / name, preset=preset)
        solved = eval_record(3, 1.0, problem_ids=ids, success_P=[1.0] * 20)
        write_log(run, [*RunFolder.read(run).log.read(), solved])
    text = invoke("compare", tmp_path / "a_b", tmp_path / "c_d").stdout
    assert not {"\\", "|", "**"} & set(text)
    header, first, second, _, differs, setting, *_ = text.splitlines()
    assert header.split()[0] == "run"
    assert first.split()[0] == "a_b"
    assert setting.split() == ["plan.preset", "teamtr", "naive_sequential"]
    assert differs.split()[-2:] == ["a_b", "c_d"]
    assert "+0.0" in second
    assert "-13.9 to +13.9" in second, "twenty problems alike are no certainty: 100 (1 - 0.05^(1/20))"
    markdown = invoke("compare", tmp_path / "a_b", tmp_path / "c_d", "--format", "md").stdout
    assert "| a\\_b" in markdown
    assert "text or md" in invoke("compare", tmp_path / "a_b", tmp_path / "c_d", "--format", "html", code=2).stderr


@pytest.mark.long
def test_an_interval_is_never_of_no_width():
    from teamtr.evaluation.metrics import summarise
    from teamtr.text import share
    from teamtr.types import Verdict

    for right, told in ((False, "0.0 % (0.0 to 0.3)"), (True, "100.0 % (99.7 to 100.0)")):
        verdicts = [[Verdict("right" if right else "wrong", float(right))] for _ in range(1000)]
        report = summarise(verdicts, [["x"]] * 1000, None, np.random.default_rng(0))
        assert share(report.avg_at_k, report.avg_interval) == told


def test_a_misspelt_hub_id_is_told_at_once(team_file, monkeypatch):
    """One question and no more; a model in the cache needs no answer."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError
    from transformers import AutoTokenizer

    from teamtr.engines.torch.pretrained import hub_options

    asked = []

    def unreachable(url: str, timeout: float) -> None:
        asked.append((url, timeout))
        raise OSError("Name or service not known")

    def unknown(url: str, timeout: float) -> None:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    def loader(*_: object, **__: object) -> None:
        raise AssertionError("loaders ask again and again")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loader)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    for command in (["check", team_file, "team.model=SmolLm/nonesuch"], ["compat", "tiny", "SmolLm/nonesuch"]):
        told = invoke(*command, code=2).stderr
        assert "'SmolLm/nonesuch': there is no such folder, and the hub could not be reached (Name or" in told
        assert len(told.splitlines()) == 1
    assert [("SmolLm/nonesuch" in url, timeout <= 10) for url, timeout in asked] == [(True, True)] * 2
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda source, name, revision: "config.json")
    assert hub_options("SmolLm/nonesuch") == {"local_files_only": True}
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unknown)
    assert "the hub does not know it" in invoke("compat", "tiny", "SmolLm/nonesuch", code=2).stderr


@pytest.mark.long
def test_another_team_file_is_refused(team_file, tmp_path):
    folder = tmp_path / "run"
    invoke("train", team_file, "--out", folder)
    result = invoke("train", team_file, "plan.radius_nats_per_message=0.02", "--out", folder, code=3)
    assert "plan.radius_nats_per_message" in result.stderr
    assert "other settings" in result.stderr


@pytest.mark.long
def test_a_run_that_never_began_binds_nobody(team_file, tmp_path):
    """A first try with a wrong model leaves a folder; the corrected command may use it."""
    invoke("train", team_file, "team.model=./nowhere", "--out", tmp_path / "run", code=2)
    invoke("train", team_file, "plan.stages=1", "--out", tmp_path / "run")


@pytest.mark.long
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
    assert "ZeroDivisionError" in invoke("check", tmp_path / "t.yaml", code=3).stderr


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


@pytest.mark.long
def test_check_measures_the_floor(team_file):
    found = last_json(invoke("check", team_file, "--json"))
    assert found["ok"]
    assert {f["agent"] for f in found["floors"]} == {"left", "right", "speaker"}
    assert all(f["noise_floor"] < 1e-8 for f in found["floors"]), "float32 sees a radius of 0.05"


@pytest.mark.long
def test_check_says_what_the_team_would_not_learn_from_and_what_the_run_takes(team_file):
    """With one token, only an empty message of left can end. 2 stages of 16 episodes, before the first update of a
    stage or before all three, as the plan likes; and 3 evaluations of 2 problems x 4."""
    result = invoke("check", team_file, "team.agents.left.max_tokens=1", "plan.preset=auto", "--json")
    found, told = last_json(result), result.stderr
    cut = found["health"]["agents"]["left"]["cut"]
    assert cut > 0.5
    advice = f"{100 * cut:.0f} % of left's messages are cut at 1 tokens: raise team.agents.left.max_tokens"
    assert advice in found["advice"]
    assert all(f"  advice: {text}" in told for text in found["advice"])
    health, estimate = found["health"], found["estimate"]
    assert health["messages"]["messages"] == 2 * 4 * 3
    per_episode = health["messages"]["mean"] * 3
    assert estimate["least_tokens"] == round(per_episode * (2 * 16 + 3 * 8))
    assert estimate["most_tokens"] == round(per_episode * (2 * 16 * 3 + 3 * 8))
    assert 0 < estimate["least_seconds"] < estimate["most_seconds"]
    assert f"the whole run, by these episodes: about {estimate['least_tokens']:,}" in told
    assert told.split("sampled tokens, ")[1].splitlines()[0].endswith(" by the model of teamtr plan --card cpu")


@pytest.mark.long
def test_seconds_of_a_run_are_those_of_the_plan_and_of_grading(team_file, monkeypatch):
    """2 stages of 16 episodes before each of three updates and 3 evaluations of 2 problems x 4: 120 episodes."""
    session = build(load_team_file(team_file))
    trial = try_out(session)
    floors = Scoring(tokens=1000, seconds=1.0)
    words = ceil(np.mean([len(turn.token_ids) for episode in trial.batch.episodes for turn in episode.turns]))
    _, planned = forecast(load_team_file(team_file), Where("cpu", message_tokens=words))
    slower = replace(trial, ledger=replace(trial.ledger, grading_seconds=0.5, environment_seconds=0.3))
    found = estimate(session, slower, floors)
    assert found.card == "cpu"
    assert found.least_seconds == found.most_seconds == pytest.approx(planned.run_seconds + 120 * 0.8 / 8)

    monkeypatch.setattr("teamtr.session.forecast.card_named", lambda name: None)
    unknown = estimate(session, slower, floors)
    assert unknown.card is None
    assert "less than" in estimate_line(unknown)
    faster = estimate(session, slower, replace(floors, seconds=0.5))
    read = np.mean([sum(len(x.context_ids) + len(x.token_ids) for x in each.turns) for each in trial.batch.episodes])
    assert unknown.least_seconds - faster.least_seconds == pytest.approx(2 * 16 * read * (2 + 3 * 2) * 0.0005)


@pytest.mark.long
def test_a_radius_that_drowns_in_rounding_is_refused(team_file, tmp_path, monkeypatch):
    """Scoring as coarse as bf16 makes a large model's: the floor is measured, named, and training does not start."""
    from teamtr.engines.torch.policy import TransformerPolicy

    features = TransformerPolicy.features
    monkeypatch.setattr(
        TransformerPolicy, "features", lambda self, p, m: (lambda h: h + 6.0 * (h * 1e6).frac())(features(self, p, m))
    )
    result = invoke("check", team_file, code=3)
    assert "the KL noise floor is too high" in result.stderr
    assert "noise floor" in result.stderr
    assert "raise plan.radius_nats_per_message, shorten max_tokens, or set plan.radius_nats_per_token" in result.stderr
    assert "fp32 (or" not in result.stderr, "it is what it has"
    invoke("train", team_file, "--out", tmp_path / "run", code=3)
    assert not (tmp_path / "run").exists(), "nothing was begun"
    invoke("train", team_file, "plan.preset=no_trust_region", "--out", tmp_path / "free")


def test_a_finer_precision_is_advised_where_there_is_one():
    from teamtr.session.checks import Floor, RadiusNotVisible, require_visible

    region = SimpleNamespace(plan=SimpleNamespace(region=SimpleNamespace(gate=True)))
    with pytest.raises(RadiusNotVisible, match=r"Set learner.precision to fp32 .* raise plan.radius_nats_per_token"):
        require_visible(region, [Floor("left", "bf16", 8, 0.1, 0.01, unit="token")])


def test_json_also_says_what_went_wrong(tmp_path):
    failed = last_json(invoke("train", tmp_path / "none.yaml", "--json", code=2))
    assert failed["exit_code"] == 2
    assert "none.yaml" in failed["error"]


def test_json_has_no_word_for_nan(capsys):
    emit({"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": 2}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.0, None], "c": {"d": 2}}


@pytest.mark.long
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


@pytest.mark.long
def test_plan_prints_what_is_needed(team_file):
    planned = last_json(invoke("plan", team_file, "--rehearse", "--json"))
    assert planned["fits"]
    assert planned["total_gb"] == pytest.approx(sum(item["gb"] for item in planned["items"]))
    assert set(planned["rehearsed"]["micro_batch"]) == {"left", "right", "speaker"}


@pytest.mark.long
def test_recipes_and_init(tmp_path):
    listed = invoke("recipes").stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(last_json(invoke("recipes", "--json"))["recipes"])
    path = tmp_path / "sub" / "team.yaml"
    invoke("init", path, "--recipe", "roles")
    first, _, rest = path.read_text().partition("\n")
    assert first == "# yaml-language-server: $schema=./team.schema.json"
    assert rest == last_json(invoke("recipes", "roles", "--json"))["team_file"]
    assert load_team_file(path).name == "roles"
    assert (path.parent / "team.schema.json").read_text() == invoke("schema").stdout
    assert "a5" in path.read_text()
    path.write_text("mine")
    assert "exists" in invoke("init", path, code=2).stderr
    assert path.read_text() == "mine"
    assert "code-exchange" in invoke("init", tmp_path / "x.yaml", "--recipe", "nonesuch", code=2).stderr


@pytest.mark.long
def test_init_renews_its_own_schema_and_leaves_any_other_alone(tmp_path):
    schema = tmp_path / "team.schema.json"
    invoke("schema", "--out", schema)
    made = schema.read_text()
    schema.write_text(json.dumps({**json.loads(made), "title": "of an older version"}))
    assert last_json(invoke("init", tmp_path / "a.yaml", "--json"))["schema"] == str(schema)
    assert schema.read_text() == made
    for other in ("{}", "[1]", "no JSON"):
        schema.write_text(other)
        assert "not made by teamtr" in invoke("init", tmp_path / "b.yaml", code=2).stderr
        assert schema.read_text() == other
        assert not (tmp_path / "b.yaml").exists()
    invoke("init", tmp_path / "b.yaml", "--force")
    assert schema.read_text() == made


@pytest.mark.parametrize("command", [[], ["demo"], ["train"], ["eval"], ["check"], ["recipes"], ["init"]])
def test_help_teaches(command):
    text = invoke(*command, "--help").stdout
    assert len(text.splitlines()) > 8


@pytest.mark.long
def test_demo_json_has_the_promised_line(tmp_path):
    result = invoke("demo", "--task", "roles", "--agents", 2, "--stages", 2, "--compare", "naive_sequential", "--json")
    line = last_json(result)
    for part in (line, line["compare"]):
        assert {"initial", "final", "updates", "accepted", "out_of_region", "tokens", "seconds"} <= set(part)
        assert part["updates"] == 4
        assert part["out_of_region"] == 0
        assert "regressing" in part
        assert part["seeds"] == {"0": {key: part[key] for key in ("initial", "final", "tokens")}}
    assert line["compare"]["tokens"] < line["tokens"], "stale rollouts are sampled once a stage"


def test_teams_of_a_demo_trained_beside_each_other(tmp_path, monkeypatch):
    """Whichever is finished first, the line has every seed of both plans."""
    from teamtr.session.demo import DemoResult, train_silently

    asked = []

    def last_first(work, runs, workers):
        asked.append((work, len(runs), workers))
        for run in reversed(runs):
            plan, seed = run.team_file.plan.preset, run.team_file.seed
            yield run, DemoResult(plan, seed, 0.1, final=0.5 + 0.1 * seed, tokens=100 if plan == "auto" else 800)

    monkeypatch.setattr("teamtr.session.processes.beside", last_first)
    arguments = ("demo", "--task", "roles", "--agents", 8, "--radius", 0.1, "--stages", 16, "--seeds", 2, "--seed", 1)
    result = invoke(*arguments, "--compare", "auto", "--workers", 3, "--out", tmp_path, "--json")
    line = last_json(result)
    assert asked == [(train_silently, 4, 3)]
    assert line["seeds"] == {
        "1": {"initial": 0.0, "final": 0.6, "tokens": 800},
        "2": {"initial": 0.0, "final": 0.7, "tokens": 800},
    }
    assert [seed["tokens"] for seed in line["compare"]["seeds"].values()] == [100, 100]
    assert line["compare"]["preset"] == "auto"
    assert "4/4  [teamtr, seed 1] success 0 % to 60 %, 800 tokens" in result.stderr
    assert [row.split()[:2] for row in result.stderr.splitlines() if row.startswith(("teamtr ", "auto "))] == [
        ["teamtr", "1"],
        ["teamtr", "2"],
        ["auto", "1"],
        ["auto", "2"],
    ]


def test_a_demo_has_the_plan_that_is_asked_for(monkeypatch):
    """By a setting, beside the one that ``--compare`` names; a seed by its option alone."""
    from teamtr.session.demo import DemoResult

    def untrained(work, runs, workers):
        return [(run, DemoResult(run.team_file.plan.preset, run.team_file.seed, 0.1)) for run in runs]

    monkeypatch.setattr("teamtr.session.processes.beside", untrained)
    arguments = ("demo", "--task", "roles", "--workers", 2)

    def plans(*more: str) -> list[str]:
        lines = invoke(*arguments, *more).stderr.splitlines()
        return [line.split()[0] for line in lines[lines.index("") + 2 : -2]]

    assert plans("plan.preset=auto") == ["auto"]
    assert plans("plan.preset=auto", "--compare", "joint") == ["auto", "joint"]
    assert plans("plan.preset=auto", "--compare", "auto") == ["auto"]
    assert plans("--compare", "auto") == ["teamtr", "auto"]
    assert "plan.preset must name a preset" in invoke(*arguments, "plan.preset=autp", code=2).stderr
    assert "--seed 4" in invoke(*arguments, "seed=4", code=2).stderr
    assert "--agents goes with --task roles" in invoke("demo", "--agents", 4, code=2).stderr


@pytest.mark.long
def test_a_demo_compared_with_itself_is_one_team(tmp_path):
    line = last_json(invoke("demo", "--task", "roles", "--agents", 2, "--stages", 1, "--compare", "teamtr", "--json"))
    assert line["updates"] == line["compare"]["updates"] == 2


@pytest.mark.long
def test_lab_verify_ends_with_the_promised_line(tmp_path):
    line = last_json(invoke("lab", "verify", "--teams", 100, "--json", "--figure", tmp_path / "v.png"))
    assert line["teams"] == 100
    assert {"thm:single", "thm:stage", "lem:chainrule", "ours:turn_aware"} <= set(line["checks"])
    for name, check in line["checks"].items():
        assert {"tested", "violations", "median_ratio", "p99_ratio"} <= set(check), name
        assert check["violations"] == 0, name
    assert (tmp_path / "v.png").stat().st_size > 10_000


@pytest.mark.long
def test_lab_roles_and_tightness(tmp_path):
    line = last_json(invoke("lab", "roles", "--largest", 4, "--json", "--figure", tmp_path / "r.pdf"))
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF-")
    assert "must end in .png, .pdf or .svg" in invoke("lab", "roles", "--figure", tmp_path / "r.gif", code=2).stderr
    assert line["n"] == [2, 3, 4]
    assert min(line["fresh"]) > 0.99 > max(line["stale"])
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


def wait_for_updates(folder: Path, count: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        log = folder / "log.jsonl"
        if log.exists() and sum('"kind":"update"' in line for line in log.read_text().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError("the run never got that far")


@pytest.mark.long
def test_ctrl_c_once_saves_and_the_same_command_goes_on(team_file, tmp_path):
    folder = tmp_path / "run"
    small = ("tiny.warmup_steps=1", "--out", folder, "--json")
    process = run_cli("train", team_file, "plan.stages=400", *small)
    wait_for_updates(folder, 2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    line = json.loads(stdout.strip().splitlines()[-1])
    assert line["status"] == "stopped"
    updates = line["updates"]
    assert RunFolder.read(folder).checkpoints.latest().number == updates
    assert "stage" in stderr
    assert "KL" in stderr, "plain progress lines without a terminal"
    finish = updates // 3 + 2
    again = last_json(
        invoke("train", team_file, f"plan.stages={finish}", "tiny.warmup_steps=1", "--out", folder, "--json")
    )
    assert again["updates"] == 3 * finish


@pytest.mark.slow
def test_ctrl_c_while_the_tiny_base_is_taught_stops_at_once(team_file, tmp_path):
    folder = tmp_path / "run"
    process = run_cli("train", team_file, "tiny.warmup_steps=100000", "--out", folder, "--json")
    try:
        said = iter(process.stderr.readline, "")
        next(line for line in said if line.startswith("teaching the tiny base"))  # on a busy machine not the first
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    *lines, last = stderr.splitlines()
    assert last == "error: interrupted; what was saved is intact: run the same command again to resume"
    assert all(line.endswith(("so far", "left at most")) for line in lines), "nothing else is done"
    assert json.loads(stdout)["exit_code"] == 130
    assert list(contents(folder)) == ["team.yaml"], "which binds nobody before there is a checkpoint"


@pytest.mark.slow
def test_ctrl_c_twice_stops_at_once_and_stays_resumable(team_file, tmp_path):
    folder = tmp_path / "run"
    small = ("plan.problems=8", "tiny.warmup_steps=1", "--out", folder)
    process = run_cli("train", team_file, "plan.stages=400", *small)
    wait_for_updates(folder, 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    commit = RunFolder.read(folder).checkpoints.latest()
    assert commit.number >= 1
    stages = commit.number // 3 + 1
    again = last_json(invoke("train", team_file, f"plan.stages={stages}", *small, "--json"))
    assert again["updates"] == 3 * stages


@pytest.mark.long
def test_what_was_asked_for_is_on_stdout_and_with_json_the_record_alone(team_file, tmp_path):
    """So that `teamtr eval run > file` keeps the figures; progress and warnings stay on stderr."""
    invoke("train", team_file, "--out", tmp_path / "run")
    commands = {
        "fine": ("check", team_file),
        "worst step": ("plan", team_file),
        "verdicts:": ("eval", tmp_path / "run", "--limit", "2"),
        "0 violations": ("lab", "verify", "--teams", "20"),
    }
    for word, command in commands.items():
        asked, recorded = invoke(*command), invoke(*command, "--json")
        assert word in asked.stdout
        assert word not in asked.stderr
        assert word in recorded.stderr
        assert isinstance(json.loads(recorded.stdout), dict), "one line of JSON and nothing else"


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["train"], ["eval"], ["lab"], ["lab", "verify"]])
def test_h_is_help(words: list[str]) -> None:
    assert invoke(*words, "-h").stdout == invoke(*words, "--help").stdout


def test_windows_is_told_that_it_will_not_do(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "not on Windows" in capsys.readouterr().err


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),
        PanicException("The global thread pool has not been initialized."),
    ],
)
def test_memory_that_runs_out_is_a_message(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, errors():
        raise error
    assert ended.value.exit_code == 1
    assert "there is not enough memory; what was saved is intact" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("error", [RuntimeError("something else"), PanicException("something else"), KeyError("x")])
def test_an_error_that_nobody_knows_keeps_its_traceback(error: BaseException) -> None:
    with pytest.raises(type(error)), errors():
        raise error
