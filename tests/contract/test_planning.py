"""The throughput model: counts by hand and by transformers, what must not grow, and errors that say what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from planned import LARGE, QWEN3_1_7B, SHAPE, TEAM, setup, workers
from teamtr.config import loads
from teamtr.engines import memory as loaded
from teamtr.engines.estimate import Held, items
from teamtr.engines.paged.sampler import PAGE
from teamtr.engines.passes import chunk_for, head_chunk
from teamtr.errors import UserError
from teamtr.planning import rates
from teamtr.planning.advice import helpful, made_to_fit, placement, smallest_sharing
from teamtr.planning.cards import CARDS, card_like, card_named
from teamtr.planning.configs import shape_of_source, tiny_shape
from teamtr.planning.exchange import exchange_seconds, gather_seconds
from teamtr.planning.learning import ATTENTION_BACK, LearnerCost, PassCount, Selection, step_rows
from teamtr.planning.memory import held, held_parameters, kept_bytes_per_token, memory_of, scored_at_once
from teamtr.planning.sampling import Decoder
from teamtr.planning.seconds import Load, Spent, distinct
from teamtr.planning.setup import Cluster, PlannedTurn, Sampling, Setup, likely_precision
from teamtr.planning.shape import FAMILIES, ModelShape, UnknownShape
from teamtr.planning.stage import predict
from teamtr.ports import GB, Engine, Lengths
from teamtr.presets import Plan, Radii
from teamtr.session.build import build
from teamtr.session.forecast import Where, _setup, forecast
from teamtr.session.memory import demand_of

# -- shapes ---------------------------------------------------------------------------------------------------


def test_weights_cache_and_operations_of_a_known_shape_by_hand():
    block = 2048 * (16 * 128) * 2 + 2048 * (8 * 128) * 2 + 3 * 2048 * 6144
    assert SHAPE.body == 28 * block == 1_409_286_144
    assert SHAPE.parameters == SHAPE.body + 28 * (2 * 2048 + 2 * 128) + 2048 + 151936 * 2048 == 1_720_574_976
    assert replace(SHAPE, tied=False).parameters - SHAPE.parameters == 151936 * 2048
    assert SHAPE.cache_bytes(2) == 2 * 28 * 8 * 128 * 2 == 114_688, "keys and values of a token in half precision"
    assert SHAPE.forward_flops(1) == 2 * SHAPE.body
    assert SHAPE.attention_flops(3, 10) == 2 * 2 * 28 * 16 * 128 * 3 * 10
    sides = 4 * 2048 + 2 * (2048 + 1024) + 3 * (2048 + 6144)  # query and output, key and value, the MLP
    assert SHAPE.adapter(16) == 28 * 16 * sides == 17_432_576
    assert SHAPE.adapter(16, ("q_proj", "v_proj")) == 28 * 16 * (2 * 2048 + 2048 + 1024)
    assert SHAPE.adapter(16, r".*\.0\.self_attn\.q_proj") == 16 * 2 * 2048, "a pattern of one block"


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_family_has_as_many_weights_as_transformers_makes(family: str, tied: bool):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 130, "tie_word_embeddings": tied,
    }  # fmt: skip
    for more in ({}, {"attention_bias": True}):
        if more and family in ("mistral", "qwen2", "smollm3"):  # they have no such choice
            continue
        config = AutoConfig.for_model(family, **sizes, **more, bos_token_id=0, eos_token_id=1, pad_token_id=2)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert ModelShape.of(json.loads(config.to_json_string())).parameters == model.num_parameters()


def test_the_built_in_model_has_the_shape_that_is_planned():
    built = build(loads(TEAM.format(train="full", engine="plain"), name="plan.yaml"))
    config = built.engine.learner("left").policy.causal_lm.config
    assert tiny_shape(layers=1, width=32, heads=4) == ModelShape.of(config.to_dict())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', which is no number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_experts": 8}, "a mixture of experts"),
        ({"model_type": "mamba"}, "model_type 'mamba'; planned without loading are dense models of the families llama"),
    ],
)
def test_a_config_that_does_not_say_enough_is_an_error_that_names_the_key(change, told):
    with pytest.raises(UnknownShape, match=told):
        ModelShape.of({**QWEN3_1_7B, **change}, "model 'x'")


def test_a_folder_without_a_readable_config_says_so(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        shape_of_source(str(tmp_path / "no"))
    with pytest.raises(UserError, match=r"no config\.json"):
        shape_of_source(str(tmp_path))
    for text, told in (("{", "is damaged"), ("[1]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=told):
            shape_of_source(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_1_7B))
    assert shape_of_source(str(tmp_path)) == SHAPE


def test_a_hub_id_is_planned_from_its_config_alone(monkeypatch):
    from transformers import AutoConfig

    asked: list[tuple[str, dict]] = []

    def config(source: str, **options: object) -> AutoConfig:
        asked.append((source, options))
        if source == "OWNER/BROKEN":
            raise OSError("no file named config.json\nmore")
        return AutoConfig.for_model(**QWEN3_1_7B)

    monkeypatch.setattr("teamtr.planning.configs.hub_options", lambda source, revision: {"local_files_only": True})
    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    assert shape_of_source("OWNER/NAME", "main") == SHAPE
    assert asked == [("OWNER/NAME", {"revision": "main", "trust_remote_code": False, "local_files_only": True})]
    with pytest.raises(UserError, match=r"OWNER/BROKEN.*no file named config\.json\); give a folder"):
        shape_of_source("OWNER/BROKEN")


def test_targets_that_name_no_layer_and_cards_that_are_not_known_are_errors():
    with pytest.raises(UnknownShape, match=r"lora\.targets"):
        SHAPE.adapter(8, ("wq",))
    assert card_named("h200") is CARDS["H200"]
    with pytest.raises(UserError, match=r"no card 'H20O' in the table \(did you mean H200\?\); there are H200, H100"):
        card_named("H20O")
    with pytest.raises(UserError, match="4 workers need as many"):
        Cluster(CARDS["H200"], workers=4, shards=2)


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("engine", ["plain", "paged"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_one_estimate_whether_models_are_loaded_or_only_their_configs_are_read(train: str, engine: str):
    """Counted and computed sizes are the same; what autograd keeps is measured in the one and computed in the other."""
    team_file = loads(TEAM.format(train=train, engine=engine), name="plan.yaml")
    built = build(team_file)
    demand = demand_of(built)
    there = _setup(team_file, built.plan, Cluster(CARDS["cpu"]), demand)
    counted = items(loaded.held(built.engine.learners, list(demand.messages)), demand)
    computed = items(held(there), demand)
    assert [item.what for item in computed] == [item.what for item in counted]
    for a, b in zip(computed, counted, strict=True):
        if a.what == "worst step":
            assert a.bytes == pytest.approx(b.bytes, rel=0.02)
        else:
            assert a == b


def test_a_worker_holds_its_part_of_the_batch_and_of_a_sharded_base():
    four = setup(**workers(4, 8))
    demand = four.worker_demand
    assert demand.episodes == 512 // 8, "one shard is sampled at a time"
    assert demand.messages == dict.fromkeys("abc", 512 // 4)
    cluster = replace(four.cluster, shard_base=True)
    assert held_parameters(SHAPE, cluster) == SHAPE.parameters - SHAPE.blocks + SHAPE.blocks // 4
    weights = next(item for item in memory_of(replace(four, cluster=cluster)).plan.items if item.what == "weights")
    assert weights.bytes == 4 * held_parameters(SHAPE, cluster)


def test_a_base_larger_than_a_card_fits_in_parts_beside_one_layer_of_it():
    """Nobody loads the whole of it: the sampler's copy in half precision is what takes most."""
    large = replace(setup(LARGE, micro_batch=1, **workers(64, shard_base=True)), sampling=Sampling(memory=4 << 30))
    small = replace(CARDS["H200"], memory=130 * 10**9)
    assert 4 * LARGE.parameters > small.memory
    found = memory_of(replace(large, cluster=replace(large.cluster, card=small)))
    assert found.fits
    sizes, layer = {item.what: item.bytes for item in found.plan.items}, 4 * LARGE.blocks // LARGE.layers
    assert sizes["a spread layer"] == layer * 3 // 2, "its weights, and half of that rounded to fp16"
    assert sizes["base in half precision"] == 2 * LARGE.head, "of the layers no copy is kept"
    full = replace(large, members=tuple(replace(member, rank=None) for member in large.members))
    trained = {item.what: item.bytes for item in memory_of(full).plan.items}["a spread layer"]
    assert trained == 4 * layer, "in fp32 its weights, and its gradient three times"
    whole = memory_of(replace(large, cluster=replace(large.cluster, shard_base=False)))
    assert "a spread layer" not in {item.what for item in whole.plan.items}


