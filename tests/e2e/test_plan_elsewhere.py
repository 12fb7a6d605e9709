"""``teamtr plan --card``: for a cluster that need not be there, from configs alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from teamtr.cli import app
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.session import models

CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
TEAM = """
name: elsewhere
task: {name: sums}
team:
  model: model
  train: lora
  max_tokens: 256
  agents: [{name: solver}, {name: checker}]
plan: {preset: teamtr, stages: 10, problems: 64, group_size: 8, radius_nats_per_message: 0.05}
learner: {epochs: 1, micro_batch: 16}
"""


@pytest.fixture
def team_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 8B parameters of which there is a config and a tokenizer, and no weight."""
    character_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "team.yaml").write_text(TEAM)
    monkeypatch.chdir(tmp_path)

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(models, "load_pretrained", load)
    return tmp_path / "team.yaml"


def plan(team_file: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(team_file), *more])


def record(team_file: Path, *more: str) -> dict:
    result = plan(team_file, *more, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.long
def test_memory_seconds_bounds_and_what_would_help_without_weights(team_file: Path):
    result = plan(team_file, "--card", "H200")
    assert result.exit_code == 0, result.output
    for told in (
        "workers: 1 on 1 x H200",
        "keys and values",
        "fits",
        "placement: 1 to a card",
        "cluster.shard_base not",
    ):
        assert told in result.output
    for told in ("sample", "score", "train", "gate", "a stage", "sampled tokens/s", "precision fp16", "would help:"):
        assert told in result.output
    assert "trained parameters: solver 43,646,976" in result.output, "as without --card"


@pytest.mark.long
def test_the_json_has_the_same_and_more_workers_are_faster_until_they_read_weights_for_few_rows(team_file: Path):
    one = record(team_file, "--card", "H200")
    two = record(team_file, "--card", "H200", "cluster.engine=ray", "cluster.workers=2")
    many = record(team_file, "--card", "H200", "cluster.engine=ray", "cluster.workers=64")
    seconds = [found["predicted"]["stage_seconds"] for found in (one, two, many)]
    assert seconds[1] < seconds[0]
    assert many["predicted"]["bound"] == "bandwidth"
    assert (two["cards"], two["workers"], two["shards"]) == (2, 2, 2), "a card for each worker, if nothing else is said"
    assert one["fits"]
    assert one["total_gb"] < one["available_gb"]
    assert sum(item["gb"] for item in one["items"]) == pytest.approx(one["total_gb"])
    phases = one["predicted"]["phases"]
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(seconds[0])
    assert one["predicted"]["run_seconds"] >= 10 * seconds[0]
    assert any("cluster.workers=2" in change["settings"] for change in one["would_help"])
    assert one["placement"]["workers_on_a_card"] == 1
    assert one["sizes"]["stages"] == 10


@pytest.mark.long
def test_workers_that_share_a_card_have_a_part_of_its_memory(team_file: Path):
    apart = record(team_file, "--card", "H200", "cluster.engine=ray", "cluster.workers=2")
    shared = record(team_file, "--card", "H200", "--cards", "1", "cluster.engine=ray", "cluster.workers=2")
    assert shared["placement"]["workers_on_a_card"] == 2
    assert shared["available_gb"] < 0.5 * apart["available_gb"]
    assert shared["predicted"]["stage_seconds"] > apart["predicted"]["stage_seconds"]


@pytest.mark.long
def test_a_slow_network_between_machines_takes_longer(team_file: Path):
    settings = ("--card", "H200", "cluster.engine=ray", "cluster.workers=16")
    usual, slow = record(team_file, *settings), record(team_file, *settings, "--network", "0.1")
    assert slow["predicted"]["phases"]["exchange"]["seconds"] > 2 * usual["predicted"]["phases"]["exchange"]["seconds"]
    one_machine = ("--card", "H200", "cluster.engine=ray", "cluster.workers=8")
    usual, slow = record(team_file, *one_machine), record(team_file, *one_machine, "--network", "0.1")
    assert slow["predicted"] == usual["predicted"], "nothing leaves the machine"


@pytest.mark.long
def test_what_does_not_fit_says_so_and_what_would(team_file: Path):
    result = plan(team_file, "--card", "H100")
    assert "DOES NOT FIT" in result.output
    assert "cluster.shard_base needed: cluster.shard_base=true over at least 2 workers" in result.output
    assert "would help: cluster.engine=ray cluster.workers=2" in result.output
    full = plan(team_file, "--card", "H200", "team.train=full")
    assert "DOES NOT FIT" in full.output
    assert "cluster.shard_base=true" in full.output
    small = plan(team_file, "--card", "RTX4090", "team.train=full")
    assert "no setting of the cluster makes it fit" in small.output


@pytest.mark.long
def test_a_plan_says_whose_activations_are_recomputed(team_file: Path):
    long = ("--card", "H200", "team.max_tokens=8192", "plan.problems=2", "learner.precision=fp16", "learner.base=fp16")
    long += ("sampling.adapters=by_row", "sampling.memory_gb=10")
    result = plan(team_file, *long)
    assert result.exit_code == 0, result.output
    assert "learner.recompute: a step computes the activations of checker again on the way back" in result.output
    assert "activations recomputed (checker)" in result.output
    found = record(team_file, *long)
    assert found["recomputed"] == ["checker"]
    hours, minutes, _ = re.search(r"stages in about (\d+):(\d\d):(\d\d), without grading", result.output).groups()
    assert int(hours) + int(minutes) / 60 == pytest.approx(found["predicted"]["run_seconds"] / 3600, abs=1 / 60)
    kept = plan(team_file, *long, "learner.recompute=never")
    assert "DOES NOT FIT" in kept.output
    assert "activations recomputed" not in kept.output
    assert "would help: learner.recompute=auto" in kept.output
    spread = ("cluster.engine=ray", "cluster.workers=2", "cluster.shard_base=true", "learner.recompute=always")
    refused = plan(team_file, "--card", "H200", *spread)
    assert refused.exit_code == 2
    assert "learner.recompute: always computes layers again" in refused.output


GROUPS = ("cluster.engine=ray", "cluster.groups=[{agents: [solver], workers: 2}, {agents: [checker]}]")


@pytest.mark.long
def test_groups_are_planned_one_by_one(team_file: Path):
    """A worker has the weights of its own group's agents, and those of both groups are what a worker would have."""
    settings = ("--card", "H200", "team.train=full", "team.agents.checker.frozen=true", "team.agents.solver.train=lora")
    together = record(team_file, *settings, "cluster.engine=ray", "cluster.workers=3")
    found = record(team_file, *settings, *GROUPS)
    assert [group["agents"] for group in found["groups"]] == [["solver"], ["checker"]]
    assert [group["workers"] for group in found["groups"]] == [2, 1]
    weights = [group["items"][0]["gb"] for group in found["groups"]]
    assert together["items"][0]["gb"] == pytest.approx(sum(weights))
    assert together["groups"] == []
    assert found["where"] == "group 0 (solver)", "which trains"
    assert (found["workers"], found["shards"]) == (3, 2)
    seconds = [group["stage_seconds"] for group in found["groups"]]
    assert found["predicted"]["stage_seconds"] == pytest.approx(sum(seconds))
    told = plan(team_file, *settings, *GROUPS)
    assert told.exit_code == 0, told.output
    for words in ("group 0 (solver): 2 workers", "group 1 (checker): 1 worker", "cluster.groups.0.workers=4"):
        assert words in told.output
    assert told.output.count("placement: 1 to a card") == 2


@pytest.mark.long
def test_shorter_messages_and_a_plan_that_decides_as_it_goes(team_file: Path):
    long, short = (
        record(team_file, "--card", "H200", *more)["predicted"]["stage_seconds"]
        for more in ((), ("--message-tokens", "64"))
    )
    assert short < 0.7 * long
    assert "one batch a stage is assumed" in plan(team_file, "--card", "H200", "plan.preset=auto").output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--card", "H300"], "no card 'H300' in the table (did you mean H"),
        (["--cards", "8"], "need --card"),
        (["--card", "H200", "--rehearse"], "--rehearse needs the card itself"),
        (["--card", "H200", "device=cpu"], "device: cpu uses no card"),
    ],
)
def test_wrong_usage_is_an_error_that_says_what_to_do(team_file: Path, options: list[str], told: str):
    result = plan(team_file, *options)
    assert result.exit_code == 2
    assert told in result.output


def test_a_config_without_a_key_names_it(team_file: Path):
    (team_file.parent / "model" / "config.json").write_text(
        json.dumps({key: value for key, value in CONFIG.items() if key != "hidden_size"})
    )
    result = plan(team_file, "--card", "H200")
    assert result.exit_code == 2
    assert "hidden_size is missing in config.json" in result.output


def test_the_built_in_model_is_planned_on_cores(tmp_path: Path):
    (tmp_path / "team.yaml").write_text(TEAM.replace("model: model", "model: tiny"))
    result = plan(tmp_path / "team.yaml", "--card", "cpu", "--cards", "2")
    assert result.exit_code == 0, result.output
    assert "a CPU's memory is not counted" in result.output
    assert "precision fp32" in result.output
