"""Layers that read the same x as one: what each computes alone, without a copy of their weights; and those apart."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from on_a_card import instead_of_kernels
from teamtr.engines.paged.one_copy import lay_below_each_other, shared_weights
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.torch import fused_lora
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.joined_products import (
    Adapters,
    Factors,
    Group,
    Whole,
    below_each_other,
    product,
    round_factors,
)
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.row_scaled import row_scaled_in
from teamtr.engines.torch.short_base import keep_short

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LAYERS = 3
ROWS = ("gated_rows", "turned_rows")
APART = ("gated", "turned")


def make_policy(
    kind: str = "Qwen3", precision: str = "fp16", ranks: tuple[int, ...] = (4,), targets: Any = "all-linear",
    kept: torch.dtype | None = None,
) -> TransformerPolicy:  # fmt: skip
    """A tiny model whose adapters say something; the agent is the last of them."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=48, intermediate_size=72,
        num_hidden_layers=LAYERS, num_attention_heads=6, num_key_value_heads=2, head_dim=12,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    loras = {f"agent{k}": SimpleNamespace(rank=rank, alpha=8.0, targets=targets) for k, rank in enumerate(ranks)}
    shared = share_base(model, loras, seed=0)
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    fused = fuse_lora(shared)
    if kept is not None:
        keep_short(model, fused, kept, rounded=True)
    adapter = f"agent{len(ranks) - 1}"
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:  # it is looked at as on a CPU
        patch.setattr(FusedLora, "fuses", lambda *_: False)
        patch.setattr(fused_lora, "computed_by_kernels", lambda _: False)
        policy = TransformerPolicy(shared, SimpleNamespace(eos_token_id=2), adapter=adapter, fused=fused)
    fused.groups.clear()
    policy.precision = precision
    return policy


