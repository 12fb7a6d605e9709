"""The memory plan: every tensor once, the worst step measured, and the rehearsal leaves nothing behind."""

from __future__ import annotations

import importlib
import json
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rank_calls
from forked import in_ranks
from planned import TEAM
from teamtr.cli.progress import TrainingScreen
from teamtr.config import loads
from teamtr.engines.estimate import Rows
from teamtr.engines.gradients import _Scaled
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.memory import (
    _longest_batch,
    _old_policy_of_the_rest,
    _takes_no_more,
    activation_bytes_per_token,
    kept_for_backward,
    trained,
)
from teamtr.engines.optim import FIRST_LOSS_SCALE
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import PAGE
from teamtr.engines.shards import spread
from teamtr.engines.torch.attention import AttentionShape, Unsupported
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.planning.memory import spread_bytes_per_token
from teamtr.planning.shape import ModelShape
from teamtr.ports import Demand, Lengths, MemoryItem, MemoryPlan
from teamtr.rollout import play
from teamtr.session import checks, driver
from teamtr.session import train as run
from teamtr.session.build import build
from teamtr.session.memory import demand_of, longest, plan_memory, rehearse
from teamtr.session.success import evaluate_team
from teamtr.theory.objective import Objective
from teamtr.types import PLAYER


def session(train: str = "full", engine: str = "plain"):
    return build(loads(TEAM.format(train=train, engine=engine), name="plan.yaml"))


def items(built) -> dict[str, int]:
    return {item.what: item.bytes for item in plan_memory(built).items}


def parameter_bytes(policy) -> int:
    return sum(p.numel() * 4 for name, p in policy.causal_lm.named_parameters() if "lora_" not in name)


@pytest.mark.long
def test_weights_of_three_whole_models_and_of_three_adapters():
    full, lora = session("full"), session("lora")
    one = parameter_bytes(full.engine.learner("left").policy)
    assert items(full)["weights"] == 3 * one
    assert items(lora)["weights"] == one, "the base is shared"
    own = [
        sum(p.numel() * 4 for p in learner.policy.parameters().values()) for learner in lora.engine.learners.values()
    ]
    assert items(lora)["adapters"] == sum(own)
    assert items(lora)["gradients, moments, snapshots"] == 9 * max(own), "of one agent, not of three"


@pytest.mark.long
def test_the_paged_engine_adds_a_copy_and_pages():
    paged, plain = items(session(engine="paged")), items(session(engine="plain"))
    assert paged["sampling copy"] == parameter_bytes(session().engine.learner("left").policy)
    assert "sampling copy" not in plain
    assert paged["keys and values"] > 0