def test_bytes_of_an_8b_base_that_is_held_once_by_hand():
    """Qwen3-8B: 36 blocks of 192,937,984 weights in matrices and 8,448 in norms; 151,936 words of 4,096, twice."""
    shape = replace(SHAPE, layers=36, width=4096, inner=12288, heads=32, tied=False, stored="bf16")
    matrices, norms = 6_945_767_424 + 1_244_659_712, 308_224
    plain = setup(shape)

    def planned(base: str, **sampling: object) -> Held:
        learning = replace(plain.learning, base=base, precision="fp16")
        return held(replace(plain, learning=learning, sampling=replace(plain.sampling, **sampling)))

    three = planned("fp32")
    assert three.weights == 4 * (matrices + norms)
    assert three.halves == 2 * (6_945_767_424 + 622_329_856), "the products and the head"
    assert three.served[0].copy_bytes == 2 * (matrices + norms)
    one = planned("fp16", by_row=True)
    assert (one.weights, one.halves) == (2 * matrices + 4 * norms, 0) == (16_382_087_168, 0)
    assert (one.served[0].copy_bytes, one.served[0].shared_bytes) == (2 * norms, 2 * matrices)
    assert one.served[0].row_bytes == 2 * 36 * (144 * 10_240 + 48 * 8_192 + 96 * 28_672 + 48 * 16_384)
    assert one.cast == 4 * 2**26, "16,384 rows of the head"
    assert planned("file", by_row=True, precision="bf16").served[0].shared_bytes == 2 * matrices
    small, body, words = planned("int8", by_row=True), 6_945_767_424, 1_244_659_712
    scales = 4 * 36 * (4_096 + 2 * 1_024 + 4_096 + 2 * 12_288 + 4_096)
    assert (small.weights, small.halves) == (body + scales + 2 * words + 4 * norms, 0) == (9_441_923_072, 0)
    assert (small.served[0].copy_bytes, small.served[0].shared_bytes) == (2 * norms, body + scales + 2 * words)
    assert small.served[0].cast == 2 * 2 * 12_288 * 4_096, "gate and up, in fp16"
    assert small.cast == one.cast > 2 * 12_288 * 4_096, "a part of the head takes more than the largest layer"
    assert planned("int8").served[0].copy_bytes == 2 * (matrices + norms), "adapters are merged"
    assert planned("file", precision="bf16").served[0].shared_bytes == 0, "adapters are merged"
    apart = planned("file", by_row=True)
    assert (apart.weights, apart.halves) == (one.weights, 0), "bf16 becomes fp16 in passing"
    assert apart.served[0].copy_bytes == 2 * (matrices + norms), "the sampler's precision is another"


