"""Common beginnings are computed once, and neither a number nor a gradient depends on it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_lean_learner import assert_close, gradients

from conftest import make_learner
from on_a_card import instead_of_kernels
from teamtr.batches import AgentBatch
from teamtr.engines.passes import Padding, _filled
from teamtr.engines.shards import Shards
from teamtr.engines.torch import attention
from teamtr.engines.torch.attention import Packed
from teamtr.engines.torch.packing import Further, Runs, Spread, pack
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.products import WIDEST, are_small, without_onednn


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_common_beginning_is_kept_once_and_every_row_can_be_read_back():
    rows = [ids(1, 2, 3), ids(1, 2, 4, 5), ids(7), ids(1, 2), ids(1, 2, 3)]
    packing = pack(rows)
    for row, places in zip(rows, packing.rows, strict=True):
        assert packing.ids_N[places].tolist() == row.tolist()
        assert packing.position_N[places].tolist() == list(range(len(row)))
    assert len(packing.ids_N) == 6  # 1 2 3, 4 5, 7
    # (1 2) is the beginning of another row and (1 2 3) is there twice: three rows carry all attention
    assert sorted(packing.ids_N[leaf].tolist() for leaf in packing.leaves) == [[1, 2, 3], [1, 2, 4, 5], [7]]


def test_rows_share_a_token_only_when_everything_before_it_is_equal():
    packing = pack([ids(1, 2, 3), ids(9, 2, 3), ids(1, 2, 300)])
    assert len(packing.ids_N) == 7


@pytest.mark.parametrize("seed", range(5))
def test_packing_of_random_rows(seed):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 3, size=rng.integers(1, 7)).astype(np.int32) for _ in range(40)]
    packing = pack(rows)
    beginnings = {tuple(row[: k + 1].tolist()) for row in rows for k in range(len(row))}
    assert len(packing.ids_N) == len(beginnings)
    for row, places in zip(rows, packing.rows, strict=True):
        assert packing.ids_N[places].tolist() == row.tolist()
    reached = np.unique(np.concatenate(packing.leaves))
    assert reached.tolist() == list(range(len(packing.ids_N)))


def test_padding_and_its_gradient_are_those_of_torch_to_the_bit():
    lengths = [2, 1, 3, 2]
    ours, theirs = (torch.linspace(-1.0, 1.0, 8).requires_grad_() for _ in range(2))
    pad = Padding.of(lengths, ours.device)
    expected_MT = torch.nn.utils.rnn.pad_sequence(list(theirs.split(lengths)), batch_first=True)
    assert torch.equal(pad(ours), expected_MT)
    assert pad.mask_MT.tolist() == [[True, True, False], [True, False, False], [True] * 3, [True, True, False]]
    weights_MT = torch.linspace(0.1, 3.0, 12).view(4, 3)
    (pad(ours) * weights_MT).sum().backward()
    (expected_MT * weights_MT).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_lengths_are_counted_once_and_nobody_can_change_them():
    rows = (ids(1, 2), ids(3))
    zeros = np.zeros(2, dtype=np.int64)
    batch = AgentBatch("left", rows, (ids(4), ids(5, 6, 7)), (), zeros, zeros, zeros)
    assert (batch.lengths_M.tolist(), batch.sizes_M.tolist()) == ([1, 3], [3, 4])
    assert batch.lengths_M is batch.lengths_M
    with pytest.raises(ValueError, match="read-only"):
        batch.lengths_M[0] = 9


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_small_products_alone_go_without_onednn(one_thread):
    assert are_small(torch.nn.Linear(WIDEST, 3))
    assert not are_small(torch.nn.Linear(WIDEST + 1, 3))
    assert not are_small(torch.nn.Linear(8, 3).bfloat16())
    torch.set_num_threads(2)
    assert not are_small(torch.nn.Linear(8, 3))


def test_onednn_is_back_after_a_pass_also_after_one_that_failed():
    before = torch.backends.mkldnn.enabled
    with without_onednn(False):
        assert torch.backends.mkldnn.enabled == before

    def fail() -> None:
        with without_onednn(True):
            raise RuntimeError(f"failed, {torch.backends.mkldnn.enabled}")

    with pytest.raises(RuntimeError, match="failed, False"):
        fail()
    assert torch.backends.mkldnn.enabled == before


def test_a_tiny_policy_computes_without_onednn_in_float32_alone(one_thread):
    policy = make_learner("full", seed=1).policy
    before = torch.backends.mkldnn.enabled
    with policy.computing():
        assert not torch.backends.mkldnn.enabled
    policy.precision = "bf16"
    with policy.computing():
        assert torch.backends.mkldnn.enabled == before
    policy.precision = "fp32"
    prompts, messages = [ids(3, 4, 5)], [ids(6, 7)]
    without = policy.features(prompts, messages)
    policy._small = False
    torch.testing.assert_close(without, policy.features(prompts, messages))


@pytest.mark.parametrize("in_runs", [False, True])
def test_spreading_adds_up_the_gradients_of_all_copies_and_none_of_padding(in_runs, monkeypatch):
    asked = instead_of_kernels(monkeypatch)
    taken = np.array([2, 0, 2, -1, 1, 2, 0])
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    spread = Spread.of(taken, 4, source.device, in_runs=in_runs)(source)
    weights = torch.randn(7, 3, dtype=torch.float64)
    weights[3] = 0.0
    (spread * weights).sum().backward()
    plain = torch.zeros(4, 3, dtype=torch.float64)
    for place, row in enumerate(taken):
        plain[row] += weights[place] if row >= 0 else 0.0
    torch.testing.assert_close(source.grad, plain)
    assert torch.equal(spread[[0, 2, 5]], source[[2, 2, 2]])
    assert asked == ["summed"] * in_runs
    source.grad = None
    firsts = Spread.of(taken, 4, source.device, in_runs=in_runs).first_only(source)
    (firsts * weights).sum().backward()
    assert torch.equal(source.grad, torch.stack([weights[1], weights[4], weights[0], torch.zeros_like(weights[0])]))
    assert asked == ["summed"] * in_runs, "there is nothing to add"


@pytest.mark.parametrize("end_to_end", [False, True])
def test_a_kernel_adds_up_copies_where_rows_go_end_to_end(end_to_end, monkeypatch):
    """In half precision on a card; elsewhere torch does, to the bits that it always had."""
    monkeypatch.setattr(attention, "goes_end_to_end", lambda *_: end_to_end)
    for rows, shares in (([ids(3, 4, 5), ids(3, 4, 6)], True), ([ids(3, 4), ids(5, 4)], False)):
        spread = attention.Packed.of(pack(rows), torch.device("cpu"), torch.float16).spread
        if shares:
            assert isinstance(spread.copies, Runs if end_to_end else Further)
        else:
            assert spread is None or spread.copies is None


def test_many_copies_and_few_are_added_up_beside_each_other():
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    copies = np.array([1, 2, 1, 40, 5, 97])
    taken = rng.permutation(np.repeat(np.arange(len(copies)), copies))
    grad = torch.from_numpy(rng.integers(-9, 9, size=(len(taken), 2, 3)).astype(np.float32))
    plain = torch.zeros(len(copies), 2, 3).index_add_(0, torch.from_numpy(taken), grad)
    assert torch.equal(Spread.of(taken, len(copies), grad.device).sum_of(grad, len(copies)), plain)


def test_gathering_gives_its_gradient_to_first_copies_alone_and_a_card_finds_them_by_their_origin():
    taken = np.array([2, 0, 2, -1, 1, 2, 0])
    spread = Spread.of(taken, 3, torch.device("cpu"))
    placed = torch.randn(7, 2, requires_grad=True)
    gathered = spread.gather(placed)
    assert torch.equal(gathered, placed[[1, 4, 0]])
    weights = torch.randn(3, 2)
    (gathered * weights).sum().backward()
    by_origin = torch.cat([weights, torch.zeros(1, 2)])[spread.origin]
    assert torch.equal(placed.grad, by_origin)
    assert spread.origin.tolist() == [2, 0, -1, -1, 1, -1, -1]


def family(rng: np.random.Generator) -> AgentBatch:
    """Three problems of different length, four episodes each; some contexts go on differently, some messages begin
    alike, two are the same."""
    prompts, messages, problems = [], [], []
    for problem, length in enumerate((9, 5, 12)):
        stem = rng.integers(3, 20, size=length)
        for k in range(4):
            own = rng.integers(3, 20, size=k // 2)
            said = np.concatenate([[4, 5], rng.integers(3, 20, size=3 - k % 3)]) if k != 3 else np.array([4])
            prompts.append(np.concatenate([stem, own]).astype(np.int32))
            messages.append(said.astype(np.int32))
            problems.append(problem)
    prompts.append(prompts[0])
    messages.append(messages[0])
    problems.append(0)
    count = len(prompts)
    return AgentBatch(
        agent="one", prompts=tuple(prompts), messages=tuple(messages),
        sampler_logprobs=tuple(np.zeros(len(m), dtype=np.float32) for m in messages),
        episode_M=np.arange(count), problem_M=np.array(problems), turn_M=np.zeros(count, dtype=np.int64),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sharing_beginnings_changes_neither_scores_nor_gradient(kind):
    batch = family(np.random.default_rng(0))
    advantages = np.random.default_rng(1).normal(size=len(batch))
    together, alone = make_learner(kind), make_learner(kind)
    alone.policy.packs = False
    np.testing.assert_allclose(together.begin(batch), alone.begin(batch), rtol=1e-5)
    assert_close(gradients(together, batch, advantages), gradients(alone, batch, advantages))


def test_the_model_sees_every_common_token_once(monkeypatch):
    batch = family(np.random.default_rng(0))
    learner = make_learner("full", micro_batch=64)
    seen = []
    decoder = learner.policy.causal_lm.get_decoder()
    inner = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda **x: seen.append(x["input_ids"].numel()) or inner(**x))
    learner.begin(batch)
    rows = [np.concatenate([p, m[:-1]]).tolist() for p, m in zip(batch.prompts, batch.messages, strict=True)]
    assert seen == [len({tuple(row[: k + 1]) for row in rows for k in range(len(row))})]
    assert seen[0] < sum(map(len, rows)) / 2


def test_the_heaviest_micro_batch_comes_first_and_a_problem_stays_together():
    batch = family(np.random.default_rng(0))
    learner = make_learner("full", micro_batch=4)
    parts = learner.passes.micro_batches(batch, np.arange(len(batch)))
    sizes = [sum(len(batch.prompts[i]) + len(batch.messages[i]) for i in part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    assert {*batch.problem_M[parts[0]]} == {2}


@pytest.mark.long
def test_rows_that_stand_end_to_end_are_taken_together_by_their_tokens(monkeypatch):
    """With the gradient that they have in parts of so many messages, and no part larger than so many of the longest."""
    batch, found, sizes = family(np.random.default_rng(0)), {}, {}
    rows = np.arange(len(batch))
    size_M = np.array([len(p) + len(m) for p, m in zip(batch.prompts, batch.messages, strict=True)])
    for end_to_end in (False, True):
        monkeypatch.setattr(TransformerPolicy, "end_to_end", property(lambda _, it=end_to_end: it))
        learner = make_learner("lora", micro_batch=2)
        parts = learner.passes.micro_batches(batch, rows)
        sizes[end_to_end] = [int(size_M[part].sum()) for part in parts]
        assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
        for part in parts:
            problems = batch.problem_M[part].tolist()
            assert problems == [p for p in dict.fromkeys(problems) for _ in range(problems.count(p))], "side by side"
        found[end_to_end] = gradients(learner, batch, np.linspace(-1, 1, len(batch)))
    assert len(sizes[True]) < len(sizes[False])
    assert max(sizes[True]) <= 2 * size_M.max()
    assert sizes[True] == sorted(sizes[True], reverse=True)
    assert_close(found[True], found[False])


def one_long_prompt() -> AgentBatch:
    """Messages of four tokens, twelve after prompts of two and one after a prompt of 60."""
    rng, count = np.random.default_rng(0), 13
    prompts = [rng.integers(3, 20, size=60 if k == 0 else 2).astype(np.int32) for k in range(count)]
    return AgentBatch(
        agent="one", prompts=tuple(prompts),
        messages=tuple(rng.integers(3, 20, size=4).astype(np.int32) for _ in range(count)),
        sampler_logprobs=(np.zeros(4, dtype=np.float32),) * count,
        episode_M=np.arange(count), problem_M=np.arange(count), turn_M=np.zeros(count, dtype=np.int64),
    )  # fmt: skip


@pytest.mark.long
def test_short_prompts_bring_no_more_logits_into_a_pass_than_are_planned(monkeypatch):
    """Ten short rows have room beside a long one, where two long ones would; the plan counts the logits of two
    messages."""
    batch, passed, held, found = one_long_prompt(), [], [], {}
    features, head, frozen_head = TransformerPolicy.features, TransformerPolicy.head, TransformerPolicy.frozen_head

    def look(self, prompts, messages):
        passed.append(len(messages))
        return features(self, prompts, messages)

    def counting(of):
        def counted(self):
            inner = of(self)
            return lambda hidden_NH: held.append(len(hidden_NH)) or inner(hidden_NH)

        return counted

    monkeypatch.setattr(TransformerPolicy, "features", look)
    monkeypatch.setattr(TransformerPolicy, "head", counting(head))
    monkeypatch.setattr(TransformerPolicy, "frozen_head", counting(frozen_head))
    for end_to_end in (False, True):
        monkeypatch.setattr(TransformerPolicy, "end_to_end", property(lambda _, it=end_to_end: it))
        learner = make_learner("lora", micro_batch=2)
        passed.clear()
        held.clear()
        learner.begin(batch)
        kl_M = learner.measure().full_M
        learner.token_shift()
        found[end_to_end] = gradients(learner, batch, np.linspace(-1, 1, len(batch)))
        assert max(passed) == (11 if end_to_end else 2)
        assert max(held) == 2 * 4
        np.testing.assert_allclose(kl_M, 0.0, atol=1e-6)
    assert_close(found[True], found[False])


def test_all_processes_cut_a_shard_alike(monkeypatch):
    """The room of a shard goes by its own longest row, so that who else computes what changes no cut."""
    monkeypatch.setattr(TransformerPolicy, "end_to_end", property(lambda _: True))
    batch, rows = one_long_prompt(), np.arange(13)
    learner = make_learner("lora", micro_batch=2)
    passes = learner.passes
    passes.shards = Shards(3)
    own = {shard: [part.tolist() for part in parts] for shard, parts in passes.own_shards(batch, rows)}
    assert passes.counts(batch, rows) == {shard: len(parts) for shard, parts in own.items()} == {0: 1, 1: 2, 2: 2}
    monkeypatch.setattr(Shards, "own", property(lambda _: [1]))
    assert [(shard, [part.tolist() for part in parts]) for shard, parts in passes.own_shards(batch, rows)] == [
        (1, own[1])
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_share_nothing_stand_as_they_are_packed(shared, monkeypatch):
    """Whatever order they came in; rows that share something are spread, each token to where its row reads it."""
    monkeypatch.setattr(attention, "goes_end_to_end", lambda *_: True)
    rows = [ids(9, 1, 2), ids(4), ids(7, 7), *([ids(9, 1, 5, 6)] if shared else [])]
    packing = pack(rows)
    layout = Packed.of(packing, torch.device("cpu"), torch.float16)
    assert (layout.spread is None) != shared
    said = torch.from_numpy(packing.ids_N.astype(np.int64))
    places = torch.from_numpy(packing.position_N)
    taken = [x if layout.spread is None else x[layout.spread.taken] for x in (said, places)]
    starts = layout.starts.tolist()
    spans = [slice(*span) for span in pairwise(starts)]
    assert sorted(taken[0][span].tolist() for span in spans) == sorted(row.tolist() for row in rows)
    assert all(taken[1][span].tolist() == list(range(span.stop - span.start)) for span in spans)
    assert list(layout.lengths) == [span.stop - span.start for span in spans]


@pytest.mark.parametrize("says_gqa", [False, True])
def test_torchs_attention_without_padding_is_told_of_shared_keys_if_it_wants_to_know(says_gqa, monkeypatch):
    """torch 2.11 shares keys and values between heads, and has no argument for it."""
    told = []

    def old(query, key, value, starts_q, starts_k, most_q, most_k, *, scale=None, window_size=(-1, -1)):
        told.append(window_size)
        return torch.zeros_like(query)

    def new(query, key, value, *given, scale=None, window_size=(-1, -1), enable_gqa=False):
        told.append(enable_gqa)
        return torch.zeros_like(query)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if says_gqa else old)
    attention._varlen_options.cache_clear()
    try:
        assert attention.goes_end_to_end(torch.device("cuda"), torch.float16)
        assert not attention.goes_end_to_end(torch.device("cuda"), torch.float32)
        layout = Packed.of(pack([ids(9, 1, 2), ids(4)]), torch.device("cpu"), torch.float16)
        layout = replace(layout, spread=None, end_to_end=True)
        query, key = torch.zeros(4, 4, 8).half(), torch.zeros(4, 2, 8).half()
        layout.attend(query, key, key, 0, 1.0)
        layout.attend(query, query, query, 0, 1.0)
    finally:
        attention._varlen_options.cache_clear()
    assert told == ([True, False] if says_gqa else [(-1, 0)] * 2)


def test_a_part_is_filled_before_the_next_is_begun():
    rows, sizes = np.array([7, 3, 0, 1, 2, 4, 5]), np.array([40, 39, 4, 4, 4, 30, 41])
    assert [part.tolist() for part in _filled(rows, sizes, 2 * 41, 9)] == [[7, 3], [0, 1, 2, 4], [5]]
    assert [part.tolist() for part in _filled(rows, sizes, 41, 9)] == [[7], [3], [0, 1, 2], [4], [5]]
    assert [part.tolist() for part in _filled(rows, sizes, 1000, 9)] == [rows.tolist()]
    assert [part.tolist() for part in _filled(rows, sizes, 1000, 3)] == [[7, 3, 0], [1, 2, 4], [5]]
    assert _filled(rows[:0], sizes[:0], 0, 9) == []


def test_one_long_row_beside_many_short_ones_takes_as_much_memory_as_they_have_tokens():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 9, size=length).astype(np.int32) for length in [8000, *[12] * 1000]]
    tracemalloc.start()
    pack(rows)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * sum(map(len, rows)), "bytes"
