"""Rows that join and leave the paged sampler's running batch say what they say in a batch of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from conftest import make_policy
from teamtr.answers import Decoding, Ended, Sample, Wanted
from teamtr.config import loads
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.buffers import NOBODY
from teamtr.engines.paged.layout import Decoding as Layout
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.row_adapters import RowAdapters, adapted_linears, adapter_numbers, why_not
from teamtr.engines.paged.sampler import PAGE, Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.attention import AttentionShape, Unsupported, attending
from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.ports import Demand, Lengths
from teamtr.randomness import uniforms
from teamtr.rollout import play
from teamtr.session.build import build
from teamtr.session.train import train
from teamtr.store import RunFolder
from teamtr.theory.objective import Objective
from teamtr.types import Ids

CPU = torch.device("cpu")


def two_agents(kind: str, pool: SamplerPool) -> LocalEngine:
    """On one server: two models, or two adapters of one base."""
    first = make_policy(kind)
    if kind == "full":
        other = make_policy(kind, seed=1)
    else:
        first.base_version = "base"
        other = TransformerPolicy(first.model, first.tokenizer, adapter="other", base_version="base", fused=first.fused)
        with torch.no_grad():
            for k, parameter in enumerate(other.parameters().values()):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)))
    for policy in (first, other):
        policy.serving = pool
    return LocalEngine({"a": PolicyLearner("a", first), "b": PolicyLearner("b", other)})


def pool_of(pages: int | None = None, **settings: Any) -> SamplerPool:
    per_page = Pool.bytes_per_page(AttentionShape.of(make_policy("full").causal_lm.config), PAGE, torch.float32)
    return SamplerPool("fp32", CPU, memory_bytes=1 << 26 if pages is None else pages * per_page, **settings)


def server_of(engine: LocalEngine) -> Server:
    policy = engine.learner("a").policy
    return policy.serving.server_of(policy.causal_lm)


def some_wanted(count: int, tokens: int = 24) -> list[Wanted]:
    """Of two agents, with prompts and messages of different lengths, the last ones the longest."""
    rng, noise = np.random.default_rng(0), uniforms(7, count, tokens)
    lengths = [3 + 5 * k for k in range(count)]
    return [
        Wanted("ab"[k % 2], rng.integers(3, 30, size=n).astype(np.int32), noise[k, : tokens // 2 + k])
        for k, n in enumerate(lengths)
    ]


def alone(engine: LocalEngine, one: Wanted) -> Sample:
    """The row by itself, without pages."""
    policy = engine.learners[one.agent].policy
    drawing = TokenSampler.of(one.decoding, policy.temperature)
    with torch.no_grad(), policy.computing():
        [sample] = policy._sample_plainly([one.prompt], one.noise_T[None], drawing)
    return sample


class Waves:
    """Wants more whenever something has ended, a few rows at a time."""

    def __init__(self, wanted: Sequence[Wanted], first: int, then: int) -> None:
        self.left, self.size, self.then = list(wanted), first, then
        self.found: dict[int, Sample] = {}

    def __call__(self, ended: Sequence[Ended]) -> list[Wanted]:
        assert not self.found.keys() & {one.row for one in ended}
        self.found.update({one.row: one.sample for one in ended})
        if self.found and not ended:
            return []
        given, self.left = self.left[: self.size], self.left[self.size :]
        self.size = self.then
        return given


def assert_as_alone(engine: LocalEngine, wanted: Sequence[Wanted], found: dict[int, Sample]) -> None:
    assert sorted(found) == list(range(len(wanted)))
    for row, sample in found.items():
        expected = alone(engine, wanted[row])
        assert sample.token_ids.tolist() == expected.token_ids.tolist(), row
        assert sample.finish == expected.finish
        assert sample.version == engine.version(wanted[row].agent)
        np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "pages"),
    [
        ("lora", None),
        ("lora by_row", 9),
        *[pytest.param(*slow, marks=pytest.mark.slow) for slow in [("full", None), ("full", 9), ("lora", 9)]],
        pytest.param("lora by_row", None, marks=pytest.mark.slow),
    ],
)
def test_rows_join_a_running_batch_and_say_what_they_say_alone(kind: str, pages: int | None, monkeypatch):
    """Also where they wait for pages, and where those that join need larger buffers. Rows of several agents are in one
    batch where adapters are applied by row, and never where weights are merged."""
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", 3)
    by_row = kind == "lora by_row"
    engine = two_agents(kind.split()[0], pool_of(pages, adapters="by_row" if by_row else "merged"))
    wanted = some_wanted(14)
    server, joined, agents = server_of(engine), 0, 0
    admit = server._admit

    def noted(waiting: Any, running: Any, *others: Any) -> Any:
        nonlocal joined, agents
        fresh = admit(waiting, running, *others)
        joined += len(fresh) if running else 0
        agents = max(agents, len({sequence.job.speaker for sequence in (*running, *fresh)}))
        return fresh

    monkeypatch.setattr(server, "_admit", noted)
    waves = Waves(wanted, first=4, then=3)
    engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)
    assert joined, "every row waited for all others: this proves nothing"
    assert agents == (2 if by_row else 1)
    assert server.books.available == server.books.count - 1, "every page was given back"


@pytest.mark.long
def test_rows_of_other_decodings_have_batches_of_their_own():
    engine = two_agents("lora", pool_of())
    wanted = [
        Wanted(one.agent, one.prompt, one.noise_T, Decoding(temperature=0.5 + k % 2))
        for k, one in enumerate(some_wanted(6))
    ]
    waves = Waves(wanted, first=6, then=0)
    engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)


@pytest.mark.long
def test_tokens_of_a_stream_are_followed_and_a_row_can_be_left():
    engine, wanted = two_agents("lora", pool_of()), some_wanted(6, tokens=60)
    told: dict[int, list[int]] = {row: [] for row in range(6)}

    def follow(row: int, before: int, token_ids: Ids) -> bool:
        assert before == len(told[row])
        told[row] += token_ids.tolist()
        return row != 3

    waves = Waves(wanted, first=2, then=2)
    engine.stream(waves, follow=follow)
    for row, sample in waves.found.items():
        expected = alone(engine, wanted[row]).token_ids.tolist()
        assert told[row] == sample.token_ids.tolist() == expected[: len(told[row])]
        assert row == 3 or len(told[row]) == len(expected)


@pytest.mark.long
def test_who_stops_a_stream_leaves_no_page_behind():
    engine, wanted = two_agents("full", pool_of()), some_wanted(5)

    def stops(ended: Sequence[Ended]) -> list[Wanted]:
        if ended:
            raise KeyboardInterrupt
        return wanted

    with pytest.raises(KeyboardInterrupt):
        engine.stream(stops)
    server = server_of(engine)
    assert server.books.available == server.books.count - 1
    waves = Waves(wanted, first=5, then=0)
    engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)


@pytest.mark.long
def test_a_message_that_is_not_finite_is_sampled_again_before_anybody_hears_of_it(monkeypatch):
    pool = SamplerPool("fp16", CPU, memory_bytes=1 << 26, fallback="fp32")
    engine, wanted = two_agents("full", pool), some_wanted(6)
    with torch.no_grad():  # of the second agent: more than float16 holds
        engine.learner("b").policy.causal_lm.get_decoder().layers[0].mlp.down_proj.weight.mul_(1e6)
    waves = Waves(wanted, first=3, then=1)
    with pytest.warns(UserWarning, match="sampled again, and from now on with paged fp32"):
        engine.stream(waves)
    assert all(np.isfinite(sample.logprobs).all() for sample in waves.found.values())
    in_full = {row: sample for row, sample in waves.found.items() if wanted[row].agent == "b"}
    for row, sample in in_full.items():
        assert sample.token_ids.tolist() == alone(engine, wanted[row]).token_ids.tolist()
    assert sorted(waves.found) == list(range(6))
    monkeypatch.setattr(SamplerPool, "fall_back", lambda self: False)
    pool.precision = "fp16"
    pool._servers.clear()
    with pytest.raises(UserError, match="not finite"):
        engine.stream(Waves(wanted, first=3, then=1))


@pytest.mark.long
def test_an_architecture_that_turns_out_unsupported_goes_on_plainly(monkeypatch):
    engine, wanted = two_agents("full", pool_of()), some_wanted(5)
    server = server_of(engine)

    def refuses(*_: Any) -> Any:
        raise Unsupported("a window shorter than its contexts")

    monkeypatch.setattr(server, "_hidden", refuses)
    waves = Waves(wanted, first=3, then=1)
    with pytest.warns(UserWarning, match="falls back to the plain"):
        engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)


@pytest.mark.long
def test_a_message_that_is_not_finite_goes_on_plainly_where_pages_turn_out_unsupported(monkeypatch):
    engine, wanted = two_agents("full", SamplerPool("fp16", CPU, memory_bytes=1 << 26, fallback="fp32")), some_wanted(6)
    with torch.no_grad():  # of the agent that speaks first: more than float16 holds
        engine.learner("a").policy.causal_lm.get_decoder().layers[0].mlp.down_proj.weight.mul_(1e6)
    server = server_of(engine)
    prefill, asked = server._prefill, []

    def refuses(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 1:
            raise Unsupported("a window shorter than its contexts")
        return prefill(*arguments)

    monkeypatch.setattr(server, "_prefill", refuses)
    waves = Waves(wanted, first=6, then=0)
    with pytest.warns(UserWarning, match="falls back to the plain"):
        engine.stream(waves)
    assert len(asked) == 2
    assert_as_alone(engine, wanted, waves.found)


def test_a_row_that_can_never_fit_is_refused_in_words():
    engine = two_agents("full", pool_of())
    room = engine.learner("a").policy.positions
    with pytest.raises(UserError, match=f"has {room} positions"):
        engine.stream(Waves([Wanted("a", np.ones(3, dtype=np.int32), np.zeros(room))], first=1, then=0))


# -- adapters by row ----------------------------------------------------------------------------------------------


def grouped(x_NI: Tensor, index_N: Tensor, adapters: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What adapters add, one agent's rows after the other's."""
    out = torch.zeros(len(x_NI), len(adapters[0][1]))
    for k, (down, up) in enumerate(adapters):
        own = (index_N == k).nonzero().squeeze(-1)
        out.index_copy_(0, own, x_NI.index_select(0, own) @ down.T @ up.T)
    return out