def test_a_micro_batch_that_does_not_fit_is_halved_until_it_does():
    found = predict(setup(micro_batch=512))
    assert found.micro_batch < 512
    assert found.memory.fits
    assert not memory_of(setup(micro_batch=2 * found.micro_batch)).fits
    lockstep = predict(setup(LARGE, micro_batch=16, **workers(8, shard_base=True)))
    assert lockstep.micro_batch == 16, "which never halve"
    assert not lockstep.memory.fits


def long_messages(tokens: int, recompute: str = "auto") -> Setup:
    """One agent on the 1.7B shape that says so much, in half precision."""
    one = setup(micro_batch=4)
    lengths = {"a": Lengths(256, tokens)}
    demand = replace(one.demand, lengths=lengths, episodes=64, problems=8, messages={"a": 64}, checked={"a": 0})
    return replace(
        one,
        members=one.members[:1],
        turns=(PlannedTurn("a", 256, tokens, 256),),
        demand=demand,
        plan=replace(one.plan, problems=8),
        learning=replace(one.learning, precision="fp16", recompute=recompute),
    )


def test_long_messages_are_recomputed_only_where_one_does_not_fit_otherwise():
    """A token of the 1.7B shape keeps 2.14 MB of activations: one of 32,768 tokens 71 GB, and 7 if only what goes into
    each layer is kept."""
    assert kept_bytes_per_token(SHAPE, "fp16", rank=16) == pytest.approx(2.144 * 2**20, rel=1e-3)
    short, long = predict(long_messages(8192)), predict(long_messages(32_768))
    assert short.as_record()["recomputed"] == []
    assert short.memory.fits
    assert long.as_record()["recomputed"] == ["a"]
    assert long.memory.fits
    assert long.micro_batch == 2
    kept = predict(long_messages(32_768, "never"))
    assert not kept.memory.fits
    assert kept.as_record()["recomputed"] == []
    assert any(change.settings.startswith("learner.recompute=auto") for change in helpful(kept))
    # one more forward pass: six products for a weight and a token instead of four
    forced = predict(long_messages(8192, "always"))
    assert 1.2 < forced.phases["train"].seconds / short.phases["train"].seconds < 1.5
    assert forced.phases["gate"].seconds <= short.phases["gate"].seconds, "nothing is recomputed without a gradient"
    spread = setup(LARGE, **workers(8, shard_base=True))
    assert memory_of(spread).plan.recomputed == (), "layers in parts are not there on the way back"


@pytest.mark.parametrize(
    ("nats", "message", "adapted", "precision"),
    [
        (0.05, 256, True, "fp16"),  # what docs/performance.md measured: 0.048 of the radius
        (0.01, 16, True, "fp16"),
        (0.01, 256, True, "fp32"),
        (0.01, 1024, True, "fp32"),
        (0.02, 256, True, "tf32"),
        (0.5, 16, False, "fp32"),
    ],
)
def test_precision_is_what_auto_was_seen_to_pick(nats, message, adapted, precision):
    assert likely_precision(Radii(nats), message, adapted=adapted) == precision


# -- seconds --------------------------------------------------------------------------------------------------


def test_waves_are_as_many_as_pages_allow():
    turn = PlannedTurn("a", 256, 256, alike=0)
    page = PAGE * SHAPE.cache_bytes(2)
    decoder = Decoder(SHAPE, CARDS["H200"], pages=100 * 8 * page)  # 512 tokens are eight pages
    assert decoder.at_once(turn, 512, 1) == 100
    assert decoder.waves(turn, 512, 1) == 6
    shared = replace(turn, alike=256)  # of a group of 8, seven rows do not need the four pages of the prompt
    assert decoder.at_once(shared, 512, 8) == int(800 / (8 - 4 * 7 / 8)) == 177
    assert replace(decoder, pages=None).waves(turn, 512, 1) == 1, "nothing is paged"
    assert replace(decoder, pages=10**15).at_once(turn, 5000, 1) == 1024, "graphs are captured for no more"
    little = replace(setup(), sampling=Sampling(memory=20 * 8 * page))
    found = predict(little)
    assert found.waves > 1
    assert found.phases["sample"].bound == "KV memory"
    assert found.seconds > predict(setup()).seconds