def test_longest_contexts_grow_with_what_was_said_before():
    found = longest(session())
    assert found["right"].prompt >= found["left"].prompt + 4
    assert found["speaker"].prompt >= found["right"].prompt
    assert all(0 < lengths.shared < lengths.prompt for lengths in found.values()), "the template, and what comes first"
    assert found["left"].message == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("player", "history"),
    [
        ("{agent: judge, max_tokens: 30}", "transcript"),
        ("{model: tiny, max_tokens: 30}", "chat"),
        pytest.param("{agent: judge, max_tokens: 30}", "chat", marks=pytest.mark.slow),
        pytest.param("{model: tiny, max_tokens: 30}", "transcript", marks=pytest.mark.slow),
    ],
)
def test_nobody_reads_more_than_is_planned_where_an_environment_speaks(player, history, tmp_path, monkeypatch):
    """Its replies are part of the contexts, and whoever plays it reads and speaks too."""
    rows = [{"surface": "A man laughs. " * k, "bottom": "He is a clown. " * k} for k in (1, 9, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"""
name: puzzles
task: {{name: 'arbench:sp', path: {tmp_path / "rows.jsonl"}, player: {player}}}
team:
  model: tiny
  max_tokens: 20
  history: {history}
  router: {{order: [asker, helper], rounds: 4}}
  agents: [{{name: asker}}, {{name: helper}}, {{name: judge, frozen: true}}]
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
plan: {{problems: 2, group_size: 2}}
"""
    built = build(loads(text, name="puzzles.yaml"))
    found, read = longest(built), Counter()
    sample = LocalEngine.sample

    def noted(self, agent, prompts, noise_BT, **options):
        read[agent] = max(read[agent], *map(len, prompts))
        assert noise_BT.shape[1] <= found[agent].message
        return sample(self, agent, prompts, noise_BT, **options)

    monkeypatch.setattr(LocalEngine, "sample", noted)
    play(built.context, built.current_team(), built.task.problems("test"), 4, seed=0)
    assert len(read) == 3
    assert (PLAYER in read) == ("model" in player)
    for name, tokens in read.items():
        assert tokens <= found[name].prompt
    assert found["asker"].prompt < 1.5 * read["asker"], "a plan far above helps nobody"
    beside = "model" in player
    one = parameter_bytes(built.engine.learner("asker").policy)
    assert items(built)["weights"] == (4 if beside else 3) * one
    assert ("and the player" in plan_memory(built).items[0].why) == beside


@pytest.mark.long
def test_activations_are_measured_and_grow_with_the_layers():
    one = activation_bytes_per_token(session().engine.learner("left"))
    two_layers = TEAM.replace("layers: 1", "layers: 2").format(train="full", engine="plain")
    two = activation_bytes_per_token(build(loads(two_layers, name="plan.yaml")).engine.learner("left"))
    assert 1.6 * one < two < 2.4 * one
    assert one > 10 * 32 * 4, "more than ten hidden states"


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "packs", "shared"),
    [
        ("fp32", True, 0),
        ("fp32", True, 40),
        ("fp32", False, 0),
        ("fp32", False, 40),
        ("fp16", True, 40),
        pytest.param("fp16", True, 0, marks=pytest.mark.slow),  # products that a CPU has no instructions for
    ],
)
def test_what_is_planned_for_a_step_is_what_autograd_keeps(shared, precision, packs):
    """Common beginnings are kept once, but for what attention keeps of every row."""
    text = TEAM.replace("width: 32", "width: 64").replace("layers: 1", "layers: 3")
    learner = build(loads(text.format(train="lora", engine="plain"), name="plan.yaml")).engine.learner("left")
    learner.policy.precision, learner.policy.packs = precision, packs
    lengths = Lengths(prompt=48, message=4, shared=shared)
    batch = _longest_batch("left", lengths, 8, processes=1)

    def keep(rows: int) -> int:
        return kept_for_backward(learner, batch.prompts[:rows], batch.messages[:rows])

    measured = keep(8) - keep(4)  # without what is kept once: weights in half precision
    sizes = trained(learner)
    planned = sizes.kept_bytes(lengths, 8) - sizes.kept_bytes(lengths, 4)
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("train", ["lora", "full"])
def test_rows_that_begin_alike_keep_what_attention_answers_twice(train):
    """As rows and as tokens: of each token that a row has alone, 3 layers of 64 numbers more than of rows apart."""
    text = TEAM.replace("width: 32", "width: 64").replace("layers: 1", "layers: 3")
    learner = build(loads(text.format(train=train, engine="plain"), name="plan.yaml")).engine.learner("left")
    sizes, passed = trained(learner), Lengths(prompt=48, message=3, shared=8)  # nothing follows from a last token
    batch = _longest_batch("left", replace(passed, message=4), 8, processes=1)
    measured, few = (kept_for_backward(learner, batch.prompts[:rows], batch.messages[:rows]) for rows in (8, 4))
    assert sizes.spread_bytes_per_token == 3 * 64 * 4
    assert sizes.kept_bytes(passed, 8) - sizes.kept_bytes(passed, 4) == pytest.approx(measured - few, rel=0.01)
    assert sizes.kept_bytes(passed, 1) == passed.whole * sizes.kept_bytes_per_token, "one row is not spread"
    apart = replace(passed, shared=0)
    assert sizes.kept_bytes(apart, 8) == 8 * apart.whole * sizes.kept_bytes_per_token, "nor are those apart"
    learner.policy.packs = False
    assert trained(learner).spread_bytes_per_token == 0.0


