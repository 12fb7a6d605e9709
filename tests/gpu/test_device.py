"""What only a card can show: captured graphs, its kernels, half precision, memory that really runs out.

    make test-gpu

Skipped where there is no card. TEAMTR_TEST_DEVICE=cpu runs what does not need one, to try the tests themselves.
"""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from teamtr.answers import Wanted
from teamtr.batches import AgentBatch
from teamtr.config import loads
from teamtr.engines import card
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.optim import FIRST_LOSS_SCALE
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import Server, _size
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.scoring import score_features, score_tokens
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
from teamtr.engines.torch.packing import Spread
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.row_scaled import RowScaled
from teamtr.engines.torch.short_base import keep_short
from teamtr.randomness import uniforms
from teamtr.session import train as run
from teamtr.session.build import build
from teamtr.session.memory import GB, plan_memory, rehearse
from teamtr.theory.objective import Objective
from teamtr.training.probe import log_ratios, token_shift

CARD = torch.cuda.is_available()
DEVICE = torch.device(os.environ.get("TEAMTR_TEST_DEVICE", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CARD and DEVICE.type == "cuda", reason="no card here"),
]
card.use(DEVICE)
needs_card = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a card")

SHAPE = TinyShape(layers=2, width=64, heads=4)
OBJECTIVE = Objective()


@pytest.fixture(params=["full", "lora"])
def policy(request) -> TransformerPolicy:
    return make_policy(request.param)


