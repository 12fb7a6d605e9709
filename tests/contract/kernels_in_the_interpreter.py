"""Run by ``test_serving.py`` under triton's interpreter: each kernel against its plain torch counterpart.

The checks named, or all of them; what was checked is printed, and on stderr the CPU seconds that it took.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from teamtr.engines.paged import (
    adapter_kernel,
    drawing_kernels,
    joined_layers,
    kernels,
    layout,
    product_kernel,
    reference,
    sampler,
    work_split,
)
from teamtr.engines.paged import products as products_of_few_rows
from teamtr.engines.paged.buffers import DecodeBuffers, Seated
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler, draw
from teamtr.engines.scoring import score_tokens
from teamtr.engines.torch import fused_layers, fused_lora, fused_rotation, narrow_products, packing
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.rotation import Rotation
from teamtr.engines.torch.scoring import fused_features, fused_score
from teamtr.randomness import uniforms

PAGE, SPREAD = kernels.PAGE, packing.Spread.of
SHAPES = ((4, 2, 16, [0, 1, 63, 64, 65, 130]), (9, 3, 64, [33, 200]), (6, 6, 24, [96, 3]))

work_split.MOST_SPLITS = 4  # enough to join, and the interpreter is slow


def decode() -> None:
    for heads, kv_heads, dim, lengths in SHAPES:
        rows, width = len(lengths), 5
        pool = torch.randn(2, rows * width + 3, kv_heads, kernels.PAGE, dim)
        table = torch.randperm(rows * width + 2)[: rows * width].reshape(rows, width).int() + 1
        length = torch.tensor(lengths).int()
        q, k, v = torch.randn(rows, heads, dim), torch.randn(rows, kv_heads, dim), torch.randn(rows, kv_heads, dim)
        ours, theirs = pool.clone(), pool.clone()
        for work_split.SPLIT_TARGET in (1, 10**6):  # one program a row, and several
            a = kernels.decode_attention(q, k, v, ours[0], ours[1], table, length, dim**-0.5)
            b = reference.decode_attention(q, k, v, theirs[0], theirs[1], table, length, dim**-0.5)
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
            assert torch.equal(ours, theirs), "the new key and value are written to their page, and nothing else"


def rotations(tokens: int, dim: int) -> list[Rotation]:
    """With norms and without; the angles are rows of a wider table."""
    angles = torch.randn(2, tokens, dim + 5)[:, :, :dim]
    weights = torch.rand(2, dim) + 0.5
    return [Rotation(angles[0], angles[1], *norms, 1e-5) for norms in ((None, None), (weights[0], weights[1]))]


def products(tokens: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    """Query, key and value as parts of one product."""
    product = torch.randn(tokens, (heads + 2 * kv_heads) * dim).unflatten(-1, (-1, dim))
    return list(product.split([heads, kv_heads, kv_heads], 1))


def decode_with_rotation() -> None:
    for heads, kv_heads, dim, all_lengths in SHAPES:
        lengths = all_lengths[1::2]  # the others are no matter of angles
        rows, width = len(lengths), 5
        pool = torch.randn(2, rows * width + 3, kv_heads, kernels.PAGE, dim)
        table = torch.arange(1, rows * width + 1).reshape(rows, width).int()
        length = torch.tensor(lengths).int()
        for rotation in rotations(rows, dim):
            parts = products(rows, heads, kv_heads, dim)
            for work_split.SPLIT_TARGET in (1, 10**6):
                ours, theirs = pool.clone(), pool.clone()
                a = kernels.decode_attention(*parts, ours[0], ours[1], table, length, dim**-0.5, rotation)
                b = reference.decode_attention(*parts, theirs[0], theirs[1], table, length, dim**-0.5, rotation)
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def in_clusters(begins: list[list[int]], width: int, members: int) -> tuple[torch.Tensor, work_split.Together]:
    """Tables of rows that begin with these pages and go on with their own, and who reads together."""
    own = iter(range(1 + max(map(max, begins)), 2000))
    pages = [[*begin, *(next(own) for _ in range(width - len(begin)))] for begin in begins]
    together = work_split.Together.none(len(pages), members, torch.device("cpu"))
    together.put(work_split.clusters(pages, members))
    return torch.tensor(pages).int(), together


THREE = [[1], [2, 3, 4, 5, 6], [1], [7]] + [[2, 3, 4, 5, 6]] * 8
"""Pages that rows begin with: full clusters and small ones, and a row that reads alone."""
PAIRS = [[k // 2 + 1] for k in range(6)]


def decode_together(*cases: tuple[tuple[int, int, int, list[int]], list[list[int]]]) -> None:
    """Rows that begin with the same pages; fewer common pages than programs and more. What a kernel has not written is
    full of nonsense."""
    for (heads, kv_heads, dim, _), begins in cases:
        rows, width, group = len(begins), 7, heads // kv_heads
        members = work_split.most_members(group, torch.float16)
        table, together = in_clusters(begins, width, members)
        length = torch.tensor([PAGE * len(begin) + (31 * k) % 100 for k, begin in enumerate(begins)]).int()
        pool = torch.randn(2, int(table.max()) + 1, kv_heads, PAGE, dim)
        rotation = rotations(rows, dim)[1]
        parts = products(rows, heads, kv_heads, dim)
        for given in ((table, length, dim**-0.5), (table, length, dim**-0.5, rotation)):
            theirs = pool.clone()
            b = reference.decode_attention(*parts, theirs[0], theirs[1], *given)
            ways = ((1, 1), (2, 1), (4, 1), (2, 10**6)) if len(given) == 4 else ((2, 1),)
            for programs, work_split.SPLIT_TARGET in ways:
                ours, work_split.SHARES_TARGET = pool.clone(), programs * rows * kv_heads
                with full_of_nonsense():
                    a = kernels.decode_attention(*parts, ours[0], ours[1], *given, together=together)
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def decode_long_together() -> None:
    """A prompt of 8,192 tokens that three rows begin with: 128 pages, in shares of eight. A row has fewer pages of its
    own than programs, of which each adds other shares; another begins with two pages only, fewer than shares."""
    heads, kv_heads, dim, _ = SHAPES[0]
    begins = [[*range(1, 129)]] * 3 + [[1, 2], [1, 2], [200]]
    table, together = in_clusters(begins, 131, 4)
    length = torch.tensor([PAGE * len(begin) + 40 * k for k, begin in enumerate(begins)]).int()
    pool = torch.randn(2, int(table.max()) + 1, kv_heads, PAGE, dim)
    parts, rotation = products(len(begins), heads, kv_heads, dim), rotations(len(begins), dim)[1]
    work_split.SPLIT_TARGET = 10**6
    assert work_split.splits(6, kv_heads) == work_split.MOST_SPLITS == 4
    assert sorted(together.pages_C.tolist()[:2]) == [2, 128]
    theirs = pool.clone()
    b = reference.decode_attention(*parts, theirs[0], theirs[1], table, length, dim**-0.5, rotation)
    for common_parts in (16, 2):  # more than a row has programs, and fewer
        work_split.SHARES_TARGET, ours = common_parts * len(begins) * kv_heads, pool.clone()
        assert work_split.shares(len(begins), kv_heads) == common_parts
        with full_of_nonsense():
            a = kernels.decode_attention(*parts, ours[0], ours[1], table, length, dim**-0.5, rotation, together)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def decode_together_in_half_precision() -> None:
    heads, kv_heads, dim, _ = SHAPES[0]
    table, together = in_clusters([[1, 2]] * 5 + [[3]], 4, 8)
    length = torch.tensor([128, 130, 190, 200, 129, 70]).int()
    pool = torch.randn(2, int(table.max()) + 1, kv_heads, PAGE, dim).half()
    parts = [part.half() for part in products(6, heads, kv_heads, dim)]
    rotation = halved(rotations(6, dim)[1])
    theirs = pool.float()
    a = kernels.decode_attention(*parts, pool[0], pool[1], table, length, dim**-0.5, rotation, together)
    wide = [part.float() for part in parts]
    b = reference.decode_attention(*wide, theirs[0], theirs[1], table, length, dim**-0.5, rotation)
    torch.testing.assert_close(a.float(), b, atol=5e-3, rtol=5e-3)


@contextmanager
def full_of_nonsense() -> Iterator[None]:
    """Within, new memory is."""
    empty, torch.empty = torch.empty, lambda *shape, **options: torch.full(shape, float("nan"), **options)
    try:
        yield
    finally:
        torch.empty = empty


def halved(rotation: Rotation) -> Rotation:
    assert rotation.query_weight_D is not None
    assert rotation.key_weight_D is not None
    weights = (rotation.query_weight_D.half(), rotation.key_weight_D.half())
    return Rotation(rotation.cos_ND.half(), rotation.sin_ND.half(), *weights, rotation.epsilon)


def decode_in_half_precision() -> None:
    """Norm and rotation in float32, rounded once: within a few roundings of float16."""
    heads, kv_heads, dim, lengths = SHAPES[0]
    rows, width = len(lengths), 3
    pool = torch.randn(2, rows * width + 1, kv_heads, kernels.PAGE, dim).half()
    table = torch.arange(1, rows * width + 1).reshape(rows, width).int()
    length = torch.tensor(lengths).int()
    rotation = halved(rotations(rows, dim)[1])
    parts = [part.half() for part in products(rows, heads, kv_heads, dim)]
    ours, theirs = pool.clone(), pool.float()
    work_split.SPLIT_TARGET = 1
    a = kernels.decode_attention(*parts, ours[0], ours[1], table, length, dim**-0.5, rotation)
    wide = [part.float() for part in parts]
    b = reference.decode_attention(*wide, theirs[0], theirs[1], table, length, dim**-0.5, rotation)
    torch.testing.assert_close(a.float(), b, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(ours.float(), theirs, atol=1e-3, rtol=1e-3)


def record() -> None:
    """One kernel does to the buffers what torch does: rows that go on, that end by a token or by their limit, and seats
    without work; before and after a token was fed."""
    for width, fed in ((0, False), (1500, True)):
        both = []
        for way in ("torch", "kernel"):
            buffers = DecodeBuffers(8, 6, 4, 2, torch.device("cpu"), kept_width=width)
            given = [
                Seated(k, np.zeros(3, np.int32), [1], np.linspace(0.1, 0.9, t) + k, frozenset({7}))
                for k, t in ((0, 5), (5, 1), (2, 6), (3, 6))
            ]
            buffers.seat(given, 1)
            buffers.step[4], buffers.token[:] = 4, torch.arange(len(buffers.token))
            generator = torch.Generator().manual_seed(0)
            ids = torch.tensor([9, 4, 5, 7, 6])
            logp, features = torch.rand(5, generator=generator), torch.rand(5, 1500, generator=generator)
            if way == "torch":
                buffers.record(slice(0, 5), ids, logp, features, fed=fed)
            else:
                seats, of = buffers.seats[:-2], (buffers.uniform, buffers.ids, buffers.logp, buffers.kept)
                drawing_kernels.record_tokens(ids, logp, features, tuple(state[:5] for state in seats), *of, fed=fed)
            both.append([*buffers.seats, buffers.ids[:-1], buffers.logp[:-1], *([buffers.kept[:-1]] if width else [])])
            assert buffers.alive[:6].tolist() == [False, True, False, False, True, False]
            assert buffers.position[1:5].tolist() == [3 + fed] * 4
            assert torch.equal(buffers.next_uniform[:6], buffers.uniform[buffers.row[:6], buffers.step[:6]])
            assert buffers.next_uniform[1] == given[0].noise_T[1]
        for ours, theirs in zip(*both, strict=True):
            assert torch.equal(ours, theirs)


def angles_of_positions() -> None:
    """As transformers computes them: positions that fill no program, half a head that fills none, and a scale."""
    for tokens, half, scale, dtype in ((1, 64, 1.0, torch.float16), (37, 24, 1.3, torch.bfloat16)):
        position, frequency = torch.randint(0, 40_000, (tokens,)), 1e4 ** -torch.linspace(0, 0.95, half)
        angle = (position[:, None].float() * frequency).repeat(1, 2)
        for here in (position, position.int()):
            with full_of_nonsense():
                cos, sin = fused_rotation.angles(here, frequency, scale, dtype)
            torch.testing.assert_close(cos, (angle.cos() * scale).to(dtype), atol=2e-3, rtol=2e-2)
            torch.testing.assert_close(sin, (angle.sin() * scale).to(dtype), atol=2e-3, rtol=2e-2)


def few_rows() -> None:
    """Products of a decode step, gated and not, with a bias and without. Rows that do not fill a tile are followed by
    nonsense, which changes nothing."""
    for rows, bias in ((5, None), (70, torch.randn(96).half())):
        with full_of_nonsense():
            x = fused_layers.with_room(rows, 128, torch.zeros(1).half())
        x.copy_(torch.randn(rows, 128))
        weight = (torch.randn(96, 128) / 11).half()
        wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert product_kernel.has_room(x)
        assert not product_kernel.has_room(x.clone())
        with full_of_nonsense():
            ours = product_kernel.product(x, weight, bias, product_kernel.Tiles(16, 32, 64, 3))
            gated = product_kernel.gated_product(x, weight, bias, product_kernel.Tiles(32, 16, 32, 2))
        torch.testing.assert_close(ours.float(), wide, atol=2e-3, rtol=2e-3)
        gate, up = wide.chunk(2, 1)
        torch.testing.assert_close(gated.float(), silu(gate) * up, atol=2e-3, rtol=2e-3)
        assert product_kernel.has_room(ours)


def rotate() -> None:
    for heads, kv_heads, dim, _ in SHAPES:
        tokens = 37
        pool = torch.randn(2, 9, kv_heads, kernels.PAGE, dim)
        page, slot = torch.randint(1, 9, (tokens,)), torch.randperm(kernels.PAGE)[:tokens]
        for rotation in rotations(tokens, dim):
            parts = products(tokens, heads, kv_heads, dim)
            ours, theirs = pool.clone(), pool.clone()
            a = kernels.rotate_into_pages(*parts, rotation, ours[0], ours[1], page, slot)
            b = reference.rotate_into_pages(*parts, rotation, theirs[0], theirs[1], page, slot)
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def prefill() -> None:
    for heads, kv_heads, dim, _ in SHAPES:
        pool = torch.randn(2, 13, kv_heads, kernels.PAGE, dim)
        table = torch.arange(1, 11).reshape(2, 5).int()
        # row 0: 30 tokens at 0, then 10 tokens at 90; row 1: 64 + 6 tokens
        blocks = torch.tensor([[0, 0, 30, 0], [1, 30, 64, 0], [1, 94, 6, 64], [0, 100, 10, 90]]).T.int().contiguous()
        q = torch.randn(110, heads, dim)
        a = kernels.prefill_attention(q, pool[0], pool[1], table, blocks, dim**-0.5)
        b = reference.prefill_attention(q, pool[0], pool[1], table, blocks, dim**-0.5)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def draw_tokens() -> None:
    for vocabulary in (7, 2048, 5000):
        logits = 3 * torch.randn(6, vocabulary)
        logits[0, 3] = -torch.inf
        uniform = torch.rand(6, dtype=torch.float64)
        uniform[1], uniform[2] = 0.0, 1 - 1e-9
        a, b = drawing_kernels.draw_token(logits, uniform, 0.8), draw(logits / 0.8, uniform)
        assert torch.equal(a[0], b[0])
        torch.testing.assert_close(a[1], b[1], atol=1e-5, rtol=1e-5)
        column = torch.stack([torch.rand_like(uniform), uniform], 1)[:, 1]  # as the plain path takes it from its table
        assert torch.equal(drawing_kernels.draw_token(logits, column, 0.8)[0], b[0])


def whole_groups() -> None:
    """The whole sampler on the kernels: three groups whose prompts begin alike, rows that end at different places."""
    model, tokenizer = tiny_model(TinyShape(layers=2, width=32, heads=2), seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
    policy = TransformerPolicy(model, tokenizer)
    policy.end_ids = frozenset({*policy.end_ids, *range(5, 25)})
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 30, size=64)
    questions = [np.concatenate([begin, rng.integers(3, 30, size=n)]).astype(np.int32) for n in (70, 64, 3)]
    prompts = [questions[k % 3] for k in range(7)]
    copy = SamplingCopy(model, torch.float32, torch.device("cpu"))
    copy.fill(model, None, version="v", base="b")
    server = sampler.Server(copy, pool_bytes=1 << 26, graphs=False)
    calls: Counter[str] = Counter()

    def cut(rows: int, *_: int) -> product_kernel.Tiles | None:
        return product_kernel.Tiles(16, 16, 16, 2) if product_kernel.whole_tiles(rows) else None

    places = (
        (work_split, {"SPLIT_TARGET": 1, "WORTH_SPARING": 0}),
        (sampler, {"LOOK_EVERY": 3}),
        (layout, {"_computing": lambda _: kernels}),
        (joined_layers, {"computed_by_kernels": lambda _: True}),
        (products_of_few_rows, {"computed_by_kernels": lambda _: True, "cores_of": lambda _: 1}),
        (product_kernel, {"plain_tiles": cut, "gated_tiles": cut}),
        *((of, {name: _counting(name, getattr(of, name), calls)}) for of, name in COUNTED),
    )
    with ExitStack() as stack:
        for module, values in places:
            stack.enter_context(patch.multiple(module, **values))
        ours = server.sample("v", prompts, uniforms(5, 7, 6), drawing=TokenSampler(), end_ids=policy.end_ids)
    assert calls["add_norm"] == 4 * calls["norm"], "of two layers: all sums but the first, which nothing is added to"
    assert calls["gated"] + calls["gated_product"] == 2 * calls["norm"]
    assert calls["angles"] == calls["norm"], "once in every pass"
    # of every step: gate and up; query, key and value, attention's last product, and down; prefills are torch's
    assert calls["product"] == 3 * calls["gated_product"] > 0 < calls["gated"]
    for a, b in zip(ours, policy.sample(prompts, uniforms(5, len(prompts), 6)), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert len({len(a.token_ids) for a in ours}) > 2


COUNTED = (
    *((fused_layers, name) for name in ("norm", "add_norm", "gated")),
    *((product_kernel, name) for name in ("product", "gated_product")),
    (fused_rotation, "angles"),
)


def score() -> None:
    for vocabulary in (7, 5000):
        for step in (0.0, 1e-6, 1e-3, 0.1, 3.0):
            cur = 2 * torch.randn(5, vocabulary)
            new = cur + step * torch.randn(5, vocabulary)
            ids = torch.randint(0, vocabulary, (5,))
            a, b = new.clone().requires_grad_(), new.clone().requires_grad_()
            ours, plain = fused_score(a, cur, ids), score_tokens(b, cur, ids)
            exact = score_tokens(new.double(), cur.double(), ids)[1]
            torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
            assert ((ours[1].double() - exact).abs() <= kl_rounding(new.double(), cur.double())).all()
            assert step > 0 or not ours[1].any(), "equal logits have a KL of exactly 0"
            g, h = torch.randn(5), torch.randn(5)
            (ours[0] @ g + ours[1] @ h).backward()
            (plain[0] @ g + plain[1] @ h).backward()
            torch.testing.assert_close(a.grad, b.grad, atol=2e-6, rtol=1e-4)


def score_features() -> None:
    """The output layer and both kernels in one, each way, at any scale of the loss: against products in float32 of the
    same float16 factors."""
    weight, other = (torch.randn(300, 16).half() for _ in range(2))
    ids, bias = torch.randint(0, 300, (6,)), torch.randn(300)
    for temperature, added, scale, keep in (
        (1.0, None, 1.0, True),
        (0.7, bias, 2.0**16, False),
        (1.0, None, 1e-9, False),
    ):
        head, frozen = (OutputLayer(w.float(), added, temperature, w) for w in (weight, other))
        cur = torch.randn(6, 16).half().float()
        a, b = (
            torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).half().float().requires_grad_() for _ in "ab"
        )
        ours = fused_features(head, frozen, a, cur, ids, keep=keep)
        plain = score_tokens(head(b), frozen(cur).detach(), ids)
        for one, two in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
        g, h = scale * torch.randn(6), scale * torch.randn(6)
        g[2] = h[2] = 0.0
        (ours[0] @ g + ours[1] @ h).backward()
        (plain[0] @ g + plain[1] @ h).backward()
        torch.testing.assert_close(a.grad / scale, b.grad / scale, atol=5e-3, rtol=5e-3)
        assert not a.grad[2].any()
        g[1] = torch.nan
        (found,) = torch.autograd.grad(fused_features(head, frozen, a, cur, ids, keep=keep)[0] @ g, a)
        assert found[1].isnan().all()
        assert found[0].isfinite().all()
    # All tokens are about as likely, and the KL is small: differences of probabilities lie below what float16 can tell.
    weight = (1e-3 * torch.randn(300, 16)).half()
    head = OutputLayer(weight.float(), None, 1.0, weight)
    cur = torch.randn(6, 16).half().float()
    new = (cur + 0.01 * torch.randn(6, 16)).half().float()
    a, b = new.clone().requires_grad_(), new.double().requires_grad_()
    fused_features(head, head, a, cur, ids, keep=True)[1].sum().backward()
    score_tokens(b @ weight.double().T, cur.double() @ weight.double().T, ids)[1].sum().backward()
    assert float((a.grad.double() - b.grad).norm() / b.grad.norm()) < 0.01


def kl_rounding(new: torch.Tensor, cur: torch.Tensor) -> torch.Tensor:
    """How far rounding to float32 can take the sum of p (exp(d) - 1 - d), d = log q - log p, from its value.

    log q and log p are differences that are rounded each, by half a unit in the last place: d is off by
    e = u (|log q| + |log p|), which is not small beside a d of 1e-3, and the sum by p |exp(d) - 1| e + p e^2 / 2.
    The normalisers are off too, by a unit or two of their size. That moves all d alike and, because both sides sum
    to one, the KL in the second order alone. The rest is relative: a few roundings of p and of each term, of which
    those with |d| >= 0.3 are differences of numbers up to 25 times as large.
    """
    unit = 2.0**-24
    log_q, log_p = new.log_softmax(-1), cur.log_softmax(-1)
    p, d = log_p.exp(), log_q - log_p
    e = unit * (log_q.abs() + log_p.abs())
    shift = 2 * unit * (new.logsumexp(-1).abs() + cur.logsumexp(-1).abs() + 4)
    kl = (p * (torch.expm1(d) - d)).sum(-1)
    moved = (p * (torch.expm1(d).abs() * e + e.square() / 2)).sum(-1)
    return moved + shift.square() / 2 + 200 * unit * kl


def gradients(work, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the work computes and its gradients, along a direction that is the same whenever shapes are."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = work(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out.float() * direction).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def gradients_where_they_lie(work, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The same of inputs that are not copied first."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = work(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out.detach(), *(x.grad for x in leaves)]


def weighted(x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Both count, and not alike."""
    return x + 3 * normed.float()


