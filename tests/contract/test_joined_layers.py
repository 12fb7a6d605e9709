"""Decoder layers of the sampling copy, joined: which are, that they say the same, and that nothing else changes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from on_a_card import instead_of_kernels
from teamtr.engines.paged import joined_layers, pool
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.randomness import uniforms
from tiny_architectures import CPU, EXPERTS, LAYERS, make_model, served, some_prompts

pytestmark = pytest.mark.long


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
        monkeypatch.setattr(joined_layers, "computed_by_kernels", lambda _, it=on_card: it)
        copy = SamplingCopy(model, torch.float32, CPU, joins_layers=joins)
        assert copy.joined == (joined and joins)
        copy.fill(model, None, version="v", base="")
        server, asked[:] = Server(copy, pool_bytes=1 << 24, graphs=False), []
        drawn = server.sample("v", some_prompts(), uniforms(1, 4, 6), drawing=TokenSampler(), end_ids=frozenset())
        said.append([(one.token_ids.tolist(), one.logprobs) for one in drawn])
    assert bool(asked) == joined
    assert asked.count("add_norm") == 2 * LAYERS * asked.count("norm"), "every sum but the first, the last norm's too"
    assert asked.count("gated") == (LAYERS * asked.count("norm") if gates else 0)
    assert asked.count("angles") == asked.count("norm"), "once in every pass"
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
        if joined_layers.computed_by_kernels(SimpleNamespace(is_cuda=on_card, dtype=dtype))
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
    monkeypatch.setattr(joined_layers, "computed_by_kernels", lambda _: True)
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