def make_policy(kind: str, precision: str = "fp32", targets: str | list[str] = "all-linear") -> TransformerPolicy:
    """Sharpened and with an adapter that does something, so that mistakes show."""
    model, tokenizer = tiny_model(SHAPE, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
    model.to(DEVICE)
    if kind == "full":
        return TransformerPolicy(model, tokenizer, precision=precision)
    shared = share_base(model, {"agent": SimpleNamespace(rank=8, alpha=16.0, targets=targets)}, seed=0)
    made = TransformerPolicy(shared, tokenizer, adapter="agent", precision=precision, fused=fuse_lora(shared))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return made


def some_prompts(count: int, lengths: tuple[int, ...] = (3, 63, 64, 65, 130)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    different = [rng.integers(3, 30, size=n).astype(np.int32) for n in lengths]
    return [different[k % len(different)] for k in range(count)]


def make_batch(count: int = 32, tokens: int = 24, lengths: tuple[int, ...] = (40, 9, 65)) -> AgentBatch:
    rng = np.random.default_rng(1)
    return AgentBatch(
        agent="agent",
        prompts=tuple(some_prompts(count, lengths)),
        messages=tuple(rng.integers(3, 30, size=rng.integers(1, tokens + 1)).astype(np.int32) for _ in range(count)),
        sampler_logprobs=tuple(np.zeros(1, dtype=np.float32) for _ in range(count)),
        episode_M=np.arange(count),
        problem_M=np.arange(count) % len(lengths),
        turn_M=np.zeros(count, dtype=np.int64),
    )


def make_learner(policy: TransformerPolicy, micro_batch: int = 8) -> PolicyLearner:
    return PolicyLearner("agent", policy, micro_batch=micro_batch)


def gradient_of(learner: PolicyLearner, batch: AgentBatch) -> torch.Tensor:
    """Read off Adam's first moment."""
    learner.max_grad_norm = 1e9
    learner.begin(batch)
    advantages = np.random.default_rng(2).normal(size=len(batch))
    stats = learner.step(np.arange(len(batch)), advantages, OBJECTIVE, beta=0.3, learning_rate=0.0)
    assert stats.applied
    moments = learner.snapshot().moments
    learner.end()
    return torch.cat([moments[k].flatten().float().cpu() for k in sorted(moments) if k.startswith("first.")])


# -- sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drawing", [TokenSampler(1.0), TokenSampler(0.7, top_p=0.8), TokenSampler(1.3, top_k=3), TokenSampler(0.0)], ids=str
)
def test_captured_eager_and_plain_say_the_same_from_the_same_noise(policy, drawing):
    prompts = some_prompts(40)
    said = {"plain": policy.sample(prompts, uniforms(5, len(prompts), 48), drawing)}
    for name, graphs in (("eager", False), ("captured", CARD)):
        copy = SamplingCopy(policy.causal_lm, torch.float32, DEVICE)
        copy.fill(policy.causal_lm, policy.adapter, version="v", base="b")
        server = Server(copy, pool_bytes=1 << 26, graphs=graphs)
        said[name] = server.sample("v", prompts, uniforms(5, 40, 48), drawing=drawing, end_ids=policy.end_ids)
    for name in ("eager", "captured"):
        for ours, plain in zip(said[name], said["plain"], strict=True):
            assert ours.token_ids.tolist() == plain.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_that_are_read_beside_running_steps_say_the_same(policy, rows, monkeypatch):
    """With steps still to be computed at every look, and without; one prompt alone, and rows that end early, that
    nobody wants any more, or that wait for pages."""
    prompts, noise = some_prompts(rows), uniforms(5, rows, 48)
    copy = SamplingCopy(policy.causal_lm, torch.float32, DEVICE)
    copy.fill(policy.causal_lm, policy.adapter, version="v", base="b")
    said = []
    for ahead, pool_bytes in ((0, 1 << 26), (2, 1 << 26), (2, 1 << 19), (5, 1 << 26)):
        monkeypatch.setattr("teamtr.engines.paged.sampler.STEPS_AHEAD", ahead)
        server, told = Server(copy, pool_bytes=pool_bytes, graphs=CARD), {row: [] for row in range(rows)}

        def follow(row, before, token_ids, told=told):
            told[row] += token_ids.tolist()
            return row % 3 != 2

        found = server.sample("", prompts, noise, drawing=TokenSampler(1.0), end_ids=frozenset({5, 6}), follow=follow)
        assert [told[row] for row in range(rows)] == [one.token_ids.tolist() for one in found]
        said.append(found)
    for others in said[1:]:
        for k, (first, other) in enumerate(zip(said[0], others, strict=True)):
            shared = min(len(first.token_ids), len(other.token_ids))
            assert k % 3 == 2 or len(first.token_ids) == len(other.token_ids)
            assert first.token_ids[:shared].tolist() == other.token_ids[:shared].tolist()
            np.testing.assert_allclose(first.logprobs[:shared], other.logprobs[:shared], atol=1e-4)


@pytest.mark.parametrize(("rows", "size", "found"), [(300, 384, 24), (40, 48, 3)])
def test_groups_that_read_their_prompts_together_say_the_same(policy, rows, size, found, monkeypatch):
    """Three of the five prompts have whole pages, for a fifth of the rows each, in clusters of 8; also where few rows
    have several programs each."""
    monkeypatch.setattr("teamtr.engines.paged.work_split.WORTH_SPARING", 0)
    monkeypatch.setattr("teamtr.engines.paged.work_split.WORTH_SPARING_FEW", 0)
    prompts, drawing, used = some_prompts(rows), TokenSampler(1.0), []
    copy = SamplingCopy(policy.causal_lm, torch.float32, DEVICE)
    copy.fill(policy.causal_lm, policy.adapter, version="v", base="b")
    server = Server(copy, pool_bytes=1 << 28, graphs=CARD)
    replay = server._replay

    def noted(sequences, drawing):
        used.append((_size(sequences), server._reads_together(), len(server._buffers.clusters)))
        replay(sequences, drawing)

    monkeypatch.setattr(server, "_replay", noted)
    ours = server.sample("v", prompts, uniforms(5, rows, 48), drawing=drawing, end_ids=policy.end_ids)
    assert used[0] == (size, True, found)
    others = 0
    for a, b in zip(ours, policy.sample(prompts, uniforms(5, len(prompts), 48)), strict=True):
        alike = min(len(a.token_ids), len(b.token_ids))
        if (a.token_ids[:alike] != b.token_ids[:alike]).any():
            alike = int((a.token_ids[:alike] != b.token_ids[:alike]).argmax())
            # 14,400 draws: rounding may push a number over the edge between two tokens, which are then neighbours
            assert abs(int(a.token_ids[alike]) - int(b.token_ids[alike])) == 1
            others += 1
        np.testing.assert_allclose(a.logprobs[:alike], b.logprobs[:alike], atol=1e-4)
    assert others <= 3


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_card)])
@pytest.mark.parametrize("adapters", ["merged", "by_row"])
def test_rows_of_two_agents_that_join_and_leave_say_what_they_say_alone(adapters, compiled):
    """In one captured step where adapters are applied by row."""
    model, tokenizer = tiny_model(SHAPE, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
    lora = SimpleNamespace(rank=8, alpha=16.0, targets="all-linear")
    shared = share_base(model.to(DEVICE), {"agent": lora, "other": lora}, seed=0)
    fused, policies = fuse_lora(shared), {}
    pool = SamplerPool("fp32", DEVICE, memory_bytes=1 << 28, compiled=compiled, adapters=adapters)
    for k, name in enumerate(("agent", "other")):
        policy = TransformerPolicy(shared, tokenizer, adapter=name, base_version="base", serving=pool, fused=fused)
        policies[name] = PolicyLearner(name, policy)
        with torch.no_grad():
            for parameter in policy.parameters().values():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k))
                parameter.add_(0.2 * noise.to(parameter))
    engine = LocalEngine(policies)
    prompts, noise = some_prompts(40), uniforms(5, 40, 48)
    wanted = [Wanted(("agent", "other")[k % 2], prompts[k], noise[k, : 20 + k % 28]) for k in range(40)]
    left, found = list(wanted), {}

    def more(ended):
        found.update({one.row: one.sample for one in ended})
        given = left[: len(ended) if found else 16]
        del left[: len(given)]
        return given

    engine.stream(more)
    assert sorted(found) == list(range(40))
    others = 0
    for row, sample in found.items():
        policy = policies[wanted[row].agent].policy
        with torch.no_grad(), policy.computing():
            [plain] = policy._sample_plainly([wanted[row].prompt], wanted[row].noise_T[None], TokenSampler())
        others += sample.token_ids.tolist() != plain.token_ids.tolist()
    assert others <= 1, "of 1,300 draws, one may lie where rounding decides"


