"""Architectures whose tokens meet elsewhere than in attention: computed rightly, or refused, never wrongly."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from on_a_card import instead_of_kernels
from teamtr.engines.paged import joined_layers, pool
from teamtr.engines.paged.fused_linears import join_attention, join_siblings
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch import fused_lora
from teamtr.engines.torch.anatomy import inspect_attention
from teamtr.engines.torch.attention import Unsupported
from teamtr.engines.torch.fused_lora import fuse_lora
from teamtr.engines.torch.known_layers import adds_twice as adds_twice_in
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.short_base import keep_short
from teamtr.errors import UserError
from teamtr.randomness import uniforms

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
COMMON = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = 4
SHAPE = {
    **COMMON, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
STATE_SPACE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
LATENT = {  # values of another width than queries
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": SHAPE,
    "Gemma3": SHAPE,
    "Gemma2": {**SHAPE, "final_logit_softcapping": None},  # caps its attention
    "DeepseekV3": {**COMMON, **LATENT},
    "Falcon": {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},  # knows two attentions
    "Bloom": {**COMMON, "hidden_size": 64, "n_layer": 3, "n_head": 4},  # attention of its own, no positions
    "GPTJ": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, **COMMON},
    "DiffLlama": SHAPE,  # asks attention twice in a layer
    "FalconH1": {**SHAPE, **STATE_SPACE},  # a state space beside attention, in every layer
    "Qwen3Next": {**SHAPE, **LINEAR},  # linear attention in most layers
    "Qwen3_5": {**SHAPE, **LINEAR},
}
OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**COMMON, **LATENT},
    "Mamba": {**COMMON, "hidden_size": 64, "num_hidden_layers": 3},
}
PACKED = {"Llama", "Gemma3"}


def make_model(kind: str, **changes: Any) -> Any:
    names = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
    config_class = getattr(transformers, names.get(kind, f"{kind}Config"), None)
    if config_class is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    config = config_class(**{**CONFIGS, **OTHERS}.get(kind, SHAPE), **changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.float().eval()


def make_model_with_eyes() -> Any:
    """A model that sees images as well: its text has a config of its own."""
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=dict(SHAPE), vision_config={**eyes, "image_size": 28, "patch_size": 14}
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def make_gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=4)).eval()


@torch.no_grad()
def scored(policy: TransformerPolicy, prompts: Any, drawn: Any) -> Any:
    """The learner's log-probability of every token that was drawn."""
    messages = [sample.token_ids for sample in drawn]
    ids = np.concatenate(messages)
    logp = policy.head()(policy.features(prompts, messages)).log_softmax(-1).numpy()
    return logp[np.arange(len(ids)), ids]


def make_policy(model: Any, **options: Any) -> TransformerPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = TransformerPolicy(model, SimpleNamespace(eos_token_id=2), **options)
    policy.end_ids = frozenset()
    return policy


def served(model: Any) -> Server:
    copy = SamplingCopy(model, torch.float32, CPU)
    copy.fill(model, None, version="v", base="")
    return Server(copy, pool_bytes=1 << 24, graphs=False)


def some_prompts() -> list[np.ndarray]:
    """Of several lengths; one twice, two that begin alike."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 100, size=length).astype(np.int32) for length in (5, 9, 5, 12)]
    prompts[2] = prompts[0].copy()
    prompts[3][:4] = prompts[1][:4]
    return prompts


@torch.no_grad()
def alone(model: Any, prompt: np.ndarray, message: np.ndarray) -> np.ndarray:
    """Log-probabilities by the model's own forward, one row at a time."""
    ids = torch.tensor([[*prompt.tolist(), *message.tolist()]])
    logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(1, torch.tensor(message, dtype=torch.int64)[:, None])[:, 0].numpy()


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

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
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


