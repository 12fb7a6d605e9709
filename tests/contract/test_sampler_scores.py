"""Scores of the old policy from what the sampler computed: the same numbers as the learner's own, or not taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import planned
from conftest import make_policy
from teamtr.answers import Ended, Wanted
from teamtr.batches import AgentBatch
from teamtr.config import loads
from teamtr.engines.kept import KeptFeatures
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import PAGE
from teamtr.engines.torch.attention import AttentionShape
from teamtr.errors import UserError
from teamtr.planning.memory import memory_of
from teamtr.presets import PRESETS
from teamtr.randomness import uniforms
from teamtr.reports import NOTHING_KEPT
from teamtr.session.build import build
from teamtr.session.memory import plan_memory
from teamtr.session.train import train
from teamtr.store import RunFolder
from teamtr.training import scoring
from teamtr.training.batch import Optimization, TrainingBatch
from teamtr.training.update import update_agent
from teamtr.types import AgentState, Ids

CPU = torch.device("cpu")
PROBLEMS, GROUP, TOKENS = 4, 8, 6
RADIUS = 0.05
WAYS = ["plain", "fp32"]
"""How it is sampled: from the model itself, or from pages in this precision."""


def engine_of(kind: str = "lora", way: str = "plain", budget: int = 1 << 20, pages: int = 1 << 26) -> LocalEngine:
    policy = make_policy(kind)
    if way != "plain":
        policy.serving = SamplerPool(way, CPU, memory_bytes=pages, keeps=True)
    return LocalEngine({"agent": PolicyLearner("agent", policy, micro_batch=8, kept_bytes=budget)})


def some_prompts() -> list[Ids]:
    """Of different lengths, one of them longer than a page; a group's are alike."""
    rng = np.random.default_rng(0)
    different = [rng.integers(2, 30, size=n).astype(np.int32) for n in (3, 70, 5, 9)[:PROBLEMS]]
    return [prompt for prompt in different for _ in range(GROUP)]


def sampled(engine: LocalEngine, *, keep: bool = True, seed: int = 0) -> AgentBatch:
    """A batch as a run makes it: what is sampled for the update is kept, and nothing else."""
    prompts = some_prompts()
    if keep:
        engine.keep_scores("agent")
    samples = engine.sample("agent", prompts, uniforms(seed, len(prompts), TOKENS))
    if keep:
        engine.keep_scores(None)
    episodes = np.arange(len(prompts))
    return AgentBatch(
        "agent",
        tuple(prompts),
        tuple(s.token_ids for s in samples),
        tuple(s.logprobs for s in samples),
        episodes,
        episodes // GROUP,
        np.zeros(len(prompts), dtype=np.int64),
    )


def tokens_of(batch: AgentBatch) -> int:
    return sum(map(len, (*batch.prompts, *batch.messages)))


def update(engine: LocalEngine, batch: AgentBatch, score: str, radius: float = RADIUS, **changes):
    plan = PRESETS["teamtr"]
    returns = np.random.default_rng(1).random((PROBLEMS, GROUP))
    data = TrainingBatch(batch, plan.advantage.estimate(returns), returns)
    state = AgentState(beta=1.0, step_scale=1.0, radius_nats=radius)
    optimization = Optimization(learning_rate=0.02, epochs=2, minibatches=2, score=score, **changes)
    return update_agent(engine.learner("agent"), data, plan, optimization, state, seed=3).report


def looked_at_rows(batch: AgentBatch) -> np.ndarray:
    """The messages that the noise floor of ``update`` is measured on."""
    return scoring.floor_rows(TrainingBatch(batch, None, None), 3)


# -- what is kept ----------------------------------------------------------------------------------------------


