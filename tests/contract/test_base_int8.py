"""A frozen base in 8 bits: numbers times scales, for scoring, training and sampling, held once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import make_batch, make_policy
from teamtr.engines import memory as loaded
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.paged import pool as pools
from teamtr.engines.paged.one_copy import plain_name, shared_weights
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.row_scaled import RowScaled, keep_row_scaled, kept_weight, row_scaled_in
from teamtr.engines.torch.short_base import keep_short
from teamtr.errors import UserError
from teamtr.randomness import uniforms

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def in_8_bits(**settings: object) -> TransformerPolicy:
    policy = make_policy("lora", **settings)
    policy.base_version = "base"
    keep_short(policy.causal_lm, policy.fused, torch.int8, rounded=True)
    return policy


def rounded(**settings: object) -> TransformerPolicy:
    """The same numbers in float32."""
    policy = make_policy("lora", **settings)
    policy.base_version = "base"
    with torch.no_grad():
        for layer in policy.fused.linears:
            layer.weight.copy_(RowScaled.of(layer.weight).to(torch.float32))
        head = policy.causal_lm.get_output_embeddings().weight
        head.copy_(head.half())
    return policy


def sampled(policy: TransformerPolicy, precision: str, adapters: str) -> list:
    policy.serving = SamplerPool(precision, CPU, memory_bytes=1 << 24, adapters=adapters)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 30, size=n).astype(np.int32) for n in (3, 9, 70, 9)]
    return policy.sample(prompts, uniforms(7, 4, 20), TokenSampler(1.0), version="now")


# -- the numbers ----------------------------------------------------------------------------------------------------


def test_values_by_hand():
    weight = torch.tensor([[127.0, -63.5, 0.4, 0.6], [0.0, 0.0, 0.0, 0.0], [-0.254, 0.127, 0.001, 1e-9]])
    found = RowScaled.of(weight)
    assert found.numbers.dtype == found.dtype == torch.int8
    assert found.numbers.tolist() == [[127, -64, 0, 1], [0, 0, 0, 0], [-127, 64, 0, 0]]  # halves go to even numbers
    assert torch.equal(found.scales, torch.tensor([127.0 / 127, 1.0, torch.tensor(0.254) / 127]))
    assert found.to(torch.float32)[0].tolist() == [127.0, -64.0, 0.0, 1.0]
    least = RowScaled.of(torch.full((1, 3), 1e-45))
    assert (least.scales.tolist(), least.numbers.tolist()) == ([1.0], [[0, 0, 0]]), "too small for a scale"


def test_a_cast_is_a_product_in_float32_rounded_once_and_no_number_moves_by_more_than_half_a_scale():
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 50)[:, None]
    found = RowScaled.of(weight)
    wide = found.numbers.double() * found.scales.double()[:, None]
    assert torch.equal(found.to(torch.float32).double(), wide.float().double())
    assert torch.equal(found.to(torch.float16), wide.float().half())
    assert bool(((wide - weight).abs() <= 0.5001 * found.scales[:, None]).all())
    again = RowScaled.of(weight)
    assert torch.equal(again.numbers, found.numbers)
    assert torch.equal(again.scales, found.scales), "the same bits on every load"


def test_linear_layers_are_int8_and_the_rest_is_as_with_fp16():
    policy, exact = in_8_bits(), make_policy("lora")
    theirs = dict(exact.causal_lm.named_parameters())
    scaled = dict(row_scaled_in(policy.causal_lm))
    for name, weight in policy.causal_lm.named_parameters():
        if "proj" in name and "lora_" not in name:
            assert weight.dtype == torch.int8
            assert torch.equal(scaled[weight].to(torch.float32), RowScaled.of(theirs[name]).to(torch.float32))
        elif "embed" in name:
            assert torch.equal(weight, theirs[name].half())
        else:
            assert weight.dtype == torch.float32
    assert len(scaled) == 7
    moved = policy.causal_lm.to("meta")
    assert {found.scales.device.type for _, found in row_scaled_in(moved)} == {"meta"}, "scales move with the model"


# -- the learner ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_features_and_gradients_are_those_of_a_float32_base_with_the_rounded_numbers(precision, targets):
    """Also of layers without an adapter, one of which is read beside layers with one."""
    lora = SimpleNamespace(rank=4, alpha=8.0, targets=targets)
    found = []
    for make in (in_8_bits, rounded):
        policy = make(lora=lora)
        policy.precision = precision
        learner = PolicyLearner("agent", policy, micro_batch=8)
        batch = make_batch(learner, problems=2)
        with torch.enable_grad(), policy.computing():
            logits = policy.head()(policy.features(batch.prompts, batch.messages))
            gradients = torch.autograd.grad(logits.square().mean(), list(policy.parameters().values()))
        assert all(bool(gradient.abs().max() > 0) for gradient in gradients)
        found.append((logits.detach(), *gradients))
        copies = policy.fused.halves
    assert bool(copies) == (precision in ("fp16", "bf16")), "of the float32 base, and of it alone"
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def test_the_kl_of_a_step_is_that_of_the_rounded_base():
    found = []
    for policy in (in_8_bits(), rounded()):
        learner = PolicyLearner("agent", policy, micro_batch=8)
        batch = make_batch(learner, problems=2)
        learner.begin(batch, reference=False)
        with torch.no_grad():
            for parameter in policy.parameters().values():
                parameter.add_(0.05)
        found.append(np.concatenate(learner.token_kls()))
    assert found[0].max() > 1e-3, "nothing moved: this proves nothing"
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-7)


# -- the sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_copy_says_what_a_copy_and_a_rounded_base_say(precision: str, monkeypatch):
    one, expected = in_8_bits(), sampled(rounded(), precision, "by_row")
    with torch.no_grad():
        before = one.features([np.arange(2, 9, dtype=np.int32)], [np.arange(3, 8, dtype=np.int32)])
    from_one = sampled(one, precision, "by_row")
    copy = one.serving.server_of(one.causal_lm).copy
    theirs = {plain_name(name): weight for name, weight in one.causal_lm.named_parameters()}
    for name, own in copy.model.named_parameters():
        assert (own.data_ptr() == theirs[name].data_ptr()) == (
            "proj" in name or (precision == "fp16" and "embed" in name)
        )
        assert (own.dtype == torch.int8) == ("proj" in name)
    attention = copy.model.get_decoder().layers[0].self_attn
    assert "_joined_forward" in attention.forward.__qualname__
    joined = copy.rows._places["model.layers.0.self_attn.k_proj"][0].of_base.weight
    learned = one.causal_lm.get_decoder().layers[0].self_attn
    assert joined.data_ptr() == learned.q_proj.base_layer.weight.data_ptr(), "and the joined weight is no copy"
    assert joined.scales.data_ptr() == kept_weight(learned.q_proj.base_layer).scales.data_ptr()
    with torch.no_grad():
        after = one.features([np.arange(2, 9, dtype=np.int32)], [np.arange(3, 8, dtype=np.int32)])
    assert torch.equal(before, after), "the learner computes the same bits as before"
    monkeypatch.setattr(pools, "shared_weights", lambda *_: {})
    from_a_copy = sampled(in_8_bits(), precision, "by_row")
    for ours, copied, rounded_one in zip(from_one, from_a_copy, expected, strict=True):
        assert np.array_equal(ours.token_ids, copied.token_ids)
        assert np.array_equal(ours.token_ids, rounded_one.token_ids)
        np.testing.assert_allclose(ours.logprobs, copied.logprobs, atol=1e-5 if precision == "fp32" else 1e-2)


def test_a_compiler_takes_the_cast_as_it_is():
    policy = in_8_bits()
    sampled(policy, "fp16", "by_row")
    copy = policy.serving.server_of(policy.causal_lm).copy
    product, _ = copy.rows._places["model.layers.0.mlp.up_proj"]
    copy.rows.of_tokens([0, 1], [2, 3])
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        compiled = torch.compile(product.__call__, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), product(x))


def test_merged_adapters_are_merged_into_the_rounded_base():
    found, expected = (sampled(policy, "fp32", "merged") for policy in (in_8_bits(), rounded()))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-6)
    policy, plain = in_8_bits(), rounded()
    copy = SamplingCopy(policy.causal_lm, torch.float16, CPU)
    copy.fill(policy.causal_lm, None, version="", base="")
    weight = plain.causal_lm.get_decoder().layers[0].mlp.down_proj.base_layer.weight
    assert torch.equal(copy.model.get_decoder().layers[0].mlp.down_proj.weight, weight.half())


def test_layers_without_an_adapter_are_cast_in_passing_by_the_sampler():
    lora = SimpleNamespace(rank=4, alpha=8.0, targets=["o_proj"])
    found, expected = (sampled(make(lora=lora), "fp32", "by_row") for make in (in_8_bits, rounded))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-6)


def test_one_sibling_of_another_precision_keeps_its_group_apart():
    policy = in_8_bits()
    attention = policy.causal_lm.get_decoder().layers[0].self_attn
    key = attention.k_proj.base_layer
    key.weight.data, key.row_scales = kept_weight(key).to(torch.float32), None
    names = shared_weights(policy.causal_lm, torch.float32, CPU)
    assert {name for name in names if "self_attn" in name} == {"model.layers.0.self_attn.o_proj.weight"}
    expected = sampled(rounded(), "fp32", "by_row")
    assert all(
        np.array_equal(ours.token_ids, theirs.token_ids)
        for ours, theirs in zip(sampled(policy, "fp32", "by_row"), expected, strict=True)
    )


# -- what is counted, and what is refused ---------------------------------------------------------------------------


def test_bytes_by_hand():
    """One block of width 16: two heads of 8, one of keys; vocabulary V, tied."""
    policy = in_8_bits()
    policy.precision = "fp16"
    policy.serving = SamplerPool("fp16", CPU, memory_bytes=1 << 24, adapters="by_row")
    inner, vocabulary = policy.causal_lm.config.intermediate_size, policy.causal_lm.config.vocab_size
    body, words, norms = (16 + 8 + 8 + 16) * 16 + 3 * 16 * inner, vocabulary * 16, 2 * 16 + 2 * 8 + 16
    scales = 4 * (16 + 8 + 8 + 16 + 2 * inner + 16)
    held = loaded.held({"agent": PolicyLearner("agent", policy)}, ["agent"])
    assert (held.weights, held.halves) == (body + scales + 2 * words + 4 * norms, 0)
    [served] = held.served
    assert (served.copy_bytes, served.shared_bytes) == (2 * norms, body + scales + 2 * words)
    assert served.cast == 2 * 2 * 16 * inner, "gate and up together"
    assert held.cast == max(4 * words, 2 * 16 * inner)
    policy.precision = "fp32"
    policy.serving = SamplerPool("fp32", CPU, memory_bytes=1 << 24, adapters="by_row")
    [served] = loaded.held({"agent": PolicyLearner("agent", policy)}, ["agent"]).served
    assert (served.copy_bytes, served.shared_bytes) == (4 * (norms + words), body + scales)
    assert served.cast == 4 * 2 * 16 * inner
    policy.serving = SamplerPool("fp16", CPU, memory_bytes=1 << 24)
    [served] = loaded.held({"agent": PolicyLearner("agent", policy)}, ["agent"]).served
    assert (served.copy_bytes, served.shared_bytes, served.cast) == (2 * (body + words + norms), 0, 0)


def test_frozen_weights_in_other_layers_are_refused_by_name():
    policy = make_policy("lora")
    convolution = nn.Conv1d(4, 4, 3).requires_grad_(False)
    policy.causal_lm.get_decoder().layers[0].mixer = convolution
    policy.fused.unfused += convolution.parameters()
    with pytest.raises(UserError, match=r"frozen weights in others: model\.layers\.0\.mixer\.weight; set"):
        keep_short(policy.causal_lm, policy.fused, torch.int8, rounded=True)
    assert not list(row_scaled_in(policy.causal_lm)), "before anything is changed"


def test_a_weight_that_two_layers_have_is_rounded_once_and_an_output_layer_among_them_is_not():
    first, second, head = (nn.Linear(3, 2, bias=False).requires_grad_(False) for _ in range(3))
    second.weight = first.weight
    expected: Tensor = RowScaled.of(first.weight).to(torch.float32)
    model = nn.Sequential(first, second, head)
    model.get_input_embeddings, model.get_output_embeddings = lambda: None, lambda: head
    keep_short(model, SimpleNamespace(linears=[first, second, head], unfused=[]), torch.int8, rounded=True)
    assert (kept_weight(head).dtype, first.weight.dtype) == (torch.float16, torch.int8)
    for layer in (first, second):
        assert torch.equal(kept_weight(layer).to(torch.float32), expected)
    keep_row_scaled(first, RowScaled.of(torch.eye(2, 3)))
    assert torch.equal(kept_weight(first).to(torch.float32), torch.eye(2, 3))