def test_of_rows_that_begin_alike_weights_that_are_trained_keep_no_values_twice_in_half_precision():
    """Layers are fused under adapters alone: elsewhere norms of queries and keys have rows of their own."""
    learner = build(loads(TEAM.format(train="full", engine="plain"), name="plan.yaml")).engine.learner("left")
    shape = ModelShape.of(learner.policy.causal_lm.config.to_dict())
    learner.policy.precision = "bf16"
    assert shape.head_norms
    assert spread_bytes_per_token(shape, "bf16", rank=None) == trained(learner).spread_bytes_per_token == 32 * 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_of_rows_that_begin_alike_a_card_keeps_values_twice_where_norms_keep_their_rows(kind, monkeypatch):
    """Counted as they are computed from a config: joined products, kernels that do nothing."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    launches = importlib.import_module("launches")
    policy = launches.make_policy(kind, 3)
    learner = PolicyLearner("agent", policy, micro_batch=8)
    shape = ModelShape.of(policy.causal_lm.config.to_dict())
    assert shape.head_norms == (kind == "Qwen3")
    with launches.by_the_way_of_a_card(Counter(), together=True):
        activation_bytes_per_token(learner)  # after the first pass, factors are rounded at once
        counted = trained(learner)
    assert counted.spread_bytes_per_token == spread_bytes_per_token(shape, "bf16", rank=8)
    assert counted.spread_bytes_per_token == 3 * 2 * (4 * 16 + (2 * 16 if kind == "Qwen3" else 0))


@pytest.mark.long
@pytest.mark.parametrize(("rows", "lengths", "recompute"), [
    (4, Lengths(4352, 4096, 256), False),  # the step that took 135 GB on a card: more than was planned for it before
    (4, Lengths(4352, 4096, 0), False),
    (2, Lengths(16_640, 16_384, 0), True),
])  # fmt: skip
def test_no_step_holds_more_on_a_card_than_is_planned_counted_at_its_true_shape(rows, lengths, recompute, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    held = importlib.import_module("held")
    found = held.count("1.7b", rows, lengths, recompute=recompute)
    assert found.kept < found.peak <= found.planned < 1.5 * found.peak
    if not recompute:
        logits = 0 if rows * lengths.message > 11_136 else 8 * rows * lengths.message * 151_936
        per_token = 2_248_416 + (172_032 if lengths.shared else 0)
        copies = (rows - 1) * lengths.shared * 344_064
        assert found.kept == pytest.approx(lengths.distinct(rows) * per_token + copies + logits, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("packs", [True, False])
def test_what_is_planned_for_a_recomputed_step_is_what_goes_into_each_layer(packs):
    text = TEAM.replace("width: 32", "width: 64").replace("layers: 1", "layers: 3")
    learner = build(loads(text.format(train="lora", engine="plain"), name="plan.yaml")).engine.learner("left")
    learner.policy.packs = packs
    lengths = Lengths(prompt=48, message=4, shared=40)
    batch = _longest_batch("left", lengths, 8, processes=1)
    kept = trained(learner)
    assert learner.policy.recompute_activations()
    planned = trained(learner)
    assert planned.recomputes
    # measured as if nothing were recomputed, but for the input of the first layer, which has a gradient now
    assert planned.kept_bytes_per_token == pytest.approx(kept.kept_bytes_per_token, rel=0.02)
    tokens = 40 + 8 * 12 if packs else 8 * 52
    assert planned.step_bytes(lengths, 8) == pytest.approx(3 * 64 * 4 * tokens + planned.kept_bytes(lengths, 8))
    assert kept.step_bytes(lengths, 8) == pytest.approx((1 + 2 / 3) * kept.kept_bytes(lengths, 8))

    # between forward and back, of what autograd keeps elsewhere only the embedding and the last norm are left
    elsewhere = 0

    def see(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal elsewhere
        elsewhere += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t), learner.policy.computing():
        learner.policy.features(batch.prompts, batch.messages)
    assert elsewhere < kept.kept_bytes(lengths, 8) / 3


@pytest.mark.long
@pytest.mark.parametrize("train", ["full", "lora"])
def test_nothing_of_the_text_that_a_step_is_measured_on_stays(train: str):
    """Neither of its activations nor of what they were computed with: at 1.7B that would be 0.4 GB an agent."""
    learner = session(train).engine.learner("left")
    said: list[weakref.ref[torch.Tensor]] = []

    def look(module: Any, given: Any, found: Any) -> None:
        said.extend(weakref.ref(x) for x in (found if isinstance(found, tuple) else (found,)) if torch.is_tensor(x))

    for module in learner.policy.causal_lm.modules():
        module.register_forward_hook(look)
    assert activation_bytes_per_token(learner) > 0
    assert len(said) > 10, "or this proves nothing"
    assert not any(tensor() is not None for tensor in said)


@pytest.mark.long
def test_a_step_is_recomputed_where_a_single_message_does_not_fit_otherwise(monkeypatch):
    """By the estimate, before anything is tried; the plan, the rehearsal and its record say so."""
    text = TEAM.replace("layers: 1", "layers: 4").replace("max_tokens: 4", "max_tokens: 100")
    built = build(loads(text.format(train="lora", engine="plain"), "plan.yaml"))
    all_passes = [learner.passes for learner in built.engine.learners.values()]

    def with_settings(micro_batch: int, recompute: str) -> MemoryPlan:
        for passes in all_passes:
            passes.micro_batch, passes.recompute = micro_batch, recompute
        return plan_memory(built)

    alone, several = with_settings(1, "never").total, with_settings(2, "always").total
    assert with_settings(1, "always").total < several < alone, "or this proves nothing"
    room = alone
    monkeypatch.setattr("teamtr.engines.memory.available_bytes", lambda device: room)
    assert with_settings(8, "auto").recomputed == (), "a single message fits"
    assert rehearse(built)["recomputed"] == []
    room = several
    assert with_settings(8, "never").recomputed == ()
    assert rehearse(built)["recomputed"] == []
    planned = with_settings(8, "auto")
    assert "speaker" in planned.recomputed
    assert "activations recomputed" in next(item for item in planned.items if item.what == "worst step").why
    assert not built.engine.learner("speaker").policy.recomputes, "a plan changes nothing"
    found = rehearse(built)
    assert set(found["recomputed"]) == set(planned.recomputed)
    assert found["micro_batch"]["speaker"] == 2, "the largest half of 8 that fits"
    room = 1
    assert rehearse(built)["micro_batch"]["speaker"] == 2, "settled once: from here on, running out of memory lowers it"


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["learner.minibatches=1"], marks=pytest.mark.slow),
        pytest.param(["plan.problems=5", "plan.group_size=3", "team.router.rounds=2"], marks=pytest.mark.slow),
        ["plan.preset=dapo", "learner.micro_batch=3"],
        [
            "plan.stages=2",
            "plan.problems=12",
            "plan.group_size=2",
            "learner.learning_rate=1e-6",
            "plan.preset=reweighted",
            "plan.reuse_across_stages=true",
        ],
        pytest.param(
            ["plan.problems=3", "diagnostics.every=1", "learner.certify_share=0.5", "learner.gate_share=1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_run_computes_more_messages_at_once_than_are_planned(overrides, monkeypatch, tmp_path):
    text = TEAM.format(train="lora", engine="plain").replace("warmup_steps: 0", "warmup_steps: 40")
    team_file = loads(text, "plan.yaml", ["plan.stages=1", "plan.group_size=4", "learner.micro_batch=64", *overrides])
    computed: dict[bool, int] = {False: 0, True: 0}
    features = TransformerPolicy.features

    def look(self, prompts, messages):
        with_gradient = torch.is_grad_enabled()
        computed[with_gradient] = max(computed[with_gradient], len(messages))
        return features(self, prompts, messages)

    monkeypatch.setattr(TransformerPolicy, "features", look)
    list(run.train(team_file, tmp_path / "run"))
    built = build(team_file)
    rows = Rows.of("speaker", team_file.learner.micro_batch, demand_of(built))  # the others speak as often
    assert computed[False] == rows.scored
    assert 0 < computed[True] <= rows.trained


@pytest.mark.long
@pytest.mark.parametrize(
    ("problems", "group", "rows"), [(2, 2, Rows(16, 1)), (5, 3, Rows(16, 4)), (128, 2, Rows(64, 64))]
)
def test_a_small_batch_plans_for_the_steps_that_it_has(problems, group, rows):
    """A fourth of its messages, however large a micro-batch may be; the check before the run scores 16 messages."""
    sizes = [f"plan.problems={problems}", f"plan.group_size={group}", "learner.micro_batch=64"]
    built = build(loads(TEAM.format(train="lora", engine="plain"), "plan.yaml", sizes))
    learner, lengths = built.engine.learner("speaker"), longest(built)["speaker"]
    assert Rows.of("speaker", 64, demand_of(built)) == rows
    sizes = trained(learner)
    one_layer = 3 * sizes.kept_bytes(lengths, rows.trained), 2 * sizes.kept_bytes(lengths, rows.scored)
    assert items(built)["worst step"] == pytest.approx(max(one_layer), rel=0.1), "and a few logits"


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("problems", "group", "minibatches"), [(5, 3, 4), (4, 4, 2), (16, 2, 3), (2, 8, 1), (9, 1, 6)])
def test_no_worker_gets_more_rows_than_its_part_of_the_demand(problems, group, minibatches, workers):
    """By counting: a problem is in one shard, shards are dealt out in turn, and steps are drawn at random."""
    shards, count = 4, problems * group
    whole = Demand(
        lengths={"a": Lengths(8, 4)}, episodes=count, problems=problems, messages={"a": count}, checked={"a": 0},
        minibatches=minibatches, objective=Objective(),
    )  # fmt: skip
    own = whole.of_worker(shards, workers)
    parts = [part.stop - part.start for part in spread(count, min(shards, count))]
    assert own.episodes == max(parts)
    worker_M = (np.arange(count) // group % shards) % workers
    assert own.messages["a"] >= np.bincount(worker_M).max()
    assert own.messages["a"] == count or workers > 1
    most, rng = 0, np.random.default_rng(0)
    luckiest = [np.argsort(worker_M != worker, kind="stable") for worker in range(workers)]
    for order in [*luckiest, *(rng.permutation(count) for _ in range(50))]:
        for rows in np.array_split(order, min(minibatches, count)):
            most = max(most, int(np.bincount(worker_M[rows]).max()))
    assert Rows.of("a", 1000, own).trained >= most
    assert whole.of_worker(1, 1) == whole


@pytest.mark.long
def test_a_rehearsal_takes_a_whole_micro_batch_in_one_shard(monkeypatch):
    """Shards are passed one after the other: rows that are spread over them would show less than a run takes."""
    text = TEAM.format(train="lora", engine="plain")
    overrides = ["plan.problems=8", "plan.group_size=4", "learner.micro_batch=8", "cluster.shards=4"]
    built, computed = build(loads(text, "plan.yaml", overrides)), {False: 0, True: 0}
    features = TransformerPolicy.features

    def look(self, prompts, messages):
        with_gradient = torch.is_grad_enabled()
        computed[with_gradient] = max(computed[with_gradient], len(messages))
        return features(self, prompts, messages)

    monkeypatch.setattr(TransformerPolicy, "features", look)
    rehearse(built)
    rows = Rows.of("left", 8, demand_of(built).of_worker(4, 1))
    assert (computed[False], computed[True]) == (rows.scored, rows.trained) == (8, 8)


@pytest.mark.long
def test_weights_in_half_precision_are_no_activations():
    """Autograd keeps them for the backward pass, once, however long the text is."""
    learner = session("lora").engine.learner("left")
    exact = activation_bytes_per_token(learner)
    learner.policy.precision = "fp16"
    half = activation_bytes_per_token(learner)
    assert 0.3 * exact < half < exact


@pytest.mark.long
def test_a_run_logs_the_peak_of_each_stage_beside_the_plan_also_when_it_goes_on(monkeypatch, tmp_path, capsys):
    planned = {"planned_gb": 1.0, "micro_batch": {}, "peak_gb": 0.5}
    monkeypatch.setattr(driver, "before_training", lambda session: planned)
    monkeypatch.setattr(driver, "peak_gb", lambda session: 2.0)
    text = TEAM.format(train="full", engine="plain")
    for stages, kind in ((2, "start"), (3, "resume")):
        team_file = loads(text, "plan.yaml", [f"plan.stages={stages}"])
        first, *records = TrainingScreen().watch(run.train(team_file, tmp_path / "run"))
        assert (first["kind"], first["memory"]) == (kind, planned)
        found = [r["memory"] for r in records if r["kind"] == "stage"]
        assert found == [{"planned_gb": 1.0, "peak_gb": 2.0}] * (2 if kind == "start" else 1)
        assert capsys.readouterr().err.count("2 GB of GPU memory were used") == 1, "told once"


@pytest.mark.long
def test_a_rehearsal_changes_nothing_and_finds_the_micro_batch_that_fits(monkeypatch):
    built = session("lora")
    before = {name: learner.fingerprint() for name, learner in built.engine.learners.items()}
    policy = built.engine.learner("speaker").policy
    enough = policy.features

    def limited(prompts, messages):
        if len(messages) > 3:
            raise torch.OutOfMemoryError("injected")
        return enough(prompts, messages)

    monkeypatch.setattr(policy, "features", limited)
    found = rehearse(built)
    assert found["micro_batch"] == {"left": 8, "right": 8, "speaker": 3}
    assert {name: learner.fingerprint() for name, learner in built.engine.learners.items()} == before


@pytest.mark.long
@pytest.mark.parametrize("reference_kl", [0.0, 0.04])
def test_a_rehearsal_does_what_an_update_does_and_holds_nothing_afterwards(reference_kl, monkeypatch):
    """It scores, beside the policy of the beginning where the objective has one, takes a step, and measures."""
    text = TEAM.format(train="lora", engine="plain")
    built, done = build(loads(text, "plan.yaml", [f"plan.reference_kl={reference_kl}"])), []

    def noted(name):
        call = getattr(PolicyLearner, name)

        def note(self, *given, **named):
            done.append((self.agent, name, *named.items())[: 3 if name == "begin" else 2])
            return call(self, *given, **named)

        return note

    for name in ("begin", "step", "measure"):
        monkeypatch.setattr(PolicyLearner, name, noted(name))
    rehearse(built)
    begun = ("speaker", "begin", ("reference", reference_kl > 0))
    assert done == [begun, ("speaker", "step"), ("speaker", "measure")]
    assert all(learner._reference is None for learner in built.engine.learners.values())


def tried_in(built, monkeypatch) -> list[str]:
    """Whom a rehearsal takes a step of, in this order."""
    tried, begin = [], PolicyLearner.begin

    def look(self, batch, **options):
        tried.append(self.agent)
        return begin(self, batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyLearner, "begin", look)
        assert set(rehearse(built)["micro_batch"]) == {"left", "right", "speaker"}
    return tried


@pytest.mark.long
def test_who_takes_no_more_than_one_that_fits_is_not_rehearsed(monkeypatch):
    """The speaker reads what both others said, and says as much."""
    assert tried_in(session("lora"), monkeypatch) == ["speaker"]
    assert tried_in(session("full"), monkeypatch) == ["speaker", "right", "left"], "models of their own"


@pytest.mark.long
def test_who_may_take_more_than_one_that_fits_is_rehearsed(monkeypatch):
    def tried(change):
        built = session("lora")
        change(built.engine.learner("left"))
        return tried_in(built, monkeypatch)

    def lower(learner):
        learner.passes.micro_batch = 4

    def recompute(learner):
        learner.policy.recomputes = True

    def compute_finer(learner):
        learner.policy.precision = "fp64"

    def keep_features(learner):
        learner.kept.budget = 1

    def pad(learner):
        learner.policy.packs = False

    for change in (lower, recompute, compute_finer, keep_features, pad):
        assert tried(change) == ["speaker", "left"], change.__name__
    text = TEAM.format(train="lora", engine="plain")
    wider = build(loads(text, "plan.yaml", ["team.agents.left.lora.rank=9"]))
    assert tried_in(wider, monkeypatch) == ["speaker", "left"]
    elsewhere = [f"{name}.lora={{rank: {rank}, targets: {where}}}" for name, rank, where in (
        ("speaker", 16, "'.*layers.3.*q_proj'"), ("left", 4, "'.*q_proj'"), ("right", 16, "'.*layers.3.*q_proj'"),
    )]  # fmt: skip
    deep = build(loads(text, "plan.yaml", ["tiny.layers=4", *(f"team.agents.{each}" for each in elsewhere)]))
    one, two = (deep.engine.learner(name) for name in ("left", "speaker"))
    assert deep.engine.info("left").trained_parameters == deep.engine.info("speaker").trained_parameters
    assert activation_bytes_per_token(one) > 2 * activation_bytes_per_token(two), "autograd begins with the first layer"
    assert tried_in(deep, monkeypatch) == ["speaker", "left"]
    built = session("lora")
    speaker = built.engine.learner("speaker").policy
    enough = speaker.features

    def limited(prompts, messages):
        if len(messages) > 3:
            raise torch.OutOfMemoryError("injected")
        return enough(prompts, messages)

    monkeypatch.setattr(speaker, "features", limited)
    assert tried_in(built, monkeypatch) == ["speaker", "right"], "the speaker did not fit as it was asked for"


@pytest.mark.long
def test_a_first_step_begins_with_the_loss_scale_that_the_rehearsal_found(monkeypatch):
    """Also that of an agent that takes no more than one that was rehearsed. Who has taken a step keeps its own."""
    built = session("lora")
    learners = built.engine.learners
    for learner in learners.values():  # as in float16, which a CPU computes too slowly
        monkeypatch.setattr(learner, "_scale", lambda optimizer=learner.optimizer: optimizer.loss_scale)
    backward = _Scaled.backward

    def overflowing(gathering, rows, part):
        backward(gathering, rows, part)
        if gathering.scale > FIRST_LOSS_SCALE / 8:
            gathering.fresh.found[-1] = float("inf")

    monkeypatch.setattr(_Scaled, "backward", overflowing)
    learners["right"].optimizer.steps = 1
    rehearse(built)
    optimizers = {name: learner.optimizer for name, learner in learners.items()}
    halved = FIRST_LOSS_SCALE / 8
    assert {n: o.loss_scale for n, o in optimizers.items()} == {
        "left": halved, "right": FIRST_LOSS_SCALE, "speaker": halved,
    }  # fmt: skip
    assert {n: o.steps for n, o in optimizers.items()} == {"left": 0, "right": 1, "speaker": 0}

    learners["speaker"].optimizer.steps, learners["speaker"].optimizer.loss_scale = 4, halved / 8
    rehearse(built)
    assert {n: o.loss_scale for n, o in optimizers.items()} == {
        "left": halved, "right": FIRST_LOSS_SCALE, "speaker": halved / 8,
    }, "a resumed run goes on as one that was not ended"  # fmt: skip


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("second", "settled"),
    [({"fits": 1}, 1), ({"micro_batch": 3}, 3)],
    ids=["runs out of memory", "ran out of memory before"],
)
def test_processes_try_the_same_agents_with_the_same_messages_whoever_has_less_memory(second, settled, tmp_path):
    """Each waits for what the others found of a message: one that passed an agent over would leave them waiting."""
    in_ranks(rank_calls.one_rehearsing, 2, TEAM.format(train="lora", engine="plain"), [{}, second], tmp_path)
    (tried, sizes, most), (as_well, smaller, others) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert tried == as_well == ["speaker", "right"], "the left one takes no more than the right one, in both"
    assert sizes == {"left": 8, "right": 8, "speaker": 8}
    assert smaller == {"left": 8, "right": 8, "speaker": settled}
    one_step = Rows.of("speaker", 8, demand_of(session("lora")).of_worker(2, 2)).trained
    assert most == others == one_step, "each takes a step of as many as may fall to it, whatever falls to the other"


def test_models_that_are_tables_take_each_its_own():
    built = build(loads(TEAM.format(train="full", engine="plain"), "plan.yaml", ["team.model=tabular"]))
    assert not _takes_no_more(built.engine.learners, demand_of(built), "left", "speaker")
    assert set(rehearse(built)["micro_batch"]) == {"left", "right", "speaker"}


def test_whose_messages_are_longer_or_more_takes_more():
    built = session("lora")
    learners, demand = built.engine.learners, demand_of(built)
    assert _takes_no_more(learners, demand, "left", "speaker")
    own = demand.lengths["left"]
    for longer in (
        replace(own, prompt=demand.lengths["speaker"].prompt + 1),
        replace(own, message=demand.lengths["speaker"].message + 1),
        replace(own, prompt=demand.lengths["speaker"].prompt, shared=0),
    ):
        assert not _takes_no_more(
            learners, replace(demand, lengths={**demand.lengths, "left": longer}), "left", "speaker"
        )
    for name in ("messages", "checked"):
        counts = getattr(demand, name)
        more = replace(demand, **{name: {**counts, "left": counts["left"] + 1}})
        assert not _takes_no_more(learners, more, "left", "speaker")


@pytest.mark.long
def test_a_rehearsal_takes_the_memory_of_sampling_first(monkeypatch):
    """So that its peak is that of a stage: pages are there when the longest step is taken."""
    built = session("lora", engine="paged")
    policy = built.engine.learner("speaker").policy
    pools = []
    enough = policy.features

    def look(prompts, messages):
        pools.append(policy.serving.server_of(policy.causal_lm).books)
        return enough(prompts, messages)

    monkeypatch.setattr(policy, "features", look)
    rehearse(built)
    (books,) = {id(found): found for found in pools}.values()
    lengths = longest(built)["speaker"]
    assert books.count >= built.team_file.plan.problems * built.plan.group_size * books.needed(lengths.whole)


@pytest.mark.long
def test_a_rehearsal_of_an_architecture_without_pages_falls_back_and_says_so(monkeypatch):
    built = session("lora", engine="paged")
    policies = [learner.policy for learner in built.engine.learners.values()]

    def unsupported(*_):
        raise Unsupported("attention with softcap")

    monkeypatch.setattr(SamplerPool, "server_of", unsupported)
    with pytest.warns(UserWarning, match="attention with softcap: sampling falls back"):
        rehearse(built)
    assert all(policy.serving is None for policy in policies)


def test_the_plan_knows_how_much_memory_pages_may_take():
    little = session(engine="paged")
    policy = little.engine.learner("left").policy
    policy.serving.memory_bytes = 4096
    assert items(little)["keys and values"] == 4096
    made = policy.serving.server_of(policy.causal_lm)
    policy.serving.memory_bytes = 1 << 30
    assert items(little)["keys and values"] == made.pool_bytes == 4096, (
        "the server has its budget from when it was made"
    )


@pytest.mark.long
def test_an_evaluation_larger_than_a_batch_is_planned_and_reserved():
    """It would otherwise grow the pages in the middle of a run, after the longest step has been tried without them."""
    text = TEAM.format(train="lora", engine="paged")
    small = build(loads(text, "plan.yaml", ["eval.every=0"]))
    large = build(loads(text, "plan.yaml", ["eval.problems=4", "eval.samples=64"]))
    assert items(large)["keys and values"] > 7 * items(small)["keys and values"]
    rehearse(large)
    policy = large.engine.learner("speaker").policy
    before = policy.serving.server_of(policy.causal_lm).books
    evaluate_team(large, large.current_team(), stage=0)
    assert policy.serving.server_of(policy.causal_lm).books is before, "no page was added"


@pytest.mark.long
def test_the_check_before_a_run_is_planned(monkeypatch):
    """It plays more episodes than a small batch has."""
    small = build(loads(TEAM.format(train="lora", engine="paged"), "plan.yaml", ["eval.every=0"]))
    planned = items(small)["keys and values"]
    checks.measure_floors(small)
    policy = small.engine.learner("speaker").policy
    server = policy.serving.server_of(policy.causal_lm)
    page = Pool.bytes_per_page(AttentionShape.of(policy.causal_lm.config), PAGE, torch.float32)
    assert 0 < server.books.count * page <= planned


@pytest.mark.parametrize("agent", ["left", "speaker"])
def test_a_rehearsal_holds_the_old_policy_of_a_whole_batch(agent, monkeypatch):
    """Of four messages an update keeps the last hidden states; with micro-batches of one, the step has those of one."""
    built = build(loads(TEAM.format(train="lora", engine="plain"), "plan.yaml", ["learner.micro_batch=1"]))
    learner, held = built.engine.learner(agent), []
    monkeypatch.setattr(learner.policy, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr("teamtr.engines.memory.torch.empty", lambda count, **options: held.append(count))
    with _old_policy_of_the_rest(learner, demand_of(built), 1):
        pass
    assert held == [3 * 4 * learner.policy.causal_lm.config.hidden_size * 4]
    learner.kept.budget = 100
    with _old_policy_of_the_rest(learner, demand_of(built), 1):
        pass
    assert held[1] == held[0] + 100, "and what the sampler keeps for it"

    def full(count, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("teamtr.engines.memory.torch.empty", full)
    refused = pytest.raises(UserError, match=r"lower plan\.problems")
    with refused, _old_policy_of_the_rest(learner, demand_of(built), 1):
        pass


def test_pages_that_do_not_fit_are_an_error_with_a_remedy(monkeypatch):
    built = session("lora", engine="paged")

    def full(*_, **__):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr("teamtr.engines.paged.sampler.Pool.__init__", full)
    with pytest.raises(UserError, match=r"keys and values do not fit .* lower sampling.memory_gb"):
        rehearse(built)


@pytest.mark.long
def test_a_team_of_models_of_two_sizes_is_planned_rehearsed_and_trained_on_pages(tmp_path):
    """A copy and pages for each architecture; two agents share one of them."""
    for name, width in (("small", 16), ("large", 32)):
        model, tokenizer = tiny_model(TinyShape(layers=1, width=width, heads=2), seed=0)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = "".join(json.dumps({"question": f"say {k}", "answer": "a"}) + "\n" for k in range(16))
    (tmp_path / "rows.jsonl").write_text(rows)
    rewards = "def odd(prompts, completions, **_):\n    return [float(len(text) % 2) for text in completions]\n"
    (tmp_path / "rewards.py").write_text(rewards)
    text = f"""
