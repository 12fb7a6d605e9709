"""Teams of every kind train end to end: adapters on a shared base, different tokenizers, tables, your own data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from teamtr import run
from teamtr.build import _use_few_threads, build
from teamtr.config import loads
from teamtr.errors import Misuse
from teamtr.store import RunFolder
from teamtr.stored import StoredRun

pytestmark = pytest.mark.long

SMALL = "tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}\n"
PLAN = """
plan: {stages: 2, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 0}
"""
CODE = """
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.8}
team:
  model: %s
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
"""


def train(text: str, folder: Path, *overrides: str) -> list[dict]:
    return list(run.train(loads(text, "team", overrides), folder))


def updates(records: list[dict]) -> list[dict]:
    return [r for r in records if r["kind"] == "update"]


def word_model(folder: Path, width: int) -> Path:
    """A model with another tokenizer (whole words) and another size, saved as any model is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["[pad]", "[end]", "[user]", "[bot]", "[sys]", "[unk]", *"ABCDEFGH0123456789", "left", "right", ":", "you"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[pad]",
        eos_token="[end]",
        unk_token="[unk]",
        additional_special_tokens=["[user]", "[bot]", "[sys]"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}[sys] {{ m.content }} {% elif m.role == 'user' %}"
        "[user] {{ m.content }} {% else %}[bot] {{ m.content }} [end]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(words),
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=width // 2,
                eos_token_id=1,
                pad_token_id=0,
                bos_token_id=None,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_lora_agents_share_one_frozen_base(tmp_path):
    text = "name: lora\n" + SMALL + CODE % "tiny" + PLAN
    overrides = ("team.train=lora", "team.lora.rank=2", "plan.stages=3", "plan.problems=4", "plan.group_size=8")
    workshop = build(loads(text, "team", overrides))
    policies = [workshop.engine.learner(n).policy for n in workshop.team.names]
    assert len({id(p.model) for p in policies}) == 1
    base = {k: v.clone() for k, v in policies[0].model.named_parameters() if "lora_" not in k}

    records = updates(train(text, tmp_path / "run", *overrides))
    assert any(r["outcome"] == "accepted" for r in records)
    assert all(r["kl_upper"] <= r["radius"] for r in records)
    stored = StoredRun.read(tmp_path / "run")
    (reopened, team), commit = stored.build(), stored.commit
    assert team.versions == commit.progress["versions"]
    for name, value in reopened.engine.learner("left").policy.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(value, base[name]), f"{name} of the frozen base changed"
    saved = RunFolder.read(tmp_path / "run").checkpoints.folder_of(commit, "left")
    assert (saved / "adapter_model.safetensors").exists()
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 2


def test_a_checkpoint_loads_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "name: plain\n" + SMALL + CODE % "tiny" + PLAN
    train(text, tmp_path / "run")
    stored = StoredRun.read(tmp_path / "run")
    (workshop, _), commit = stored.build(), stored.commit
    folder = RunFolder.read(tmp_path / "run").checkpoints.folder_of(commit, "speaker")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = workshop.engine.learner("speaker").policy
    ids = torch.tensor([tokenizer.encode("<user>left: A<bot>", add_special_tokens=False)])
    with torch.no_grad():
        expected = ours.model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_team_of_different_sizes_and_tokenizers(tmp_path):
    big = word_model(tmp_path / "words", width=32)
    text = "name: mixed\n" + SMALL + CODE % "tiny" + PLAN
    overrides = (f"team.agents.speaker.model={big}", "team.agents.speaker.train=full")
    records = updates(train(text, tmp_path / "run", *overrides))
    assert len(records) == 6
    assert all(np.isfinite(r["kl_full"]) for r in records)
    batch_file = sorted((tmp_path / "run" / "episodes").iterdir())[0]
    from teamtr.store import read_episodes

    episode = read_episodes(batch_file).episodes[0]
    by_agent = {t.agent: t for t in episode.turns}
    assert len(by_agent["speaker"].context_ids) < len(by_agent["left"].text + by_agent["right"].text) + 20
    assert max(by_agent["speaker"].token_ids) < 30, "the speaker's tokens are words of its own tokenizer"


def test_a_tabular_team_runs_from_a_team_file(tmp_path):
    text = "name: table\n" + CODE % "tabular" + PLAN
    records = updates(train(text, tmp_path / "run", "plan.problems=4", "plan.group_size=32"))
    assert any(r["outcome"] == "accepted" for r in records)
    assert all(r["noise_floor"] is None or r["noise_floor"] < 1e-8 for r in records)


def test_per_token_radius_is_gated_per_token(tmp_path):
    text = "name: token\n" + SMALL + CODE % "tiny" + PLAN.replace("radius_nats_per_message", "radius_nats_per_token")
    records = updates(train(text, tmp_path / "run", "plan.problems=4", "plan.group_size=8"))
    accepted = [r for r in records if r["outcome"] == "accepted"]
    assert accepted
    for r in accepted:
        assert r["unit"] == "token"
        assert r["kl_per_token"] <= r["kl_upper"] <= r["radius"]
        assert r["kl_full"] > r["kl_per_token"], "messages here have more than one token"


@pytest.mark.parametrize("extra", [(), ("team.history=chat", "team.router.rounds=2")])
def test_own_data_with_a_number_and_two_rounds(tmp_path, extra):
    rows = [{"question": f"{i}+1?", "answer": str(i + 1), "hint": "count"} for i in range(30)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    text = f"""
name: data
{SMALL}
task: {{name: data, path: {tmp_path}/q.jsonl, held_out: 0.3, grader: number, private: {{b: hint}}}}
team:
  model: tiny
  max_tokens: 3
  agents: [{{name: a}}, {{name: b}}]
  answer: majority
{PLAN}"""
    records = updates(train(text, tmp_path / "run", *extra))
    assert len(records) == 4


def test_own_python_reward(tmp_path):
    """A reward that likes digits teaches an untrained model to write digits; it sees prompts and columns."""
    (tmp_path / "reward.py").write_text(
        "def reward(prompts, completions, weight, **columns):\n"
        "    assert all(p.startswith('say') for p in prompts)\n"
        "    return [w * sum(c.isdigit() for c in text) / 4 for text, w in zip(completions, weight)]\n"
    )
    rows = [{"question": f"say {i}", "answer": "", "weight": 1.0} for i in range(12)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    text = f"""
name: reward
{SMALL}
task: {{name: data, path: {tmp_path}/q.jsonl, held_out: 0.2, grader: "python:{tmp_path}/reward.py:reward"}}
team: {{model: tiny, max_tokens: 4, agents: [{{name: a}}]}}
plan: {{stages: 25, problems: 8, group_size: 8, radius_nats_per_message: 0.1}}
learner: {{minibatches: 2}}
eval: {{every: 0}}
"""
    records = updates(train(text, tmp_path / "run"))
    rewards = [r["reward"] for r in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards


def test_dapo_redraws_problems_without_signal(tmp_path):
    text = "name: dapo\n" + SMALL + CODE % "tiny" + PLAN
    small = ("task.symbols=ABCD", "tiny.warmup_steps=60", "plan.problems=8", "plan.group_size=2")
    plain = updates(train(text, tmp_path / "plain", "plan.preset=grpo", *small))
    dapo = updates(train(text, tmp_path / "dapo", "plan.preset=dapo", *small))
    assert sum(r["groups_without_signal"] for r in dapo) < sum(r["groups_without_signal"] for r in plain)
    assert dapo[-1]["episodes_total"] > plain[-1]["episodes_total"]


@pytest.mark.slow
def test_the_demo_learns_on_three_seeds(tmp_path):
    """What the README promises: from at most 30 % to at least 85 %, mean of three seeds, nothing out of region."""
    from teamtr.demo import demo_file, train_demo

    results = [
        train_demo(
            demo_file("code", agents=3, preset="teamtr", seed=s, radius=None, stages=None),
            tmp_path / str(s),
            iter,
            lambda: False,
        )
        for s in range(3)
    ]
    assert np.mean([r.initial for r in results]) <= 0.30
    assert np.mean([r.final for r in results]) >= 0.85
    assert sum(r.out_of_region for r in results) == 0


def test_learning_rate_zero_changes_no_bit_of_a_transformer_team(tmp_path):
    text = "name: still\n" + SMALL + CODE % "tiny" + PLAN
    records = train(
        text, tmp_path / "run", "learner.learning_rate=0", "plan.stages=7", "plan.problems=4", "plan.group_size=8"
    )
    done = updates(records)
    assert len(done) == 21
    assert sum(r["outcome"] == "restored" for r in done) >= 10, "too few updates were tried to show anything"
    for r in done:
        assert (r["kl_full"], r["kl_upper"], r["kl_k1"], r["kl_k3"]) == (0.0, 0.0, 0.0, 0.0)
        assert r["version_before"] == r["version_after"]
    fresh = build(loads(text, "team", ["learner.learning_rate=0"]))
    _, team = StoredRun.read(tmp_path / "run").build()
    assert team.versions == fresh.team.versions


@pytest.mark.parametrize("kind", ["gain", "certified"])
def test_radii_are_shared_out_by_what_agents_gained(tmp_path, kind):
    text = "name: share\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.stages=3", "plan.problems=4", "plan.group_size=8", f"plan.allocate={kind}")
    found = updates(train(text, tmp_path / "run", *settings))
    by_stage = [[r["radius"] for r in found if r["stage"] == stage] for stage in range(3)]
    assert by_stage[0] == [0.05] * 3
    shared = [radii for radii in by_stage[1:] if len(set(radii)) > 1]
    assert shared, "some stage gave some agent more than another"
    assert all(sum(radii) <= 3 * 0.05 * (1 + 1e-9) for radii in by_stage)
    assert all(radius >= 0.005 for radii in by_stage for radius in radii)


def test_radii_are_not_shared_out_by_certificates_that_are_not_issued():
    overrides = ("plan.preset=naive_sequential", "plan.allocate=gain")
    with pytest.raises(Misuse, match="reuses rollouts"):
        loads("name: x\n" + SMALL + CODE % "tiny" + PLAN, "team", overrides)


def test_diagnostics_change_no_bit(tmp_path):
    text = "name: gate\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.stages=2", "plan.group_size=48", "learner.epochs=1")
    plain = updates(train(text, tmp_path / "plain", *settings))
    probed = updates(train(text, tmp_path / "probed", *settings, "diagnostics.every=1"))
    assert [r["version_after"] for r in plain] == [r["version_after"] for r in probed]
    assert any("probe" in r for r in probed)


@pytest.mark.parametrize(("overrides", "whole"), [((), False), (("plan.preset=naive_sequential",), True),
                                                  (("diagnostics.every=1",), False)])  # fmt: skip
def test_only_plans_that_reuse_rollouts_gate_on_every_message(tmp_path, overrides, whole):
    text = "name: gate\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.stages=3", "learner.confidence=0.5", "plan.problems=2", "plan.group_size=64", *overrides)
    kept = [r for r in updates(train(text, tmp_path / "run", *settings)) if r["outcome"] == "accepted"]
    assert kept
    looked_at_all = [r["messages_measured"] == r["messages"] for r in kept]
    assert all(looked_at_all) is whole


@pytest.mark.parametrize(
    ("models", "asked", "threads"),
    [(("tiny", "tiny"), None, [1]), (("tiny", "./folder"), None, []), (("tiny", "tiny"), "4", [])],
)
def test_built_in_models_take_one_thread_unless_the_environment_says(monkeypatch, models, asked, threads):
    team = {"agents": [{"name": f"a{k}", "model": model} for k, model in enumerate(models, start=1)]}
    team_file = loads(f"name: threads\ntask: {{name: roles}}\nteam: {json.dumps(team)}\n")
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    _use_few_threads(team_file)
    assert set_to == threads