def test_a_decode_step_by_hand():
    """Few rows read all weights; many compute. Keys and values are read beside."""
    card, decoder = CARDS["H200"], Decoder(SHAPE, CARDS["H200"], pages=1 << 40)
    few = decoder.step(8, 1000)
    read = 2 * (SHAPE.body + SHAPE.head) + 8 * 1000 * SHAPE.cache_bytes(2)
    assert few.by["bandwidth"] == pytest.approx(read / (rates.READ * card.bandwidth))
    assert few.by.get("compute", 0.0) == 0.0
    many = decoder.step(1024, 1000)
    assert many.by["bandwidth"] == pytest.approx(1024 * 1000 * SHAPE.cache_bytes(2) / (rates.READ * card.bandwidth))
    compute = 2 * 1024 * (SHAPE.body / rates.DECODE_PRODUCTS + SHAPE.head / rates.DECODE_HEAD) / card.flops["fp16"]
    assert many.by["compute"] == pytest.approx(compute)
    assert decoder.step(129, 10).by["compute"] == decoder.step(192, 10).by["compute"], "a graph of 192 rows is replayed"


def test_common_beginnings_are_read_once_by_a_group_where_that_pays():
    decoder = Decoder(SHAPE, CARDS["H200"], pages=1 << 40)
    apart, together = decoder.step(256, 320).by["bandwidth"], decoder.step(256, 320, 256, 8).by["bandwidth"]
    assert together / apart == pytest.approx((64 + 256 / 8) / 320)
    few = decoder.step(32, 320, 256, 8)  # splits a row's pages among programs
    assert few.by["bandwidth"] == decoder.step(32, 320).by["bandwidth"]


def test_tokens_of_a_step_share_the_prompts_that_are_drawn_together():
    assert distinct(PlannedTurn("a", 256, 100, alike=256), problems=4, rows=32) == 4 * 256 + 32 * 100
    assert distinct(PlannedTurn("a", 600, 100, alike=256, known=400), 4, 32) == 32 * (700 - 400)
    one = setup()
    rows = step_rows(LearnerCost(one, one.members[0]), Load.learned(one))
    assert rows.episodes == 128
    assert rows.problems == pytest.approx(64 * (1 - 0.75**8)), "of eight episodes, one at least is in a given quarter"


@pytest.mark.parametrize(("precision", "recomputes"), [("fp16", False), ("fp16", True), ("fp32", False)])
def test_attention_goes_back_in_two_and_a_half_times_what_it_takes_forward(precision, recomputes):
    """One message of 16,384 tokens by hand, on prompts of as many: as torch counts its kernels, which keep no weights
    of pairs. Of adapters; one pass more where a layer is computed again."""
    forward, back = sdpa_flop_count(*[(1, 1, 64, 16)] * 3), sdpa_backward_flop_count(*[(1, 1, 64, 16)] * 4)
    assert back / forward == ATTENTION_BACK
    tokens, said = 32_768, 256
    turn, card = PlannedTurn("a", tokens - said, said, alike=0), CARDS["H200"]
    one = setup(micro_batch=1)
    one = replace(one, turns=(turn, *one.turns[1:]), learning=replace(one.learning, precision=precision))
    step = LearnerCost(one, one.members[0], recomputes).step(Selection(problems=1, episodes=1, micro_batches=1))
    attention = 4 * 28 * 16 * 128 * tokens * tokens / 2
    products = 2 * SHAPE.body * tokens
    again = 1 if recomputes else 0
    adapters, head = 6 * one.members[0].trained * tokens, 3 * 2 * SHAPE.head * said
    share = rates.TRAIN[precision]
    attended = (1 + 2.5 + again) * attention / rates.ATTENTION.get(precision, share)
    seconds = (((2 + again) * products + adapters + head) / share + attended) / card.flops[precision]
    assert step.by["compute"] == pytest.approx(seconds)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_logits_that_are_not_held_until_the_way_back_are_computed_once_more(precision):
    """Of both policies. Where output layer and score are one, a chunk is 1.6 times as long."""
    one, rows = setup(micro_batch=1), Selection(problems=1, episodes=1, micro_batches=1)
    one = replace(one, learning=replace(one.learning, precision=precision))
    held_at_once = int(0.03 * 141e9) // 4 // SHAPE.vocabulary
    held_at_once = int(1.6 * held_at_once) if precision == "fp16" else held_at_once

    def compute(said: int) -> float:
        turn = PlannedTurn("a", 20_000 - said, said, alike=0)
        chosen = replace(one, turns=(turn, *one.turns[1:]))
        return LearnerCost(chosen, chosen.members[0]).step(rows).by["compute"]

    rate = rates.TRAIN[precision] * CARDS["H200"].flops[precision]
    position = 2 * SHAPE.head / rate
    assert compute(held_at_once) - compute(held_at_once - 100) == pytest.approx(3 * 100 * position, rel=1e-6)
    more = compute(held_at_once + 1) - compute(held_at_once)
    assert more == pytest.approx((3 + 2 * (held_at_once + 1)) * position, rel=1e-6)