def rows_of(engine: LocalEngine) -> RowAdapters:
    rows = server_of(engine).copy.rows
    assert rows is not None
    for name in ("a", "b"):
        paged = engine.learner(name).policy.paged(engine.version(name), TokenSampler())
        assert paged is not None
        paged.speaker.take_up()
    return rows


def test_a_row_gets_what_its_own_adapter_adds_and_nobody_nothing():
    """In joined layers too; and whatever another agent's adapter would make of the row."""
    engine = two_agents("lora", pool_of(adapters="by_row"))
    rows = rows_of(engine)
    policy = engine.learner("a").policy
    assert rows.number == {"agent": 0, "other": 1}
    torch.manual_seed(0)
    with torch.no_grad():
        for name, module in adapted_linears(policy.causal_lm).items():
            x_NI = torch.randn(6, module.base_layer.in_features)
            index_N = torch.tensor([1, 0, NOBODY, 1, 0, NOBODY])
            adapters = [
                (module.lora_A[k].weight, module.lora_B[k].weight * module.scaling[k]) for k in ("agent", "other")
            ]
            layer = server_of(engine).copy.model.get_submodule(name)
            rows.index_N = torch.full((6,), NOBODY)
            base = layer(x_NI)
            torch.testing.assert_close(base, torch.nn.functional.linear(x_NI, layer.weight, layer.bias))
            rows.index_N = index_N
            added = layer(x_NI) - base
            torch.testing.assert_close(added, grouped(x_NI, index_N, adapters), atol=1e-5, rtol=1e-4)
            assert added[2].abs().max() == 0 == added[5].abs().max()
            assert added[0].abs().max() > 0.01
        for product, _ in rows._places.values():  # overflows on every row
            product.down[product.adapter_of_column == 1] = 3e38
            rows.index_N = torch.zeros(3, dtype=torch.int64)
            assert product(torch.ones(3, product.down.shape[1])).isfinite().all()