def rows_turned(r: Rotation, heads: int, rows: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values (two heads each) end to end. Gradients of queries and keys come as parts of wider rows,
    those of values head by head."""
    weights = r.query_weight_D, r.key_weight_D
    query, key, value = fused_rotation.turned_rows(rows, r.cos_ND, r.sin_ND, *weights, r.epsilon, heads, 2)
    value.register_hook(lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1))
    return torch.cat([query, key, value], 1)


def side_by_side(heads: int, rows: torch.Tensor, both: torch.Tensor) -> list[tuple[list[torch.Tensor], ...]]:
    """Rows of query, key and value, and of gate and up: what kernels make of them, and torch of the parts."""
    pairs = []
    with full_of_nonsense():
        for r in rotations(len(rows), rows.shape[1] // (heads + 4)):
            apart = gradients(partial(parts_turned, r, heads), rows.float())
            pairs.append((gradients(partial(rows_turned, r, heads), rows), apart))
        ours = gradients(fused_layers.gated_rows, both)
    return [*pairs, (ours, gradients(lambda x: silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1], both.float()))]


def parts_turned(r: Rotation, heads: int, rows: torch.Tensor) -> torch.Tensor:
    query, key, value = rows.unflatten(-1, (heads + 4, -1)).split([heads, 2, 2], 1)
    return torch.cat([r.query(query), r.key(key), value], 1)


def between_products() -> None:
    """Sum, norm, gate and rotation with their gradients: in float32 as torch computes them, in half rounded once."""
    for dtype, error in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        for width, heads, dim in ((48, 3, 24), (64, 4, 16)):
            x, weight = torch.randn(2, 7, width), torch.rand(width) + 0.5
            product = torch.randn(7, heads, dim).to(dtype)
            gate, up = (4 * torch.randn(2, 7, width)).to(dtype), torch.randn(2, 7, width).to(dtype)
            both = torch.cat([gate, up], -1)
            pairs = [
                (
                    gradients(lambda x, w=weight: fused_layers.norm(x, w, 1e-3, dtype), x),  # noqa: B023
                    gradients(lambda x, w=weight: rms_norm(x, w.shape, w, 1e-3), x),
                ),
                (
                    gradients(fused_layers.gated, gate, up),
                    gradients(lambda g, u: silu(g) * u, gate.float(), up.float()),
                ),
                (
                    gradients(lambda both: fused_layers.gated(*both.chunk(2, -1)), both),
                    gradients(lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1], both.float()),
                ),
            ]
            delta = torch.randn(2, 7, width).to(dtype)
            pairs += [
                (
                    gradients(lambda x, w=weight: weighted(*fused_layers.branch(x, w, 1e-3, dtype)), x),  # noqa: B023
                    gradients(lambda x, w=weight: weighted(x, rms_norm(x, w.shape, w, 1e-3)), x),
                ),
                (
                    gradients(lambda *xs, w=weight: weighted(*fused_layers.add_norm(*xs, w, 1e-3, dtype)), x, delta),  # noqa: B023
                    gradients(
                        lambda x, d, w=weight: weighted(x + d, rms_norm(x + d, w.shape, w, 1e-3)), x, delta.float()
                    ),
                ),
                (gradients(fused_layers.added, x, delta), gradients(torch.add, x, delta.float())),
            ]
            for r in rotations(7, dim):
                w = r.query_weight_D
                pairs.append((
                    gradients(lambda x, r=r, w=w: fused_rotation.turned(x, r.cos_ND, r.sin_ND, w, r.epsilon), product),
                    gradients(r.query, product.float()),
                ))  # fmt: skip
            pairs += side_by_side(heads, torch.randn(7, (heads + 4) * dim).to(dtype), both.flatten(0, 1))
            for ours, theirs in pairs:
                for a, b in zip(ours, theirs, strict=True):
                    assert float((a.float() - b).abs().max() / b.abs().max()) < error
    assert fused_layers.norm(x, weight, 1e-3, torch.float16).dtype == torch.float16
    long = torch.randn(2, 3, 2 * 1100)  # more than a block, wherever the parts lie
    for gate, up in (
        (long[..., :1100], long[..., 1100:].contiguous()),
        (long[..., :1100].contiguous(), long[..., 1100:]),
        (long[..., ::2], long[..., 1::2]),
        (long[:1, :1, :1100], long[:1, :1, 1100:]),
    ):
        for ours, theirs in zip(
            gradients_where_they_lie(fused_layers.gated, gate, up),
            gradients_where_they_lie(lambda g, u: silu(g) * u, gate, up),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(
        gradients(fused_layers.gated_rows, long[0]),
        gradients(lambda both: silu(both[:, :1100]) * both[:, 1100:], long[0]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    half, delta = x.to(torch.bfloat16), torch.randn_like(x).to(torch.bfloat16)  # as the sampler adds
    total, normed = fused_layers.add_norm(half, delta, weight, 1e-3, torch.bfloat16)
    torch.testing.assert_close(total, half + delta)
    torch.testing.assert_close(
        normed, rms_norm(half.float() + delta.float(), weight.shape, weight, 1e-3).to(torch.bfloat16)
    )
    rows, origin = torch.randn(4, 2, 700)[1:], torch.tensor([2, -1, 0, 1, -1])  # what lies before is not read
    with full_of_nonsense():
        assert torch.equal(fused_layers.placed(rows, origin), torch.cat([rows, torch.zeros(1, 2, 700)])[origin])


def copies_of_rows() -> None:
    """More columns than a block and fewer, rows of a wider table and tokens by head; a row without places is zero."""
    table = torch.randn(6, 3, 500)
    for rows in (
        table,
        table[:, :2],
        table[:, :, :20],
        table[:, :, ::2],
        table.transpose(0, 1)[:, :, :40].transpose(0, 1),
    ):
        places, starts = torch.tensor([5, 0, 2, 2, 1]), torch.tensor([0, 1, 4, 4, 5])
        for dtype, error in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
            given = rows.to(dtype)
            with full_of_nonsense():
                found = fused_layers.summed(given, places, starts)
            wide = given.float()
            expected = torch.stack([wide[5], wide[0] + 2 * wide[2], torch.zeros_like(wide[0]), wide[1]])
            torch.testing.assert_close(found, expected.to(dtype), atol=error, rtol=error)


def own_adapters() -> None:
    """Of several agents beside each other, and of nobody; with numbers of others that must not be touched."""
    for rows, outputs, rank, adapters, parts in (
        (40, 130, 3, 2, 1),
        (1, 48, 16, 3, 3),
        (9, 48, 16, 3, 3),
        (65, 256, 8, 1, 2),
    ):
        columns = parts * adapters * rank
        product, up = torch.randn(1, rows, outputs + columns).half(), torch.randn(outputs, columns).half()
        index = torch.arange(rows) % (adapters + 1) - 1
        own = index[:, None] == torch.arange(columns) % (adapters * rank) // rank
        product[0, :, outputs:][~own] = torch.nan
        narrow = torch.where(own, product[0, :, outputs:].float(), 0.0)
        expected = product[0, :, :outputs].float() + narrow @ up.float().T
        with full_of_nonsense():
            found = adapter_kernel.with_own_adapter(product, up, index, rank, adapters)
        torch.testing.assert_close(found[0], expected.half(), rtol=2e-3, atol=2e-3)
        assert torch.equal(found[0, index < 0], product[0, index < 0, :outputs])


def narrow_factors() -> None:
    """Tokens and columns that fill no tile, ranks that fill none, rows of a wider table; several shares of the tokens
    and one. Sums do not depend on how often they are made."""
    for tokens, width, rank in ((70, 96, 16), (33, 600, 8), (200, 48, 24), (5, 1100, 16)):
        wide = torch.randn(tokens, width + 8).half()[:, :width]
        factor, narrow = torch.randn(rank, width).half(), torch.randn(tokens, rank + 3).half()[:, :rank]
        along, across = wide.float() @ factor.float().T, wide.float().T @ narrow.float()
        torch.testing.assert_close(narrow_products.narrow(wide, factor), along.half(), rtol=2e-3, atol=2e-3)
        for narrow_products.PROGRAMS in (1, 264):
            with full_of_nonsense():
                sums, found = narrow_products.across_and_along(wide, narrow, factor.T, 0.5)
                several_layers(wide, rank)
            torch.testing.assert_close(2 * sums, across, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found, (0.5 * along).half(), rtol=2e-3, atol=2e-3)
            assert torch.equal(narrow_products.across(wide, narrow).T, 2 * sums)
    turned = torch.randn(96, 40).half().T  # columns side by side
    factor, narrow = torch.randn(8, 96).half(), torch.randn(40, 8).half()
    along = (turned.float() @ factor.float().T).half()
    torch.testing.assert_close(narrow_products.narrow(turned, factor), along, rtol=2e-3, atol=2e-3)
    sums, found = narrow_products.across_and_along(turned, narrow, factor.T)
    torch.testing.assert_close(found, along, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sums, turned.float().T @ narrow.float(), rtol=1e-4, atol=1e-4)
    nobody, none = turned[:0], narrow[:0]  # an expert that no token was sent to
    assert narrow_products.narrow(nobody, factor).shape == (0, 8)
    sums, found = narrow_products.across_and_along(nobody, none, factor.T)
    assert found.shape == (0, 8)
    assert torch.equal(sums, torch.zeros(96, 8))


def several_layers(wide: torch.Tensor, rank: int) -> None:
    """Side by side, of widths that fill no block: each as if it were alone."""
    tokens, width = wide.shape
    for sizes in ((width // 2 + 3, width - width // 2 - 3), (width - 40, 7, 33)):
        factor, narrow = torch.randn(width, rank).half(), torch.randn(tokens, len(sizes) * rank + 3).half()
        narrow = narrow[:, : len(sizes) * rank]
        sums, found = narrow_products.across_and_along(wide, narrow, factor, 0.5, sizes)
        parts = (
            wide.split(sizes, 1),
            narrow.split(rank, 1),
            factor.split(sizes),
            sums.split(sizes),
            found.split(rank, 1),
        )
        for part, own, up, of_up, along in zip(*parts, strict=True):
            torch.testing.assert_close(of_up, 0.5 * part.float().T @ own.float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(along, (0.5 * part.float() @ up.float()).half(), rtol=2e-3, atol=2e-3)


def fused_learner() -> None:
    """A fused model over packed rows, some of which begin alike: the same features and gradients through kernels."""
    _, passed = learning("fp32")
    products, between = {"narrow": 8, "across": 8, "across_and_along": 14}, {"branch": 2, "add_norm": 2, "added": 2}
    plain, calls = passed(fuses=False)
    assert not calls
    ours, calls = passed(fuses=True)
    assert calls == Counter(gated=2, turned=4, **products, **between)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)


def joined_learner() -> None:
    """In half precision layers are one; as far from float32 as torch is in half precision, or nearer."""
    policy, passed = learning("fp32")
    exact, _ = passed(fuses=False)
    policy.precision = "fp16"
    plain, _ = passed(fuses=False)
    products, between = {"narrow": 8, "across": 8, "across_and_along": 8}, {"branch": 2, "add_norm": 2, "added": 2}
    for _ in range(2):  # factors are rounded where they are read, then all at once
        ours, calls = passed(fuses=True)
        assert calls == Counter(gated_rows=2, turned_rows=2, summed=5, **products, **between), "keys, values, features"
        errors = [
            float(torch.cat([(a.float() - b).flatten() for a, b in zip(found, exact, strict=True)]).norm())
            for found in (ours, plain)
        ]
        assert 0 < errors[0] < 1.5 * errors[1]


def learning(precision: str):
    """A policy, and what passes with kernels or without give: features and gradients, and the kernels asked for."""
    model, tokenizer = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
    shared = share_base(model, {"agent": SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")}, seed=0)
    policy = TransformerPolicy(shared, tokenizer, adapter="agent", precision=precision, fused=fuse_lora(shared))
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.2 * torch.randn(parameter.shape))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    rows = [np.array(r, dtype=np.int32) for r in ([5, 6, 7, 8], [5, 6, 7, 8], [9, 4], [5, 6, 11])]
    messages = [np.array(r, dtype=np.int32) for r in ([4, 5], [7, 7, 3], [8], [6, 5])]
    calls: Counter[str] = Counter()
    kernels = {
        fused_layers: ("branch", "add_norm", "added", "gated", "gated_rows", "summed"),
        fused_rotation: ("turned", "turned_rows"),
        narrow_products: ("narrow", "across", "across_and_along"),
    }
    for module, names in kernels.items():
        for name in names:
            setattr(module, name, _counting(name, getattr(module, name), calls))

    def passed(*, fuses: bool) -> tuple[list[torch.Tensor], Counter[str]]:
        calls.clear()
        FusedLora.fuses = lambda *_: fuses
        fused_lora.computed_by_kernels = lambda *_: fuses
        in_runs = fuses and policy.precision != "fp32"
        packing.Spread.of = lambda *given, **_: SPREAD(*given, in_runs=in_runs)
        features = policy.features(rows, messages)
        (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        found = [features.detach(), *(p.grad.clone() for p in policy.parameters().values())]
        for parameter in policy.parameters().values():
            parameter.grad = None
        return found, Counter(calls)

    return policy, passed


def _counting(name: str, work, calls: Counter[str]):
    def counted(*args, **named):
        calls[name] += 1
        return work(*args, **named)

    return counted


def forbidden_blocks() -> None:
    """Logits of minus infinity, a whole block of them first."""
    cur = torch.randn(3, 9000)
    cur[:, :4096] = -torch.inf
    new = cur + 0.1 * torch.randn(3, 9000)
    ids = torch.tensor([5000, 6000, 8999])
    ours, plain = fused_score(new, cur, ids), score_tokens(new, cur, ids)
    torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], plain[1], atol=1e-7, rtol=1e-4)


CHECKS = {
    "decode": decode,
    "rotated": decode_with_rotation,
    "together": partial(decode_together, (SHAPES[0], THREE)),
    "long together": decode_long_together,
    "other shapes together": partial(decode_together, (SHAPES[1], THREE), (SHAPES[2], PAIRS)),
    "half": decode_in_half_precision,
    "half together": decode_together_in_half_precision,
    "rotate": rotate,
    "prefill": prefill,
    "draw": draw_tokens,
    "record": record,
    "angles": angles_of_positions,
    "few rows": few_rows,
    "groups": whole_groups,
    "score": score,
    "features": score_features,
    "forbidden": forbidden_blocks,
    "between": between_products,
    "narrow": narrow_factors,
    "own": own_adapters,
    "copies": copies_of_rows,
    "learner": fused_learner,
    "joined learner": joined_learner,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or CHECKS:
        torch.manual_seed(0)
        begun = time.process_time()
        CHECKS[name]()
        print(name)
        print(f"{name}: {time.process_time() - begun:.1f} s", file=sys.stderr)
