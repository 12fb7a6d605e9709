"""Agents of a team replaced, as a person or a script does it: compat, swap, and export of what came of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from called import invoke, last_json
from teamtr.config import loads
from teamtr.session import train as runs
from teamtr.session.resume import StoredRun
from teamtr.store import RunFolder
from teamtr.swap import run_strings

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 10, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2, train: lora, lora: {rank: 2}}
    - {name: speaker, max_tokens: 3}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 1}
eval: {every: 1, samples: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "run"
    for _ in runs.train(loads(TEAM, "small"), folder):
        pass
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("commands") / "out"
    return out, last_json(invoke("export", run, out, "--json"))


@pytest.mark.long
def test_compat(exported, run, tmp_path):
    from transformers import AutoTokenizer

    out, _ = exported
    same = last_json(invoke("compat", "tiny", out / "left", "--run", run, "--json"))
    assert same["identical"]
    assert same["strings"] == len(run_strings(run)) + 1000
    fewer = last_json(invoke("compat", "tiny", out / "left", "--run", run, "--count", 5, "--json"))
    assert fewer["strings"] == 5 + 1000, "the difficult ones are always all there"
    tokenizer = AutoTokenizer.from_pretrained(out / "left")
    tokenizer.add_tokens(["AB"])
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "strings.txt").write_text("BA\nxAB\n")
    result = invoke(
        "compat", "tiny", tmp_path / "other", "--strings", tmp_path / "strings.txt", "--count", 4, "--json", code=3
    )
    found = last_json(result)
    assert not found["identical"]
    assert found["differences"][0]["string"] == "xAB"
    assert found["differences"][0]["position"] == 1
    assert "exact KL does not apply" in result.stderr
    assert "the folder has no tokenizer" in invoke("compat", "tiny", tmp_path, code=2).stderr


@pytest.mark.long
def test_swap_then_train_then_export(exported, run, tmp_path):
    model, out = exported[0] / "left", tmp_path / "out"
    options = (
        "--agent",
        "speaker",
        "--with",
        model,
        "--train",
        "full",
        "--out",
        out,
        "--probes",
        32,
        "--max-steps",
        25,
    )
    told = last_json(invoke("swap", run, *options, "--json"))
    assert told["folder"] == str(out)
    assert told["certified"] is False
    assert "curve" not in told["alignment"]
    trained = last_json(invoke("train", out / "team.yaml", "--out", out, "--json"))
    assert trained["updates"] == 6
    invoke("export", out, tmp_path / "agents")
    cards = {name: (tmp_path / "agents" / name / "README.md").read_text() for name in ("left", "speaker")}
    assert "swapped in | after 3 updates of the team, aligned; not certified" in cards["speaker"]
    assert re.search(r"updates of this agent, since it joined after 1 stage \| [01] kept of 1 \|", cards["speaker"])
    assert re.search(r"updates of this agent, since the run began \| [012] kept of 2 \|", cards["left"])


@pytest.mark.long
def test_without_out_the_new_run_is_beside_the_old_one(run, monkeypatch):
    """Also for one that stands in it."""
    monkeypatch.chdir(run)
    before = set(run.iterdir())
    invoke("swap", ".", "--agent", "speaker", "--with", "tiny", "--no-align", "--probes", 8, "--eval-problems", 1)
    assert set(run.iterdir()) == before
    assert (run.parent / "run-swap-speaker" / "team.yaml").exists()


@pytest.mark.long
def test_swap_looks_at_what_was_asked_before_anything_takes_time(run, exported, tmp_path, monkeypatch):
    """No model is built for a name that nobody has, a folder that is not there, or a folder that is taken."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    (tmp_path / "empty").mkdir()

    def build(*_: object) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr("teamtr.session.train.build", build)
    for agent, model, out, told in (
        ("nobody", "tiny", "x", "no agent 'nobody' in this run; it has left, right, speaker"),
        ("left", "./nowhere", "x", "there is no such folder"),
        ("left", tmp_path / "empty", "x", "the folder has no config.json"),
        ("left", exported[0] / "right", "x", "is an adapter, not a whole model"),
        ("left", "SmolLm/nonesuch", "x", "there is no such folder, and the hub could not be reached"),
        ("left", "tiny", "mine", "neither empty nor a run folder"),
    ):
        refused = invoke("swap", run, "--agent", agent, "--with", model, "--out", tmp_path / out, code=2).stderr
        assert told in refused
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["empty", "mine", "mine/file"]


@pytest.mark.long
def test_a_swap_that_never_began_binds_nobody(run, exported, tmp_path):
    """Weights that are no numbers are found out when they are loaded; the corrected command may use the same folder."""
    model, torn = exported[0] / "left", tmp_path / "torn"
    shutil.copytree(model, torn)
    weights = load_file(torn / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, torn / "model.safetensors", {"format": "pt"})
    options = ("--agent", "speaker", "--no-align", "--probes", 8, "--eval-problems", 1, "--out", tmp_path / "out")
    refused = invoke("swap", run, "--with", torn, *options, code=2).stderr
    assert "(model.norm.weight in model.safetensors)" in refused
    told = invoke("swap", run, "--with", "tiny", *options).stderr
    assert "held-out success" in told
    assert "another swap (model differ)" in invoke("swap", run, "--with", model, *options, code=3).stderr