def test_a_chunk_of_logits_by_hand_and_as_a_card_is_asked(monkeypatch):
    """A CPU holds 16 million at once; a card 3 % of all its memory, in float32; neither less than one position."""
    assert chunk_for(None, 151_936) == 105
    assert chunk_for(141 * 10**9, 151_936) == 6_960
    assert chunk_for(None, 16_000_001) == chunk_for(10**6, 151_936) == 1
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * 10**9))
    assert head_chunk(torch.device("cuda"), 151_936) == 6_960
    assert head_chunk(torch.device("cpu"), 151_936) == 105


@pytest.mark.parametrize(
    ("precision", "rank", "card", "positions"),
    [
        ("fp16", 16, "H200", 11_136),
        ("bf16", 16, "H200", 6_960),  # the head is float32
        ("fp16", None, "H200", 6_960),  # the head is trained
        ("fp16", 16, "cpu", 105),
    ],
)
def test_more_logits_are_held_only_under_adapters_in_fp16_on_a_card(precision, rank, card, positions):
    """Where output layer and score are one kernel."""
    one = setup(rank=rank)
    one = replace(one, cluster=Cluster(CARDS[card]), learning=replace(one.learning, precision=precision))
    assert scored_at_once(one, one.members[0]) == positions


def test_logits_are_held_where_the_micro_batch_has_few_enough_of_the_agents_longest_turn():
    """Two messages at a time, 6,960 positions: whatever the agent says at other turns, and others say at theirs."""
    one = setup(micro_batch=2)
    one = replace(one, learning=replace(one.learning, precision="fp32"))
    rows, short, other = Selection(1, 2, 1), PlannedTurn("a", 64, 64, 0), PlannedTurn("b", 256, 8_000, 0)

    def compute(said: int) -> float:
        chosen = replace(one, turns=(PlannedTurn("a", 20_000 - said, said, 0), short, other))
        return LearnerCost(chosen, chosen.members[0]).step(rows).by["compute"]

    position = 2 * SHAPE.head / (rates.TRAIN["fp32"] * CARDS["H200"].flops["fp32"])
    assert compute(3_480) - compute(3_380) == pytest.approx(3 * 2 * 100 * position, rel=1e-6)
    both = 2 * 2 * (3_481 + 64)
    assert compute(3_481) - compute(3_480) == pytest.approx((3 * 2 + both) * position, rel=1e-6)


@pytest.mark.parametrize(("rank", "recomputes"), [(16, False), (16, True), (None, False), (None, True)])
def test_what_is_computed_in_a_step_and_how_often_it_is_launched_by_hand(rank, recomputes):
    """Of weights that are trained themselves three products and three of the output layer, and the old policy's; of
    adapters two. Python goes through 28 blocks once forward and twice back, and once more where they are recomputed."""
    one = setup(micro_batch=1, rank=rank)
    one = replace(one, learning=replace(one.learning, precision="fp32"))
    turn, again = PlannedTurn("a", 768, 256, alike=0), 1 if recomputes else 0
    one = replace(one, turns=(turn, *one.turns[1:]))
    learner = LearnerCost(one, one.members[0], recomputes)
    rate = CARDS["H200"].flops["fp32"]
    products, attention = 2 * SHAPE.body * 1_024, 4 * 28 * 16 * 128 * 1_024 * 512
    head = 2 * SHAPE.head * 256
    forward = (products + attention + 2 * head) / (rates.SCORE["fp32"] * rate)
    assert learner.forward(Selection(1, 1, 1), heads=2).by == pytest.approx({"compute": forward, "bandwidth": 0})
    adapters = 0 if rank is None else 6 * one.members[0].trained * 1_024
    passes, heads = (3, 4) if rank is None else (2, 3)
    flops = (passes + again) * products + (3.5 + again) * attention + heads * head + adapters
    assert learner.step(Selection(1, 1, 1)).by["compute"] == pytest.approx(flops / (rates.TRAIN["fp32"] * rate))
    idle = Selection(1e-9, 1e-9, 10)
    assert learner.step(idle).by == {"launches": pytest.approx((3 + again) * 10 * 28 * rates.HOST_BLOCK_S)}
    assert learner.forward(idle, heads=1).by == {"launches": pytest.approx(10 * 28 * rates.HOST_BLOCK_S)}