@torch.no_grad()
def test_adapters_by_row_may_differ_in_ranks_and_in_the_layers_that_they_sit_on():
    """Also one adapter from layer to layer."""
    model, _ = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)
    on = {"all": ("all-linear", 4), "few": (["q_proj", "down_proj"], 2)}
    loras = {name: SimpleNamespace(rank=rank, alpha=8.0, targets=targets) for name, (targets, rank) in on.items()}
    shared = share_base(model, loras, seed=0)
    shared.add_adapter("uneven", LoraConfig(r=2, rank_pattern={"q_proj": 6}, target_modules=["q_proj", "up_proj"]))
    causal_lm = shared.get_base_model()
    copy = SamplingCopy(causal_lm, torch.float32, CPU)
    copy.apply_by_row(causal_lm)
    assert copy.rows is not None
    torch.manual_seed(0)
    for name, parameter in causal_lm.named_parameters():
        if "lora_" in name:
            parameter.normal_()
    for name in copy.rows.number:
        copy.put(causal_lm, name, version="", base="")
    copy.rows.index_N = torch.tensor([2, 1, 0, NOBODY])
    for name, module in adapted_linears(causal_lm).items():
        x_NI = torch.randn(4, module.base_layer.in_features)
        expected = module.base_layer(x_NI)
        for row, adapter in enumerate(["uneven", "few", "all"]):
            if adapter in module.lora_A:
                expected[row] += module.scaling[adapter] * module.lora_B[adapter](module.lora_A[adapter](x_NI[row]))
        layer = copy.model.get_submodule(name)
        torch.testing.assert_close(layer(x_NI), expected)
        if siblings := getattr(layer, "siblings", None):
            held = [one.untyped_storage().data_ptr() for one in (siblings.weight, layer.weight)]
            assert held[0] == held[1], "nobody holds the weight that they had before"
    products = {id(product): product for product, _ in copy.rows._places.values()}.values()
    assert sum(product.down.numel() + product.up.numel() for product in products) == adapter_numbers(causal_lm)


