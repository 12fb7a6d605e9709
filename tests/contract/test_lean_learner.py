"""The learner's economies change memory and time, never the numbers: fused adapters, packing, smaller micro-batches,
recomputed activations, loss scaling, hashes on the device."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from conftest import LORA, make_batch, make_learner, make_policy
from teamtr.batches import AgentBatch
from teamtr.engines import hashing
from teamtr.engines.gradients import _Scaled
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.optim import FIRST_LOSS_SCALE
from teamtr.engines.passes import forget_gradients
from teamtr.engines.scoring import scores_in_half
from teamtr.engines.torch import fused_lora
from teamtr.engines.torch.attention import Unsupported
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.joined_products import Factors, Group
from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.theory.objective import Objective

OBJECTIVE = Objective()


def gradients(learner: PolicyLearner, batch, advantages) -> dict[str, torch.Tensor]:
    """Some way from the frozen weights, where the KL has a gradient too."""
    before = learner.snapshot()
    learner.begin(batch)
    learner.perturb(0.1, seed=4)
    rows = np.arange(len(batch))
    learner.passes.fitting(lambda: learner._accumulate(rows, advantages, OBJECTIVE, beta=2.0))
    found = {name: p.grad.clone() for name, p in learner.policy.parameters().items() if p.grad is not None}
    forget_gradients(learner.policy)
    learner.restore(before)
    learner.end()
    return found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-4, atol=2e-6)


def advantages_for(batch) -> np.ndarray:
    return np.random.default_rng(0).normal(size=len(batch))


# -- fused adapters ------------------------------------------------------------------------------------------------


def adapted_models() -> tuple[nn.Module, nn.Module]:
    """The same PEFT model twice, the second fused; both adapters changed from zero."""
    models = []
    for _ in range(2):
        model, _ = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
        shared = share_base(model, {"one": LORA, "two": LORA}, seed=3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        models.append(shared)
    return models[0], models[1]


@pytest.mark.parametrize("adapter", ["one", "two"])
def test_slim_layers_compute_what_peft_computes(adapter):
    plain, fused = adapted_models()
    state = fuse_lora(fused)
    state.adapter = adapter
    ids = torch.arange(3, 13)[None]
    found = []
    for model in (plain, fused):
        model.set_adapter(adapter)
        hidden = model.get_base_model().get_decoder()(input_ids=ids).last_hidden_state
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1]
    assert found[0][1].keys() == found[1][1].keys()
    for name, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][name], rtol=1e-4, atol=1e-5)


def test_layers_whose_adapter_comes_first_compute_the_same(monkeypatch):
    """The order of a card, which adds the wide product to the adapter's part: both ways, with a bias and without."""
    features = []
    for order in (False, True):
        monkeypatch.setattr(fused_lora, "computed_by_kernels", lambda _, it=order: it)
        monkeypatch.setattr(fused_lora, "MOST_RANKS", 0)  # without the kernels
        _, fused = adapted_models()
        for layer in fused.get_base_model().model.layers:
            layer.self_attn.k_proj.base_layer.bias = nn.Parameter(torch.linspace(-1, 1, 16), requires_grad=False)
        fuse_lora(fused).adapter = "one"
        fused.set_adapter("one")
        hidden = fused.get_base_model().get_decoder()(input_ids=torch.arange(3, 13)[None]).last_hidden_state
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        grads = {n: p.grad for n, p in fused.named_parameters() if p.grad is not None}
        features.append({"hidden": hidden.detach(), **grads})
    largest = max(float(grad.abs().max()) for grad in features[0].values())
    assert len(features[0]) > 1
    for name, found in features[0].items():
        torch.testing.assert_close(features[1][name], found, rtol=1e-4, atol=1e-5 * largest)


