"""The paged sampler: the same tokens from the same noise as the plain path, whatever company, order and pages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_batch, make_policy
from teamtr.config import loads
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.fused_linears import join_siblings
from teamtr.engines.paged.layout import Decoding
from teamtr.engines.paged.pages import OutOfPages, Pages, Pool
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.sampler import LOOK_EVERY, PAGE, SIZES, STEPS_AHEAD, Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.paged.work_split import clusters, most_members, remaining, shares, spared, splits, worth_sparing
from teamtr.engines.sampling import TokenSampler, keep_likely
from teamtr.engines.torch.attention import AttentionShape, Unsupported, attending
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.progress import Work
from teamtr.randomness import uniforms
from teamtr.rollout import play
from teamtr.session.build import build
from teamtr.theory.objective import Objective
from teamtr.types import common_beginning

CPU = torch.device("cpu")
LENGTHS = (3, 63, 64, 65, 130)


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request):
    return make_policy(request.param)


def make_server(policy, pool_bytes: int = 1 << 26) -> Server:
    copy = SamplingCopy(policy.causal_lm, torch.float32, CPU)
    copy.fill(policy.causal_lm, policy.adapter, version="v", base="b")
    return Server(copy, pool_bytes=pool_bytes, graphs=False)


def some_prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    different = [rng.integers(3, 30, size=n).astype(np.int32) for n in LENGTHS]
    return [different[k % len(different)] for k in range(count)]


def assert_same(plain, paged) -> None:
    for a, b in zip(plain, paged, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 2, 20])
@pytest.mark.parametrize(
    "drawing", [TokenSampler(1.0), TokenSampler(0.7, top_p=0.8), TokenSampler(1.3, top_k=3), TokenSampler(0.0)], ids=str
)
def test_paged_and_plain_say_the_same_from_the_same_noise(policy, drawing, tokens):
    prompts = some_prompts(12)
    plain = policy.sample(prompts, uniforms(5, len(prompts), tokens), drawing)
    server = make_server(policy)
    paged = server.sample("v", prompts, uniforms(5, 12, tokens), drawing=drawing, end_ids=policy.end_ids)
    assert_same(plain, paged)
    assert server.books.available == server.books.count - 1, "every page was given back"


@pytest.mark.long
def test_rows_wait_for_pages_and_still_say_the_same(policy):
    """With pages for a few rows only, rows are admitted as others leave."""
    prompts = some_prompts(12)
    per_page = Pool.bytes_per_page(AttentionShape.of(policy.causal_lm.config), PAGE, torch.float32)
    server = make_server(policy, pool_bytes=7 * per_page)
    paged = server.sample("v", prompts, uniforms(5, 12, 20), drawing=TokenSampler(1.0), end_ids=policy.end_ids)
    assert server.books.count == 7
    assert_same(policy.sample(prompts, uniforms(5, len(prompts), 20)), paged)


@pytest.mark.long
def test_tokens_are_followed_and_rows_that_nobody_wants_give_their_pages_back(policy):
    """Also where rows wait for pages: what a row holds is free with the look after its last wanted token."""
    prompts, noise = some_prompts(12), uniforms(5, 12, 40)
    per_page = Pool.bytes_per_page(AttentionShape.of(policy.causal_lm.config), PAGE, torch.float32)
    for pool_bytes in (1 << 26, 7 * per_page):
        server = make_server(policy, pool_bytes=pool_bytes)
        told: dict[int, list[int]] = {row: [] for row in range(12)}

        def follow(row: int, before: int, token_ids: np.ndarray, told=told) -> bool:
            assert before == len(told[row])
            told[row] += token_ids.tolist()
            return row % 3 != 0

        paged = server.sample("v", prompts, noise, drawing=TokenSampler(1.0), end_ids=policy.end_ids, follow=follow)
        plain = policy.sample(prompts, noise)
        assert max(len(sample.token_ids) for sample in plain[::3]) > LOOK_EVERY + 1
        for row, (sample, expected) in enumerate(zip(paged, plain, strict=True)):
            written = len(sample.token_ids)
            assert told[row] == sample.token_ids.tolist() == expected.token_ids.tolist()[:written]
            assert sample.finish == ("length" if written < len(expected.token_ids) else expected.finish)
            first_look = 1 + LOOK_EVERY - STEPS_AHEAD
            assert written <= first_look if row % 3 == 0 else written == len(expected.token_ids)
        assert server.books.available == server.books.count - 1, "every page was given back"


@pytest.mark.long
@pytest.mark.parametrize(("look", "ahead"), [(1, 0), (1, 2), (2, 2), (3, 5), (16, 0), (16, 2)])
def test_steps_that_are_still_to_be_computed_at_a_look_change_no_message(policy, look, ahead, monkeypatch):
    """Rows of different limits, some of which nobody wants any more; the first ends in the steps after a look, when the
    second leaves. Every step is counted once."""
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", look)
    monkeypatch.setattr("teamtr.engines.paged.sampler.STEPS_AHEAD", ahead)
    monkeypatch.setattr(policy, "end_ids", frozenset({5, 6, 7}))
    counted: list[int] = []
    monkeypatch.setattr(Work, "advance", lambda self, count=1: counted.append(count))
    for rows, limits in ((1, [16]), (2, [16, 60]), (9, [16, 60, 3, 17, 18, 1, 33, 40, 32])):
        prompts, noise = some_prompts(rows), uniforms(5, rows, max(limits))
        plain = [policy.sample([prompts[k]], noise[k : k + 1, :limit])[0] for k, limit in enumerate(limits)]
        for row, limit in enumerate(limits):
            noise[row, limit:] = np.nan
        server, steps, unwanted = make_server(policy), [], {1, 4}
        step, told = server._step, {row: [] for row in range(rows)}
        monkeypatch.setattr(
            server, "_step", lambda size, drawing, to=steps, by=step: to.append(size) or by(size, drawing)
        )

        def follow(row, before, token_ids, told=told, unwanted=unwanted):
            told[row] += token_ids.tolist()
            return row not in unwanted

        for wants_all in (True, False):
            counted[:], steps[:] = [], []
            given = {} if wants_all else {"follow": follow}
            paged = server.sample("", prompts, noise, drawing=TokenSampler(), end_ids=policy.end_ids, **given)
            for row, (sample, expected) in enumerate(zip(paged, plain, strict=True)):
                said = sample.token_ids.tolist()
                assert said == expected.token_ids.tolist()[: len(said)]
                assert len(said) == len(expected.token_ids) or (row in unwanted and not wants_all)
                assert wants_all or told[row] == said
            assert min(counted) >= 0
            assert len(steps) <= max(limits) - 1 + look + ahead


def test_a_message_that_can_never_fit_is_refused_with_the_remedy(policy):
    server = make_server(policy, pool_bytes=1)
    with pytest.raises(UserError, match=r"sampling\.memory_gb"):
        server.sample("v", some_prompts(1), uniforms(0, 1, 4), drawing=TokenSampler(), end_ids=policy.end_ids)


def test_one_prefill_serves_a_group_and_later_calls_find_it(policy):
    server = make_server(policy)
    long = some_prompts(5)[4]  # 130 tokens: two whole pages and two tokens
    group = [long] * 8

    def sample(version: str, prompts) -> int:
        before = (server.books.wanted_tokens, server.books.found_tokens) if server.books else (0, 0)
        server.sample(version, prompts, uniforms(1, len(prompts), 4), drawing=TokenSampler(), end_ids=policy.end_ids)
        assert server.books.wanted_tokens - before[0] == 128, "one look-up for the whole group"
        return server.books.found_tokens - before[1]

    assert sample("first", group) == 0
    assert sample("second", group) == 0, "pages of other weights are never found"
    assert sample("first", group) == 128, "an update of another agent leaves this agent's pages"


def test_without_a_version_nothing_is_found_again(policy):
    server = make_server(policy)
    for _ in range(2):
        server.sample("", some_prompts(5), uniforms(1, 5, 2), drawing=TokenSampler(), end_ids=policy.end_ids)
    assert server.books.found_tokens == 0


@pytest.mark.long
def test_an_agents_own_words_are_found_when_the_context_only_grew(policy):
    server = make_server(policy)
    prompts = some_prompts(10)
    said = server.sample("v", prompts, uniforms(3, 10, 70), drawing=TokenSampler(), end_ids=frozenset())
    grown = [np.concatenate([p, s.token_ids, [7, 8, 9]]).astype(np.int32) for p, s in zip(prompts, said, strict=True)]
    before = server.books.found_tokens
    paged = server.sample("v", grown, uniforms(4, 10, 6), drawing=TokenSampler(), end_ids=policy.end_ids)
    # All whole pages of prompt and message, less the last token drawn, which was never fed.
    assert server.books.found_tokens - before == sum((len(p) + 69) // PAGE * PAGE for p in prompts)
    assert_same(policy.sample(grown, uniforms(4, len(grown), 6)), paged)


@pytest.mark.long
@pytest.mark.parametrize("history", ["transcript", "chat"])
def test_in_play_an_agent_finds_what_it_read_and_in_a_chat_what_it_said(history, monkeypatch):
    """A transcript tells an agent's own words anew, as a line; a chat has them where they were said."""
    text = f"""
name: talk
task: {{name: sums}}
team:
  model: tiny
  max_tokens: 150
  history: {history}
  router: {{rounds: 2}}
  system_prompt: {"Add. " * 30}
  agents: [{{name: ann}}]
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
sampling: {{engine: paged}}
"""
    built = build(loads(text, name="talk.yaml"))
    admit, found_by_row = Server._admit, {}

    def noted(self, waiting, *others):
        before = self.books.found_tokens if self.books else 0
        admitted = admit(self, waiting, *others)
        if admitted:
            found_by_row[min(sequence.row for sequence in admitted)] = self.books.found_tokens - before
        return admitted

    monkeypatch.setattr(Server, "_admit", noted)
    batch = play(built.context, built.current_team(), built.task.problems("train")[:3], 1, seed=0)
    first, second = zip(*(episode.turns for episode in batch.episodes), strict=True)
    read, said = [turn.context_ids for turn in first], [turn.token_ids for turn in first]
    read_again = [turn.context_ids for turn in second]
    found = sum(tokens for row, tokens in found_by_row.items() if row >= 3)
    known = [np.concatenate([prompt, message[:-1]]) for prompt, message in zip(read, said, strict=True)]
    common = [common_beginning(a, b) for a, b in zip(known, read_again, strict=True)]
    assert found == sum(tokens // PAGE * PAGE for tokens in common)
    beyond = [tokens - len(prompt) for tokens, prompt in zip(common, read, strict=True)]
    if history == "chat":
        assert max(beyond) > 0, "its own words, as far as the text gives the same tokens again"
    else:
        assert max(beyond) < 0
    assert min(common) >= PAGE


def two_agents(kind: str) -> LocalEngine:
    """On one server: two models, or two adapters of one base."""
    first = make_policy(kind)
    if kind == "full":
        policies = {"a": first, "b": make_policy(kind, seed=1)}
    else:
        first.base_version = "base"
        other = TransformerPolicy(first.model, first.tokenizer, adapter="other", base_version="base", fused=first.fused)
        policies = {"a": first, "b": other}
    room = SamplerPool("fp32", CPU, memory_bytes=1 << 26)
    for policy in policies.values():
        policy.serving = room
    return LocalEngine({name: PolicyLearner(name, policy) for name, policy in policies.items()})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_update_is_sampled_from_at_once_and_leaves_the_other_agents_pages(kind):
    engine, prompts = two_agents(kind), some_prompts(10)
    learner = engine.learner("a")
    server = learner.policy.serving.server_of(learner.policy.causal_lm)
    in_pages = sum((n - 1) // PAGE * PAGE for n in LENGTHS)

    def say(agent: str):
        """What the agent says now, and how many tokens of its prompts were found in pages."""
        before = server.books.found_tokens if server.books else 0
        said = engine.sample(agent, prompts, uniforms(3, len(prompts), 8))
        policy = engine.learner(agent).policy
        with torch.no_grad(), policy.computing():
            assert_same(policy._sample_plainly(prompts, uniforms(3, len(prompts), 8), TokenSampler()), said)
        return [s.token_ids.tolist() for s in said], server.books.found_tokens - before

    others, found = say("b")
    assert found == 0
    old, found = say("a")
    assert found == 0
    assert say("a") == (old, in_pages), "nothing changed, nothing is computed again"
    before = learner.snapshot()
    batch = make_batch(learner)
    learner.begin(batch)
    learner.step(np.arange(len(batch)), np.linspace(-1, 1, len(batch)), Objective(), beta=0.0, learning_rate=0.1)
    learner.end()
    new, found = say("a")
    assert new != old, "the step is too small for this test"
    assert found == 0, "pages of the old weights"
    assert say("b") == (others, in_pages), "an update of another agent leaves this agent's pages"
    learner.restore(before)
    assert say("a") == (old, in_pages), "weights that came back find their own pages"


@pytest.mark.long
def test_rows_that_ended_leave_and_the_others_close_ranks(policy, monkeypatch):
    """Every step computes the smallest size that holds the rows still open at the last look."""
    rows, tokens, look = 40, 26, 4
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", look)
    prompts = some_prompts(rows)
    monkeypatch.setattr(policy, "end_ids", frozenset({*policy.end_ids, *range(5, 14)}))
    server = make_server(policy)
    sizes: list[int] = []
    step = server._step
    monkeypatch.setattr(server, "_step", lambda size, drawing: sizes.append(size) or step(size, drawing))
    paged = server.sample("v", prompts, uniforms(5, rows, tokens), drawing=TokenSampler(), end_ids=policy.end_ids)
    assert_same(policy.sample(prompts, uniforms(5, len(prompts), tokens)), paged)
    lengths = np.array([len(s.token_ids) for s in paged])
    # Each row has its first token from the prefill, and one more per step. A look comes before a round's last steps.
    seen = [1 + (done := k // look * look) - min(STEPS_AHEAD, tokens - 1 - done) for k in range(len(sizes))]
    still_open = [int((lengths > seen[k]).sum()) if k >= look else rows for k in range(len(sizes))]
    assert sizes == [next(size for size in SIZES if size >= count) for count in still_open]
    assert len({*sizes}) > 3, "too few sizes to see anything"


@pytest.mark.long
def test_rows_that_read_pages_together_have_these_pages(policy, monkeypatch):
    """At every step, while rows come and leave: members of a cluster begin with the same pages, all of them written,
    and no row has two clusters."""
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", 4)
    monkeypatch.setattr("teamtr.engines.paged.work_split.SPLIT_TARGET", 48)  # some of its sizes have several programs
    monkeypatch.setattr("teamtr.engines.paged.work_split.WORTH_SPARING", 0)
    monkeypatch.setattr("teamtr.engines.paged.work_split.WORTH_SPARING_FEW", 0)
    monkeypatch.setattr(policy, "end_ids", frozenset({*policy.end_ids, *range(5, 14)}))
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 30, size=PAGE)
    prompts = [p if k % 2 else np.concatenate([begin, p]).astype(np.int32) for k, p in enumerate(some_prompts(60))]
    per_page = Pool.bytes_per_page(AttentionShape.of(policy.causal_lm.config), PAGE, torch.float32)
    server = make_server(policy, pool_bytes=60 * per_page)
    step, seen = server._step, []

    def checked(size: int, drawing: TokenSampler) -> None:
        if not server._reads_together():
            return step(size, drawing)
        buffers = server._buffers
        member, pages, first = (tensor.tolist() for tensor in buffers.together.of(size))
        table, position, alone = buffers.table.tolist(), buffers.position.tolist(), set(range(size))
        for rows, count in zip(member, pages, strict=True):
            rows = [row for row in rows if row >= 0]
            assert len({tuple(table[row][:count]) for row in rows}) <= 1
            assert all(position[row] >= count * PAGE and first[row] == count > 0 for row in rows)
            assert alone.issuperset(rows)
            alone -= set(rows)
        assert all(first[row] == 0 for row in alone)
        seen.append((size, size - len(alone)))
        return step(size, drawing)

    monkeypatch.setattr(server, "_step", checked)
    paged = server.sample("v", prompts, uniforms(5, 60, 26), drawing=TokenSampler(), end_ids=policy.end_ids)
    assert_same(policy.sample(prompts, uniforms(5, len(prompts), 26)), paged)
    assert len({size for size, _ in seen}) > 2
    assert max(together for _, together in seen) > 20


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=3), max_size=9), st.integers(1, 4)
)  # fmt: skip
def test_clusters_spare_as_much_reading_as_any_cut_of_the_sorted_rows(begins, most):
    rows = [[*begin, 10 + k] for k, begin in enumerate(begins)]  # the last page is a row's own
    found = clusters(rows, most)
    taken = [row for members, _ in found for row in members]
    assert len(taken) == len(set(taken))
    for members, common in found:
        assert 2 <= len(members) <= most
        assert common > 0
        assert len({tuple(rows[row][:common]) for row in members}) == 1

    def most_spared(ordered: list[list[int]]) -> int:
        if not ordered:
            return 0
        options = []
        for size in range(1, min(most, len(ordered)) + 1):
            columns = zip(*ordered[:size], strict=False)
            common = next((k for k, column in enumerate(columns) if len({*column}) > 1), 0) if size > 1 else 0
            options.append((size - 1) * common + most_spared(ordered[size:]))
        return max(options)

    assert spared(found) == most_spared(sorted(rows))