@pytest.mark.long
def test_an_update_is_applied_by_row_at_once():
    engine, wanted = two_agents("lora", pool_of(adapters="by_row")), some_wanted(6)
    engine.stream(Waves(wanted, first=6, then=0))
    before = engine.version("a")
    engine.learner("a").perturb(0.5, seed=1)
    assert engine.version("a") != before
    waves = Waves(wanted, first=6, then=0)
    engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)
    batches = {agent: engine.sample(agent, [one.prompt for one in wanted], uniforms(1, 6, 9)) for agent in "ab"}
    for agent, samples in batches.items():  # a batch is sampled the same way
        for one, sample, noise in zip(wanted, samples, uniforms(1, 6, 9), strict=True):
            expected = alone(engine, Wanted(agent, one.prompt, noise))
            assert sample.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.long
def test_adapters_by_row_are_one_graph_for_the_compiler_whoever_speaks():
    engine = two_agents("lora", pool_of(adapters="by_row"))
    rows, server = rows_of(engine), server_of(engine)
    server.reserve([8], 4)
    layout = Layout(
        server._require_pool(), torch.ones(2, 1, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    )
    ids = torch.tensor([[5, 6]])
    rows.index_N = torch.tensor([0, 1])
    with attending(server.copy.model, layout):
        explained = torch._dynamo.explain(server.copy.model.get_decoder())(
            input_ids=ids, position_ids=ids, use_cache=False
        )
    assert explained.graph_break_count == 0


@pytest.mark.long
def test_what_adapters_take_beside_each_other_is_planned():
    engine = two_agents("lora", pool_of(adapters="by_row"))
    rows = rows_of(engine)
    products = {id(product): product for product, _ in rows._places.values()}.values()
    held = sum(4 * (product.down.numel() + product.up.numel()) for product in products)
    assert held == 4 * adapter_numbers(engine.learner("a").policy.causal_lm) > 0
    lengths = dict.fromkeys("ab", Lengths(20, 10))
    demand = Demand(lengths, 4, 2, dict.fromkeys("ab", 4), dict.fromkeys("ab", 4), 1, Objective())
    [planned] = [item.bytes for item in engine.memory_plan(demand).items if item.what == "adapters by row"]
    assert planned == held


@pytest.mark.long
def test_adapters_that_cannot_be_applied_by_row_are_merged_and_somebody_is_told(monkeypatch):
    monkeypatch.setattr("teamtr.engines.paged.pool.why_not", lambda causal_lm: "x is no plain linear layer")
    engine, wanted = two_agents("lora", pool_of(adapters="by_row")), some_wanted(4)
    waves = Waves(wanted, first=4, then=0)
    with pytest.warns(UserWarning, match=r"merged, one agent at a time, .*: x is no plain linear layer"):
        engine.stream(waves)
    assert_as_alone(engine, wanted, waves.found)


def test_what_is_more_than_a_low_rank_product_of_the_body_is_not_applied_by_row():
    policy = make_policy("lora")
    assert why_not(policy.causal_lm) is None
    assert why_not(make_policy("full").causal_lm) == "it has none"
    adapted = next(iter(adapted_linears(policy.causal_lm).values()))
    adapted.use_dora["agent"] = True
    assert "more than a low-rank product" in str(why_not(policy.causal_lm))
    adapted.use_dora["agent"] = False
    adapted.base_layer.__class__ = type("Other", (torch.nn.Linear,), {})
    assert "no plain linear layer" in str(why_not(policy.causal_lm))


# -- through play and training ------------------------------------------------------------------------------------

TEAM = """
name: ragged
task: {name: sums}
team: {model: tiny, train: lora, max_tokens: 20, router: {rounds: 2}, agents: [{name: ann}, {name: bob}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {stages: 2, problems: 2, group_size: 2, radius_nats_per_message: 0.05}
learner: {micro_batch: 16}
eval: {every: 0}
"""
BY_ROW = ("sampling.engine=paged", "sampling.adapters=by_row")


@pytest.mark.long
def test_a_team_whose_episodes_go_on_by_themselves_plays_what_the_plain_one_plays_in_lockstep(monkeypatch):
    monkeypatch.setattr("teamtr.engines.paged.sampler.LOOK_EVERY", 2)
    batches, admit, agents = {}, Server._admit, []

    def noted(self: Server, waiting: Any, running: Any, *others: Any) -> Any:
        fresh = admit(self, waiting, running, *others)
        agents.append(len({sequence.job.speaker for sequence in (*running, *fresh)}))
        return fresh

    monkeypatch.setattr(Server, "_admit", noted)
    for overrides in ((), BY_ROW):
        session = build(loads(TEAM, "ragged", overrides))
        for k, name in enumerate(("ann", "bob")):
            session.engine.learner(name).perturb(0.5, seed=k)
        batches[overrides] = play(
            session.context, session.current_team(), session.task.problems("train")[:3], 3, seed=1
        )
    for plain, paged in zip(*(batch.episodes for batch in batches.values()), strict=True):
        assert [(t.agent, t.token_ids.tolist(), t.finish) for t in plain.turns] == [
            (t.agent, t.token_ids.tolist(), t.finish) for t in paged.turns
        ]
        assert plain.verdict == paged.verdict
    assert max(agents) == 2, "no batch held rows of both agents: this proves nothing"


@pytest.mark.long
@pytest.mark.slow
def test_a_resumed_run_whose_episodes_go_on_by_themselves_ends_with_the_same_weights(tmp_path: Path):
    found = []
    for name, parts in (("whole", (2,)), ("halves", (1, 2))):
        for stages in parts:
            list(train(loads(TEAM, "ragged", (*BY_ROW, f"plan.stages={stages}")), tmp_path / name))
        commit = RunFolder.read(tmp_path / name).checkpoints.latest()
        assert commit is not None
        found.append(dict(commit.agents))
    assert found[0] == found[1]