def test_factors_that_are_rounded_at_once_are_those_that_each_layer_rounds(monkeypatch):
    """To the bit, in every pass anew: weights change between passes, and agents of one base follow each other. What a
    pass computed with is still there on its way back, when another has been made meanwhile."""
    model, tokenizer = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
    shared = share_base(model, {"one": LORA, "two": LORA}, seed=3)
    fused = fuse_lora(shared)
    one, two = (
        TransformerPolicy(shared, tokenizer, adapter=name, precision="fp16", fused=fused) for name in ("one", "two")
    )
    prompts, messages = [np.array([5, 6, 7], dtype=np.int32)] * 2, [np.array([4, 5], dtype=np.int32)] * 2
    at_once = []
    each = FusedLora._rounded

    def passed(policy: TransformerPolicy, alone: bool) -> dict[str, torch.Tensor]:
        def rounded(self: FusedLora, groups: Iterable[Group]) -> dict[Group, Factors]:
            at_once.append(len(found := {} if alone else each(self, groups)))
            return found

        monkeypatch.setattr(FusedLora, "_rounded", rounded)
        with policy.computing():
            hidden = policy.features(prompts, messages)
            policy.features(prompts, messages)
            hidden.float().square().sum().backward()
        found = {name: p.grad.clone() for name, p in policy.parameters().items() if p.grad is not None}
        forget_gradients(policy)
        return {"hidden": hidden.detach(), **found}

    for policy in (one, two, one):
        with torch.no_grad():
            for parameter in policy.parameters().values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        plain, ours = passed(policy, True), passed(policy, False)
        assert plain.keys() == ours.keys()
        assert all(torch.equal(plain[name], ours[name]) for name in plain)
    assert at_once == [0, 0, 14, 14] * 3, "seven layers in each of two"
    assert not fused.rounded, "nothing is left for whoever computes without a pass"


def test_slim_leaves_alone_a_norm_that_is_not_what_its_name_says():
    model, _ = tiny_model(TinyShape(layers=1, width=32, heads=4), seed=0)

    class OddRMSNorm(nn.Module):
        def __init__(self, like):
            super().__init__()
            self.weight, self.variance_epsilon = like.weight, like.variance_epsilon

        def forward(self, x):
            return (1.0 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    layer = model.model.layers[0]
    layer.input_layernorm = odd = OddRMSNorm(layer.input_layernorm)
    shared = share_base(model, {"one": LORA}, seed=0)
    fuse_lora(shared)
    assert "forward" not in vars(odd), "its forward was replaced"
    assert "forward" in vars(layer.post_attention_layernorm)


# -- packing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_packed_and_padded_batches_give_the_same_gradient(kind):
    learner = make_learner(kind)
    batch = make_batch(learner)
    advantages = advantages_for(batch)
    packed = gradients(learner, batch, advantages)
    learner.policy.packs = False
    assert_close(packed, gradients(learner, batch, advantages))


def test_an_unsupported_attention_is_padded_and_says_so_once(monkeypatch):
    policy = make_policy("full")
    prompts = [np.array([3, 4], dtype=np.int32), np.array([3, 4, 5], dtype=np.int32)]
    messages = [np.array([4, 5], dtype=np.int32)] * 2
    expected = policy.features(prompts, messages)

    def refuse(*_, **__):
        raise Unsupported("a sliding window of 2 tokens")

    monkeypatch.setattr(policy, "_packed_features", refuse)
    with pytest.warns(UserWarning, match="sliding window of 2 tokens: batches are padded"):
        found = policy.features(prompts, messages)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_window_shorter_than_the_rows_is_padded_inside_the_learner_too():
    """The layout that the packed try had put up must be gone when the padded one runs."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=4, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = TransformerPolicy(MistralForCausalLM(config).eval(), SimpleNamespace(eos_token_id=1))
    learner = PolicyLearner("agent", policy, micro_batch=2)
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, 40, size=9).astype(np.int32) for _ in range(3)]
    batch = AgentBatch(
        "agent", tuple(x[:6] for x in ids), tuple(x[6:] for x in ids), tuple(np.zeros(3, np.float32) for _ in ids),
        np.arange(3), np.arange(3), np.zeros(3, dtype=np.int64),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="batches are padded"):
        found = learner.begin(batch)
    with torch.no_grad():
        logp = policy.causal_lm(torch.tensor(np.stack(ids), dtype=torch.int64)).logits.log_softmax(-1)
    expected = [sum(float(logp[b, t - 1, row[t]]) for t in range(6, 9)) for b, row in enumerate(ids)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert learner.step(np.arange(3), np.array([1.0, -1.0, 0.5]), OBJECTIVE, beta=0.1, learning_rate=1e-3).applied


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="empty prompt"):
        make_policy("full").features([np.zeros(0, dtype=np.int32)], [np.array([4, 5], dtype=np.int32)])


# -- clipping -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0.25, 4.0], ids=["shortened", "left alone"])
@pytest.mark.parametrize("kind", ["tabular", "full", "lora"])
def test_a_gradient_longer_than_the_limit_is_shortened_to_it(kind, times):
    """Read off Adam's moments after one step: first = (1 - b1) g, second = (1 - b2) g^2."""
    learner = make_learner(kind, micro_batch=3)
    batch = make_batch(learner)
    rows, advantages = np.arange(len(batch)), advantages_for(batch)
    learner.begin(batch)
    learner._accumulate(rows, advantages, OBJECTIVE, beta=0.5)
    exact = {name: p.grad.clone() for name, p in learner.policy.parameters().items() if p.grad is not None}
    norm = float(torch.cat([g.flatten() for g in exact.values()]).norm())
    learner.max_grad_norm = times * norm
    stats = learner.step(rows, advantages, OBJECTIVE, beta=0.5, learning_rate=1e-3)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4), "what is told is the length before"
    b1, b2 = learner.optimizer.betas
    moments = learner.snapshot().moments
    assert_close(
        {n: moments[f"first.{n}"] / (1 - b1) for n in exact}, {n: min(times, 1.0) * g for n, g in exact.items()}
    )
    assert_close(
        {n: (moments[f"second.{n}"] / (1 - b2)).sqrt() for n in exact},
        {n: min(times, 1.0) * g.abs() for n, g in exact.items()},
    )