def test_few_rows_have_several_programs_each_and_many_have_one():
    assert [splits(rows, 8) for rows in (8, 16, 33, 66, 256)] == [32, 8, 2, 1, 1]
    assert splits(SIZES[0], 1) == 64
    assert [shares(rows, 8) for rows in (8, 32, 64, 66, 128, 256, 512, 1024)] == [16, 16, 8, 4, 4, 2, 1, 1]


def test_a_long_prompt_of_few_rows_is_read_together():
    """Eight rows on a prompt of 8,192 tokens of Qwen3-8B: 128 pages of 256 KB in a layer, which seven rows need not
    read, 235 MB; nine rows on more spare enough. A prompt of 1,024 tokens is in the cache."""
    page = 2 * 8 * PAGE * 128 * 2

    def pays(rows: int, tokens: int) -> bool:
        pages = [[*range(1, 1 + tokens // PAGE), 10_000 + row] for row in range(rows)]
        return spared(clusters(pages, most_members(4, torch.float16))) * page >= worth_sparing(rows, 8)

    assert [pays(8, tokens) for tokens in (1024, 8192, 16_384, 32_768)] == [False, False, True, True]
    assert [pays(16, tokens) for tokens in (1024, 4096, 8192)] == [False, False, True]
    assert pays(72, 1024), "many rows have one program each"


def test_the_rows_of_a_cluster_fit_into_a_program():
    half = [most_members(group, torch.float16) for group in (1, 2, 3, 4, 8, 16, 64, 71)]
    assert half == [16, 8, 8, 8, 8, 4, 1, 1]
    assert [most_members(group, torch.float32) for group in (1, 2, 3, 8, 32)] == [16, 8, 5, 2, 1]


@pytest.mark.parametrize(
    ("spares", "target", "limit", "expected"),
    [
        (0, 1, "WORTH_SPARING", True),
        (1, 1, "WORTH_SPARING", False),
        (0, 10**6, "WORTH_SPARING", False),
        (0, 10**6, "WORTH_SPARING_FEW", True),
        (1, 10**6, "WORTH_SPARING_FEW", False),
    ],
)
def test_pages_are_read_together_where_it_spares_enough(spares, target, limit, expected, monkeypatch):
    """Eight rows with two common pages spare 14 pages of a layer; one byte more is not spared. Rows that have several
    programs each have a limit of their own."""
    model, tokenizer = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
    policy = TransformerPolicy(model, tokenizer)
    server, prompt = make_server(policy), some_prompts(5)[4]
    page = 2 * policy.causal_lm.config.num_key_value_heads * PAGE * policy.causal_lm.config.head_dim * 4
    monkeypatch.setattr("teamtr.engines.paged.work_split.SPLIT_TARGET", target)
    monkeypatch.setattr(f"teamtr.engines.paged.work_split.{limit}", 14 * page + spares)
    step, together = server._step, []
    monkeypatch.setattr(server, "_step", lambda *a: together.append(server._reads_together()) or step(*a))
    server.sample("v", [prompt] * 8, uniforms(0, 8, 2), drawing=TokenSampler(), end_ids=frozenset())
    assert together == [expected]


def test_clusters_go_on_without_the_rows_that_left():
    found = [([4, 0], 3), ([1, 2, 5], 1)]
    assert remaining(found, [True, False, True, True, True, True]) == [([3, 0], 3), ([1, 4], 1)]
    assert remaining(found, [False, True, False, True, True, False]) == []


@pytest.mark.long
@pytest.mark.parametrize("length", [56, 120])
def test_a_row_that_has_said_all_it_may_writes_to_nobodys_page(policy, length, monkeypatch):
    """Its next place would be behind its last page, which the table is just wide enough for. It stays while others
    that came later go on to the next look."""
    monkeypatch.setattr(policy, "end_ids", frozenset(range(5, 20)))
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", 3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 30, size=length).astype(np.int32) for _ in range(24)]
    tokens = 9  # a whole number of pages, and one more token that is drawn and never fed
    per_page = Pool.bytes_per_page(AttentionShape.of(policy.causal_lm.config), PAGE, torch.float32)
    for rows_at_once in (24, 5):
        server = make_server(policy, pool_bytes=(1 + rows_at_once * ((length + 8) // PAGE)) * per_page)
        for _ in range(2):
            paged = server.sample("v", prompts, uniforms(5, 24, tokens), drawing=TokenSampler(), end_ids=policy.end_ids)
            assert_same(policy.sample(prompts, uniforms(5, len(prompts), tokens)), paged)
    lengths = [len(sample.token_ids) for sample in paged]
    assert 0 < lengths.count(tokens) < len(lengths), "some end early and some do not"


def test_adapters_of_one_base_share_the_copy_and_keep_apart():
    policy = make_policy("lora")
    room = SamplerPool("fp32", CPU, memory_bytes=1 << 26)
    server = room.server_of(policy.causal_lm)
    assert room.server_of(policy.causal_lm) is server
    prompts = some_prompts(4)
    said = {}
    for adapter in ("agent", "other", "agent"):
        server.copy.fill(policy.causal_lm, adapter, version=adapter, base="b")
        samples = server.sample(adapter, prompts, uniforms(2, 4, 12), drawing=TokenSampler(), end_ids=policy.end_ids)
        ids = [s.token_ids.tolist() for s in samples]
        assert said.setdefault(adapter, ids) == ids
    assert said["agent"] != said["other"]


def test_weights_without_a_name_are_taken_over_every_time(monkeypatch):
    policy = make_policy("full")
    monkeypatch.setattr(policy, "serving", SamplerPool("fp32", CPU, memory_bytes=1 << 26))
    prompts = some_prompts(4)
    for _ in range(2):
        paged = policy.sample(prompts, uniforms(1, len(prompts), 6))
        room, policy.serving = policy.serving, None
        assert_same(policy.sample(prompts, uniforms(1, len(prompts), 6)), paged)
        policy.serving = room
        with torch.no_grad():
            policy.causal_lm.get_input_embeddings().weight.add_(1.0)


def test_a_model_that_was_saved_keeps_its_copy(tmp_path):
    """Saving writes the class' name into its config; that made a second copy, beside the first."""
    policy, room = make_policy("full"), SamplerPool("fp32", CPU, memory_bytes=1 << 26)
    before = room.server_of(policy.causal_lm)
    policy.save_weights(tmp_path)
    assert room.server_of(policy.causal_lm) is before


def test_an_unsupported_architecture_falls_back_and_says_so_once(policy, monkeypatch):
    class NoRoom:
        precision = "fp32"

        def server_of(self, *_):
            raise Unsupported("attention with softcap")

    monkeypatch.setattr(policy, "serving", NoRoom())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, again = (policy.sample(some_prompts(2), uniforms(0, 2, 3)) for _ in range(2))
    assert_same(first, again)
    (one,) = told
    assert "softcap: sampling falls back to the plain" in str(one.message)
    assert policy.sampling_path == "plain fp32"


def test_logits_that_are_not_finite_are_sampled_anew_in_the_other_precision(monkeypatch):
    policy = make_policy("full")
    room = SamplerPool("fp16", CPU, memory_bytes=1 << 26, fallback="fp32")
    monkeypatch.setattr(policy, "serving", room)
    with torch.no_grad():  # beyond float16, well within float32: what follows is a norm
        policy.causal_lm.get_input_embeddings().weight.mul_(1e6)
    prompts = some_prompts(4)
    with pytest.warns(UserWarning, match=r"not finite \(paged fp16\): sampled again, and from now on with paged fp32"):
        said = policy.sample(prompts, uniforms(0, len(prompts), 5))
    assert policy.sampling_path == "paged fp32"
    monkeypatch.setattr(policy, "serving", None)
    assert_same(policy.sample(prompts, uniforms(0, len(prompts), 5)), said)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("room", [None, SamplerPool("fp32", CPU, memory_bytes=1 << 26)], ids=["plain", "paged"])
def test_broken_weights_are_an_error_and_no_message(room, temperature, monkeypatch):
    policy = make_policy("full")
    monkeypatch.setattr(policy, "serving", room)
    with torch.no_grad():
        next(iter(policy.causal_lm.parameters()))[:] = float("nan")
    with pytest.raises(UserError, match=r"not finite .*sampling\.precision"):
        policy.sample(some_prompts(2), uniforms(0, len(some_prompts(2)), 3), TokenSampler(temperature))


def test_top_k_then_top_p_keep_exactly_the_likely_tokens():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]))
    kept = keep_likely(logits, top_p=1.0, top_k=2).isfinite()
    assert kept.tolist() == [[True, True, False, False], [True, True, False, False]]
    kept = keep_likely(logits, top_p=0.65, top_k=0).isfinite()
    assert kept.tolist() == [[True, True, False, False], [True, True, True, False]]
    # of 0.4 and 0.3 renormalised, the first alone holds 0.57
    assert keep_likely(logits, top_p=0.5, top_k=2).isfinite()[0].tolist() == [True, False, False, False]


def test_a_draw_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([0.5, 0.0, 0.25, 0.25])).expand(5, -1)
    ids, logp = TokenSampler()(logits, torch.tensor([0.0, 0.4999, 0.5001, 0.7501, 1.0 - 1e-16], dtype=torch.float64))
    assert ids.tolist() == [0, 0, 2, 3, 3], "a token without probability is never drawn"
    np.testing.assert_allclose(logp, np.log([0.5, 0.5, 0.25, 0.25, 0.25]), rtol=1e-6)


def test_a_rows_noise_does_not_depend_on_its_company():
    np.testing.assert_array_equal(uniforms(3, 4, 6), uniforms(3, 9, 6)[:4])


# -- books of pages -------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("ftse"), st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_books_never_hand_out_a_page_twice(steps):
    """Rows take pages (t) or find some first (f), are extended and named again (e), and give their pages back (s)."""
    books = Pages(count=12, size=4)
    held: list[list[int]] = []
    texts: list[np.ndarray] = []
    for kind, which, tokens in steps:
        ids = (np.arange(tokens) + which).astype(np.int32)
        if kind == "s" and held:
            pages = held.pop(which % len(held))
            del texts[which % (len(held) + 1)]
            books.give_back(pages)
            continue
        if kind == "e" and held:
            k = which % len(held)
            ids = np.concatenate([texts[k], ids])
            more = books.needed(len(ids)) - len(held[k])
            if more > books.available:
                continue
            held[k] += books.take(more)
            texts[k], pages = ids, held[k]
        else:
            found = books.find("v", ids) if kind == "f" else []
            try:
                pages = found + books.take(books.needed(tokens) - len(found))
            except OutOfPages:
                books.give_back(found)
                continue
            held.append(pages)
            texts.append(ids)
        books.name("v", ids, pages)
        own = [page for pages in held for page in pages]
        assert 0 not in own, "the scratch page is nobody's"
        counts = {page: own.count(page) for page in own}
        assert all(books._holders[page] == n for page, n in counts.items())
        for page, name in books._name_of.items():
            assert books._page_of[name] == page
        expected = dict(zip(books._names(b"v", ids), pages, strict=False))
        assert all(books._name_of.get(page, name) == name for name, page in expected.items()), "as from the beginning"
    for pages in held:
        books.give_back(pages)
    assert books.available == 11


# -- kernels --------------------------------------------------------------------------------------------------


KERNELS = "decode, prefill, draw, record, angles, few rows, score, features, narrow, own, copies"
OTHERS = (
    "together, long together, rotate, learner, joined learner, rotated, half, half together, forbidden, between, "
    "other shapes together, groups"
)
INTERPRETED = Path(__file__).with_name("kernels_in_the_interpreter.py")


def test_every_check_of_a_kernel_is_run():
    (table,) = re.findall(r"^CHECKS = \{\n(.*?)^\}", INTERPRETED.read_text(), re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r'^    "([^"]+)": ', table, re.MULTILINE)) == sorted(f"{KERNELS}, {OTHERS}".split(", "))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)")
