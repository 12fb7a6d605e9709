"""Architectures whose tokens meet elsewhere than in attention: computed rightly, or refused, never wrongly."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from on_a_card import instead_of_kernels
from teamtr.engines.paged import joined_layers
from teamtr.engines.paged.fused_linears import join_attention, join_siblings
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch import fused_lora
from teamtr.engines.torch.anatomy import inspect_attention
from teamtr.engines.torch.attention import Unsupported
from teamtr.engines.torch.fused_lora import fuse_lora
from teamtr.engines.torch.known_layers import adds_twice as adds_twice_in
from teamtr.engines.torch.known_layers import turns_plainly
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.short_base import keep_short
from teamtr.errors import UserError
from teamtr.randomness import uniforms
from tiny_architectures import (
    CONFIGS,
    CPU,
    EXPERTS,
    LAYERS,
    PACKED,
    SHAPE,
    alone,
    make_gpt2,
    make_model,
    make_model_with_eyes,
    make_policy,
    scored,
    served,
    some_prompts,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", CONFIGS)
def test_sampler_and_learner_agree_with_the_model_itself(kind):
    model = make_model(kind)
    room = SamplerPool("fp32", CPU, memory_bytes=1 << 24)
    policy = make_policy(model, serving=room)
    prompts = some_prompts()
    drawn = policy.sample(prompts, uniforms(1, len(prompts), 6))
    expected = [alone(model, prompt, sample.token_ids) for prompt, sample in zip(prompts, drawn, strict=True)]
    np.testing.assert_allclose(np.concatenate([s.logprobs for s in drawn]), np.concatenate(expected), atol=2e-5)
    np.testing.assert_allclose(scored(policy, prompts, drawn), np.concatenate(expected), atol=2e-5)
    assert policy.packs == (kind in PACKED), "only where tokens meet in attention alone"
    assert (policy.serving is not None) == (kind in PACKED)


def test_what_an_architecture_has_is_said():
    with pytest.warns(UserWarning, match="FalconH1ForCausalLM has more between its tokens than attention: batches are"):
        TransformerPolicy(make_model("FalconH1"), SimpleNamespace(eos_token_id=2))
    with pytest.warns(UserWarning, match="BloomForCausalLM has an attention of its own, or layers without one: sampl"):
        TransformerPolicy(
            make_model("Bloom"), SimpleNamespace(eos_token_id=2), serving=SamplerPool("fp32", CPU, memory_bytes=1 << 20)
        )


@pytest.mark.parametrize(("kind", "pads"), [("FalconH1", False), ("Llama", True)])
def test_what_is_found_with_one_adapter_holds_with_another_on_the_same_layers(kind, pads):
    """It is not computed again, and decides whether tokens that are not there would be read."""
    adapters = {name: SimpleNamespace(rank=4, alpha=8.0, targets=FEW) for name in ("one", "two")}
    shared = share_base(make_model(kind), adapters, seed=0)
    room = SamplerPool("fp32", CPU, memory_bytes=1 << 24)
    options = {"fused": fuse_lora(shared), "serving": room}
    one = make_policy(shared, adapter="one", **options)
    two, again = (make_policy(shared, adapter="two", alike=alike, **options) for alike in (one, None))
    for policy in (one, two, again):
        assert (policy.packs, policy._pads, policy.serving) == (kind in PACKED, pads, room if kind in PACKED else None)
    prompts = some_prompts()
    drawn = two.sample(prompts, uniforms(1, len(prompts), 6))
    expected = [alone(shared, prompt, sample.token_ids) for prompt, sample in zip(prompts, drawn, strict=True)]
    np.testing.assert_allclose(np.concatenate([s.logprobs for s in drawn]), np.concatenate(expected), atol=2e-5)


def test_a_cache_that_is_not_the_common_one_is_refused():
    with pytest.raises(ValueError, match="gives other logits token by token than at once"):
        make_policy(make_model("Mamba"))


def test_angles_that_depend_on_the_longest_sequence_of_a_batch_are_refused():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    policy = make_policy(make_model("Phi3", rope_parameters=rope, **lengths))
    assert len(policy.sample(some_prompts(), uniforms(1, len(some_prompts()), 4))) == 4
    with pytest.raises(UserError, match="need 17 tokens; beyond 16, Phi3ForCausalLM turns all positions of a batch"):
        policy.sample(some_prompts(), uniforms(1, len(some_prompts()), 5))


# -- norm and rotation within attention --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes", "joined"),
    [
        ("Llama", {}, LAYERS),
        ("Qwen2", {}, LAYERS),  # biases
        ("Qwen3", {}, LAYERS),  # a norm over each head
        ("Mistral", {}, LAYERS),
        ("Granite", {}, LAYERS),  # a scale of its own
        ("SmolLM3", {}, LAYERS - 1),  # every fourth layer does not rotate
        ("Olmo", {}, LAYERS),
        ("Olmo", {"clip_qkv": 8.0}, 0),
        ("Olmo2", {}, 0),  # a norm over all heads
        ("Cohere", {}, 0),  # pairs lie side by side
        ("Glm", {}, 0),  # half of a head is rotated
        ("BitNet", {}, 0),  # a norm between attention and its last layer
        ("Gemma3", {}, 0),  # its norms add one to their weights
    ],
)
def test_norm_and_rotation_join_attention_only_where_they_are_the_same(kind, changes, joined, dtype):
    model = make_model(kind, **changes).to(dtype)
    assert join_attention(inspect_attention(model), join_siblings(model)) == joined


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "SmolLM3", "Granite"])
def test_a_copy_with_joined_attention_says_what_the_model_says(kind):
    model = make_model(kind)
    prompt = np.array([5, 9, 2, 40, 7, 7, 31], dtype=np.int32)
    server = served(model)
    (said,) = server.sample("v", [prompt], uniforms(3, 1, 12), drawing=TokenSampler(1.0), end_ids=frozenset())
    np.testing.assert_allclose(said.logprobs, alone(model, prompt, said.token_ids), atol=2e-5)


def test_a_window_is_still_looked_at_when_attention_is_joined():
    model = make_model("Mistral", sliding_window=80)
    server = served(model)
    options = {"drawing": TokenSampler(1.0), "end_ids": frozenset()}
    assert server.sample("v", [np.arange(20, dtype=np.int32)], uniforms(3, 1, 4), **options)
    with pytest.raises(Unsupported, match="a sliding window of 80 tokens"):
        server.sample("v", [np.arange(90, dtype=np.int32)], uniforms(3, 1, 4), **options)


def test_queries_that_grow_with_their_position_stay_with_their_own_forward():
    """Few tokens do not show it: the scale is 1 until the first positions are behind."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    model = make_model("Ministral3", rope_parameters=rope, max_position_embeddings=512, sliding_window=None)
    prompt = np.random.default_rng(0).integers(3, 100, size=150).astype(np.int32)
    server = served(model)
    (said,) = server.sample("v", [prompt], uniforms(3, 1, 6), drawing=TokenSampler(1.0), end_ids=frozenset())
    np.testing.assert_allclose(said.logprobs, alone(model, prompt, said.token_ids), atol=2e-5)
    assert join_attention(inspect_attention(model), join_siblings(model)) == 0