@needs_card
def test_compiled_decoding_says_the_same(policy):
    prompts, drawing = some_prompts(24), TokenSampler(1.0)
    found = []
    for compiled in (False, True):
        copy = SamplingCopy(policy.causal_lm, torch.float32, DEVICE, joins_layers=not compiled)
        copy.fill(policy.causal_lm, policy.adapter, version="v", base="b")
        server = Server(copy, pool_bytes=1 << 26, graphs=True, compiled=compiled)
        found.append(server.sample("v", prompts, uniforms(3, 24, 24), drawing=drawing, end_ids=policy.end_ids))
    for a, b in zip(*found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-6), pytest.param("fp16", 1e-2, marks=needs_card)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_card)])
def test_features_kept_in_captured_steps_are_the_learners(policy, precision, most, compiled):
    policy.serving = SamplerPool(precision, DEVICE, memory_bytes=1 << 28, compiled=compiled, keeps=True)
    learner = PolicyLearner("agent", policy, kept_bytes=1 << 28)
    engine, prompts = LocalEngine({"agent": learner}), some_prompts(40)
    engine.keep_scores("agent")
    samples = engine.sample("agent", prompts, uniforms(5, len(prompts), 48))
    engine.keep_scores(None)
    rows = np.arange(len(prompts))
    said = (tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples))
    learner.begin(AgentBatch("agent", tuple(prompts), *said, rows, rows, np.zeros_like(rows)), from_sampler=True)
    assert (learner.sampler_scored, learner.tokens["scored"]) == (len(prompts), 0)
    apart = learner.measure().full_M
    assert 0.0 <= apart.min() <= apart.max() < most
    for ours, sample in zip(learner.token_logprobs(), samples, strict=True):
        np.testing.assert_allclose(ours, sample.logprobs, atol=1e-4 if precision == "fp32" else 0.1)


