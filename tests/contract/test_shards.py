"""A batch in shards: as many shards give the same bits, however many processes compute them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import rank_calls
from conftest import make_batch, make_learner, make_policy
from forked import in_ranks
from teamtr.engines.gradients import LossPart, added, gather_in_lockstep, gather_shards
from teamtr.engines.shards import Shards, spread

KINDS = ["tabular", "full", "lora"]


def ranks_of(
    world: int, shards: int, kind: str, out: Path, *, sharded: bool = False, precision: str = "fp32"
) -> list[dict[str, np.ndarray]]:
    """What each of so many ranks found."""
    in_ranks(rank_calls.one_rank, world, shards, kind, sharded, precision, out)
    return [dict(np.load(out / f"{rank}.npz")) for rank in range(world)]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (2, "lora"),
        pytest.param(3, "lora", marks=pytest.mark.slow),
        pytest.param(2, "full", marks=pytest.mark.slow),
        (2, "tabular"),
        pytest.param(4, "tabular", marks=pytest.mark.slow),
    ],
)
def test_ranks_find_what_one_process_finds_to_the_bit(world, kind, tmp_path):
    alone = rank_calls.learner_of(make_policy(kind), Shards(4))
    expected = rank_calls.everything(alone, tmp_path / "alone")
    found = ranks_of(world, 4, kind, tmp_path)
    for rank in found:
        for name, value in expected.items():
            np.testing.assert_array_equal(rank[name], value, err_msg=name)
    tokens = np.sum([rank["tokens"] for rank in found], axis=0)
    np.testing.assert_array_equal(tokens, list(alone.tokens.values()), err_msg="each rank passes its own rows only")
    assert all((rank["tokens"] < tokens).all() for rank in found)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("world", "shards"), [(2, 4), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_so_do_ranks_that_hold_a_part_of_the_base_each(world, shards, tmp_path):
    """Whoever has fewer rows of a step, or none, passes idly: else the others would wait for its part for ever."""
    alone = rank_calls.learner_of(make_policy("lora"), Shards(shards))
    expected = rank_calls.everything(alone, tmp_path / "alone")
    for rank in (found := ranks_of(world, shards, "lora", tmp_path, sharded=True)):
        for name, value in expected.items():
            np.testing.assert_array_equal(rank[name], value, err_msg=name)
    tokens = np.sum([rank["tokens"] for rank in found], axis=0)
    np.testing.assert_array_equal(tokens, list(alone.tokens.values()), err_msg="idle passes do not count")


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("worlds", [(2,), pytest.param((1, 2, 3, 5), marks=pytest.mark.slow)])
def test_of_weights_that_are_trained_in_parts_any_number_of_ranks_makes_the_same(worlds, tmp_path):
    """Gradients of layers add up from pass to pass, and not shard by shard: one process that holds all of them rounds
    otherwise."""
    alone = rank_calls.learner_of(make_policy("full"), Shards(5))
    expected = rank_calls.everything(alone, tmp_path / "alone")
    found = {}
    for world in worlds:
        (tmp_path / str(world)).mkdir()
        found[world] = ranks_of(world, 5, "full", tmp_path / str(world), sharded=True)
    first = found[worlds[0]][0]
    for world in worlds:
        for rank in found[world]:
            for name in set(first) - {"tokens"}:
                np.testing.assert_array_equal(rank[name], first[name], err_msg=f"{name} with {world} ranks")
        tokens = np.sum([rank["tokens"] for rank in found[world]], axis=0)
        np.testing.assert_array_equal(tokens, list(alone.tokens.values()), err_msg="idle passes do not count")
        for file in (tmp_path / str(worlds[0]) / "saved").iterdir():
            assert file.read_bytes() == (tmp_path / str(world) / "saved" / file.name).read_bytes(), file.name
    for name, value in expected.items():
        if value.dtype != np.uint8:  # versions, which rounding changes
            np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=2e-6, err_msg=name)
    np.testing.assert_array_equal(first["at first"], expected["at first"], err_msg="the hash is that of whole weights")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_one_rank_with_one_shard_finds_what_a_process_finds_that_knows_nothing_of_parts(kind, tmp_path):
    expected = rank_calls.everything(rank_calls.learner_of(make_policy(kind), Shards(1)), tmp_path / "alone")
    (found,) = ranks_of(1, 1, kind, tmp_path, sharded=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class InParts(Shards):
    """Of one process, which passes as if others held parts of the model."""

    lockstep = True


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_norm_of_one_shard_is_added_up_tensor_by_tensor_in_parts_or_not(scale):
    """It was added up over all tensors at once in parts, which rounds otherwise (of SmolLM2's adapters 59.05 instead of
    59.11 on a CPU), and gradients were clipped by another norm."""
    rng = torch.Generator().manual_seed(0)
    goals = [torch.randn(400, 500, generator=rng), 100 * torch.randn(7, generator=rng), torch.randn(300, generator=rng)]
    weights = [torch.nn.Parameter(torch.zeros_like(goal)) for goal in goals]
    parts = [np.array([0, 1]), np.array([2])]

    def forward(rows) -> LossPart:
        loss = sum(((weight - goal) ** 2).sum() for weight, goal in zip(weights, goals, strict=True)) * float(len(rows))
        return LossPart(loss, torch.stack([loss.detach().double()]))

    whole = gather_shards([(0, parts)], Shards(), forward, weights, scale, nullcontext)
    expected = added(whole, Shards(), [0], weights, 1)
    gradients = [weight.grad.clone() for weight in weights]
    shards = InParts()
    own = gather_in_lockstep(
        [(0, parts)], {0: 2}, shards, forward, lambda: None, weights, scale, nullcontext
    )  # fmt: skip
    found = added(own, shards, [0], weights, 1)
    assert (found.norm, found.sums, found.scale) == (expected.norm, expected.sums, expected.scale)
    assert found.norm == float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
    for weight, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(weight.grad, gradient)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["lora", "few"])
def test_in_half_precision_too(kind, precision, tmp_path):
    """In float16 the first step overflows, and what overflowed is computed again while others pass idly. All in new
    processes: where a processor lacks bf16, torch computes otherwise for good once it was asked for it."""
    (tmp_path / "alone").mkdir()
    expected = ranks_of(1, 3, kind, tmp_path / "alone", precision=precision)[0]
    del expected["tokens"]
    assert precision == "bf16" or expected["scale"] < rank_calls.OVERFLOWING, "else nothing overflowed"
    for rank in ranks_of(2, 3, kind, tmp_path, sharded=True, precision=precision):
        for name, value in expected.items():
            np.testing.assert_array_equal(rank[name], value, err_msg=name)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_of_weights_that_are_trained_in_parts_in_half_precision_any_number_of_ranks_makes_the_same(precision, tmp_path):
    (tmp_path / "alone").mkdir()
    expected = ranks_of(1, 5, "full", tmp_path / "alone", precision=precision)[0]
    found = {}
    for world in (1, 2, 3):
        (tmp_path / str(world)).mkdir()
        found[world] = ranks_of(world, 5, "full", tmp_path / str(world), sharded=True, precision=precision)
    first = found[1][0]
    assert precision == "bf16" or first["scale"] < rank_calls.OVERFLOWING, "else nothing overflowed"
    for world, ranks in found.items():
        for rank in ranks:
            for name in set(first) - {"tokens"}:
                np.testing.assert_array_equal(rank[name], first[name], err_msg=f"{name} with {world} ranks")
    for name in ("begin", "token_logprobs", "values"):
        np.testing.assert_array_equal(first[name], expected[name], err_msg=f"{name}: as autocast computes it")
    np.testing.assert_allclose(first["step"], expected["step"], rtol=0.03, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_shards_change_rounding_only(kind, tmp_path):
    one, four = (
        rank_calls.everything(rank_calls.learner_of(make_policy(kind), Shards(count)), tmp_path / str(count))
        for count in (1, 4)
    )
    for name, value in one.items():
        if value.dtype == np.uint8:  # versions, which rounding changes
            continue
        np.testing.assert_allclose(four[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_shards_decides_the_bits_and_nothing_else_does(kind, tmp_path):
    first, again = (
        rank_calls.everything(rank_calls.learner_of(make_policy(kind), Shards(3)), tmp_path / str(k)) for k in range(2)
    )
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_a_problem_is_in_one_shard_and_every_row_in_one():
    learner = make_learner("tabular")
    batch = make_batch(learner, problems=5, group=3)
    rows = np.array([14, 2, 7, 3, 0, 9])
    parts = Shards(3).split(batch, rows)
    assert sorted(row for _, part in parts for row in part) == sorted(rows)
    assert all(set(batch.problem_M[part] % 3) == {shard} for shard, part in parts)
    assert [shard for shard, _ in Shards(8).split(batch, rows)] == [0, 1, 2, 3, 4], "shards without rows are left out"
    assert Shards(1).split(batch, rows)[0][1] is rows


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1]), (5, 1, [5]), (2, 2, [1, 1])]
)
def test_rows_are_spread_evenly_and_in_order(rows, parts, sizes):
    found = spread(rows, parts)
    assert [part.stop - part.start for part in found] == sizes
    assert [k for part in found for k in range(rows)[part]] == list(range(rows))