# -- loss scaling ---------------------------------------------------------------------------------------------


def scaled(learner: PolicyLearner, monkeypatch) -> PolicyLearner:
    """As in float16, which a CPU computes too slowly: only the loss scale."""
    monkeypatch.setattr(learner, "_scale", lambda: learner.optimizer.loss_scale)
    return learner


def overflow_at(learner: PolicyLearner, monkeypatch, overflows) -> list[tuple[tuple[int, ...], float]]:
    """The gradients of rows for which ``overflows(rows, scale)`` become infinite; returns what was computed."""
    computed: list[tuple[tuple[int, ...], float]] = []
    backward = _Scaled.backward

    def overflowing(gathering, rows, part):
        backward(gathering, rows, part)
        computed.append((tuple(rows.tolist()), gathering.scale))
        if overflows(rows, gathering.scale):
            gathering.fresh.found[-1] = float("inf")
            for gradient in gathering.fresh.gradients:
                gradient.fill_(float("inf"))

    monkeypatch.setattr(_Scaled, "backward", overflowing)
    return computed


def steps_taken(learner: PolicyLearner, batch) -> dict[str, torch.Tensor]:
    learner.begin(batch)
    rows = np.arange(len(batch))
    stats = learner.step(rows, advantages_for(batch), OBJECTIVE, beta=0.5, learning_rate=1e-3)
    assert stats.applied
    return {k: p.detach().clone() for k, p in learner.policy.parameters().items()}