def test_the_oldest_go_first_and_other_weights_or_words_are_not_found():
    kept, (prompt, other) = KeptFeatures(budget=3 * 2 * 4 * 4), (np.arange(5, dtype=np.int32), np.arange(4))
    messages = [np.array([k, 7], dtype=np.int32) for k in range(4)]
    for k, message in enumerate(messages[:3]):
        kept.put("v", prompt, message, torch.full((2, 4), float(k)))
    kept.put("v", prompt, messages[0], torch.full((2, 4), 9.0))
    assert kept.bytes == kept.budget, "the same message again takes the place of the first"
    kept.put("v", prompt, messages[3], torch.zeros(2, 4))
    assert kept.find("v", prompt, messages[1]) is None, "it was the oldest"
    assert float(kept.find("v", prompt, messages[0])[0, 0]) == 9.0
    assert kept.bytes == kept.budget
    assert kept.find("w", prompt, messages[0]) is None
    assert kept.find("v", other, messages[0]) is None
    assert kept.find("v", np.append(prompt, messages[0][:1]), messages[0][1:]) is None, "the same text, cut elsewhere"
    kept.put("v", prompt, np.arange(7), torch.zeros(7, 4))
    assert len(kept) == 0, "what is larger than all of it is not kept, and nothing older than it is"
    assert kept.bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_the_sampler_keeps_is_what_the_learner_computes(kind, way):
    engine = engine_of(kind, way)
    learner, batch = engine.learner("agent"), sampled(engine)
    before = dict(learner.tokens)
    logp_M = learner.begin(batch, from_sampler=True)
    assert learner.sampler_scored == len(batch)
    assert learner.tokens == before, "no token passed through the model"
    taken, taken_tokens = learner._reference, learner.token_logprobs()
    learner.perturb(1e-2, seed=1)
    from_sampler = learner.measure()
    engine = engine_of(kind, way)
    learner = engine.learner("agent")
    np.testing.assert_allclose(learner.begin(batch), logp_M, atol=1e-5)
    assert learner.sampler_scored == 0
    assert learner.tokens["scored"] == tokens_of(batch)
    for ours, theirs in zip(learner._reference.features, taken.features, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    for ours, theirs in zip(learner.token_logprobs(), taken_tokens, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    learner.perturb(1e-2, seed=1)
    own = learner.measure()
    assert own.full_M.max() > 1e-4, "a step that can be seen"
    np.testing.assert_allclose(from_sampler.full_M, own.full_M, atol=1e-6)
    np.testing.assert_allclose(from_sampler.log_ratio_M, own.log_ratio_M, atol=2e-5)


@pytest.mark.long
def test_rows_that_wait_join_or_are_cut_short_keep_what_they_said(monkeypatch):
    """Few pages, buffers that grow in the middle, tokens that nobody wants any more: each row has its own features."""
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", 2)
    per_page = Pool.bytes_per_page(AttentionShape.of(make_policy("full").causal_lm.config), PAGE, torch.float32)
    engine = engine_of("full", "fp32", pages=9 * per_page)
    noise, rng = uniforms(4, 24, 40), np.random.default_rng(2)
    wanted = [
        Wanted("agent", rng.integers(2, 30, size=3 + 2 * k).astype(np.int32), noise[k, : 8 + k]) for k in range(24)
    ]
    found: dict[int, Ended] = {}
    left = list(enumerate(wanted))

    def more(ended):
        found.update({one.row: one for one in ended})
        return [left.pop(0)[1] for _ in range(min(5, len(left)))]

    engine.keep_scores("agent")
    engine.stream(more, follow=lambda row, before, ids: row % 3 > 0)
    engine.keep_scores(None)
    learner = engine.learner("agent")
    policy, kept, version = learner.policy, learner.kept, learner.version()
    assert len(found) == len(kept) == 24
    assert any(len(found[row].sample.token_ids) < len(wanted[row].noise_T) for row in range(0, 24, 3))
    for row, one in found.items():
        message = one.sample.token_ids
        features = kept.find(version, wanted[row].prompt, message)
        with torch.no_grad():
            torch.testing.assert_close(features, policy.features([wanted[row].prompt], [message]), atol=2e-5, rtol=0)


def test_of_two_agents_in_one_batch_only_the_next_one_to_learn_is_kept():
    first = make_policy("lora")
    pool = SamplerPool("fp32", CPU, memory_bytes=1 << 26, adapters="by_row", keeps=True)
    first.base_version = "base"
    other = type(first)(first.model, first.tokenizer, adapter="other", base_version="base", fused=first.fused)
    first.serving = other.serving = pool
    learners = {name: PolicyLearner(name, p, kept_bytes=1 << 20) for name, p in (("a", first), ("b", other))}
    engine, noise = LocalEngine(learners), uniforms(0, 6, 4)
    rows = [Wanted("ab"[k % 2], np.arange(2, 5 + k, dtype=np.int32), noise[k]) for k in range(6)]

    def ask() -> None:
        left = [rows]
        engine.stream(lambda ended: left.pop() if left else [])

    engine.keep_scores("b")
    ask()
    assert (len(learners["a"].kept), len(learners["b"].kept)) == (0, 3)
    engine.keep_scores("a")
    ask()
    assert (len(learners["a"].kept), len(learners["b"].kept)) == (3, 0), "and what was kept before is forgotten"
    engine.keep_scores(None)
    learners["a"].kept.clear()
    ask()
    assert len(learners["a"].kept) == 0, "nobody asked"


@pytest.mark.long
def test_on_a_cpu_what_is_kept_rests_on_no_page_of_an_earlier_call():
    """They were computed in other company, which rounds otherwise: a run that is resumed does not have them."""
    engine, noise = engine_of("full", "fp32"), uniforms(0, 1, 4)
    prompts = [np.arange(2, 72, dtype=np.int32) % 29 + 2]
    found = []
    for keep in (None, None, "agent", None):
        engine.keep_scores(keep)
        engine.sample("agent", prompts, noise)
        policy = engine.learner("agent").policy
        found.append(policy.serving.server_of(policy.causal_lm).books.found_tokens)
    assert np.diff([0, *found]).tolist() == [0, PAGE, 0, PAGE]


# -- the update ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_an_update_decides_alike_with_fewer_tokens(way):
    found = {}
    for score in ("own", "sampler"):
        engine = engine_of("lora", way)
        batch = sampled(engine, keep=score == "sampler")
        found[score] = update(engine, batch, score)
    own, ours = found["own"], found["sampler"]
    assert (own.sampler_scored, own.mismatch_kl, own.own_scores) == (0, None, "")
    assert (ours.sampler_scored, ours.own_scores) == (PROBLEMS * GROUP, "")
    assert ours.mismatch_kl < 1e-9
    assert ours.noise_floor < 1e-9
    assert ours.outcome == own.outcome == "accepted"
    assert (ours.steps, ours.backtracks) == (own.steps, own.backtracks)
    for name in ("kl_full", "kl_upper"):
        assert getattr(ours, name) == pytest.approx(getattr(own, name), abs=1e-6)
    for name in ("surrogate", "fraction"):
        assert getattr(ours, name) == pytest.approx(getattr(own, name), rel=1e-5)
    assert own.kl_full > 1e-3
    spared = own.tokens["scored"] - ours.tokens["scored"]
    assert spared == tokens_of(batch) - tokens_of(batch.rows(looked_at_rows(batch))), "all, but to measure the mismatch"
    assert ours.tokens["trained"] == own.tokens["trained"]


@pytest.mark.long
def test_weights_that_moved_since_are_scored_anew_and_publishing_forgets():
    engine = engine_of()
    learner = engine.learner("agent")
    batch = sampled(engine)
    learner.perturb(1e-3, seed=0)
    report = update(engine, batch, "sampler")
    assert (report.sampler_scored, report.own_scores, report.mismatch_kl) == (0, NOTHING_KEPT, None)
    batch = sampled(engine)
    assert len(learner.kept) > 0
    engine.publish("agent", learner.version())
    assert len(learner.kept) == 0, "a run that is resumed here has nothing either"
    assert update(engine, batch, "sampler").own_scores == NOTHING_KEPT


@pytest.mark.long
def test_what_is_not_kept_is_computed_beside_it():
    """As where another worker sampled some of the rows, or memory did not reach."""
    few = engine_of(budget=8 * TOKENS * 16 * 4)
    batch = sampled(few)
    learner = few.learner("agent")
    logp_M = learner.begin(batch, from_sampler=True)
    assert 0 < learner.sampler_scored < len(batch)
    assert learner.kept.bytes <= learner.kept.budget
    assert 0 < learner.tokens["scored"] < tokens_of(batch)
    np.testing.assert_allclose(logp_M, engine_of().learner("agent").begin(batch), atol=1e-5)
    own = update(engine_of(), batch, "own")
    engine = engine_of(budget=learner.kept.budget)
    some = update(engine, sampled(engine), "sampler")
    assert 0 < some.sampler_scored < len(batch)
    assert some.outcome == own.outcome
    assert some.kl_full == pytest.approx(own.kl_full, abs=1e-6)


def tampered(engine: LocalEngine, batch: AgentBatch, rows, size: float) -> None:
    learner = engine.learner("agent")
    for row in rows:
        features = learner.kept.find(learner.version(), batch.prompts[row], batch.messages[row])
        features += size * torch.randn(features.shape, generator=torch.Generator().manual_seed(int(row)))


@pytest.mark.long
def test_features_that_were_tampered_with_are_refused_and_the_update_is_the_learners_own_to_the_bit():
    engine = engine_of()
    expected = update(engine, sampled(engine, keep=False), "own")
    after = engine.learner("agent").fingerprint()
    engine = engine_of()
    batch = sampled(engine)
    tampered(engine, batch, range(len(batch)), 0.3)
    report = update(engine, batch, "sampler")
    assert report.mismatch_kl > 0.1 * RADIUS
    assert "more than a tenth of the radius 0.05" in report.own_scores
    assert report.sampler_scored == 0
    assert engine.learner("agent").fingerprint() == after
    assert report.noise_floor == expected.noise_floor
    same = ("mismatch_kl", "own_scores", "tokens", "seconds")
    assert replace(report, **{name: getattr(expected, name) for name in same}) == expected


@pytest.mark.long
def test_one_message_of_many_is_caught_by_what_the_sampler_said_of_it():
    """The floor's messages are few: this one is not among them."""
    engine = engine_of()
    batch = sampled(engine)
    whole = [p.tobytes() + m.tobytes() for p, m in zip(batch.prompts, batch.messages, strict=True)]
    looked_at = {whole[row] for row in looked_at_rows(batch)}
    row = next(row for row in range(len(batch)) if whole[row] not in looked_at)
    tampered(engine, batch, [row], 3.0)
    report = update(engine, batch, "sampler")
    assert report.mismatch_kl < 1e-9
    assert report.sampler_scored == 0
    assert "what it said of its tokens" in report.own_scores


def test_features_that_are_not_finite_are_refused():
    engine = engine_of()
    batch = sampled(engine)
    tampered(engine, batch, [0], float("nan"))
    report = update(engine, batch, "sampler")
    assert report.outcome == "accepted"
    assert "not finite" in report.own_scores
    assert (report.sampler_scored, report.mismatch_kl) == (0, None), "nothing was measured on them"


@pytest.mark.long
def test_half_precision_is_taken_within_a_tenth_of_the_radius_and_not_beyond():
    """The error is measured, whatever the sampler's arithmetic: bfloat16 serves a wide radius, and no narrow one."""
    engine = engine_of("lora", "bf16")
    wide = update(engine, sampled(engine), "sampler", radius=10.0)
    assert wide.sampler_scored == PROBLEMS * GROUP
    assert 1e-7 < wide.mismatch_kl <= wide.noise_floor * 1.5
    assert wide.noise_floor < 1.0
    engine = engine_of("lora", "bf16")
    narrow = update(engine, sampled(engine), "sampler", radius=wide.noise_floor)
    assert narrow.mismatch_kl == wide.mismatch_kl
    assert (narrow.sampler_scored, narrow.own_scores != "") == (0, True)
    assert narrow.noise_floor < 1e-9, "the learner's own"


def test_a_policy_without_features_and_a_sampler_without_room_say_so():
    engine = LocalEngine({"agent": PolicyLearner("agent", make_policy("tabular"))})
    with pytest.raises(UserError, match=r"learner\.score: sampler is for transformers"):
        engine.keep_scores("agent")
    engine.keep_scores(None)
    engine = engine_of("full", "fp32")
    engine.learner("agent").policy.serving.keeps = False
    with pytest.raises(RuntimeError, match="without keeps"):
        engine.keep_scores("agent")


# -- a run -----------------------------------------------------------------------------------------------------

TEAM = """
name: kept
task: {{name: code, symbols: AB, half_length: 1, held_out: 0.5, skill: 0.8}}
team: {{model: tiny, train: lora, agents: [{{name: left, max_tokens: 2}}, {{name: right, max_tokens: 2}}, {{name: speaker, max_tokens: 3}}]}}
tiny: {{layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}}
plan: {{preset: {preset}, problems: 4, group_size: 4, stages: 2, radius_nats_per_message: 0.05}}
learner: {{minibatches: 2, epochs: 1, score: sampler}}
sampling: {{engine: {engine}}}
eval: {{every: 1, samples: 1}}
"""  # noqa: E501


def updates_of(folder: Path) -> list[dict]:
    return [record for record in RunFolder.read(folder).log.read() if record["kind"] == "update"]


def bits(folder: Path) -> list[tuple]:
    names = ("agent", "outcome", "version_after", "kl_full", "mismatch_kl", "sampler_scored", "own_scores")
    return [tuple(record[name] for name in names) for record in updates_of(folder)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "engine"),
    [
        ("auto", "plain"),
        pytest.param("teamtr", "plain", marks=pytest.mark.slow),
        pytest.param("teamtr", "paged", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stops_in_the_middle_of_a_stage_ends_with_the_bits_of_one_that_does_not(tmp_path, preset, engine):
    """What was kept is gone with the process: each update uses only what was sampled since the commit before it."""
    team_file = loads(TEAM.format(preset=preset, engine=engine), "kept")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    list(train(team_file, folder=whole))
    list(train(team_file, folder=pieces, stop=lambda: (pieces / "log.jsonl").read_text().count('"update",') > 3))
    assert len(bits(pieces)) == 4, "in the second of two stages of three updates"
    list(train(team_file, folder=pieces))
    assert bits(pieces) == bits(whole)
    used = [record["sampler_scored"] for record in updates_of(whole) if record["steps"]]
    assert len(used) > 1, "too little happens in this run to prove anything"
    assert all(used) if preset == "teamtr" else 0 < sum(map(bool, used)) < len(used), used


# -- what it takes, and where it is refused ---------------------------------------------------------------------


def test_it_is_off_by_default_and_refused_where_nobody_keeps_anything():
    text = TEAM.format(preset="teamtr", engine="plain").replace(", score: sampler", "")
    assert loads(text, "kept").learner.score == "own"
    assert loads(text, "kept").learner.kept_bytes == 0
    for overrides, reason in (
        (("sampling.engine=vllm", "sampling.vllm.urls=[http://127.0.0.1:1]"), "vLLM gives only log-probabilities"),
        (("cluster.engine=ray", "cluster.shard_base=true"), "cluster.shard_base spreads them"),
        (("team.model=tabular", "team.train=full"), "is a table"),
    ):
        loads(text, "kept", overrides)
        with pytest.raises(UserError, match=reason):
            loads(text, "kept", (*overrides, "learner.score=sampler"))


@pytest.mark.long
def test_the_memory_plan_counts_what_is_kept_and_where():
    """By hand: float32, width 32; four problems of four, messages of three tokens in buffers of four."""
    text = TEAM.format(preset="teamtr", engine="paged")
    items = {}
    for score in ("own", "sampler"):
        session = build(loads(text, "kept", (f"learner.score={score}", "tiny.warmup_steps=0")))
        planned = plan_memory(session).items
        items[score] = {item.what: item.bytes for item in planned}
    why = {item.what: item.why for item in planned}
    assert why["features of open messages"] == "buffers for 17 messages of 4 tokens", "one spare, and powers of two"
    new = {what: size for what, size in items["sampler"].items() if what not in items["own"]}
    assert {what: items["sampler"][what] for what in items["own"]} == items["own"]
    assert new == {"features of open messages": (16 + 1) * 4 * 32 * 4, "features of the sampler": 16 * 3 * 32 * 4}
    plain = build(loads(TEAM.format(preset="teamtr", engine="plain"), "kept", ("tiny.warmup_steps=0",)))
    assert {i.what: i.bytes for i in plan_memory(plain).items}["features of open messages"] == 16 * 4 * 32 * 4
    small = build(loads(text, "kept", ("learner.score_memory_gb=1e-6", "tiny.warmup_steps=0")))
    assert {i.what: i.bytes for i in plan_memory(small).items}["features of the sampler"] == int(1e-6 * 2**30)
    policy = session.engine.learner("left").policy
    policy.reserve(16, 10, 3)
    assert policy.serving.server_of(policy.causal_lm)._buffers.kept.nbytes == new["features of open messages"]


def test_a_plan_without_models_counts_the_same():
    setup = planned.setup()
    plans = [
        memory_of(replace(setup, learning=replace(setup.learning, kept_features=size))).plan.items
        for size in (0, 4 << 30)
    ]
    own, kept = ({item.what: item.bytes for item in items} for items in plans)
    assert kept.pop("features of open messages") == (512 + 1) * 256 * 2048 * 2
    assert kept.pop("features of the sampler") == 512 * 256 * 2048 * 4
    assert kept == own
