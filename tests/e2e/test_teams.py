"""Teams of every kind train end to end: adapters on a shared base, different tokenizers, tables, your own data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr.config import loads
from teamtr.errors import UserError
from teamtr.randomness import generator
from teamtr.rollout import has_signal_P, punishments_PG, trained_returns_PG
from teamtr.session import driver
from teamtr.session import train as run
from teamtr.session.build import build
from teamtr.session.inputs import OtherInputs
from teamtr.session.models import _use_few_threads
from teamtr.session.resume import StoredRun
from teamtr.store import RunFolder, StoreError, batch_name, read_episodes

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
    session = build(loads(text, "team", overrides))
    policies = [session.engine.learner(n).policy for n in session.team.names]
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
    (session, _), commit = stored.build(), stored.commit
    folder = RunFolder.read(tmp_path / "run").checkpoints.folder_of(commit, "speaker")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = session.engine.learner("speaker").policy
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_dapo_redraws_problems_without_signal(tmp_path):
    text = "name: dapo\n" + SMALL + CODE % "tiny" + PLAN
    small = ("task.symbols=ABCD", "tiny.warmup_steps=60", "plan.problems=4", "plan.group_size=2")
    plain = updates(train(text, tmp_path / "plain", "plan.preset=grpo", *small))
    dapo = updates(train(text, tmp_path / "dapo", "plan.preset=dapo", *small))
    assert sum(r["groups_without_signal"] for r in dapo) < sum(r["groups_without_signal"] for r in plain)
    assert dapo[-1]["episodes_total"] > plain[-1]["episodes_total"]
    exhausted = ("task.symbols=AB", "plan.problems=8", "plan.group_size=2", "plan.stages=1")
    (first, *_) = updates(train(text, tmp_path / "exhausted", "plan.preset=dapo", *exhausted))
    assert first["dynamic_sampling"]["ended"] == "all_tried", "two problems, and a batch of eight has them all"
    assert (first["dynamic_sampling"]["rounds"], first["episodes_total"]) == (0, 16)


@pytest.mark.slow
def test_the_demo_learns_on_three_seeds(tmp_path):
    """What the README promises: from at most 30 % to at least 85 %, mean of three seeds, nothing out of region."""
    from teamtr.session.demo import demo_file, train_demo

    results = [
        train_demo(
            demo_file("code", agents=3, seed=s),
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


@pytest.mark.parametrize("kind", ["gain", pytest.param("certified", marks=pytest.mark.slow)])
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
    with pytest.raises(UserError, match="reuses rollouts"):
        loads("name: x\n" + SMALL + CODE % "tiny" + PLAN, "team", overrides)


@pytest.mark.slow
def test_diagnostics_change_no_bit(tmp_path):
    text = "name: gate\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.stages=2", "plan.group_size=48", "learner.epochs=1")
    plain = updates(train(text, tmp_path / "plain", *settings))
    probed = updates(train(text, tmp_path / "probed", *settings, "diagnostics.every=1"))
    assert [r["version_after"] for r in plain] == [r["version_after"] for r in probed]
    assert any("probe" in r for r in probed)


@pytest.mark.parametrize(
    ("overrides", "whole"),
    [
        (("plan.preset=naive_sequential",), True),
        pytest.param(("diagnostics.every=1",), False, marks=pytest.mark.slow),
        pytest.param((), False, marks=pytest.mark.slow),
    ],
)
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


ROLES = """
name: roles
task: {name: roles}
team: {model: tabular, max_tokens: 2, agents: [{name: a1}, {name: a2}, {name: a3}]}
plan: {stages: 3, problems: 16, group_size: 16, radius_nats_per_message: 0.1}
learner: {learning_rate: 0.1}
eval: {every: 0}
"""


@pytest.mark.slow
def test_joint_is_naive_sequential_to_the_bit_in_a_run(tmp_path):
    """At the default share of episodes that the gate looks at first, which fresh rollouts use."""
    versions = {}
    for preset in ("joint", "naive_sequential", "teamtr"):
        found = updates(train(ROLES, tmp_path / preset, f"plan.preset={preset}"))
        versions[preset] = [(r["agent"], r["version_after"]) for r in found]
        shares = {r["messages_measured"] / r["messages"] for r in found if r["outcome"].startswith("accepted")}
        assert (min(shares) == 1.0) == (preset != "teamtr")
    assert versions["joint"] == versions["naive_sequential"]
    assert versions["joint"] != versions["teamtr"]


@pytest.mark.slow
def test_probes_of_a_plan_that_reuses_rollouts_play_their_own(tmp_path):
    """Rollouts of probes are counted apart, and gone when the stage is over."""
    records = train(ROLES, tmp_path / "run", "plan.preset=naive_sequential", "diagnostics.every=1")
    plain = train(ROLES, tmp_path / "plain", "plan.preset=naive_sequential")
    probed = [r for r in updates(records) if r["probe"] and r["step"] > 0]
    assert len(probed) >= 3
    assert all(r["probe"]["gap"]["estimate"] != 0.0 for r in probed)
    assert all(r["probe"]["fresh"] != r["surrogate"] for r in probed)
    for ours, theirs in zip(updates(records), updates(plain), strict=True):
        assert ours["version_after"] == theirs["version_after"]
        assert ours["sampled_tokens_total"] == theirs["sampled_tokens_total"]
    commit = RunFolder.read(tmp_path / "run").checkpoints.latest()
    assert commit.progress["account"]["tokens"]["a1"]["probe"] > 0
    assert not list((tmp_path / "run" / "episodes").glob("probe-*"))


@pytest.mark.slow
def test_a_cross_fitted_run_learns_and_stays_inside(tmp_path):
    records = updates(train(ROLES, tmp_path / "run", "learner.cross_fit=true", "plan.stages=6"))
    kept = [r for r in records if r["outcome"].startswith("accepted")]
    assert kept
    assert all(r["kl_upper"] <= r["radius"] for r in kept)
    assert all(r["surrogate"] > 0 for r in kept)
    with pytest.raises(UserError, match="has no gate"):
        loads(ROLES, "team", ["learner.cross_fit=true", "plan.preset=grpo"])
    with pytest.raises(UserError, match="must be 4 or more"):
        loads(ROLES, "team", ["learner.cross_fit=true", "plan.problems=3"])


# -- GRPO and DAPO, as their papers have them ------------------------------------------------------------------


@pytest.mark.slow
def test_grpo_logs_how_far_it_is_from_where_it_began(tmp_path):
    text = "name: grpo\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.stages=3", "plan.problems=4", "plan.group_size=8")
    found = updates(train(text, tmp_path / "run", "plan.preset=grpo", *settings))
    assert all(r["kl_reference"] > 0 for r in found if r["steps"] and r["version_after"] != r["version_before"])
    free = updates(train(text, tmp_path / "free", "plan.preset=grpo", "plan.reference_kl=0", *settings))
    assert all(r["kl_reference"] is None for r in free)
    assert found[-1]["version_after"] != free[-1]["version_after"]
    held = updates(train(text, tmp_path / "held", "plan.preset=grpo", "plan.reference_kl=20", *settings))
    assert np.mean([r["kl_reference"] for r in held[-3:]]) < np.mean([r["kl_reference"] for r in found[-3:]])


def test_a_reference_that_changed_on_disk_is_refused(tmp_path):
    words = word_model(tmp_path / "words", width=32)
    text = "name: grpo\n" + CODE % words + PLAN
    overrides = ("team.train=full", "plan.preset=grpo")
    records = run.train(loads(text, "team", overrides), tmp_path / "run", stop=lambda: True)
    assert list(records)[-1]["kind"] == "stopped"
    model = tmp_path / "words" / "model.safetensors"
    weights = load_file(model)
    save_file({k: v + 0.01 for k, v in weights.items()}, model, {"format": "pt"})
    with pytest.raises(OtherInputs, match=r"agent left: the weights that it began with are other ones"):
        train(text, tmp_path / "run", *overrides)
    with pytest.raises(StoreError, match=r"plan\.reference_kl needs them"):
        list(run.train(loads(text, "team", overrides), tmp_path / "run", accept_changes=True))
    train(text, tmp_path / "free", *overrides, "plan.reference_kl=0")


def test_dapo_logs_the_task_s_own_reward_and_its_punishment_beside(tmp_path):
    text = "name: dapo\n" + SMALL + CODE % "tiny" + PLAN
    settings = ("plan.preset=dapo", "plan.overlong_cache=0.5", "plan.dynamic_sampling=false", "plan.group_size=8")
    found = updates(train(text, tmp_path / "run", *settings))
    plan = loads(text, "team", settings).plan.plan()
    limits = {"left": 2, "right": 2, "speaker": 3}
    returns = []
    for r in found:
        batch = read_episodes(tmp_path / "run" / "episodes" / batch_name(r["stage"], r["step"]))
        assert r["reward"] == np.mean([e.reward for e in batch.episodes])
        assert r["success"] == np.mean([e.verdict.right for e in batch.episodes])
        assert r["punishment"] == punishments_PG(batch, plan, limits).mean() < 0
        assert r["dynamic_sampling"] is None
        returns.append(trained_returns_PG(batch, plan, limits))
    # what is measured is the return that was trained, as what is certified
    for before, after, r in zip(returns, returns[1:], found[1:], strict=False):
        if r["step"] > 0:
            assert r["measured_before"]["estimate"] == pytest.approx((after - before).mean())
    plain = updates(train(text, tmp_path / "plain", *settings, "plan.overlong_cache=0"))
    assert all(r["punishment"] is None for r in plain)


def test_certificates_know_that_punished_returns_have_a_wider_range(tmp_path, monkeypatch):
    text = "name: dapo\n" + CODE % "tabular" + PLAN
    ranges = []
    update_agent = driver.update_agent

    def look(*args, **options):
        ranges.append(options["certificate_inputs"].reward_range)
        return update_agent(*args, **options)

    monkeypatch.setattr(driver, "update_agent", look)
    for cache, dynamic, wanted in (("0.2", "false", 2.0), ("0", "false", 1.0), ("0.2", "true", None)):
        ranges.clear()
        settings = (f"plan.overlong_cache={cache}", f"plan.dynamic_sampling={dynamic}", "plan.stages=1")
        train(text, tmp_path / (cache + dynamic), "plan.preset=dapo", *settings)
        assert set(ranges) == {wanted}


def test_redrawn_problems_are_the_rest_of_the_stage_s_order(tmp_path):
    """Round 0 is what any plan plays; the log says how the search for signals ended."""
    text = "name: dapo\n" + CODE % "tabular" + PLAN
    settings = ("task.symbols=ABCDE", "plan.group_size=2", "plan.problems=3", "plan.stages=2")
    session = build(loads(text, "team", settings))
    problems = session.task.problems("train")
    plain = updates(train(text, tmp_path / "plain", *settings))
    for r in plain:
        batch = read_episodes(tmp_path / "plain" / "episodes" / batch_name(r["stage"], r["step"]))
        order = generator(0, "problems", r["stage"], 0).permutation(len(problems))
        assert [p.id for p in batch.problems] == [problems[i].id for i in order[:3]]
        assert r["dynamic_sampling"] is None
    for limit in (0, 2):
        folder = tmp_path / f"limit-{limit}"
        found = updates(train(text, folder, *settings, "plan.preset=dapo", f"plan.dynamic_sampling_limit={limit}"))
        for r in found:
            batch = read_episodes(folder / "episodes" / batch_name(r["stage"], r["step"]))
            told = r["dynamic_sampling"]
            assert told["without_signal"] == (~has_signal_P(batch)).sum()
            assert told["ended"] in (("signal", "all_tried") if limit == 0 else ("signal", "all_tried", "limit"))
            assert (told["without_signal"] == 0) == (told["ended"] == "signal")
            assert told["ended"] != "limit" or told["rounds"] == limit
            assert len({p.id for p in batch.problems}) == 3
        assert max(r["dynamic_sampling"]["rounds"] for r in found) > 3 or limit