# -- adapters in half precision ------------------------------------------------------------------------------------

FEW = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("kind", "changes", "targets", "stranger"),
    [
        ("Llama", {}, "all-linear", False),
        ("Llama", {}, FEW, False),  # most layers carry no adapter
        ("Qwen2", {}, FEW, False),  # and have biases
        ("Gemma3", {}, FEW, False),
        ("Olmo", {"clip_qkv": 8.0}, "all-linear", False),  # changes products in place
        ("Bloom", {}, "all-linear", True),  # adds numbers in float32
        ("StableLm", {"qk_layernorm": True}, "all-linear", True),  # a card's norm wants weights like its input
        ("DeepseekV2", {}, "all-linear", True),  # rotates by complex numbers
        ("Qwen3Moe", EXPERTS, FEW, True),  # experts are no linear layers
        ("Qwen3Moe", EXPERTS, "all-linear", True),
        ("Mixtral", EXPERTS, FEW, True),
    ],
)
def test_half_precision_has_the_gradient_of_float32_whatever_carries_the_adapter(kind, changes, targets, stranger):
    shared = share_base(
        make_model(kind, **changes), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets=targets)}, seed=0
    )
    fused = fuse_lora(shared)
    assert bool(fused.unfused) == stranger
    generator = torch.Generator().manual_seed(1)
    prompts, messages = some_prompts(), [np.array([4, 5, 9], dtype=np.int32)] * len(some_prompts())
    found = []
    for precision in ("fp32", "fp16"):
        policy = make_policy(shared, adapter="agent", precision=precision, fused=fused)
        if precision == "fp32":
            with torch.no_grad():
                for parameter in policy.parameters().values():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        with policy.computing():
            features = policy.features(prompts, messages).float()
            (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        found.append((features.detach(), torch.cat([p.grad.flatten() for p in policy.parameters().values()])))
        for parameter in policy.parameters().values():
            parameter.grad = None
    for exact, half in zip(*found, strict=True):
        assert 0 < float((half - exact).norm() / exact.norm()) < 0.01
    assert policy.frozen_half_bytes() > 0


@pytest.mark.parametrize(
    ("kind", "changes", "adds_twice"),
    [
        ("Llama", {}, True),
        ("Qwen3", {}, True),
        ("Qwen2", {}, True),
        ("Qwen3Moe", EXPERTS, True),
        ("Gemma3", {}, False),  # norms what it adds
        ("Olmo2", {}, False),
        ("Granite", {"residual_multiplier": 0.3}, False),  # adds less
        ("Cohere", {"logit_scale": 1.0}, False),  # attention and the rest side by side
    ],
)
def test_what_a_card_computes_between_products_is_what_the_architecture_says(kind, changes, adds_twice, monkeypatch):
    """The way of a card, with torch in the place of its kernels: features and gradients are the model's own."""
    shared = share_base(
        make_model(kind, **changes), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")}, seed=0
    )
    layer = shared.get_base_model().get_decoder().layers[0]
    parts = [name for name, _ in layer.named_children()]
    before = {name: getattr(layer, name).forward for name in parts}
    assert adds_twice_in(layer) == adds_twice
    assert {name: getattr(layer, name).forward for name in parts} == before, "parts are put back as they were"
    policy = make_policy(shared, adapter="agent", fused=fuse_lora(shared))
    with torch.no_grad():
        for key, parameter in policy.parameters().items():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))
    prompts, messages = some_prompts(), [np.array([4, 5, 9], dtype=np.int32)] * len(some_prompts())
    asked = instead_of_kernels(monkeypatch)
    found = []
    for fuses, recomputes in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(fused_lora.FusedLora, "fuses", lambda *_, it=fuses: it)
        if recomputes:
            assert policy.recompute_activations()
        with policy.computing():
            features = policy.features(prompts, messages)
            (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        found.append([features.detach(), *(p.grad for p in policy.parameters().values())])
        for parameter in policy.parameters().values():
            parameter.grad = None
    assert asked.count("add_norm") == (3 * LAYERS if adds_twice else 0), "once, and twice where it is computed again"
    for plain, ours, again in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
        assert torch.equal(again, ours)


# -- the sampling copy --------------------------------------------------------------------------------------------


def test_layers_that_processes_hold_in_parts_keep_their_forward(monkeypatch):
    for in_parts in (False, True):
        lora = {"agent": SimpleNamespace(rank=4, alpha=8.0, targets=FEW)}
        shared = share_base(make_model("Llama"), lora, seed=0)
        monkeypatch.setattr(fused_lora, "is_spread", lambda _, it=in_parts: it)
        fuse_lora(shared)
        layers = shared.get_base_model().get_decoder().layers
        assert [("forward" in vars(layer)) for layer in layers] == [not in_parts] * LAYERS


def test_norms_that_are_trained_get_their_gradient(monkeypatch):
    """Kernels have none for them, and are not asked."""
    shared = share_base(make_model("Llama"), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets=FEW)}, seed=0)
    norms = [parameter.requires_grad_() for name, parameter in shared.named_parameters() if "layernorm" in name]
    policy = make_policy(shared, adapter="agent", fused=fuse_lora(shared))
    asked = instead_of_kernels(monkeypatch)
    monkeypatch.setattr(fused_lora.FusedLora, "fuses", lambda *_: True)
    policy.features(some_prompts(), [np.array([4, 5, 9], dtype=np.int32)] * len(some_prompts())).sum().backward()
    assert {"gated", "turned"} == set(asked)
    assert len(norms) == 2 * LAYERS
    assert all(norm.grad is not None and norm.grad.any() for norm in norms)