@pytest.mark.parametrize(
    ("kind", "changes", "joined", "gates"),
    [
        ("Llama", {}, True, True),
        ("Qwen3", {}, True, True),
        ("Qwen2", {}, True, True),
        ("Qwen3Moe", EXPERTS, True, False),
        ("Gemma3", {}, False, False),
        ("Granite", {"residual_multiplier": 0.3}, False, False),
        ("Granite", {"residual_multiplier": 1.0, "embedding_multiplier": 3.0}, True, True),
        ("Cohere", {"logit_scale": 1.0}, False, False),
    ],
)
def test_layers_of_the_sampling_copy_leave_their_last_sum_to_the_next_one(kind, changes, joined, gates, monkeypatch):
    """On a CPU to the bit; by the way of a card, with torch in the place of its kernels, but for rounding."""
    model, said, asked = make_model(kind, **changes), [], instead_of_kernels(monkeypatch)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    for joins, on_card in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(joined_layers, "has_kernels", lambda _, it=on_card: it)
        copy = SamplingCopy(model, torch.float32, CPU, joins_layers=joins)
        assert copy.joined == (joined and joins)
        copy.fill(model, None, version="v", base="")
        server, asked[:] = Server(copy, pool_bytes=1 << 24, graphs=False), []
        drawn = server.sample("v", some_prompts(), uniforms(1, 4, 6), drawing=TokenSampler(), end_ids=frozenset())
        said.append([(one.token_ids.tolist(), one.logprobs) for one in drawn])
    assert bool(asked) == joined
    assert asked.count("add_norm") == 2 * LAYERS * asked.count("norm"), "every sum but the first, the last norm's too"
    assert asked.count("gated") == (LAYERS * asked.count("norm") if gates else 0)
    for plain, carried, by_kernels in zip(*said, strict=True):
        assert plain[0] == carried[0] == by_kernels[0]
        assert np.array_equal(plain[1], carried[1])
        np.testing.assert_allclose(plain[1], by_kernels[1], atol=1e-5)


def test_a_pass_that_broke_off_leaves_nothing_to_the_next():
    model = make_model("Llama")
    server = served(model)
    decoder, ask = server.copy.model.get_decoder(), {"drawing": TokenSampler(), "end_ids": frozenset()}
    before = server.sample("v", some_prompts(), uniforms(1, 4, 6), **ask)

    def breaks(*_: Any) -> None:
        raise KeyboardInterrupt

    breaking = decoder.layers[2].register_forward_pre_hook(breaks)  # after the second layer, before anybody added
    with pytest.raises(KeyboardInterrupt):
        server.sample("w", some_prompts(), uniforms(1, 4, 6), **ask)
    breaking.remove()
    after = server.sample("x", some_prompts(), uniforms(1, 4, 6), **ask)
    for a, b in zip(before, after, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.logprobs, b.logprobs)


def _larger_in_place(_: Any, args: tuple[Any, ...]) -> None:
    if args[0].ndim == 3:  # the decoder's own
        args[0].mul_(1.5)


def _by_place(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return (*args, named.pop("attention_mask")), named


def _says_more(_: Any, __: Any, said: Any) -> None:
    said.last_hidden_state = said.last_hidden_state + 1.0


def _norms_again(decoder: Any, _: Any, said: Any) -> None:
    decoder.norm(said.last_hidden_state)


@pytest.mark.parametrize(
    "does",
    [
        lambda it: it.layers[2].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:])),
        lambda it: it.layers[2].register_forward_pre_hook(_larger_in_place),
        lambda it: it.norm.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:])),
        lambda it: it.norm.register_forward_pre_hook(_larger_in_place),
        lambda it: it.layers[0].register_forward_pre_hook(_by_place, with_kwargs=True),
        lambda it: setattr(it, "norm", torch.nn.LayerNorm(64)),
        lambda it: it.register_forward_hook(_says_more),
        lambda it: it.register_forward_hook(_norms_again),
    ],
    ids=[
        "between layers",
        "into a layer's",
        "before the norm",
        "into the last layer's",
        "by place",
        "another norm",
        "after",
        "a norm again",
    ],
)
def test_a_decoder_that_does_something_to_what_a_layer_said_is_not_joined(does):
    model = make_model("Llama")
    assert joined_layers.Stack.of(model) is not None
    assert not any(module._forward_hooks for module in model.modules())
    does(model.get_decoder())
    assert joined_layers.Stack.of(model) is None


@pytest.mark.parametrize("on_card", [True, False])
def test_kernels_are_for_half_precision_on_a_card(on_card):
    found = {
        dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if joined_layers.has_kernels(SimpleNamespace(is_cuda=on_card, dtype=dtype))
    }  # fmt: skip
    assert found == ({torch.float16, torch.bfloat16} if on_card else set())