def test_passes_are_counted_by_tokens_where_they_are_filled_by_tokens():
    """Two turns of 256 and 768 tokens: in half precision, two thirds of the passes that all messages would take."""
    one = setup()
    turns = (PlannedTurn("a", 128, 128, 128), PlannedTurn("a", 640, 128, 128))
    twice = replace(one, turns=(*turns, *one.turns[1:]))

    def passes(precision: str) -> float:
        chosen = replace(twice, learning=replace(twice.learning, precision=precision))
        return step_rows(LearnerCost(chosen, chosen.members[0]), Load.learned(chosen)).micro_batches

    assert passes("fp32") == 128 * 2 / 16
    assert passes("fp16") == passes("bf16") == -(-128 * 2 * 512 / 768 // 16)
    alike = replace(twice, turns=(turns[1], turns[1], *one.turns[1:]))
    assert step_rows(LearnerCost(alike, alike.members[0]), Load.learned(alike)).micro_batches == passes("fp32")


@pytest.mark.parametrize(
    ("base", "precision", "moved"),
    [
        ("fp32", "fp16", 0),  # computed with halves that are kept
        ("fp16", "fp16", 0),
        ("file", "fp16", 4),  # bf16 is read, fp16 written
        ("int8", "fp16", 3),
        ("int8", "fp32", 5),
    ],
)
def test_casting_a_base_counts_once_forward_once_back_and_once_more_where_it_is_recomputed(base, precision, moved):
    """1,409,286,144 weights in the layers, at 0.82 of 4.8 TB/s; of weights that are trained none is cast."""
    plain = setup(replace(SHAPE, stored="bf16"))
    chosen = replace(plain, learning=replace(plain.learning, base=base, precision=precision))
    cast = moved * 1_409_286_144 / (0.82 * 4.8e12)
    rows = Selection(problems=64, episodes=512, micro_batches=8)

    def bandwidth(cost: Spent) -> float:
        return cost.by["bandwidth"]

    for recomputes, times in ((False, 2), (True, 3)):
        learner = LearnerCost(chosen, chosen.members[0], recomputes)
        assert bandwidth(learner.forward(rows, 1)) == pytest.approx(8 * cast)
        assert bandwidth(learner.step(rows)) == pytest.approx(8 * times * cast)
    trained = replace(chosen, members=tuple(replace(member, rank=None) for member in chosen.members))
    assert bandwidth(LearnerCost(trained, trained.members[0]).step(rows)) == 0.0


def test_two_gradients_pass_through_a_worker_in_every_step():
    """Four steps; seven eighths of a gradient away, as much of the sum back, and a gradient's worth of additions."""
    eight = setup(**workers(8))
    size = 4 * SHAPE.adapter(16)
    expected = 4 * size * (2 * 7 / 8 / rates.GLOO + 1 / rates.HOST_ADD)
    assert exchange_seconds(eight, eight.members[0]).by == {"network": pytest.approx(expected)}
    assert exchange_seconds(setup(), setup().members[0]).seconds == 0.0
    slow = replace(eight, cluster=replace(eight.cluster, cards_per_machine=4, network=1e8))
    assert exchange_seconds(slow, slow.members[0]).seconds > 5 * expected


def test_a_sharded_base_is_gathered_in_every_pass():
    eight = setup(**workers(8, shard_base=True))
    once = 4 * SHAPE.blocks * 7 / 8 / (rates.GATHER * CARDS["H200"].link)
    found = gather_seconds(eight, eight.members[0], PassCount(forward=3, backward=2))
    assert found.seconds == pytest.approx(5 * once)
    whole = setup(**workers(8))
    assert gather_seconds(whole, whole.members[0], PassCount(3, 2)).seconds == 0.0


def on_a_slow_network(count: int) -> Setup:
    """Beyond eight workers."""
    placed = setup(**workers(count))
    return replace(placed, cluster=replace(placed.cluster, network=1e8))


def test_workers_never_slow_down_what_they_share_out_until_exchange_outweighs_it():
    shared = ("sample", "score", "train", "gate")
    found = [predict(setup(**workers(count, 64))) for count in (1, 2, 4, 8, 16, 32, 64)]
    for phase in shared:
        seconds = [one.phases[phase].seconds for one in found]
        assert seconds == sorted(seconds, reverse=True)
    by_workers = [predict(on_a_slow_network(count)) for count in (1, 2, 4, 64)]
    assert by_workers[1].seconds < by_workers[0].seconds
    assert by_workers[-1].phases["exchange"].seconds > by_workers[2].phases["exchange"].seconds
    assert by_workers[-1].seconds > by_workers[2].seconds
    assert by_workers[-1].spent.bound == "network"


def test_more_of_anything_takes_longer_and_a_faster_card_does_not():
    base = predict(setup()).seconds
    longer = replace(setup(), turns=tuple(replace(turn, message=300) for turn in setup().turns))
    assert predict(longer).seconds > base
    assert predict(replace(setup(), learning=replace(setup().learning, epochs=2))).seconds > base
    assert predict(replace(setup(), plan=replace(setup().plan, problems=128))).seconds > base
    faster = replace(CARDS["H200"], bandwidth=1e13)
    assert predict(replace(setup(), cluster=Cluster(faster))).seconds < base
    assert predict(replace(setup(), cluster=Cluster(CARDS["A100-80"]))).seconds > base


def test_workers_without_an_equal_part_are_waited_for():
    load = Load.learned(setup(**workers(3, 4)))
    assert load == Load(problems=16, rows=128, parts=2, busy=64 / (16 * 2 * 3))
    spent = Spent({"compute": 3.0}).waiting(load.busy)
    assert spent.seconds == pytest.approx(3.0), "waiting is part of the time, not on top of it"
    assert spent.by["waiting"] == pytest.approx(1.0)
    assert predict(setup(**workers(128))).phases["train"].by["waiting"] > 0.0, "64 problems for 128 workers"


def test_plans_that_reuse_rollouts_sample_once_and_gate_on_all():
    fresh, stale = (
        setup(),
        replace(setup(), plan=Plan.preset("naive_sequential", radius=0.05, problems=64, group_size=8)),
    )
    a, b = predict(fresh), predict(stale)
    assert a.phases["sample"].seconds == pytest.approx(3 * b.phases["sample"].seconds)
    assert b.phases["gate"].seconds > 3 * a.phases["gate"].seconds
    assert a.sampled_tokens == 3 * b.sampled_tokens == 3 * 512 * 3 * 256
    assert replace(setup(), plan=Plan.preset("auto")).batches == 1, "assumed: it decides as it goes"


# -- advice ---------------------------------------------------------------------------------------------------


def test_what_would_help_is_faster_and_fits():
    found = predict(setup(**workers(2, 8)))
    changes = helpful(found)
    assert any(change.settings == "cluster.shards=2" for change in changes)
    assert all(change.seconds <= 0.95 * found.seconds for change in changes), "less is not worth telling"
    assert [change.seconds for change in changes] == sorted(change.seconds for change in changes)
    crowded = predict(on_a_slow_network(16))
    assert any(change.settings == "cluster.workers=8" for change in helpful(crowded)), "fewer, where exchange bounds"


@pytest.mark.long
def test_a_base_that_does_not_fit_three_times_is_told_to_be_held_once():
    large = setup(replace(LARGE, stored="bf16"))
    told = {change.settings: change for change in helpful(predict(large))}
    [once] = [settings for settings in told if settings.startswith("learner.base=fp16 sampling.adapters=by_row")]
    assert "--cards" not in once, "it fits on the card that there is"
    spread = [settings for settings in told if "cluster.shard_base=true" in settings]
    assert spread
    assert not any("learner.base" in settings for settings in spread)
    short = replace(large, learning=replace(large.learning, base="file"))
    spread = [change.settings for change in helpful(predict(short)) if "cluster.shard_base=true" in change.settings]
    assert spread
    assert all("cluster.shard_base=true learner.base=fp32" in settings for settings in spread)
    assert not any("learner.base=int8" in settings for settings in told), "rounded no further than it must be"
    small = replace(large, cluster=replace(large.cluster, card=CARDS["H100"]))
    told = [change.settings for change in helpful(predict(small)) if "learner.base" in change.settings]
    assert told
    assert all(settings.startswith("learner.base=int8 sampling.adapters=by_row") for settings in told)
    mixed = replace(small, members=(*small.members[:-1], replace(small.members[-1], rank=None)))
    assert not any("learner.base=int8" in change.settings for change in helpful(predict(mixed)))
    whole = replace(setup(LARGE, rank=None), sampling=replace(large.sampling, by_row=True))
    assert not any("learner.base" in change.settings for change in helpful(predict(whole)))


def longest_rows(card: str) -> Setup:
    """An agent on the 8B shape whose step on one message of 65,536 tokens takes most of a card."""
    one = long_messages(65_536)
    shape = replace(SHAPE, layers=36, width=4096, inner=12288, heads=32, tied=False)
    demand = replace(one.demand, episodes=8, problems=1, messages={"a": 8})
    return replace(
        one,
        members=(replace(one.members[0], shape=shape),),
        demand=demand,
        plan=replace(one.plan, problems=1),
        cluster=Cluster(CARDS[card]),
        learning=replace(one.learning, base="fp16", micro_batch=1),
        sampling=replace(one.sampling, precision="fp16", by_row=True),
    )


def test_long_rows_are_told_to_leave_memory_of_their_keys_to_the_step():
    """As much as is left, where a batch's would be too much; and nothing if that would not hold one row."""
    found = predict(longest_rows("H200"))
    assert not found.memory.fits
    row = (65_536 + 256) * found.setup.members[0].shape.cache_bytes(2)
    assert 8 * row > found.memory.pages["a"], "a batch takes more than its share of the card"
    [fewer] = [settings for settings in told_of(found.setup) if settings.startswith("sampling.memory_gb=")]
    pages = int(float(fewer.partition("=")[2]) * GB)
    assert row < pages < found.memory.pages["a"]

    def fits(more: int) -> bool:
        return predict(replace(found.setup, sampling=replace(found.setup.sampling, memory=pages + more))).memory.fits

    assert (fits(0), fits(GB // 50)) == (True, False), "in whole hundredths, rounded down"
    assert helpful(predict(longest_rows("H100"))) == [], "its step alone takes more than there is"


def told_of(one: Setup) -> list[str]:
    return [change.settings for change in helpful(predict(one)) if "--cards" not in change.settings]


def test_the_fewest_workers_that_share_a_base_are_those_below_which_it_does_not_fit():
    """Seven, which is no power of two."""

    def fits(workers: int) -> bool:
        cluster = Cluster(CARDS["H200"], cards=workers, workers=workers, shards=workers, shard_base=True)
        return memory_of(made_to_fit("", replace(setup(LARGE), cluster=cluster))[1]).fits

    assert [fits(workers) for workers in (4, 5, 6, 7, 8)] == [False, False, False, True, True]
    assert smallest_sharing(setup(LARGE)) == 7


def test_placement_says_whether_the_base_must_be_sharded():
    assert "models fit whole" in placement(predict(setup())).sharding
    assert placement(predict(setup())).fit_on_a_card == 1
    large = predict(setup(LARGE))
    assert smallest_sharing(setup(LARGE)) == 7
    assert placement(large).sharding == "needed: cluster.shard_base=true over at least 7 workers"
    (change,) = [change for change in helpful(large) if "shard_base=true" in change.settings]
    assert change.settings.startswith("cluster.engine=ray cluster.workers=7 --cards 7 cluster.shard_base=true")
    full = predict(setup(LARGE, rank=None))
    assert "what stays whole" in placement(full).sharding
    assert helpful(full) == []
    small = setup(LARGE)
    small = replace(small, cluster=Cluster(CARDS["H100"]))
    assert "what stays whole" in placement(predict(small)).sharding
    assert "not counted" in placement(predict(replace(setup(), cluster=Cluster(CARDS["cpu"])))).sharding


# -- from a team file -----------------------------------------------------------------------------------------


def test_turns_of_several_rounds_grow_and_find_what_was_read_before():
    text = TEAM.format(train="lora", engine="plain").replace("max_tokens: 4", "max_tokens: 4\n  router: {rounds: 2}")
    _, found = forecast(loads(text, name="plan.yaml"), Where("cpu"))
    turns = found.setup.turns
    assert [turn.agent for turn in turns] == ["left", "right", "speaker"] * 2
    assert [turn.context for turn in turns] == sorted(turn.context for turn in turns[:3]) + [
        turn.context for turn in turns[3:]
    ]
    assert [turn.known for turn in turns[:3]] == [0, 0, 0]
    assert [turn.known for turn in turns[3:]] == [turn.context for turn in turns[:3]]
    _, short = forecast(loads(text, name="plan.yaml"), Where("cpu", message_tokens=1))
    assert all(turn.message == 1 for turn in short.setup.turns)
    assert short.seconds < found.seconds
    assert short.memory.plan == found.memory.plan, "memory is for the longest"


def test_what_cannot_be_planned_without_weights_says_so():
    tabular = TEAM.format(train="full", engine="plain").replace("model: tiny", "model: tabular")
    with pytest.raises(UserError, match="tabular agent"):
        forecast(loads(tabular, name="plan.yaml"), Where("H200"))
    on_cpu = loads(TEAM.format(train="full", engine="plain"), "plan.yaml", ["device=cpu"])
    with pytest.raises(UserError, match="--card is H200"):
        forecast(on_cpu, Where("H200"))
    frozen = TEAM.format(train="full", engine="plain").replace("}}]", "}]").replace("{name: ", "{frozen: true, name: ")
    frozen = frozen.replace("task: {frozen: true, name: code", "task: {name: code")
    with pytest.raises(UserError, match="nobody is trained"):
        forecast(loads(frozen, name="plan.yaml"), Where("H200"))
    session, _ = forecast(loads(TEAM.format(train="full", engine="plain"), name="plan.yaml"), Where("H200"))
    assert isinstance(session.engine, Engine)
    assert session.engine.memory_plan(demand_of(session)).fits
    with pytest.raises(UserError, match="without loading the models"):
        session.engine.learner("left")
    with pytest.raises(UserError, match="without loading the models"):
        session.engine.sample("left", [], np.zeros((0, 4)))


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", None),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 3090", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_a_device_is_known_by_its_own_name(device: str, card: str | None) -> None:
    found = card_like(device)
    assert (found and found.name) == card


@pytest.mark.parametrize("alike", [0, 512])
def test_attention_is_counted_of_whole_rows_however_much_of_them_is_alike(alike):
    """Only products see a common beginning once: for attention its tokens are spread to every row."""
    turn, rows = PlannedTurn("a", 768, 256, alike), Selection(problems=1, episodes=8, micro_batches=1)
    one = setup()
    one = replace(one, turns=(turn, *one.turns[1:]), learning=replace(one.learning, precision="fp32"))
    products = 2 * SHAPE.body * (alike + 8 * (1_024 - alike))
    attention = 4 * 28 * 16 * 128 * 8 * 1_024 * 1_024 / 2
    spent = LearnerCost(one, one.members[0]).forward(rows, heads=0).by["compute"]
    assert spent == pytest.approx((products + attention) / (rates.SCORE["fp32"] * CARDS["H200"].flops["fp32"]))


@pytest.mark.parametrize("shards", [1, 8])
def test_logits_of_a_step_of_few_messages_are_held_however_large_the_micro_batch(shards):
    """Four messages of 1,700 tokens in each shard: 6,800 positions, of 6,960 that are held. One worker passes the
    shards one after the other."""

    def compute(micro_batch: int) -> float:
        one = setup(micro_batch=micro_batch, shards=shards)
        small = replace(one.plan, problems=2 * shards, group_size=8)
        turns = (PlannedTurn("a", 300, 1_700, 0), *one.turns[1:])
        one = replace(one, plan=small, turns=turns, learning=replace(one.learning, precision="fp32"))
        learner = LearnerCost(one, one.members[0])
        return learner.step(step_rows(learner, Load.learned(one))).by["compute"]

    assert compute(64) == compute(4)