name: mixed
task: {{name: data, path: {tmp_path}/rows.jsonl, grader: "python:{tmp_path}/rewards.py:odd"}}
team:
  train: lora
  max_tokens: 2
  agents:
    - {{name: a1, model: {tmp_path}/small}}
    - {{name: a2, model: {tmp_path}/large}}
    - {{name: a3, model: {tmp_path}/small}}
plan: {{stages: 1, problems: 8, group_size: 8, radius_nats_per_message: 0.5}}
learner: {{precision: fp32}}
sampling: {{engine: paged}}
"""
    built = build(loads(text, name="mixed.yaml"))
    planned = plan_memory(built).items
    assert sorted(item.bytes for item in planned if item.what == "sampling copy") == sorted(
        parameter_bytes(built.engine.learner(name).policy) for name in ("a1", "a2")
    )
    assert len([item for item in planned if item.what == "keys and values"]) == 2
    assert set(rehearse(built)["micro_batch"]) == {"a1", "a2", "a3"}
    records = list(run.train(loads(text, name="mixed.yaml"), tmp_path / "run"))
    assert set(next(r for r in records if r["kind"] == "start")["samplers"].values()) == {"paged fp32"}
    learnt = {r["agent"] for r in records if r["kind"] == "update" and r["outcome"].startswith("accepted")}
    assert {"a2"} < learnt, "a model of either size is updated"


@pytest.mark.parametrize(("available", "fits"), [(None, True), (99, False), (100, True)])
def test_a_plan_that_does_not_fit_says_so(available, fits):
    plan = MemoryPlan((MemoryItem("a", 60), MemoryItem("b", 40)), available)
    assert plan.total == 100
    assert plan.fits is fits


def test_a_card_that_is_named_by_number_is_the_current_one_before_a_model_is_put_on_it(monkeypatch):
    """Triton launches on the current device, whatever device its arguments are on."""

    def chosen(device: torch.device) -> None:
        raise InterruptedError(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    with pytest.raises(InterruptedError, match="cuda:1"):
        build(loads(TEAM.format(train="lora", engine="plain"), "plan.yaml", ["device=cuda:1"]))