@pytest.mark.parametrize(
    ("whose", "joined", "gates"),
    [
        (lambda layer: layer, False, 0),
        (lambda layer: layer.input_layernorm, False, 0),
        (lambda layer: layer.mlp, True, LAYERS - 1),
        (lambda layer: layer.self_attn, True, LAYERS),  # which computes by itself
    ],
    ids=["of a layer", "of a norm", "of a gate", "of attention"],
)
def test_what_is_learned_and_does_not_show_in_a_new_model_is_not_left_out(whose, joined, gates):
    """A scale of one, or a bias of zero: recognition looks at a copy before it is filled."""
    model = make_model("Llama")
    whose(model.get_decoder().layers[1]).register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    found = joined_layers.Stack.of(model)
    assert (found is not None) == joined
    assert len(found.gates if found else ()) == gates


@torch.no_grad()
def test_joined_layers_keep_nothing_longer_than_the_layers_they_stand_for(monkeypatch):
    """A prefill of many tokens is where memory is tightest: what was added is gone before the next large product."""
    model, kept, looks = make_model("Llama").get_decoder(), [], []

    def heard(_: Any, __: Any, said: Any) -> None:
        kept.append(weakref.ref(said[0] if isinstance(said, tuple) else said))

    def look(*_: Any) -> None:
        looks.append(sum(tensor() is not None for tensor in kept))

    instead_of_kernels(monkeypatch)
    monkeypatch.setattr(joined_layers, "has_kernels", lambda _: True)
    joined_layers.join_layers(joined_layers.Stack.of(model), {})
    for layer in model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(heard)
            part.register_forward_pre_hook(look)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.register_forward_hook(heard)
        layer.mlp.down_proj.register_forward_pre_hook(look)
    model(input_ids=torch.arange(5)[None], use_cache=False)
    look()
    assert looks == [0] * (3 * LAYERS + 1)


@torch.no_grad()
def test_attention_may_say_more_than_its_layer_reads():
    model = make_model("Llama").get_decoder()
    for layer in model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda attend=attend, **named: (*attend(**named), None)
        norms = layer.input_layernorm, layer.post_attention_layernorm

        def forward(x, layer=layer, norms=norms, **named):
            x = x + layer.self_attn(hidden_states=norms[0](x), **named)[0]
            return x + layer.mlp(norms[1](x))

        layer.forward = forward
    ids = torch.arange(5)[None]
    expected = model(input_ids=ids, use_cache=False).last_hidden_state
    joined_layers.join_layers(joined_layers.Stack.of(model), {})
    assert torch.equal(model(input_ids=ids, use_cache=False).last_hidden_state, expected)


def test_torch_compiles_large_models_whose_layers_are_not_known_and_those_it_is_asked_to(monkeypatch):
    """On a card, of which there is none here: what a server is made with is looked at."""
    made: list[tuple[bool, bool]] = []

    def server(copy: SamplingCopy, *, compiled: bool, **_: Any) -> Any:
        made.append((copy.joined, compiled))
        return SimpleNamespace(pool_bytes=0)

    monkeypatch.setattr(pool, "Server", server)
    monkeypatch.setattr(
        pool, "SamplingCopy", lambda model, dtype, _, *given, **asked: SamplingCopy(model, dtype, CPU, *given, **asked)
    )
    kinds = {
        "known": make_model("Llama"),
        "unknown": make_model("Gemma3"),
        "other gates": make_model("Qwen3Moe", **EXPERTS),
        "other rotation": make_model("Helium"),
    }

    def asked(precision: str, compiled: bool | None) -> dict[str, tuple[bool, bool]]:
        made.clear()
        for model in kinds.values():
            room = SamplerPool(precision, torch.device("cuda"), memory_bytes=1 << 20, compiled=compiled)
            room.server_of(model)
        return dict(zip(kinds, made, strict=True))

    joined, by_torch, neither = (True, False), (False, True), (False, False)
    for least in (10**9, 1):
        monkeypatch.setattr(pool, "COMPILE_FROM_PARAMETERS", least)
        for precision in ("fp16", "fp32"):  # in float32 there are no kernels
            known = joined if precision == "fp16" else neither
            assert set(asked(precision, True).values()) == {by_torch}
            plain = {"known": known, "unknown": neither, "other gates": known, "other rotation": known}
            assert asked(precision, False) == plain
            large = dict.fromkeys(kinds, by_torch) | ({"known": joined} if precision == "fp16" else {})
            assert asked(precision, None) == (large if least == 1 else plain)


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
        monkeypatch.setattr(joined_layers, "has_kernels", lambda _, it=on_card: it)
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