# -- a base in 8 bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_weight_in_8_bits_is_cast_to_the_same_bits_and_takes_no_more_memory_than_that(dtype):
    weight = RowScaled.of(torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)))
    there = RowScaled(*(part.to(DEVICE) for part in weight))
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    cast = there.to(dtype)
    if DEVICE.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before == cast.nbytes
    assert torch.equal(cast.cpu(), weight.to(dtype))


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-4), pytest.param("fp16", 0.1, marks=needs_card)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_card)])
def test_a_base_in_8_bits_is_sampled_where_it_is_and_as_it_is_scored(precision, most, compiled):
    policy = make_policy("lora")
    keep_short(policy.causal_lm, policy.fused, torch.int8, rounded=True)
    policy.serving = SamplerPool(precision, DEVICE, memory_bytes=1 << 28, compiled=compiled, adapters="by_row")
    prompts = some_prompts(10)
    samples = policy.sample(prompts, uniforms(5, len(prompts), 24), version="v")
    copied = policy.serving.server_of(policy.causal_lm).copy.model.get_decoder().layers[0].mlp.down_proj.weight
    kept = policy.causal_lm.get_decoder().layers[0].mlp.down_proj.base_layer.weight
    assert (copied.data_ptr(), copied.dtype) == (kept.data_ptr(), torch.int8)
    ids = np.concatenate([sample.token_ids for sample in samples])
    with torch.no_grad(), policy.computing():
        logits = policy.head()(policy.features(prompts, [sample.token_ids for sample in samples]))
    scored = torch.log_softmax(logits, -1).cpu().numpy()[np.arange(len(ids)), ids]
    np.testing.assert_allclose(scored, np.concatenate([sample.logprobs for sample in samples]), atol=most)


# -- learning --------------------------------------------------------------------------------------------------


