"""What vLLM servers that a run starts take, beside what trains: bytes by hand, and what does not fit is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planned import QWEN3_1_7B
from teamtr.cli import app
from teamtr.config import loads
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.engines.vllm.engine import VllmEngine
from teamtr.engines.vllm.memory import ModelSize, ServerMemory, Servers, slots
from teamtr.errors import UserError
from teamtr.planning.advice import placement
from teamtr.planning.stage import Prediction
from teamtr.ports import GB, MemoryItem, MemoryPlan
from teamtr.session.build import build
from teamtr.session.forecast import Where, forecast
from teamtr.session.memory import crowded, demand_of, plan_memory
from teamtr.session.train import train

PARAMETERS = 1_720_574_976
"""Of Qwen3-1.7B: 28 layers of 50,336,000, a norm of 2,048, and an embedding of 151,936 x 2,048."""
ADAPTER = 17_432_576
"""Of rank 16: 28 layers of 16 x (4,096 + 3,072 + 3,072 + 4,096 + 3 x 8,192)."""
H200 = 141 * 10**9

TEAM = """
name: served
task: {name: sums}
team: {model: MODEL, train: lora, max_tokens: 64, agents: [{name: a}, {name: b}, {name: c}]}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 0}
plan: {preset: teamtr, stages: 1, problems: 16, group_size: 8, radius_nats_per_message: 0.05}
learner: {epochs: 1, micro_batch: 8}
sampling: {engine: vllm, vllm: {python: PYTHON}}
eval: {every: 0}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config and a tokenizer, and no weight."""
    folder = tmp_path / "model"
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_1_7B))
    return folder


def text_of(model: Path | str) -> str:
    return TEAM.replace("MODEL", str(model)).replace("PYTHON", sys.executable)


def predicted(model: Path, *settings: str, card: str = "H200", cards: int | None = None) -> Prediction:
    return forecast(loads(text_of(model), "served", settings), Where(card, cards))[1]


def planned(model: Path, *settings: str, card: str = "H200") -> MemoryPlan:
    return predicted(model, *settings, card=card).memory.plan


# -- on another card, from configs ----------------------------------------------------------------------------


def test_a_server_takes_four_tenths_of_the_card_that_trains_and_leaves_the_rest(model):
    plan = planned(model)
    (server,) = plan.servers
    assert server.bytes == plan.taken == int(0.4 * H200) == 56_400_000_000
    assert plan.available == H200 - 56_400_000_000
    assert plan.fits
    weights, adapters = 2 * PARAMETERS, 2 * 3 * ADAPTER
    cache = 56_400_000_000 - weights - adapters
    assert server.why == (
        f"a, b, c: fp16 weights {weights / GB:.3g} GB, adapters {adapters / GB:.3g} GB, keys and values "
        f"{cache / GB:.3g} GB; on the card that trains, the first of this process"
    )
    assert "keys and values" not in [item.what for item in plan.items], "the learner samples nothing"
    plain = planned(model, "sampling.engine=plain")
    assert plan.total == plain.total - next(item.bytes for item in plain.items if item.what == "keys and values")
    assert (plain.servers, plain.available) == ((), H200)


def test_with_memory_gb_it_takes_its_weights_adapters_and_so_much(model):
    plan = planned(model, "sampling.memory_gb=8")
    assert plan.taken == 2 * PARAMETERS + 2 * 3 * ADAPTER + 8 * 2**30
    assert plan.available == H200 - plan.taken
    wide = planned(model, "sampling.memory_gb=8", "sampling.precision=fp32", "team.lora.rank=20")
    assert wide.taken == 4 * PARAMETERS + 4 * 3 * 2 * ADAPTER + 8 * 2**30, "rank 20 gets room for 32"


def test_agents_whose_weights_are_all_trained_have_a_server_each_which_share(model):
    plan = planned(model, "team.train=full", "sampling.memory_gb=6")
    assert [server.bytes for server in plan.servers] == 3 * [2 * PARAMETERS + 2 * 2**30]
    by_share = planned(model, "team.train=full")
    assert [server.bytes for server in by_share.servers] == 3 * [int(0.133 * H200)]


def test_servers_on_cards_of_their_own_leave_all_to_the_learner(model):
    plan = planned(model, "sampling.vllm.cards='1'")
    (server,) = plan.servers
    assert (server.bytes, plan.taken, plan.available) == (int(0.9 * H200), 0, H200)
    assert server.why.endswith("on card 1 alone (sampling.vllm.cards)")
    second = planned(model, "device=cuda:1")
    assert (second.taken, second.available) == (0, H200)
    assert second.servers[0].why.endswith("on the first card of this process; cuda:1 trains")


def test_of_servers_that_run_it_is_said_that_nobody_counts_them(model):
    plan = planned(model, "sampling.vllm.python=null", "sampling.vllm.urls=[http://host:8000]")
    assert plan.servers == (MemoryItem("vLLM server", 0, "at http://host:8000: its memory is not counted"),)
    assert plan.available == H200


@pytest.mark.long
def test_workers_that_share_the_card_share_what_is_left(model):
    two = ("cluster.engine=ray", "cluster.workers=2")
    (one,) = {predicted(model, *two, cards=1).memory.plan.available}
    assert one == int(H200 * 0.95 / 2) - 56_400_000_000 // 2
    assert predicted(model, *two, cards=2).memory.plan.available == H200 - 56_400_000_000
    found = predicted(model)
    assert placement(found).fit_on_a_card == (H200 - 56_400_000_000) // found.memory.least


@pytest.mark.long
def test_what_does_not_fit_says_who_takes_what_and_what_to_do(model):
    plan = planned(model, card="RTX4090")
    assert plan.taken == int(0.4 * 24e9)
    assert not plan.fits
    told = crowded(plan)
    assert told is not None
    for words in ("servers take 8.94 GB", "leave 13.4 GB", f"needs {plan.total / GB:.3g} GB", "sampling.vllm.cards"):
        assert words in told
    assert crowded(planned(model)) is None
    assert crowded(planned(model, "sampling.engine=plain", card="RTX4090")) is None, "as ever: out of memory lowers it"


def test_beside_servers_a_micro_batch_is_not_halved_in_silence(model):
    found = predicted(model, "learner.micro_batch=512", "team.max_tokens=512")
    assert found.micro_batch == 512
    assert not found.memory.fits
    assert (
        predicted(model, "learner.micro_batch=512", "team.max_tokens=512", "sampling.vllm.cards='1'").micro_batch < 512
    )


def test_a_server_whose_weights_do_not_fit_into_its_share_lacks_memory(model):
    plan = planned(model, "team.train=full", card="RTX4090")
    assert len(plan.lacking) == 3
    assert plan.lacking[0] == (
        f"the vLLM server of a may take {int(0.133 * 24e9) / GB:.3g} GB (0.133 of its card), and its weights and "
        f"adapters alone need {2 * PARAMETERS / GB:.3g} GB"
    )
    assert not plan.fits
    assert str(crowded(plan)).startswith(plan.lacking[0])


def test_servers_that_do_not_fit_beside_each_other_on_their_cards_lack_memory():
    server = ServerMemory(("a",), 6, 1, "fp16", 0.45, cache=3, place="", beside=False)
    plan = MemoryPlan((), 20)
    assert Servers((server, server)).beside(plan, 20).lacking == ()
    (told,) = Servers((server, server)).beside(plan, 19).lacking
    assert told.startswith("2 vLLM servers need")
    assert "needs" in Servers((server,)).beside(plan, 9).lacking[0], "one alone says it of itself"


def test_slots_have_room_for_the_largest_adapter_each():
    small, large = (ModelSize(100, 8), 4), (ModelSize(100, 40), 8)
    assert slots([small, large], 8) == 2 * 40
    assert slots([], 8) == 0


@pytest.mark.long
def test_the_command_shows_servers_and_what_is_refused(model, tmp_path):
    (tmp_path / "team.yaml").write_text(text_of(model))
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "team.yaml"), "--card", "RTX4090"])
    assert told.exit_code == 0, told.output
    for words in (
        "vLLM server",
        "DOES NOT FIT",
        "refused by `teamtr train`: vLLM servers take 8.94 GB",
        "plain sampler",
    ):
        assert words in told.output
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "team.yaml"), "--card", "H200", "--json"])
    record = json.loads(shown.stdout.splitlines()[-1])
    assert [server["gb"] for server in record["servers"]] == [int(0.4 * H200) / GB]
    assert record["available_gb"] == (H200 - int(0.4 * H200)) / GB


# -- on this machine, of loaded models ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), ("team.train=full",), ("sampling.memory_gb=1", "team.lora.rank=5")])
def test_loaded_models_and_their_configs_give_the_same_servers(settings):
    team_file = loads(text_of("tiny"), "served", ["device=cpu", *settings])
    engine: Any = build(team_file).engine
    found = forecast(team_file, Where("cpu"))[1].setup.sampling.servers
    assert engine.servers == found
    assert all(server.weights > 0 for server in found.started)
    engine.close()


@pytest.mark.long
def test_of_this_machine_servers_take_what_is_available_until_they_have_it(monkeypatch):
    session = build(loads(text_of("tiny"), "served", ["device=cpu", "sampling.memory_gb=1"]))
    engine: Any = session.engine
    on_cpu = plan_memory(session)
    assert on_cpu.available is None
    assert on_cpu.taken == sum(server.bytes for server in on_cpu.servers) > 2**30
    assert "in this machine's memory" in on_cpu.servers[0].why
    assert "keys and values" not in [item.what for item in on_cpu.items]
    inner = engine.inner.memory_plan
    monkeypatch.setattr(engine.inner, "memory_plan", lambda demand: replace(inner(demand), available=10 * 2**30))
    engine.card_bytes = 16 * 2**30
    assert engine.memory_plan(demand_of(session)).available == 10 * 2**30 - on_cpu.taken
    engine.sharing = 2
    assert engine.memory_plan(demand_of(session)).available == 10 * 2**30 - on_cpu.taken // 2
    monkeypatch.setattr(type(engine.hosts["a"]), "runs_here", True)
    assert engine.memory_plan(demand_of(session)).available == 10 * 2**30, "what they have is not free"
    engine.close()


CROWDED = MemoryPlan(
    (MemoryItem("weights", 9 * GB),), 4 * GB, servers=(MemoryItem("vLLM server", 6 * GB, "a"),), taken=6 * GB
)


@pytest.mark.long
def test_check_and_train_refuse_before_a_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(VllmEngine, "memory_plan", lambda self, demand: CROWDED)
    monkeypatch.setattr(VllmEngine, "sample", lambda *_, **__: pytest.fail("a message was asked for"))
    (tmp_path / "team.yaml").write_text(text_of("tiny"))
    told = "vLLM servers take 6 GB of the card that trains and leave 4 GB, and the learner needs 9 GB"
    found = CliRunner().invoke(app, ["check", str(tmp_path / "team.yaml"), "device=cpu"])
    assert found.exit_code == 2
    assert told in found.output
    with pytest.raises(UserError, match=told):
        list(train(loads(text_of("tiny"), "served", ["device=cpu"]), tmp_path / "run"))
