"""Long prompts and messages: passes of bounded size, and the same tokens and numbers as in one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_paged_stream import Waves, alone, pool_of, server_of, two_agents
from test_serving import assert_same, make_server
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import make_policy
from teamtr.answers import Wanted
from teamtr.engines.paged.layout import BLOCK, Piece, portions
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch import attention
from teamtr.engines.torch.packing import pack
from teamtr.randomness import uniforms


def prompts_of(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 30, size=n).astype(np.int32) for n in lengths]


# -- prefill --------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_where_it_alone_is_too_long_for_a_pass():
    found = list(portions([(0, 100), (64, 400), (0, 60), (0, 128), (0, 1)], 2 * BLOCK))
    assert found == [
        [Piece(0, 0, 100)],
        [Piece(1, 64, 192)],
        [Piece(1, 192, 320)],
        [Piece(1, 320, 400)],
        [Piece(2, 0, 60)],
        [Piece(3, 0, 128)],
        [Piece(4, 0, 1)],
    ]
    # the end of a cut prompt leaves room for the next one, and a budget below a block of queries is one block
    assert list(portions([(0, 130), (0, 100)], 2 * BLOCK)) == [
        [Piece(0, 0, 128)],
        [Piece(0, 128, 130), Piece(1, 0, 100)],
    ]
    found = list(portions([(640, 700), (640, 700)], 2 * BLOCK))
    assert found == [[Piece(0, 640, 700), Piece(1, 640, 700)]], "what pages hold takes nothing of a pass"
    assert list(portions([(0, 65)], 1)) == [[Piece(0, 0, 64)], [Piece(0, 64, 65)]]
    assert list(portions([], 64)) == []


@pytest.mark.parametrize(
    "lengths", [[0, 64, 20_000], [7, 32_768], [8_192] * 256], ids=["mixed", "one of 32k", "256 of 8k"]
)
def test_no_pass_has_more_tokens_than_its_budget_and_every_token_is_in_one(lengths):
    budget, seen = 16_384, dict.fromkeys(range(len(lengths)), 0)
    for part in portions([(0, length) for length in lengths], budget):
        assert 0 < sum(end - start for _, start, end in part) <= budget
        for prompt, start, end in part:
            assert start == seen[prompt], "in order, so that a piece finds the keys of those before it"
            seen[prompt] = end
    assert list(seen.values()) == lengths


@pytest.mark.long
def test_prompts_in_pieces_say_what_they_say_in_one_pass(monkeypatch):
    """Also of prompts that begin with the pages of one that is cut, and are admitted in the same call."""
    policy = make_policy("lora")
    prompts = prompts_of(3, 130, 200, 333)
    prompts += [np.concatenate([prompts[3][:256], prompts[1]]), prompts[3]]
    noise = uniforms(5, len(prompts), 6)
    found = []
    for budget in (16_384, 2 * BLOCK):
        monkeypatch.setattr("teamtr.engines.paged.sampler.PREFILL_TOKENS", budget)
        server, computed = make_server(policy), []
        hidden = server._hidden
        server._hidden = lambda layout, ids, at, c=computed, h=hidden: c.append(len(ids)) or h(layout, ids, at)
        found.append(server.sample("v", prompts, noise, drawing=TokenSampler(1.0), end_ids=frozenset()))
        prefilled = computed[: len(computed) - 5]
        assert sum(prefilled) == 3 + 130 + 200 + 333 + 130, "what is common is computed once"
        assert (len(prefilled) == 1) == (budget > 1000)
        assert max(prefilled) <= budget
    assert_same(*found)
    monkeypatch.setattr(policy, "end_ids", frozenset())
    assert_same(policy.sample(prompts, noise), found[1])


@pytest.mark.long
def test_pieces_of_agents_whose_adapters_are_applied_by_row_have_their_own(monkeypatch):
    monkeypatch.setattr("teamtr.engines.paged.sampler.PREFILL_TOKENS", BLOCK)
    engine = two_agents("lora", pool_of(adapters="by_row"))
    noise = uniforms(3, 4, 6)
    wanted = [Wanted("ab"[k % 2], prompt, noise[k]) for k, prompt in enumerate(prompts_of(150, 100, 20, 70))]
    waves = Waves(wanted, first=4, then=0)
    engine.stream(waves)
    assert server_of(engine).copy.rows is not None
    for row, sample in waves.found.items():
        assert sample.token_ids.tolist() == alone(engine, wanted[row]).token_ids.tolist()


# -- attention of the learner ---------------------------------------------------------------------------------


@pytest.mark.long
def test_heads_with_keys_of_their_own_compute_what_heads_that_share_them_compute(monkeypatch):
    policy = make_policy("lora")
    config = policy.causal_lm.config
    assert config.num_key_value_heads < config.num_attention_heads, "or this proves nothing"
    prompts, messages = prompts_of(40, 7, 40), prompts_of(5, 60, 3)
    found = []
    for own_keys in (False, True):
        monkeypatch.setattr(attention, "_needs_own_keys", lambda query, longest, own=own_keys: own)
        with policy.computing():
            features = policy.features(prompts, messages)
            (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        found.append([features.detach(), *(p.grad.clone() for p in policy.parameters().values())])
        for parameter in policy.parameters().values():
            parameter.grad = None
    for shared, own in zip(*found, strict=True):
        torch.testing.assert_close(own, shared, atol=1e-5, rtol=1e-4)


def test_only_long_rows_of_a_card_in_float32_have_keys_of_their_own():
    def needs(kind: str, dtype: torch.dtype, longest: int) -> bool:
        return attention._needs_own_keys(SimpleNamespace(device=torch.device(kind), dtype=dtype), longest)

    assert needs("cuda", torch.float32, attention.LONG + 1)
    assert not needs("cuda", torch.float32, attention.LONG)
    assert not needs("cuda", torch.float16, 32_768)
    assert not needs("cpu", torch.float32, 32_768), "its kernel shares them in linear memory"


def test_attention_of_a_long_row_takes_memory_in_proportion_to_its_length():
    """On a CPU, forward and back: no tensor has an entry for every pair of tokens."""
    heads, kv_heads, dim, tokens = 4, 2, 8, 1500
    layout = attention.Packed.of(pack([np.arange(tokens)]), torch.device("cpu"), torch.float32)
    largest = 0

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.untyped_storage().nbytes() // 4)
            return found

    with Watched():
        q, k, v = (torch.randn(tokens, count, dim, requires_grad=True) for count in (heads, kv_heads, kv_heads))
        layout.attend(q, k, v, 0, dim**-0.5).sum().backward()
    assert 0 < largest <= 2 * tokens * heads * dim < tokens * tokens


# -- what it takes --------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    folder = Path(__file__).parents[2] / "bench"
    monkeypatch.syspath_prepend(str(folder))
    return lambda name: importlib.import_module(name)


def test_the_page_has_what_one_card_holds_of_long_messages_as_the_benchmark_prints_it(bench):
    long = bench("long")
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text().splitlines()
    rows = list(long.plans())
    assert [row for row in map(long.as_markdown, rows) if row not in page] == []
    fits = {(row["model"], row["tokens"]): row["fits"] for row in rows}  # the last one of each, recomputed where needed
    assert [key for key, fit in fits.items() if fit == "no"] == [("8b", 32_768)]


def test_a_radius_is_seen_that_is_ten_times_every_error_within_it(bench):
    seen_from = bench("precision").seen_from
    true = {1e-3: 1e-6, 1e-2: 1e-4, 1e-1: 1e-2}
    assert seen_from(true, true, negligible=1e-9) == pytest.approx(1e-8)
    off = {size: kl + 3e-6 for size, kl in true.items()}
    assert seen_from(true, off, negligible=1e-8) == pytest.approx(1e-7), "the smallest of them is not within 1e-7"
    assert seen_from(true, off, negligible=1e-6) == pytest.approx(3e-5)
    assert seen_from(true, {**off, 1e-2: 1.2e-4}, negligible=1e-5) == pytest.approx(2e-4)


def test_products_in_half_precision_are_added_up_in_float32_and_rounded_once(bench):
    precision = bench("precision")
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(5, 5, generator=rng).bfloat16() for _ in range(3))
    with precision.RoundedOnce():
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
        wide = torch.addmm(c.float(), a.float(), b.float(), alpha=0.5)
        assert torch.equal(torch.addmm(c, a, b, alpha=0.5), wide.bfloat16())
        summed = c.clone()
        assert summed.addmm_(a, b) is summed
        assert torch.equal(summed, torch.addmm(c.float(), a.float(), b.float()).bfloat16())
        assert (a.float() @ b.float()).dtype == torch.float32