@needs_card
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize(("width", "heads", "dim"), [(2048, 16, 128), (576, 9, 64)])
def test_what_lies_between_products_agrees_with_float64(width, heads, dim, dtype, error):
    """Both ways, rounded once: the largest error is a rounding of the largest element."""
    from teamtr.engines.torch.fused_layers import add_norm, added, branch, gated, gated_rows, norm
    from teamtr.engines.torch.fused_rotation import turned, turned_rows

    def weighted(x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return x + 3 * normed.to(x.dtype)

    def both_ways(work, *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        result = work(*leaves)
        generator = torch.Generator(DEVICE).manual_seed(5)
        direction = torch.randn(result.shape, generator=generator, device=DEVICE).to(dtype).to(result.dtype)
        result.backward(direction)
        return [result.detach(), *(x.grad for x in leaves)]

    def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()

    def exact_turn(x: torch.Tensor) -> torch.Tensor:
        x = exact_norm(x, of_head)
        first, second = x.chunk(2, -1)
        return x * cos[:, None].double() + torch.cat([-second, first], -1) * sin[:, None].double()

    torch.manual_seed(0)
    tokens = 300
    x, weight = 3 * torch.randn(tokens, width, device=DEVICE), torch.rand(width, device=DEVICE) + 0.5
    gate, up = (3 * torch.randn(tokens, 3 * width, device=DEVICE).to(dtype) for _ in range(2))
    product, of_head = torch.randn(tokens, heads, dim, device=DEVICE).to(dtype), torch.rand(dim, device=DEVICE) + 0.5
    angles = 6 * torch.rand(tokens, dim, device=DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    delta = torch.randn(tokens, width, device=DEVICE).to(dtype)
    pairs = [
        (both_ways(lambda x: norm(x, weight, 1e-6, dtype), x), both_ways(lambda x: exact_norm(x, weight), x.double())),
        (
            both_ways(lambda x: weighted(*branch(x, weight, 1e-6, dtype)), x),
            both_ways(lambda x: weighted(x, exact_norm(x, weight)), x.double()),
        ),
        (
            both_ways(lambda x, d: weighted(*add_norm(x, d, weight, 1e-6, dtype)), x, delta),
            both_ways(lambda x, d: weighted(x + d, exact_norm(x + d, weight)), x.double(), delta.double()),
        ),
        (both_ways(added, x, delta), both_ways(torch.add, x.double(), delta.double())),
        (
            both_ways(gated, gate, up),
            both_ways(lambda g, u: torch.nn.functional.silu(g) * u, gate.double(), up.double()),
        ),
        (
            both_ways(lambda x: turned(x, cos, sin, of_head, 1e-6), product),
            both_ways(exact_turn, product.double()),
        ),
    ]
    rows = torch.randn(tokens, 3 * heads * dim, device=DEVICE).to(dtype)

    def turned_apart(x: torch.Tensor) -> torch.Tensor:
        query, key, value = x.unflatten(1, (3 * heads, dim)).chunk(3, 1)
        return torch.cat([exact_turn(query), exact_turn(key), value], 1)

    def turned_together(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(turned_rows(x, cos, sin, of_head, of_head, 1e-6, heads, heads), 1)

    pairs += [
        (both_ways(turned_together, rows), both_ways(turned_apart, rows.double())),
        (
            both_ways(gated_rows, torch.cat([gate, up], 1)),
            both_ways(
                lambda both: torch.nn.functional.silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1],
                torch.cat([gate, up], 1).double(),
            ),
        ),
    ]
    for ours, exact in pairs:
        for a, b in zip(ours, exact, strict=True):
            assert float((a.double() - b).abs().max() / b.abs().max()) < error


@needs_card
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize(("tokens", "width", "rank"), [(5000, 6144, 16), (300, 2048, 48), (77, 576, 8)])
def test_products_with_narrow_factors_agree_with_float64(tokens, width, rank, dtype, error):
    from teamtr.engines.torch import narrow_products

    torch.manual_seed(0)
    wide = torch.randn(tokens, width, device=DEVICE).to(dtype)
    factor, narrow = (
        torch.randn(rank, width, device=DEVICE).to(dtype),
        torch.randn(tokens, rank, device=DEVICE).to(dtype),
    )
    along, across = wide.double() @ factor.double().T, wide.double().T @ narrow.double()
    sums, found = narrow_products.across_and_along(wide, narrow, factor.T)
    for ours, exact, within in (
        (narrow_products.narrow(wide, factor), along, error), (sums, across, 1e-5), (found, along, error)
    ):  # fmt: skip
        assert float((ours.double() - exact).abs().max() / exact.abs().max()) < within
    assert torch.equal(narrow_products.across(wide, narrow).T, sums), "the same numbers have the same bits"
    sizes = (width // 2 + 8, width - width // 2 - 8)
    both = torch.cat([narrow, 2 * narrow], 1)
    joined, along = narrow_products.across_and_along(wide, both, factor.T, 1.0, sizes)
    parts = joined.split(sizes), wide.double().split(sizes, 1), (narrow, 2 * narrow), factor.T.split(sizes)
    for of_up, part, own, up, found in zip(*parts, along.split(rank, 1), strict=True):
        exact = part.T @ own.double()
        assert float((of_up.double() - exact).abs().max() / exact.abs().max()) < 1e-5
        assert float((found.double() - part @ up.double()).abs().max() / (part @ up.double()).abs().max()) < error


@needs_card
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fused_layers_have_the_gradient_of_torch(precision, monkeypatch):
    batch = make_batch()
    fused = gradient_of(make_learner(make_policy("lora", precision)), batch)
    monkeypatch.setattr(FusedLora, "fuses", lambda *_: False)
    plain = gradient_of(make_learner(make_policy("lora", precision)), batch)
    assert 0 < float((fused - plain).norm() / plain.norm()) < (0.01 if precision == "fp16" else 0.08)


@needs_card
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layers_that_are_one_have_the_gradient_of_each(precision, monkeypatch):
    batch = make_batch()
    one = gradient_of(make_learner(make_policy("lora", precision)), batch)
    monkeypatch.setattr(FusedLora, "_whole", lambda *_: None)
    each = gradient_of(make_learner(make_policy("lora", precision)), batch)
    assert 0 < float((one - each).norm() / each.norm()) < (0.01 if precision == "fp16" else 0.08)


@needs_card
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_copies_of_rows_are_added_up_as_in_float64(dtype):
    from teamtr.engines.torch.fused_layers import summed

    taken = np.random.default_rng(0).integers(0, 200, size=5000)
    torch.manual_seed(0)
    grad = torch.randn(5000, 8, 128, device=DEVICE).to(dtype)
    runs = Spread.of(taken, 200, grad.device, in_runs=True).copies
    exact = torch.zeros(200, 8, 128, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, torch.from_numpy(taken).to(DEVICE), grad.double())
    error = float((summed(grad, *runs).double() - exact).abs().max() / exact.abs().max())
    assert error < torch.finfo(dtype).eps


@needs_card
@pytest.mark.parametrize("step", [0.0, 1e-6, 1e-3, 0.1])
def test_the_fused_kernel_agrees_with_float64(step):
    torch.manual_seed(0)
    cur = 2 * torch.randn(64, 20_000, device=DEVICE)
    new = (cur + step * torch.randn_like(cur)).requires_grad_()
    ids = torch.randint(0, 20_000, (64,), device=DEVICE)
    exact_in = new.detach().double().requires_grad_()
    logp, kl = score_tokens(new, cur, ids)
    exact_logp, exact_kl = score_tokens(exact_in, cur.double(), ids)
    torch.testing.assert_close(logp.double(), exact_logp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kl.double(), exact_kl, atol=1e-11, rtol=1e-3)
    (logp.sum() + 3 * kl.sum()).backward()
    (exact_logp.sum() + 3 * exact_kl.sum()).backward()
    torch.testing.assert_close(new.grad.double(), exact_in.grad, atol=1e-6, rtol=1e-3)


@needs_card
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
@pytest.mark.parametrize("scale", [1.0, 2.0**24])
def test_output_layer_and_score_in_one_agree_with_float64(keep, scale):
    torch.manual_seed(0)
    weight = (0.05 * torch.randn(20_000, 256, device=DEVICE)).half()
    head = OutputLayer(weight.float(), None, 0.8, weight)
    cur = torch.randn(64, 256, device=DEVICE).half().float()
    new = (cur + 0.1 * torch.randn_like(cur)).half().float().requires_grad_()
    ids = torch.randint(0, 20_000, (64,), device=DEVICE)
    logp, kl = score_features(head, head, new, cur, ids, keep=keep)
    assert type(logp.grad_fn).__name__ == "_FusedFeaturesBackward"
    exact_in = new.detach().double().requires_grad_()
    logits, before = (x @ weight.double().T / 0.8 for x in (exact_in, cur.double()))
    exact_logp, exact_kl = score_tokens(logits, before, ids)
    torch.testing.assert_close(logp.double(), exact_logp, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(kl.double(), exact_kl, atol=1e-8, rtol=1e-3)
    (scale * (logp.sum() + 3 * kl.sum())).backward()
    (scale * (exact_logp.sum() + 3 * exact_kl.sum())).backward()
    assert float((new.grad.double() - exact_in.grad).norm() / exact_in.grad.norm()) < 1e-3


@needs_card
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "rank", "adapters", "parts"), [(256, 12288, 16, 3, 2), (7, 576, 4, 2, 3)])
def test_each_row_gets_what_its_own_adapter_adds(rows, outputs, rank, adapters, parts, dtype, error):
    from teamtr.engines.paged.adapter_kernel import with_own_adapter

    torch.manual_seed(0)
    columns = parts * adapters * rank
    product = torch.randn(1, rows, outputs + columns, device=DEVICE).to(dtype)
    up = torch.randn(outputs, columns, device=DEVICE).to(dtype)
    index = torch.arange(rows, device=DEVICE) % (adapters + 1) - 1
    own = index[:, None] == torch.arange(columns, device=DEVICE) % (adapters * rank) // rank
    exact = product[0, :, :outputs].double() + (product[0, :, outputs:].double() * own) @ up.double().T
    product[0, :, outputs:][~own] = torch.inf
    found = with_own_adapter(product, up, index, rank, adapters)[0]
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < error
    assert torch.equal(found[index < 0], product[0, index < 0, :outputs])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all", "few"])
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 5e-3), ("fp16", 3e-2)])
def test_half_precision_has_the_gradient_of_float32(precision, tolerance, targets):
    batch = make_batch()
    exact = gradient_of(make_learner(make_policy("lora", targets=targets)), batch)
    found = gradient_of(make_learner(make_policy("lora", precision, targets)), batch)
    assert float((found - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_unchanged_weights_have_no_kl_and_the_square_law_holds(precision):
    learner = make_learner(make_policy("lora", precision))
    learner.begin(make_batch())
    before = learner.snapshot()
    assert float(learner.measure().full_M.max()) == 0.0
    learner.perturb(0.03, seed=0)
    after = learner.snapshot()
    whole = learner.measure().full_M.mean()
    learner.move(before, after, 0.5)
    assert whole / learner.measure().full_M.mean() == pytest.approx(4.0, rel=0.25)


def test_half_precision_verifies_as_float32_does():
    batch, rng = make_batch(count=96), np.random.default_rng(3)
    noise_N, noise_M = rng.random(int(batch.lengths_M.sum())), rng.random(len(batch))
    kept = {}
    for precision in ("fp32", "fp16"):
        learner = make_learner(make_policy("lora", precision))
        learner.begin(batch)
        assert (learner.verify(noise_N, noise_M).kept_M == batch.lengths_M).all(), "nothing changed: all is kept"
        learner.perturb(0.1, seed=0)
        found = learner.verify(noise_N, noise_M)
        cut_M = found.kept_M < batch.lengths_M
        assert (found.next_M[cut_M] >= 0).all()
        assert (found.next_M[~cut_M] == -1).all()
        kept[precision] = found.kept_M
    assert 0.0 < (kept["fp32"] < batch.lengths_M).mean() < 1.0, "some are cut and some are not"
    assert (kept["fp16"] == kept["fp32"]).mean() > 0.9


def test_a_real_overflow_of_float16_lowers_the_scale_and_loses_nothing():
    batch = make_batch()
    exact = gradient_of(make_learner(make_policy("lora", "fp16")), batch)
    learner = make_learner(make_policy("lora", "fp16"))
    learner.optimizer.loss_scale = 2.0**40
    found = gradient_of(learner, batch)
    assert learner.optimizer.loss_scale < 2.0**40
    assert float((found - exact).norm() / exact.norm()) < 1e-2
    assert FIRST_LOSS_SCALE < 2.0**40


@needs_card
def test_memory_is_handed_out_from_ranges_that_grow():
    make_policy("lora", "fp16")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


@needs_card
def test_a_process_of_four_knows_of_a_quarter_of_the_card():
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    try:
        card.take_share(4)
        assert card.free_bytes(DEVICE) + torch.cuda.memory_allocated(DEVICE) <= card.SHARED_OUT / 4 * whole
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@needs_card
def test_memory_that_runs_out_lowers_the_micro_batch_and_gives_the_same_gradient():
    batch = make_batch(count=256, tokens=400, lengths=(300, 700, 500))
    exact = gradient_of(make_learner(make_policy("lora", "fp16"), micro_batch=8), batch)
    learner = make_learner(make_policy("lora", "fp16"), micro_batch=256)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (600 << 20)) / whole)
    try:
        found = gradient_of(learner, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert learner.passes.micro_batch < 256
    assert float((found - exact).norm() / exact.norm()) < 1e-2


@needs_card
def test_only_the_agent_being_updated_has_its_moments_on_the_card(policy):
    learner, batch = make_learner(policy), make_batch()

    def where() -> set[str]:
        return {moment.device.type for moment in learner.optimizer.moments.values()}

    before = learner.snapshot()
    learner.begin(batch)
    learner.step(np.arange(len(batch)), np.linspace(-1, 1, len(batch)), OBJECTIVE, beta=0.1, learning_rate=1e-3)
    after = learner.snapshot()
    assert where() == {"cuda"}
    learner.end()
    assert where() == {"cpu"}
    kept = learner.fingerprint()
    log_ratios(learner, before, after, batch)
    assert where() == {"cpu"}
    token_shift(learner, before, after, batch, np.random.default_rng(0))
    assert where() == {"cpu"}
    assert learner.fingerprint() == kept
    learner.begin(batch)
    assert where() == {"cuda"}


# -- a run -----------------------------------------------------------------------------------------------------

TEAM = f"""
name: card
device: {DEVICE.type}
task: {{name: code}}
team: {{model: tiny, train: lora, max_tokens: 4, agents: [{{name: left}}, {{name: right}}, {{name: speaker}}]}}
tiny: {{warmup_steps: 20}}
plan: {{stages: 2, problems: 4, group_size: 4, radius_nats_per_message: 0.05}}
eval: {{every: 2, problems: 4}}
"""


def test_a_team_trains_and_resumes(tmp_path):
    records = list(run.train(loads(TEAM), tmp_path / "run"))
    updates = [r for r in records if r["kind"] == "update"]
    assert len(updates) == 6
    assert all(r["kl_upper"] <= r["radius"] for r in updates if r["outcome"].startswith("accepted"))
    assert [r for r in run.train(loads(TEAM, overrides=["plan.stages=3"]), tmp_path / "run") if r["kind"] == "update"]


@needs_card
def test_the_memory_plan_is_above_what_is_used():
    gc.collect()
    before = torch.cuda.memory_allocated()  # what other tests left
    session = build(loads(TEAM))
    planned = plan_memory(session).total
    used = rehearse(session)["peak_gb"] * GB - before
    assert used <= planned


# -- products of few rows --------------------------------------------------------------------------------------------


@needs_card
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [5, 64, 100, 128, 256])
def test_products_of_few_rows_are_those_of_torch(rows, bias):
    """Plain and gated; what lies behind the last row changes nothing."""
    from teamtr.engines.paged import product_kernel, products
    from teamtr.engines.torch.fused_layers import with_room

    outputs, inputs = 4096, 2048
    memory = torch.randn(256, inputs, device=DEVICE).half()
    room = with_room(rows, inputs, memory)
    room.as_strided((product_kernel.whole_tiles(rows), inputs), (inputs, 1)).fill_(torch.nan)
    room.copy_(memory[:rows])
    weight = (torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5).half()
    added = torch.randn(outputs, device=DEVICE).half() if bias else None
    wide = torch.nn.functional.linear(room.float(), weight.float(), None if added is None else added.float())
    gate, up = wide.chunk(2, 1)
    cores = products.cores_of(memory.device)
    if cores is None or product_kernel.plain_tiles(rows, outputs, inputs, cores) is None:
        pytest.skip("the kernel is not cut for this card")
    assert products.tiles_of(room, weight) is not None is not products.tiles_of(room, weight, gated=True)
    for ours, exact in (
        (products.product(room[None], weight, added), wide),
        (products.gated_product(room[None], weight, added), torch.nn.functional.silu(gate) * up),
    ):
        assert float((ours[0].float() - exact).norm() / exact.norm()) < 1e-3
    alone = products.tiles_of(memory[:rows].clone(), weight)
    assert (alone is None) == (rows in (5, 100)), "nothing may be read behind the last row"