@pytest.mark.parametrize("place", ["first", "middle", "last", "all"])
def test_a_micro_batch_that_overflows_is_computed_again_alone(monkeypatch, place):
    batch = make_batch(make_learner("full"))
    expected = steps_taken(make_learner("full", micro_batch=2), batch)
    learner = scaled(make_learner("full", micro_batch=2), monkeypatch)
    parts = learner.passes.micro_batches(batch, np.arange(len(batch)))
    chosen = {"first": parts[:1], "middle": parts[1:2], "last": parts[-1:], "all": parts}[place]
    hit = {tuple(part.tolist()) for part in chosen}
    computed = overflow_at(
        learner, monkeypatch, lambda rows, scale: tuple(rows.tolist()) in hit and scale > FIRST_LOSS_SCALE / 4
    )
    assert_close(expected, steps_taken(learner, batch))
    assert learner.optimizer.loss_scale == FIRST_LOSS_SCALE / 4
    assert len(computed) == len(parts) + 2, "the halved scale holds for what comes after"


def test_a_loss_scale_that_was_not_to_blame_is_kept(monkeypatch):
    """A gradient that is broken at every scale throws its step away, and nothing else."""
    learner = scaled(make_learner("full"), monkeypatch)
    batch = make_batch(learner)
    rows = np.arange(len(batch))
    with monkeypatch.context() as broken:
        overflow_at(learner, broken, lambda rows, scale: True)
        learner.begin(batch)
        version = learner.version()
        assert not learner.step(rows, advantages_for(batch), OBJECTIVE, beta=0.5, learning_rate=1e-3).applied
    assert learner.version() == version
    assert learner.optimizer.loss_scale == FIRST_LOSS_SCALE
    assert learner.step(rows, advantages_for(batch), OBJECTIVE, beta=0.5, learning_rate=1e-3).applied


def test_a_loss_that_is_not_finite_is_not_tried_again(monkeypatch):
    learner = scaled(make_learner("full", micro_batch=2), monkeypatch)
    batch = make_batch(learner)
    computed = overflow_at(learner, monkeypatch, lambda rows, scale: False)
    advantages = advantages_for(batch)
    advantages[learner.passes.micro_batches(batch, np.arange(len(batch)))[0][0]] = float("nan")
    learner.begin(batch)
    stats = learner.step(np.arange(len(batch)), advantages, OBJECTIVE, beta=0.5, learning_rate=1e-3)
    assert not stats.applied
    assert len(computed) == 1, "nor is anything computed after it"
    assert learner.optimizer.loss_scale == FIRST_LOSS_SCALE


def test_the_loss_scale_does_not_change_the_step():
    moved = []
    for scale in (1.0, 2.0**12):
        learner = make_learner("full")
        batch = make_batch(learner)
        learner._scale = lambda scale=scale: scale  # type: ignore[method-assign]
        learner.begin(batch)
        learner.step(np.arange(len(batch)), advantages_for(batch), OBJECTIVE, beta=0.5, learning_rate=1e-3)
        moved.append({k: p.detach().clone() for k, p in learner.policy.parameters().items()})
    assert_close(moved[0], moved[1])


def test_the_loss_scale_is_saved_and_restored(tmp_path):
    learner = make_learner("full")
    learner.optimizer.loss_scale, learner.optimizer._clean_steps = 128.0, 7
    learner.save(tmp_path)
    other = PolicyLearner("agent", make_policy("full"))
    other.load(tmp_path)
    assert (other.optimizer.loss_scale, other.optimizer._clean_steps) == (128.0, 7)
    assert other.fingerprint() == learner.fingerprint()


# -- hashes ---------------------------------------------------------------------------------------------------


def test_a_hash_sees_every_bit_name_and_place():
    rng = torch.Generator().manual_seed(0)
    base = torch.randn(5000, generator=rng)

    def changed(change) -> torch.Tensor:
        copy = base.clone()
        change(copy)
        return copy

    def flip_last_bit(t):
        t.view(torch.int32)[4321] ^= 1

    def swap(t):
        t[10], t[11] = t[11].clone(), t[10].clone()

    tensors = [base, changed(flip_last_bit), changed(swap), base.view(50, 100), base.double(), base[:-1]]
    hashes = [hash_tensors({"w": t}) for t in tensors]
    hashes += [hash_tensors({"v": base}), hash_tensors({"w": base}, salt="x"), hash_tensors({})]
    assert len(set(hashes)) == len(hashes)
    assert hash_tensors({"w": base.clone()}) == hashes[0]
    assert hash_tensors({"w": base.half()}) != hash_tensors({"w": base.bfloat16()})