def test_swap_says_where_it_is_within_the_radius_and_where_not():
    from teamtr.cli.swap import _lines

    alignment = {"within_radius": True, "radius": 0.05, "kl": 0.01, "kl_upper": 0.04, "train_kl": 0.02}
    record = {
        "kind": "swap",
        "agent": "left",
        "mode": "aligned",
        "from": {"model": "tiny"},
        "to": {"model": "other"},
        "shock": 0.0,
        "direct_shock": 0.5,
    }
    near, far = ({"messages": 9, "kl": upper / 2, "kl_upper": upper} for upper in (0.05, 0.3))
    within = _lines({**record, "alignment": {**alignment, "unseen": near}})
    assert within[1] == "on held-out probes: KL 0.0100 (upper 0.0400), within the radius 0.05"
    assert within[2:] == ["on unseen test problems: KL 0.0250 (upper 0.0500), within the radius 0.05"]
    outside = _lines({**record, "alignment": {**alignment, "unseen": far}})
    assert outside[1] == within[1]
    assert outside[2] == "on unseen test problems: KL 0.1500 (upper 0.3000), outside the radius 0.05"
    assert "more --probes" in outside[3]
    short = _lines({**record, "alignment": {**alignment, "within_radius": False, "kl_upper": 0.2, "unseen": far}})
    assert short[1].endswith("(upper 0.2000), outside the radius 0.05")
    assert short[3].startswith("warning: the radius was not reached")


@pytest.mark.long
@pytest.mark.parametrize("command", ["eval", "export", pytest.param("swap", marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_read(command, run, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(run, torn)
    numbers = RunFolder.read(torn).checkpoints.numbers()
    newest = torn / "checkpoints" / "commits" / f"{numbers[-1]:06d}" / "team.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    told = {
        "eval": ("eval", torn, "--limit", 1, "--json"),
        "export": ("export", torn, tmp_path / "out", "--agent", "left", "--json"),
        "swap": ("swap", torn, "--agent", "left", "--with", "tiny", "--no-align", "--probes", 8, "--eval-problems", 1),
    }[command]
    result = invoke(*told)
    said = " ".join(result.stderr.split())
    assert f"warning: commit {numbers[-1]} was passed over: {newest} has" in said
    assert f"Read instead: the team after {numbers[-2]} updates" in said
    if command == "eval":
        assert last_json(result)["updates"] == numbers[-2]
    if command == "export":
        assert "after 3 updates" not in (tmp_path / "out" / "README.md").read_text(), "that is of the damaged one"


@pytest.mark.long
def test_a_run_that_is_read_is_built_though_it_has_gone_on(run, tmp_path):
    """What ``eval``, ``export`` and ``swap`` do beside ``train``: read the newest commit, and then load it."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    stored = StoredRun.read(copied)
    versions = stored.commit.progress["versions"]
    with RunFolder.open(copied, keep_commits=1) as writer:
        for number in range(4, 8):
            agents = {name: f"{number:x}{k}" for k, name in enumerate(stored.commit.agents)}
            save = lambda name, folder: (folder / "model.safetensors").write_bytes(b"")  # noqa: E731
            writer.checkpoints.commit(number, agents, save, {})
        _, team = stored.build()
        assert team.versions == versions
        assert writer.checkpoints.numbers() == [3, 7]


def test_stages_after_a_swap(run):
    """As the help of --stages says: what is left; of a finished run all once more; or what was asked for."""
    from teamtr.swap.request import Request, new_team_file

    told = " ".join(re.sub("[│╭╮╰╯─]", " ", invoke("swap", "--help").stdout).split())
    assert "default: remaining stages, or the full plan if finished" in told
    team_file = loads(TEAM.replace("train: lora, lora: {rank: 2}", "train: full"), "small", ["plan.stages=10"])
    for next_stage, stages, ends in ((4, None, 10), (10, None, 20), (10, 3, 13)):
        request = Request("left", "tiny", stages=stages)
        made = new_team_file(team_file, request, next_stage=next_stage, models=run.parent / "models")
        assert made.plan.stages == ends


@pytest.mark.long
def test_swap_refuses_what_contradicts_itself(run, tmp_path):
    options = ("--agent", "left", "--with", "tiny", "--out", tmp_path / "x")
    assert "use either --no-align or --reset" in invoke("swap", run, *options, "--no-align", "--reset", code=2).stderr
    for flag, value in (("--learning-rate", 0.1), ("--max-steps", 3), ("--held-out", 0.5), ("--doublings", 0)):
        for mode in ("--no-align", "--reset"):
            refused = invoke("swap", run, *options, mode, flag, value, code=2).stderr
            assert f"{flag} is for the alignment, and {mode} makes none" in refused
    assert "--check-every is for" in invoke("swap", run, *options, "--reset", "--check-every", 5, code=2).stderr
    assert "full or lora" in invoke("swap", run, *options, "--train", "some", code=2).stderr
    assert "keep or strip or forbid" in invoke("swap", run, *options, "--think", "aloud", code=2).stderr
    assert "strictly between" in invoke("swap", run, *options, "--held-out", 1, code=2).stderr
    for rate in ("nan", "inf", "0", "-0.001"):
        refused = invoke("swap", run, *options, "--learning-rate", rate, code=2).stderr
        assert "--learning-rate is a finite number above 0" in refused, rate
    assert not (tmp_path / "x").exists()