@needs_card
def test_kernels_that_are_launched_early_see_what_was_written_before(monkeypatch):
    """Forty layers of norm, product, gated product and norm: captured with early launches, to the bit what each kernel
    computes if it is launched when the previous one has ended."""
    from teamtr.engines.paged import products
    from teamtr.engines.torch.fused_layers import add_norm

    width, scale = 2048, torch.ones(2048, device=DEVICE).half()
    wide, narrow = (
        (torch.randn(*shape, device=DEVICE) * shape[1] ** -0.5).half() for shape in ((8192, width), (width, 4096))
    )
    start = torch.randn(1, 96, width, device=DEVICE).half()

    def layers() -> torch.Tensor:
        x, delta = start, start
        for _ in range(40):
            x, normed = add_norm(x, delta, scale, 1e-6, x.dtype, room=True)
            delta = products.product(products.gated_product(normed, wide, None), narrow, None)
        return x + delta

    if products.cores_of(start.device) is None:
        pytest.skip("the kernel is not cut for this card")
    with torch.no_grad():
        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers()
        said = []
        for _ in range(20):
            graph.replay()
            said.append(found.clone())
        for module in ("torch.fused_layers", "paged.product_kernel"):
            monkeypatch.setattr(f"teamtr.engines.{module}.early", lambda x: {"EARLY": False})
        one_by_one = layers()
    assert all(torch.equal(one, one_by_one) for one in said)