@pytest.mark.parametrize("checks", [KERNELS, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_kernels_compute_what_the_reference_computes(checks):
    """In triton's interpreter, in a process of its own: the switch must be set before triton is imported."""
    names = checks.split(", ")
    done = subprocess.run(
        [sys.executable, str(INTERPRETED), *names], capture_output=True, text=True, timeout=800,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == names


def test_siblings_are_joined_and_compute_what_they_computed_alone():
    model, _ = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
    ids = torch.arange(6)[None]
    alone = model(input_ids=ids).logits
    join_siblings(model)
    layer = model.get_decoder().layers[0]
    assert layer.self_attn.q_proj.weight.untyped_storage().data_ptr() == (
        layer.self_attn.v_proj.weight.untyped_storage().data_ptr()
    )
    torch.testing.assert_close(model(input_ids=ids).logits, alone)
    # a younger sibling asked about another input than the eldest computes for itself
    x, y = torch.randn(2, 32), torch.randn(2, 32)
    layer.self_attn.q_proj(x)
    torch.testing.assert_close(layer.self_attn.k_proj(y), y @ layer.self_attn.k_proj.weight.T)
    # and the common weight is what a new agent's weights are written to
    with torch.no_grad():
        layer.self_attn.k_proj.weight.zero_()
    layer.self_attn.q_proj(x)
    assert not layer.self_attn.k_proj(x).any()


@pytest.mark.long
def test_joined_siblings_are_one_graph_for_the_compiler():
    model, _ = tiny_model(TinyShape(layers=2, width=32, heads=4), seed=0)
    join_siblings(model)
    ids = torch.arange(6)[None]
    explained = torch._dynamo.explain(model.get_decoder())(input_ids=ids, use_cache=False)
    assert explained.graph_break_count == 0


@pytest.mark.long
def test_joined_attention_is_one_graph_for_the_compiler(policy):
    copy = SamplingCopy(policy.causal_lm, torch.float32, CPU)
    server = Server(copy, pool_bytes=1 << 24, graphs=False)
    server.reserve([8], 4)
    layout = Decoding(server._require_pool(), torch.ones(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    ids = torch.tensor([[5]])
    with attending(copy.model, layout):
        explained = torch._dynamo.explain(copy.model.get_decoder())(input_ids=ids, position_ids=ids, use_cache=False)
    assert explained.graph_break_count == 0
    names = {str(node.target) for graph in explained.graphs for node in graph.graph.nodes}
    assert any("rotated_attention" in name for name in names)


def test_prompts_that_only_begin_alike_share_pages_in_the_same_call(policy):
    """Three episodes of two problems in the second turn: the problem is computed once for each."""
    rng = np.random.default_rng(3)
    problems = [rng.integers(3, 30, size=2 * PAGE + 5).astype(np.int32) for _ in range(2)]
    turns = [np.concatenate([problems[k % 2], rng.integers(3, 30, size=40).astype(np.int32)]) for k in range(6)]
    server = make_server(policy)
    computed = []
    hidden = server._hidden
    server._hidden = lambda layout, ids, position: computed.append(len(ids)) or hidden(layout, ids, position)
    noise = uniforms(1, 6, 5)
    drawing = TokenSampler(1.0, 1.0, 0)
    found = server.sample("v", turns, noise, drawing=drawing, end_ids=policy.end_ids)
    assert computed[0] == 2 * 2 * PAGE + 6 * 45
    with torch.no_grad():
        plain = policy._sample_plainly(turns, noise, drawing)
    assert [s.token_ids.tolist() for s in found] == [s.token_ids.tolist() for s in plain]


def test_a_prefill_that_fails_leaves_no_page_to_be_found(policy):
    server = make_server(policy)
    prompts, noise, drawing = some_prompts(4), uniforms(1, 4, 5), TokenSampler(1.0, 1.0, 0)
    hidden = server._hidden

    def broken(*_):
        raise torch.OutOfMemoryError("injected")

    server._hidden = broken
    with pytest.raises(torch.OutOfMemoryError):
        server.sample("v", prompts, noise, drawing=drawing, end_ids=policy.end_ids)
    server._hidden = hidden
    found = server.sample("v", prompts, noise, drawing=drawing, end_ids=policy.end_ids)
    with torch.no_grad():
        plain = policy._sample_plainly(prompts, noise, drawing)
    assert [s.token_ids.tolist() for s in found] == [s.token_ids.tolist() for s in plain]