def prompts_and_messages() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Some begin alike."""
    prompts = [np.array(r, dtype=np.int32) for r in ([5, 6, 7, 8], [5, 6, 7, 8], [9, 4], [5, 6, 11])]
    return prompts, [np.array(r, dtype=np.int32) for r in ([4, 5], [7, 7, 3], [8], [6, 5])]


def passed(policy: TransformerPolicy) -> dict[str, Tensor]:
    """Features and the gradients of all factors."""
    with policy.computing():
        features = policy.features(*prompts_and_messages()).float()
        (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
    found = {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}
    for parameter in policy.parameters().values():
        parameter.grad = None
    return {"features": features.detach(), **found}


@pytest.fixture
def on_card(monkeypatch) -> list[str]:
    """The way of a card; the kernels that were asked for."""
    monkeypatch.setattr(FusedLora, "fuses", lambda *_: True)
    monkeypatch.setattr(fused_lora, "computed_by_kernels", lambda _: True)
    return instead_of_kernels(monkeypatch)


@contextmanager
def each_alone(monkeypatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setattr(FusedLora, "_whole", lambda *_: None)
        yield


def together(asked: list[str]) -> bool:
    """Whether gate and up, and query, key and value, were each one; never a mixture."""
    found = {name for name in asked if name in ROWS + APART}
    assert found in (set(ROWS), set(APART))
    return found == set(ROWS)


# -- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7,), (6, 6), (9, 4, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_as_one_compute_what_each_computes(sizes, bias, monkeypatch):
    """Both ways, in float64: x W' + b + scale (x A') B' of every layer, side by side."""
    instead_of_kernels(monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layers, rank, width = len(sizes), 3, sum(sizes)
    weight, start = drawn(width, 5), drawn(width)
    x, direction = drawn(2, 4, 5).requires_grad_(), drawn(8, width)
    adapters = Adapters.of(
        tuple(drawn(rank, 5).requires_grad_() for _ in sizes),
        tuple(drawn(size, rank).requires_grad_() for size in sizes),
    )
    group: Any = object()
    whole = Whole(weight, weight.T, start if bias else weight.new_empty(1), float(bias), 0.7)
    factors = round_factors([(group, adapters)], torch.float64, lambda _: whole)[group]
    leaves = [x, *adapters.downs, *adapters.ups]
    ours = product(x, factors, adapters)
    parts = zip(weight.split(sizes), start.split(sizes), adapters.downs, adapters.ups, strict=True)
    each = [x @ w.T + (b if bias else 0.0) + 0.7 * (x @ a.T) @ up.T for w, b, a, up in parts]
    apart = torch.cat(each, -1).view(8, width)
    torch.testing.assert_close(ours, apart)
    found = torch.autograd.grad(ours, leaves, direction)
    for one, other in zip(found, torch.autograd.grad(apart, leaves, direction), strict=True):
        torch.testing.assert_close(one, other)
    assert len(found) == 1 + 2 * layers
    nobody = [one.detach() for one in leaves[1:]]
    still = product(x, factors, Adapters.of(nobody[:layers], nobody[layers:]))
    (of_x,) = torch.autograd.grad(still, [x], direction)
    assert torch.equal(of_x, found[0]), "also where only x learns"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen2"])  # without norms of heads, with them, with biases
def test_a_model_whose_layers_are_one_has_the_features_and_gradients_of_its_layers(
    kind, precision, on_card, monkeypatch
):
    """As far from float32 as each alone is; and the same bits when activations are computed again."""
    policy = make_policy(kind, "fp32")
    with monkeypatch.context() as context:
        context.setattr(FusedLora, "fuses", lambda *_: False)
        context.setattr(fused_lora, "computed_by_kernels", lambda _: False)
        exact = passed(policy)
    policy.precision = precision
    with each_alone(monkeypatch):
        apart = passed(policy)
    assert not together(on_card)
    on_card.clear()
    ours = passed(policy)
    assert together(on_card)
    counted = {"turned_rows": 1, "gated_rows": 1, "narrow": 4, "across_and_along": 4, "across": 4}
    assert {name: on_card.count(name) for name in counted} == {name: LAYERS * n for name, n in counted.items()}
    assert ours.keys() == apart.keys() == exact.keys()
    for kind, times in (("features", 1.25), ("lora_A", 1.75), ("lora_B", 1.75)):
        whole, one, each = (
            torch.cat([found[name].flatten() for name in ours if kind in name]) for found in (exact, ours, apart)
        )
        assert 0 < float((one - whole).norm()) < times * float((each - whole).norm())
    for name, found in ours.items():  # not a number: how much half precision is off depends on the CPU
        assert float((found - exact[name]).norm()) < 2.5 * float((apart[name] - exact[name]).norm()), name
    assert policy.recompute_activations()
    on_card.clear()
    again = passed(policy)
    assert on_card.count("turned_rows") == 2 * LAYERS
    assert all(torch.equal(again[name], found) for name, found in ours.items())


def test_the_first_pass_has_the_bits_of_those_that_follow(on_card):
    """Factors are rounded where they are read in the first, and at its beginning in the others."""
    policy = make_policy(ranks=(4, 4))
    first = passed(policy)
    assert together(on_card)
    assert all(torch.equal(found, first[name]) for name, found in passed(policy).items())
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.mul_(1.5)
    moved = passed(policy)
    assert not torch.equal(moved["features"], first["features"]), "what was trained is read anew"


def test_what_each_layer_rounds_is_rounded_at_once_and_its_blocks_are_zero_elsewhere():
    generator = torch.Generator().manual_seed(0)
    shapes = {"one": (5,), "two": (4, 6), "three": (6, 3, 3), "two again": (4, 6), "one again": (5,)}
    groups: Any = {
        name: Adapters.of(
            tuple(torch.randn(2, 8, generator=generator) for _ in sizes),
            tuple(torch.randn(size, 2, generator=generator) for size in sizes),
        )
        for name, sizes in shapes.items()
    }
    whole = Whole(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.0, 1.0)
    found: Any = round_factors(groups.items(), torch.float16, lambda name: whole if name != "one" else None)  # type: ignore[comparison-overlap]
    assert found.keys() == groups.keys()
    for name, (downs, ups, *_) in groups.items():
        ours: Factors = found[name]
        assert torch.equal(ours.down_RH, torch.cat(downs).half())
        assert all(torch.equal(a, b.half()) for a, b in zip(ours.ups, ups, strict=True))
        assert ours.up_Wr is not None
        assert ours.block_RW is not None
        assert torch.equal(ours.up_Wr, torch.cat(ups).half())
        assert torch.equal(ours.block_RW, torch.block_diag(*(up.half().T for up in ups)))
        assert (ours.whole is None) == (name == "one")
    uneven = Adapters.of([torch.ones(2, 8), torch.ones(3, 8)], [torch.ones(4, 2), torch.ones(5, 3)])
    nobody: Any = [("uneven", uneven)]
    assert not round_factors(nobody, torch.float16, lambda _: None), "each layer rounds its own"


# -- where weights lie ----------------------------------------------------------------------------------------------


def bytes_of(tensors: Any) -> int:
    """Of the memory that they lie in, counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("packs", [True, False])
def test_there_is_no_second_copy_of_weights_that_are_one(packs, on_card):
    """Halves of layers that are read together lie below each other, whoever asks first."""
    policy = make_policy(precision="bf16")
    if not packs:
        policy.packs = False  # every layer by itself, as padded batches are computed
        passed(policy)
        policy.packs = True
        assert "turned_rows" not in on_card
    passed(policy)
    assert on_card.count("turned_rows") == on_card.count("gated_rows") - (0 if packs else LAYERS) == LAYERS
    state = policy.fused
    wholes = [whole for group in state.groups for whole in group._wholes.values()]
    assert len(wholes) == 4 * LAYERS, "what the pass before read by itself is not rounded any more"
    copies = bytes_of([*state.halves.values(), *(whole.weight_WH for whole in wholes)])
    assert copies == bytes_of(state.halves.values()) == policy.frozen_half_bytes()
    layer = policy.causal_lm.get_decoder().layers[0].self_attn
    halves = [state.weight_of(getattr(layer, name).base_layer) for name in ("q_proj", "k_proj", "v_proj")]
    for half, name in zip(halves, ("q_proj", "k_proj", "v_proj"), strict=True):
        assert torch.equal(half, getattr(layer, name).base_layer.weight.bfloat16())
    assert below_each_other(halves) is not None


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_base_that_is_kept_short_is_one_where_the_sampler_has_laid_it_so(precision, on_card):
    """Else a copy would take what was saved. The same numbers each way; nothing is held of where they lay before."""
    dtype = HALF[precision]
    policy = make_policy("Qwen2", precision, kept=dtype)
    apart = passed(policy)
    assert "gated" in on_card
    assert "gated_rows" not in on_card
    weights = shared_weights(policy.causal_lm, dtype, CPU)
    for _ in range(2):  # wherever they come to lie
        before = [weight.data for weight in weights.values()]
        lay_below_each_other(policy.causal_lm, weights)
        on_card.clear()
        ours = passed(policy)
        assert together(on_card)
        assert not policy.fused.halves
        wholes = [whole for group in policy.fused.groups for whole in group._wholes.values() if whole is not None]
        assert len(wholes) == 4 * LAYERS
        held, lie, lay = (
            {tensor.untyped_storage().data_ptr() for tensor in tensors}
            for tensors in ([whole.weight_WH for whole in wholes], weights.values(), before)
        )
        assert held < lie
        assert lay - lie
        assert not held & (lay - lie)
    for name, found in ours.items():
        torch.testing.assert_close(found, apart[name], rtol=0.05, atol=0.02 * float(apart[name].abs().max()))


def test_where_weights_lay_is_given_back_as_soon_as_a_server_has_moved_them(on_card, monkeypatch):
    """A run that goes on passes over its models, to count what they take, before it samples anything."""
    policy = make_policy("Qwen2", kept=torch.float16)
    for policy.packs in (False, True):  # each layer by itself, too
        passed(policy)
    layers = [layer for layer in policy.fused.linears if layer is not policy.causal_lm.get_output_embeddings()]
    lay = [weakref.ref(layer.weight.untyped_storage()) for layer in layers]
    policy.serving = SamplerPool("fp16", CPU, memory_bytes=1 << 20, adapters="by_row")
    with monkeypatch.context() as context, torch.no_grad():
        context.setattr(FusedLora, "fuses", lambda *_: False)  # the copy is looked at as on a CPU
        policy.reserve(1, 4, 4)
    gc.collect()
    assert len(lay) == 7 * LAYERS
    assert not [place for place, storage in enumerate(lay) if storage() is not None]
    on_card.clear()
    passed(policy)
    assert together(on_card)


def test_only_what_lies_in_one_piece_is_below_each_other():
    whole = torch.arange(24.0).view(6, 4)
    parts = whole.split([1, 3, 2])
    found = below_each_other(parts)
    assert found is not None
    assert torch.equal(found, whole)
    assert found.data_ptr() == whole.data_ptr()
    for others in (
        parts[::-1],
        (parts[0], parts[2]),
        (parts[0], parts[1].clone()),
        whole.view(2, 12).split([6, 6], 1),
        (parts[0], parts[0]),
    ):
        assert below_each_other(others) is None


# -- where layers stay apart -----------------------------------------------------------------------------------------


def first_attention(policy: TransformerPolicy) -> Any:
    return policy.causal_lm.get_decoder().layers[0].self_attn


def with_one_bias(policy: TransformerPolicy) -> None:
    base = first_attention(policy).k_proj.base_layer
    base.bias = nn.Parameter(torch.linspace(-1, 1, len(base.weight)), requires_grad=False)


def with_another_scale(policy: TransformerPolicy) -> None:
    first_attention(policy).v_proj.scaling["agent0"] *= 2


def with_another_rank(policy: TransformerPolicy) -> None:
    layer = first_attention(policy).v_proj
    for factors, shape in ((layer.lora_A, (2, 48)), (layer.lora_B, (24, 2))):
        factors["agent0"].weight = nn.Parameter(0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("settings", "change", "apart"),
    [
        ({"kept": torch.int8}, None, "all"),
        ({"kept": torch.float16}, None, "groups"),  # which nobody laid below each other
        ({"kept": torch.bfloat16}, None, "all"),  # cast in passing
        ({"precision": "fp32"}, None, "all"),
        ({"ranks": (17,)}, None, "query, key and value"),  # 51 together
        ({"targets": ["q_proj", "v_proj", "up_proj"]}, None, "groups"),
        ({}, with_one_bias, "one"),
        ({}, with_another_scale, "one"),
        ({}, with_another_rank, "one"),
    ],
    ids=["int8", "short", "cast", "float32", "many ranks", "few layers", "a bias", "scales", "ranks"],
)  # fmt: skip
def test_what_cannot_be_one_is_computed_as_ever(settings, change, apart, on_card, monkeypatch):
    policy = make_policy(**settings)
    if change is not None:
        change(policy)
    policy.__dict__.pop("_parameters", None)
    ours = passed(policy)
    counted = {name: on_card.count(name) for name in ROWS + APART}
    expected = {
        "all": (0, 0, LAYERS, 2 * LAYERS),
        "groups": (0, 0, LAYERS, 2 * LAYERS),
        "query, key and value": (LAYERS, 0, 0, 2 * LAYERS),
        "one": (LAYERS, LAYERS - 1, 0, 2),
    }[apart]
    assert tuple(counted[name] for name in (*ROWS, *APART)) == expected
    wholes = [whole for group in policy.fused.groups for whole in group._wholes.values() if whole is not None]
    assert (apart == "all") == (not wholes), "layers by themselves are one in any case but these"
    with each_alone(monkeypatch):
        as_ever = passed(policy)
    assert ours.keys() == as_ever.keys()
    for name, found in ours.items():
        if apart == "all":
            assert torch.equal(found, as_ever[name])
        torch.testing.assert_close(found, as_ever[name], rtol=0.05, atol=0.02 * float(as_ever[name].abs().max()))


def test_on_a_cpu_nothing_is_one(monkeypatch):
    policy = make_policy()
    asked = instead_of_kernels(monkeypatch)
    for _ in range(2):
        passed(policy)
    assert not asked
    assert policy.fused.groups
    assert not any(group._wholes for group in policy.fused.groups)


def test_a_base_that_processes_hold_in_parts_is_not_one(on_card):
    """Not even of the dtype that is computed in: its memory comes and goes."""
    policy = make_policy(kept=torch.float16)
    passed(policy)
    state = policy.fused
    assert any(state._whole(group) is not None for group in state.groups)
    state.spread = True
    assert all(state._whole(group) is None for group in state.groups)


def test_of_layers_that_are_kept_differently_only_those_in_float32_have_halves(on_card):
    policy = make_policy()
    attention = first_attention(policy)
    short = attention.k_proj.base_layer.weight
    short.data = short.data.half()
    passed(policy)
    assert on_card.count("turned") == 2
    halves = policy.fused.halves
    assert (id(short), torch.float16) not in halves
    assert (id(attention.q_proj.base_layer.weight), torch.float16) in halves
    assert bytes_of(halves.values()) == 2 * sum(
        layer.weight.numel() for layer in policy.fused.linears if layer.weight is not short
    )


def test_agents_of_one_base_are_one_with_their_own_factors(on_card, monkeypatch):
    """In turns, with other ranks and scales; and weights are not looked for again."""
    policy = make_policy(ranks=(2, 8))
    other = copy.copy(policy)
    other.adapter = "agent0"
    other.__dict__.pop("_parameters", None)
    with each_alone(monkeypatch):
        apart = [passed(one) for one in (policy, other)]
    on_card.clear()
    for _ in range(2):
        for one, found in zip((policy, other), apart, strict=True):
            ours = passed(one)
            for name in found:
                atol = 0.02 * float(found[name].abs().max())
                torch.testing.assert_close(ours[name], found[name], rtol=0.05, atol=atol)
    assert together(on_card)


def test_weights_that_processes_hold_in_parts_are_asked_for_each_time():
    """They are other tensors from pass to pass."""
    layer: Any = SimpleNamespace(
        base_layer=None,
        lora_A={"a": SimpleNamespace(weight=torch.zeros(1))},
        lora_B={"a": SimpleNamespace(weight=torch.zeros(1))},
    )
    for spread in (False, True):
        group = Group([layer], spread=spread)
        group.plain = True
        before = group.adapters("a")
        layer.lora_A["a"].weight = torch.ones(1)
        after = group.adapters("a")
        assert before is not None
        assert after is not None
        assert (after.downs[0] is before.downs[0]) == (not spread)
        assert group.adapters("b") is None


def test_int8_is_what_it_was(on_card):
    policy = make_policy(kept=torch.int8)
    assert dict(row_scaled_in(policy.causal_lm))
    passed(policy)
    assert not policy.fused.halves
