"""One copy of a frozen base: kept in half precision without a copy to compute with, and sampled from where it is."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from conftest import make_batch, make_policy
from teamtr.engines import memory as loaded
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged import pool as pools
from teamtr.engines.paged.one_copy import NotShared, plain_name, shared_weights
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.row_adapters import adapter_numbers
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch import head as heads
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.short_base import keep_short
from teamtr.errors import UserError
from teamtr.randomness import uniforms

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
PLAINLY = TokenSampler(1.0)


def adapted(*, rounded_to: torch.dtype | None = None, kept: torch.dtype | None = None) -> TransformerPolicy:
    """An adapter on a base whose numbers have room in one dtype, and which is kept in another."""
    policy = make_policy("lora")
    policy.base_version = "base"
    with torch.no_grad():
        for name, parameter in policy.causal_lm.named_parameters():
            if rounded_to is not None and "lora_" not in name:
                parameter.copy_(parameter.to(rounded_to))
    if kept is not None:
        keep_short(policy.causal_lm, policy.fused, kept, rounded=False)
    return policy


def sampled(policy: TransformerPolicy, precision: str = "fp32", **settings) -> list:
    policy.serving = SamplerPool(precision, CPU, memory_bytes=1 << 24, adapters="by_row", **settings)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 30, size=n).astype(np.int32) for n in (3, 9, 70, 9)]
    return policy.sample(prompts, uniforms(7, 4, 20), PLAINLY, version="now")


def scores(policy: TransformerPolicy) -> torch.Tensor:
    prompts, messages = [np.arange(2, 9, dtype=np.int32)] * 2, [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 6)]
    with torch.no_grad(), policy.computing():
        return policy.head()(policy.features(prompts, messages))


# -- no copy to compute with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["agent", "other"])
def test_copies_in_a_precision_that_no_agent_computes_in_any_more_go(last: str):
    """As where ``precision: auto`` goes on to a finer one. What one agent of a base needs is counted and stays."""
    first = adapted()
    second = TransformerPolicy(first.model, first.tokenizer, adapter="other", base_version="base", fused=first.fused)
    policies = {"agent": first, "other": second}
    engine = LocalEngine({name: PolicyLearner(name, policy, micro_batch=8) for name, policy in policies.items()})
    assert first.fused is not None
    for name, policy in policies.items():
        engine.set_precision(name, "fp16")
        scores(policy)
    (other,) = {*policies} - {last}
    engine.set_precision(other, "bf16")
    scores(policies[other])
    assert {dtype for _, dtype in first.fused.halves} == {torch.float16, torch.bfloat16}
    both = policies[last].frozen_half_bytes() + policies[other].frozen_half_bytes()
    assert loaded.held(engine.learners, engine.agents).halves == both
    engine.set_precision(other, "fp32")
    assert {dtype for _, dtype in first.fused.halves} == {torch.float16}
    assert loaded.held(engine.learners, engine.agents).halves == policies[last].frozen_half_bytes() > 0
    copies = [weakref.ref(half) for half in first.fused.halves.values()]
    engine.set_precision(last, "fp32")
    assert not any(copy() is not None for copy in copies)
    assert loaded.held(engine.learners, engine.agents).halves == 0


@pytest.mark.parametrize(
    ("kept", "precision"), [("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "tf32")]
)
def test_a_base_that_is_kept_short_has_no_copies_and_computes_the_same_bits(kept: str, precision: str):
    found = []
    for short in (None, HALF[kept]):
        policy = adapted(rounded_to=HALF[kept], kept=short)
        policy.precision = precision
        learner = PolicyLearner("agent", policy, micro_batch=8)
        batch = make_batch(learner, problems=2)
        learner.begin(batch, reference=False)
        with torch.enable_grad(), policy.computing():
            logits = policy.head()(policy.features(batch.prompts, batch.messages))
            gradients = torch.autograd.grad(logits.square().mean(), list(policy.parameters().values()))
        copies = policy.fused.halves
        assert bool(copies) == (short is None and precision in HALF)
        assert (policy.frozen_half_bytes() > 0) == bool(copies)
        found.append((logits, *gradients))
    for plain, short in zip(*found, strict=True):
        assert torch.equal(plain, short)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_that_is_kept_short_is_cast_in_parts(bias: bool, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator).bfloat16()
    added = torch.randn(50, generator=generator) if bias else None
    hidden = torch.randn(7, 16, generator=generator, requires_grad=True)
    up = torch.randn(7, 50, generator=generator)
    plain = OutputLayer(weight.float(), added, 2.0)
    monkeypatch.setattr(heads, "CAST_AT_ONCE", 16 * 12)  # 12 rows at once, and 2 are left at the end
    for short, expected in [
        (OutputLayer(weight, added, 2.0), plain),
        (OutputLayer(weight, added, 2.0, weight), OutputLayer(weight.float(), added, 2.0, weight.half())),
    ]:
        torch.testing.assert_close(short(hidden), expected(hidden))
        ours, theirs = (torch.autograd.grad(head(hidden), hidden, up) for head in (short, expected))
        torch.testing.assert_close(ours, theirs)


def test_a_base_that_is_rounded_is_what_it_is_everywhere_and_one_without_room_is_refused():
    policy, exact = adapted(), adapted()
    keep_short(policy.causal_lm, policy.fused, torch.float16, rounded=True)
    kept = dict(policy.causal_lm.named_parameters())
    for name, weight in exact.causal_lm.named_parameters():
        short = weight.ndim == 2 and "lora_" not in name
        assert kept[name].dtype == (torch.float16 if short else torch.float32)
        assert torch.equal(kept[name], weight.half() if short else weight)
    assert not torch.equal(scores(policy), scores(exact)), "rounding shows"
    torch.testing.assert_close(scores(policy), scores(exact), rtol=1e-2, atol=1e-1)
    with torch.no_grad():
        exact.causal_lm.get_decoder().layers[0].mlp.up_proj.base_layer.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"as large as 1e\+06 and has no room in float16: set learner\.base: file"):
        keep_short(exact.causal_lm, exact.fused, torch.float16, rounded=True)


# -- one copy with the sampler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_sampler_reads_the_learners_weights_and_says_what_it_says_from_a_copy(precision: str, monkeypatch):
    kept = HALF.get(precision)
    one, two = (adapted(rounded_to=kept, kept=kept) for _ in range(2))
    before = scores(one)
    monkeypatch.setattr(pools, "shared_weights", lambda *_: {})
    from_a_copy = sampled(two, precision)
    monkeypatch.setattr(pools, "shared_weights", shared_weights)
    from_one = sampled(one, precision)
    for ours, theirs in zip(from_one, from_a_copy, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert np.array_equal(ours.logprobs, theirs.logprobs)
    assert torch.equal(scores(one), before), "the learner computes the same bits as before"
    assert torch.equal(scores(one), scores(two))
    copy = one.serving.server_of(one.causal_lm).copy
    theirs = {plain_name(name): weight for name, weight in one.causal_lm.named_parameters()}
    same = {name for name, own in copy.model.named_parameters() if own.data_ptr() == theirs[name].data_ptr()}
    assert same == {name for name, own in copy.model.named_parameters() if own.ndim == 2}, "all but norms"
    assert "_joined_forward" in copy.model.get_decoder().layers[0].self_attn.forward.__qualname__
    attention = one.causal_lm.get_decoder().layers[0].self_attn
    together = {
        getattr(attention, name).base_layer.weight.untyped_storage().data_ptr() for name in ("q_proj", "v_proj")
    }
    assert together == {copy.model.get_decoder().layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr()}
    parts = [getattr(attention, name).base_layer.weight.nbytes for name in ("q_proj", "k_proj", "v_proj")]
    below = copy.rows._places["model.layers.0.self_attn.q_proj"][0].down.nbytes
    assert attention.q_proj.base_layer.weight.untyped_storage().nbytes() == sum(parts) + below, (
        "nothing else lies there"
    )


def test_weights_of_another_precision_are_copied_and_one_sibling_of_another_keeps_its_group_apart():
    policy = adapted(rounded_to=torch.bfloat16, kept=torch.bfloat16)
    assert not shared_weights(policy.causal_lm, torch.float16, CPU)
    layer = policy.causal_lm.get_decoder().layers[0]
    layer.self_attn.k_proj.base_layer.weight.data = layer.self_attn.k_proj.base_layer.weight.data.float()
    names = set(shared_weights(policy.causal_lm, torch.bfloat16, CPU))
    assert {name for name in names if "self_attn" in name} == {"model.layers.0.self_attn.o_proj.weight"}
    assert len(names) == 5, "with the embedding, gate, up and down"
    sampled(policy, "bf16")
    one, two = (getattr(layer.self_attn, name).base_layer.weight for name in ("q_proj", "k_proj"))
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def test_another_model_of_the_architecture_has_a_server_of_its_own_and_leaves_the_base_alone():
    policy, other = adapted(), make_policy("full", seed=1)
    sampled(policy)
    before = {name: weight.clone() for name, weight in policy.causal_lm.named_parameters()}
    other.serving = policy.serving
    prompt = np.arange(2, 9, dtype=np.int32)
    [paged] = other.sample([prompt], uniforms(1, 1, 12), PLAINLY, version="other")
    with torch.no_grad():
        [plain] = other._sample_plainly([prompt], uniforms(1, 1, 12), PLAINLY)
    assert np.array_equal(paged.token_ids, plain.token_ids)
    assert len(policy.serving._servers) == 2
    for name, weight in policy.causal_lm.named_parameters():
        assert torch.equal(weight, before[name])
    with pytest.raises(AssertionError, match="the learner's own"):
        policy.serving.server_of(policy.causal_lm).copy.fill(policy.causal_lm, "agent", version="", base="base")


def test_a_model_that_cannot_be_made_around_weights_is_copied_and_somebody_is_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise NotShared("it is too clever")

    expected = sampled(adapted())
    monkeypatch.setattr("teamtr.engines.paged.weights.made_around", refuse)
    with pytest.warns(UserWarning, match="from a copy of its weights.* it is too clever"):
        found = sampled(adapted())
    assert np.array_equal(found[2].token_ids, expected[2].token_ids)


# -- what is counted ------------------------------------------------------------------------------------------------


def test_bytes_of_one_copy_by_hand():
    """One block of width 16: two heads of 8, one of keys; vocabulary V, tied. Adapters of rank 4, two of them."""
    policy = adapted(rounded_to=torch.float16, kept=torch.float16)
    policy.precision = "fp16"
    policy.serving = SamplerPool("fp16", CPU, memory_bytes=1 << 24, adapters="by_row")
    config = policy.causal_lm.config
    inner, vocabulary = config.intermediate_size, config.vocab_size
    matrices = (16 + 8 + 8 + 16) * 16 + 3 * 16 * inner + vocabulary * 16
    norms = 2 * 16 + 2 * 8 + 16
    held = loaded.held({"agent": PolicyLearner("agent", policy)}, ["agent"])
    assert held.weights == 2 * matrices + 4 * norms
    assert held.halves == 0
    [served] = held.served
    assert (served.copy_bytes, served.shared_bytes) == (2 * norms, 2 * matrices)
    by_hand = 3 * 8 * (16 + 32) + 8 * (16 + 16) + 2 * 8 * (16 + 2 * inner) + 8 * (inner + 16)
    assert served.row_bytes == 2 * by_hand == 2 * adapter_numbers(policy.causal_lm)
    assert held.cast == 4 * vocabulary * 16, "the head in float32, for its gradient"
    policy.precision = "fp32"
    held = loaded.held({"agent": PolicyLearner("agent", policy)}, ["agent"])
    assert held.cast == 4 * max(vocabulary * 16, 16 * inner)
    sampled(policy, "fp16")
    rows = policy.serving.server_of(policy.causal_lm).copy.rows
    places = {id(product): product for product, _ in rows._places.values()}.values()
    assert sum(product.down.nbytes + product.up.nbytes for product in places) == served.row_bytes