@pytest.mark.parametrize(
    ("attend", "transform", "as_we_do"),
    [
        (lambda a, x, angles: a(hidden_states=x, position_embeddings=angles, attention_mask=None), None, True),
        (lambda a, x, angles: a(hidden_states=x, position_embeddings=None, attention_mask=None), None, False),
        (lambda a, x, angles: a(x, position_embeddings=angles, attention_mask=None), None, False),
        (None, lambda mlp, x: mlp(x, None), False),
        (None, lambda mlp, x: mlp(x)[0], False),
    ],
    ids=["as we do", "other angles", "attention by place", "mlp reads more", "mlp says more"],
)
def test_a_layer_that_asks_its_parts_otherwise_than_we_do_keeps_its_forward(attend, transform, as_we_do, monkeypatch):
    layer = make_model("Llama").get_decoder().layers[0]
    attend = attend or (lambda a, x, angles: a(hidden_states=x, position_embeddings=angles, attention_mask=None))
    transform = transform or (lambda mlp, x: mlp(x))

    def forward(x, position_embeddings=None, **_):
        x = x + attend(layer.self_attn, layer.input_layernorm(x), position_embeddings)[0]
        return x + transform(layer.mlp, layer.post_attention_layernorm(x))

    monkeypatch.setattr(layer, "forward", forward)
    assert adds_twice_in(layer) == as_we_do