def test_factors_that_are_kept_hash_as_those_that_are_computed(monkeypatch):
    tensors = {"a": torch.arange(12.0), "b": torch.arange(12.0) + 1, "c": torch.arange(5)}
    kept = [hash_tensors(tensors) for _ in range(2)]
    monkeypatch.setattr(hashing, "KEPT_LENGTH", 0)
    assert [*kept, hash_tensors(tensors)] == 3 * [kept[0]]


@pytest.mark.parametrize(("chunk", "threads"), [(None, 1), (1 << 10, 1), (1 << 10, 3), (999, 2), (1 << 22, 1)])
def test_a_hash_is_what_it_was_however_it_is_added_up(chunk, threads, monkeypatch):
    """Checkpoints and logs hold hashes of earlier versions."""
    if chunk is not None:
        monkeypatch.setattr(hashing, "CPU_CHUNK", chunk)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numbers = torch.arange(100_003, dtype=torch.float32)
    tensors = {
        "a": numbers * -0.37,
        "b": numbers,
        "c": torch.arange(37),
        "d": (torch.arange(50_001) % 251).to(torch.uint8),
        "e": torch.zeros(0),
        "f": numbers[:70_000].bfloat16(),
    }
    assert hash_tensors(tensors, salt="x") == "e36dbfa7000941a1dc68731821b7fbbc"


def test_a_head_of_half_precision_factors_adds_up_in_single_and_keeps_the_gradient():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator)
    hidden = torch.randn(7, 16, generator=generator, requires_grad=True)
    whole, half = OutputLayer(weight, None, 1.0), OutputLayer(weight, None, 1.0, weight.half())
    up = torch.randn(7, 50, generator=generator)
    (exact,) = torch.autograd.grad(whole(hidden), hidden, up)
    (rounded,) = torch.autograd.grad(half(hidden), hidden, up)
    torch.testing.assert_close(rounded, exact)
    assert half(hidden).dtype == torch.float32
    torch.testing.assert_close(half(hidden), whole(hidden), rtol=0, atol=1e-2)
    assert not torch.equal(half(hidden), half(hidden).half().float())  # sums are not rounded to half


@pytest.mark.parametrize(
    ("dtype", "on_card", "in_one"),
    [(torch.float16, True, True), (torch.float16, False, False), (torch.bfloat16, True, False)],
    ids=["float16 on a card", "on a CPU", "kept as bfloat16, and cast in passing"],
)
def test_output_layer_and_score_are_one_where_a_card_has_the_weight_in_float16(dtype, on_card, in_one):
    weight = torch.zeros(5, 4)
    half = SimpleNamespace(dtype=dtype, is_cuda=on_card)  # there is no card here
    assert scores_in_half(OutputLayer(weight, None, 1.0, half)) == in_one
    assert not scores_in_half(OutputLayer(weight, None, 1.0))
    assert not scores_in_half(lambda hidden: hidden @ weight.T), "of another engine"


def test_no_more_logits_are_held_than_the_micro_batch_s_longest_messages_have(monkeypatch):
    """Which the memory plan counts: where passes are filled by tokens, one has more messages. And 1.6 times as many
    where score and output layer are one; never more than a card holds."""
    passes, held = make_learner("lora", micro_batch=2).passes, 100
    batch = SimpleNamespace(lengths_M=np.array([3, 5, 4]))
    monkeypatch.setattr("teamtr.engines.passes.head_chunk", lambda *_: held)

    def sizes(lean: bool) -> list[int]:
        return [len(part) for (part,) in passes.chunks(batch, lambda h: h, torch.zeros(33, 4), lean=lean)]

    assert sizes(lean=False) == [10, 10, 10, 3]
    assert sizes(lean=True) == [16, 16, 1]
    held = 8
    assert sizes(lean=False) == [8, 8, 8, 8, 1]
    assert sizes(lean=True) == [12, 12, 9]