@pytest.mark.parametrize(
    ("scaling", "plainly"),
    [
        (None, True),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, True),
        ({"rope_type": "dynamic", "factor": 4.0}, False),  # like the next, it is plain up to 4,096 positions
        ({"rope_type": "longrope", "factor": 4.0, "short": 1.0, "long": 2.0}, False),
    ],
    ids=str,
)
def test_angles_are_computed_by_us_if_they_depend_on_the_position_alone(scaling, plainly):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    rope = {"rope_theta": 1e4, **({"rope_type": "default"} if scaling is None else scaling)}
    if rope["rope_type"] == "longrope":
        rope |= {f"{kind}_factor": [rope.pop(kind)] * 8 for kind in ("short", "long")}
        rope["original_max_position_embeddings"] = 4096
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope)
    module = LlamaRotaryEmbedding(config)
    assert turns_plainly(module) == plainly
    assert not turns_plainly(torch.nn.Linear(2, 2))
    module.inv_freq = module.inv_freq[None]
    assert not turns_plainly(module)
    assert not turns_plainly(None)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_angles_of_another_shape_or_size_are_left_to_the_model(scale):
    class Interleaved(torch.nn.Module):
        """Each number twice, next to each other, as in GPT-J."""

        inv_freq, attention_scaling = torch.tensor([1.0, 0.1]), 1.0

        def forward(self, x, position_ids):
            angle = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, -1) * scale
            return angle.cos(), angle.sin()

    assert not turns_plainly(Interleaved())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_agents_of_one_base_may_have_adapters_on_different_layers(precision):
    """Each says what it says on a base of its own."""
    chosen = {"all": "all-linear", "few": FEW}
    loras = {name: SimpleNamespace(rank=4, alpha=8.0, targets=targets) for name, targets in chosen.items()}
    together = share_base(make_model("Llama"), loras, seed=0)
    alone = {name: share_base(make_model("Llama"), {name: lora}, seed=0) for name, lora in loras.items()}
    fused = fuse_lora(together)
    prompts, messages = some_prompts(), [np.array([4, 5, 9], dtype=np.int32)] * len(some_prompts())
    for name in chosen:
        mine = make_policy(alone[name], adapter=name, precision=precision, fused=fuse_lora(alone[name]))
        ours = make_policy(together, adapter=name, precision=precision, fused=fused)
        assert mine.parameters().keys() == ours.parameters().keys()
        with torch.no_grad():
            for key, parameter in ours.parameters().items():
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))
                mine.parameters()[key].copy_(parameter)
            torch.testing.assert_close(ours.features(prompts, messages), mine.features(prompts, messages))


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (lambda: make_model("Llama"), FEW),
        (lambda: make_model("Qwen3Moe", **EXPERTS), "all-linear"),  # experts carry adapters, several in one weight
        (lambda: make_model("Mixtral", **EXPERTS), "all-linear"),
        (make_gpt2, "all-linear"),  # weights stand the other way round
        (make_model_with_eyes, "all-linear"),
    ],
    ids=["few", "experts", "mixtral", "transposed", "eyes"],
)
def test_sampler_and_learner_agree_wherever_the_adapter_sits(make, targets, paged):
    shared = share_base(make(), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets=targets)}, seed=0)
    room = SamplerPool("fp32", CPU, memory_bytes=1 << 24) if paged else None
    policy = make_policy(shared, adapter="agent", fused=fuse_lora(shared), serving=room)
    prompts = some_prompts()
    before = policy.sample(prompts, uniforms(1, len(prompts), 6))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    drawn = policy.sample(prompts, uniforms(1, len(prompts), 6))
    said = np.concatenate([sample.logprobs for sample in drawn])
    np.testing.assert_allclose(scored(policy, prompts, drawn), said, atol=2e-5)
    assert not np.array_equal(np.concatenate([sample.logprobs for sample in before]), said), "the adapter is there"
    assert (policy.serving is not None) == paged


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Qwen2", "Gemma3", "Phi3"])  # biases, a scaled embedding, products that are joined
@pytest.mark.parametrize("kept", [torch.float16, torch.int8])
def test_a_base_that_is_held_once_is_joined_as_a_copy_is_and_sampled_as_it_is_scored(kind, kept, monkeypatch):
    shared = share_base(make_model(kind), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")}, seed=0)
    fused = fuse_lora(shared)
    keep_short(shared.get_base_model(), fused, kept, rounded=True)
    room = SamplerPool("fp16", CPU, memory_bytes=1 << 24, adapters="by_row")
    policy = make_policy(shared, adapter="agent", fused=fused, serving=room)
    prompts = some_prompts()
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    asked = instead_of_kernels(monkeypatch)
    for on_card in (False, True):
        monkeypatch.setattr(joined_layers, "computed_by_kernels", lambda _, it=on_card: it)
        drawn = policy.sample(prompts, uniforms(1, len(prompts), 6))
        assert ("gated" in asked) == (on_card and kind == "Qwen2"), "adapters and small weights below our gates"
        said = np.concatenate([sample.logprobs for sample in drawn])
        np.testing.assert_allclose(scored(policy, prompts, drawn), said, atol=1e-2)
    ours, copied = room.server_of(policy.causal_lm).copy, SamplingCopy(policy.causal_lm, torch.float16, CPU)
    assert ours.shared

    def joined(copy: SamplingCopy) -> list[bool]:
        return ["_joined_forward" in getattr(m.forward, "__qualname__", "") for m in copy.model.modules()]

    assert joined(ours) == joined(copied)
    assert any(joined(ours)) == (kind == "Qwen2")


def test_heads_that_the_config_does_not_tell_are_sampled_plainly():
    model = make_gpt2()
    model.config.num_key_value_heads = 2
    with pytest.warns(UserWarning, match="GPT2LMHeadModel has heads that its config does not tell: sampling falls"):
        policy = TransformerPolicy(
            model, SimpleNamespace(eos_token_id=2), serving=SamplerPool("fp32", CPU, memory_bytes=1 << 24)
        )
    assert policy.serving is None
    assert policy.packs


def test_a_model_that_does_not_run_with_its_adapters_says_so_and_what_to_do():
    shared = share_base(
        make_model("Phimoe", **EXPERTS), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")}, seed=0
    )
    with pytest.raises(
        UserError, match=r"PhimoeForCausalLM does not run.*name attention and MLP layers in lora.targets"
    ):
        make_policy(shared, adapter="agent", fused=fuse_lora(shared))
    few = share_base(
        make_model("Phimoe", **EXPERTS), {"agent": SimpleNamespace(rank=4, alpha=8.0, targets=FEW)}, seed=0
    )
    assert make_policy(few, adapter="agent", fused=fuse_lora(few)).sample(
        some_prompts(), uniforms(1, len(some_prompts()), 2)
    )


def test_a_model_that_reads_what_comes_later_is_refused():
    config = transformers.BertGenerationConfig(**{k: v for k, v in SHAPE.items() if "kv" not in k and "key" not in k})
    model = transformers.BertGenerationDecoder(config).eval()
    with pytest.raises(UserError, match=r"BertGenerationDecoder reads what comes later as well.*is_decoder: true"):
        make_policy(model)
    config.is_decoder = True
    assert make_policy(transformers.BertGenerationDecoder(config).eval()).packs


def test_agents_of_one_base_are_sampled_each_with_its_own_adapter_and_none_of_the_others():
    """They speak in turn through one copy; where the first has an adapter and the second none, the base is put back."""
    chosen = {"all": "all-linear", "few": FEW}
    loras = {name: SimpleNamespace(rank=4, alpha=8.0, targets=targets) for name, targets in chosen.items()}
    shared = share_base(make_model("Llama"), loras, seed=0)
    fused, room = fuse_lora(shared), SamplerPool("fp32", CPU, memory_bytes=1 << 24)
    policies = {
        name: make_policy(shared, adapter=name, fused=fused, serving=room, base_version="base") for name in chosen
    }
    with torch.no_grad():
        for k, policy in enumerate(policies.values()):
            generator = torch.Generator().manual_seed(k)
            for parameter in policy.parameters().values():
                parameter.normal_(std=0.2, generator=generator)
    prompts = some_prompts()
    for name in ("all", "few", "all", "few"):
        policy = policies[name]
        drawn = policy.sample(prompts, uniforms(1, len(prompts), 6), version=name)
        said = np.concatenate([sample.logprobs for sample in drawn])
        np.testing.assert_allclose(scored(policy, prompts, drawn), said, atol=2e-5)
