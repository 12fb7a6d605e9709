"""Sampling with vLLM, against a stand-in for its servers: what is asked, what of the answers is believed, and that
messages are written by the weights that the team names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_vllm import FakeVllm, Running, completion, error, letters, transformer
from teamtr.answers import Decoding
from teamtr.config import ConfigError, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.vllm.client import BadAnswer, Client, Drawing, seeds_of
from teamtr.engines.vllm.engine import VllmEngine
from teamtr.errors import UserError
from teamtr.ports import EngineLost
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.session.models import save_pretrained
from teamtr.session.resume import MAY_CHANGE, differences
from teamtr.session.train import train
from teamtr.store import RunFolder, read_episodes

pytestmark = pytest.mark.long

PROMPT = np.array([5, 6, 7], dtype=np.int32)
DRAWING = Drawing("m", salt="m-1", end_ids=frozenset({1, 2}))

TEAM = """
name: vllm
task: {name: code, half_length: 1}
team: {model: tiny, train: lora, max_tokens: 4, agents: [{name: left}, {name: right}, {name: speaker}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {problems: 2, group_size: 2, stages: 1, radius_nats_per_message: 0.05}
learner: {micro_batch: 8}
eval: {every: 0}
"""


LEARNS = (
    "task.symbols=AB",
    "task.skill=0.8",
    "tiny.width=32",
    "tiny.warmup_steps=40",
    "tiny.warmup_learning_rate=1e-2",
    "plan.problems=4",
    "plan.group_size=4",
)
"""So that some messages are right and some wrong, and every update moves its agent."""


def own(url: str, folder: Path) -> tuple[str, ...]:
    return ("sampling.engine=vllm", f"sampling.vllm.urls=[{url}]", f"sampling.vllm.folder={folder}")


def scripted(answer: Any, status: int = 200) -> FakeVllm:
    fake = FakeVllm("m", letters)
    fake.before = lambda path, body: (status, answer)
    return fake


def said(fake: FakeVllm, tokens: int = 4, drawing: Drawing = DRAWING, patience_s: float = 20.0) -> Any:
    with Running(fake) as running:
        return Client(running.url, patience_s=patience_s).message(PROMPT, tokens, 7, drawing)


# -- token ids in, token ids and log-probabilities out --------------------------------------------------------


def test_a_message_is_what_the_server_wrote_end_token_included():
    found = said(scripted(completion([5, 6, 7], [9, 8, 2], [-1.0, -0.5, -0.25])))
    assert found.token_ids.tolist() == [9, 8, 2]
    assert found.logprobs.tolist() == [-1.0, -0.5, -0.25]
    assert (found.finish, found.token_ids.dtype, found.logprobs.dtype) == ("stop", np.int32, np.float32)
    assert said(scripted(completion([5, 6, 7], [9, 8, 8, 9], [-1.0] * 4))).finish == "length"
    assert said(scripted(completion([5, 6, 7], [9, 8, 8, 1], [-1.0] * 4))).finish == "stop"


def test_every_setting_that_decides_a_message_is_sent():
    """Else a default of the server, or the model's generation_config, would decide."""
    fake = FakeVllm("m", letters)
    said(fake, drawing=replace(DRAWING, temperature=0.7, top_p=0.9, top_k=11))
    (asked,) = fake.asked
    assert asked == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "seed": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stop_token_ids": [1, 2],
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "cache_salt": "m-1",
    }


WRONG = {
    "nothing": ({}, "no message"),
    "a list": ([], "no message"),
    "two choices": ({"choices": 2 * completion([5, 6, 7], [9], [-1.0])["choices"]}, "no message"),
    "no token ids": ({"choices": [{"text": "hello", "logprobs": None}]}, "no message"),
    "another prompt": (completion([5, 6], [9, 1], [-1.0, -1.0]), "read 2 tokens that are not the 3"),
    "a token more": (completion([5, 6, 7], [9] * 5, [-1.0] * 5), "5 tokens with 5 log-probabilities, of at most 4"),
    "no token": (completion([5, 6, 7], [], []), "0 tokens"),
    "a log-probability less": (completion([5, 6, 7], [9, 9, 9, 1], [-1.0] * 3), "4 tokens with 3 log-probabilities"),
    "a token that is none": (completion([5, 6, 7], [-9, 1], [-1.0] * 2), "2 tokens"),
    "a word": (completion([5, 6, 7], ["a", 1], [-1.0] * 2), "2 tokens"),
    "on after the end": (completion([5, 6, 7], [9, 1, 9, 9], [-1.0] * 4), "went on after the end token 1"),
    "an end of its own": (completion([5, 6, 7], [9, 8], [-1.0] * 2), "stopped after 2 of 4 tokens, at 8"),
    "no log-probability": (completion([5, 6, 7], [9, 1], [-1.0, None]), "sampling.precision"),
    "more than certain": (completion([5, 6, 7], [9, 1], [-1.0, 0.5]), "sampling.precision"),
    "not JSON": (b"<html>", "something else than JSON"),
    "half of it": (b'{"choices": [', "something else than JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_is_no_message_is_refused(name):
    answer, told = WRONG[name]
    with pytest.raises(BadAnswer, match=told):
        said(scripted(answer))


def test_greedy_messages_were_certain():
    found = said(FakeVllm("m", letters), drawing=replace(DRAWING, temperature=0.0))
    assert not found.logprobs.any()


def test_a_temperature_that_vllm_would_change_is_refused():
    with pytest.raises(UserError, match="no temperature between 0 and"):
        Client("http://127.0.0.1:9").sample([PROMPT], [4], [1], replace(DRAWING, temperature=0.001))


@pytest.mark.long
def test_rows_come_back_in_order_however_many():
    fake = FakeVllm("m", letters)
    prompts = [np.array([k, k + 1], dtype=np.int32) for k in range(300)]
    with Running(fake) as running:
        client = Client(running.url, patience_s=60.0)
        whole = client.sample(prompts, [3] * 300, range(300), DRAWING)
        assert len(fake.asked) == 300
        one = client.sample(prompts[250:251], [3], [250], DRAWING)
    for k, sample in enumerate(whole):
        assert sample.token_ids.tolist() == letters(None, {**fake.asked[0], "prompt": [k, k + 1], "seed": k})[0]
    assert one[0].token_ids.tolist() == whole[250].token_ids.tolist()


def test_a_seed_belongs_to_its_row():
    noise = uniforms(3, 64, 5)
    seeds = seeds_of(noise)
    assert len(set(seeds)) == 64
    assert seeds_of(noise[10:12]) == seeds[10:12]
    assert all(0 <= seed < 2**53 for seed in seeds)


# -- servers that fail ----------------------------------------------------------------------------------------


def test_a_name_that_the_server_does_not_have_is_an_error():
    with pytest.raises(EngineLost, match="does not have left-abc: it was never given these weights"):
        said(FakeVllm("m", letters), drawing=replace(DRAWING, model="left-abc"))


def test_what_the_server_refuses_is_told_in_its_words():
    with pytest.raises(UserError, match="400: at most 16 tokens"):
        said(scripted(error("at most 16 tokens"), status=400))


def test_a_server_that_fails_is_lost():
    with pytest.raises(EngineLost, match="500: EngineCore died"):
        said(scripted(error("EngineCore died"), status=500))


def test_a_server_that_goes_in_the_middle_of_an_answer_is_lost():
    with pytest.raises(EngineLost, match="is gone"):
        said(scripted("", status=0))


def test_a_server_that_nobody_runs_is_lost():
    with socket.socket() as deaf:  # holds the port, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(EngineLost, match="cannot be reached"):
            Client(f"http://127.0.0.1:{deaf.getsockname()[1]}", patience_s=60.0).message(PROMPT, 4, 7, DRAWING)


def test_a_server_that_says_nothing_is_lost():
    fake, done = FakeVllm("m", letters), threading.Event()
    fake.before = lambda path, body: done.wait(20) and None
    try:
        with pytest.raises(EngineLost, match="has not answered for 0 s"):
            said(fake, patience_s=0.2)
    finally:
        done.set()


def test_one_row_that_fails_is_the_failure_of_the_batch():
    fake = FakeVllm("m", letters)
    fake.before = lambda path, body: (500, error("no")) if body["seed"] == 17 else None
    with Running(fake) as running, pytest.raises(EngineLost, match="500: no"):
        Client(running.url).sample([PROMPT] * 40, [4] * 40, range(40), DRAWING)


# -- the engine around one that trains ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def write() -> Any:
    return transformer(loads(TEAM, "vllm"))


@pytest.fixture
def fake(write: Any) -> FakeVllm:
    return FakeVllm("tiny", write)


@pytest.fixture
def engine(fake: FakeVllm, tmp_path: Path) -> Iterator[VllmEngine]:
    with Running(fake) as running:
        made = build(loads(TEAM, "vllm", own(running.url, tmp_path / "weights"))).engine
        assert isinstance(made, VllmEngine)
        yield made
        made.close()


def prompts_of(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 60, size=3 + k % 3).astype(np.int32) for k in range(count)]


def moved(engine: VllmEngine, agent: str = "left", seed: int = 1) -> str:
    engine.learner(agent).perturb(0.5, seed)
    return engine.version(agent)


def test_nothing_is_asked_of_a_server_before_a_message_is(engine, fake):
    assert engine.sample("left", [], uniforms(0, 0, 4)) == []
    assert (fake.given, fake.asked) == ([], [])


def test_an_adapter_is_served_under_its_agent_and_version(engine, fake, tmp_path):
    version = moved(engine)
    engine.publish("left", version)
    ((name, folder),) = fake.given
    assert name == f"left-{version}"
    assert sorted(p.name for p in Path(folder).glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert Path(folder).is_relative_to(tmp_path / "weights")
    fake.asked.clear()
    samples = engine.sample("left", prompts_of(3), uniforms(0, 3, 4))
    assert {sample.version for sample in samples} == {version}
    assert {(asked["model"], asked["cache_salt"]) for asked in fake.asked} == {(name, name)}


def test_a_server_is_asked_for_the_tokens_of_each_row(engine, fake):
    engine.publish("left", moved(engine))
    fake.asked.clear()
    noise = uniforms(0, 2, 4)
    noise[1, 2:] = np.nan
    engine.sample("left", prompts_of(2), noise)
    assert sorted(asked["max_tokens"] for asked in fake.asked) == [2, 4]


def test_names_and_folders_are_used_once_and_old_ones_go(engine, fake):
    versions = []
    for seed in range(4):
        versions.append(moved(engine, seed=seed))
        engine.publish("left", versions[-1])
        assert set(fake.adapters) == {f"left-{versions[-1]}"}
        assert [Path(folder).exists() for _, folder in fake.given] == [False] * seed + [True]
    assert len({name for name, _ in fake.given}) == len({folder for _, folder in fake.given}) == 4


def test_weights_that_are_gone_back_to_are_served_from_a_new_folder(engine, fake):
    before = engine.learner("left").snapshot()
    old = engine.version("left")
    engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    engine.publish("left", moved(engine))
    engine.learner("left").restore(before)
    (sample,) = engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    assert sample.version == old
    names, folders = zip(*fake.given, strict=True)
    assert names[0] == names[2] == f"left-{old}"
    assert len(set(folders)) == 3


def test_weights_that_nobody_published_are_served_before_they_are_sampled(engine, fake):
    """What was loaded from a commit is never published by the loop."""
    engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    new = moved(engine)
    samples = engine.sample("left", prompts_of(8), uniforms(0, 8, 4))
    assert {sample.version for sample in samples} == {new}
    assert set(fake.adapters) == {f"left-{new}"}


@pytest.mark.long
def test_a_server_that_lost_the_weights_never_writes_with_others(engine, fake):
    """A publish that does not arrive, a hundred times: caught a hundred times."""
    engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    for _ in range(100):
        fake.adapters.clear()
        fake.adapters["left-" + "0" * 32] = "elsewhere"
        with pytest.raises(EngineLost, match="does not have left-"):
            engine.sample("left", prompts_of(1), uniforms(0, 1, 4))


def test_an_adapter_that_the_server_does_not_take_is_told_and_removed(engine, fake, tmp_path):
    fake.before = lambda path, body: (500, error("rank 16 is too large")) if "load_lora" in path else None
    with pytest.raises(UserError, match=r"does not take the adapter left-.*rank 16 is too large"):
        engine.publish("left", moved(engine))
    assert list((tmp_path / "weights").glob("*/left-*")) == []
    fake.before = lambda path, body: (404, {"detail": "Not Found"}) if "load_lora" in path else None
    with pytest.raises(UserError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        engine.publish("left", engine.version("left"))


def test_what_a_killed_run_left_on_a_server_is_put_there_anew(engine, fake):
    name = f"left-{engine.version('left')}"
    fake.adapters[name] = "gone"
    engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    assert fake.given[-1][0] == name
    assert fake.adapters[name] != "gone"


def test_a_server_that_runs_keeps_nothing_of_ours(fake, tmp_path):
    with Running(fake) as running:
        engine = build(loads(TEAM, "vllm", own(running.url, tmp_path / "weights"))).engine
        engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
        assert len(fake.adapters) == 1
        engine.close()
    assert fake.adapters == {}
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.long
def test_log_probabilities_are_those_of_what_was_drawn_from(engine):
    """At another temperature, and of fewer tokens, as the sampler of the engine inside tells them."""
    prompts, noise = prompts_of(6), uniforms(4, 6, 4)
    learner = engine.learner("left")
    for settings in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}, {"temperature": 0.0}):
        for prompt, sample in zip(
            prompts, engine.sample("left", prompts, noise, decoding=Decoding(**settings)), strict=True
        ):
            told = expected(learner.policy, prompt, sample.token_ids, **settings)
            np.testing.assert_allclose(sample.logprobs, told, atol=1e-5)


def expected(policy: Any, prompt: np.ndarray, ids: np.ndarray, temperature=1.0, top_p=1.0, top_k=0) -> np.ndarray:
    import torch

    from teamtr.engines.sampling import keep_likely

    if temperature == 0.0:
        return np.zeros(len(ids))
    with torch.no_grad():
        logits = policy.head()(policy.features([prompt], [ids])) * policy.temperature / temperature
        logp = torch.log_softmax(keep_likely(logits, top_p, top_k), -1)
    return logp[torch.arange(len(ids)), torch.as_tensor(ids, dtype=torch.long)].numpy()


def test_a_server_that_tells_log_probabilities_of_something_else_is_refused(engine, fake):
    fake.before = lambda path, body: (
        (200, completion(body["prompt"], [9], [-2.5])) if path == "/v1/completions" else None
    )
    with pytest.raises(UserError, match="processed_logprobs"):
        engine.sample("left", prompts_of(1), uniforms(0, 1, 4))


def test_a_message_for_which_there_is_no_room_is_refused_by_name(engine, fake):
    fake.context = 6
    assert len(engine.sample("left", prompts_of(1), uniforms(0, 1, 3))) == 1
    with pytest.raises(UserError, match="of agent 'left' and its message need 7 tokens, but its vLLM server takes 6"):
        engine.sample("left", prompts_of(1), uniforms(0, 1, 4))


def test_no_server_has_the_model(tmp_path):
    with Running(FakeVllm("another/model", letters)) as running:
        engine = build(loads(TEAM, "vllm", own(running.url, tmp_path))).engine
        with pytest.raises(UserError, match=r"no server has tiny; http://127.* has another/model"):
            engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
        engine.close()


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, {"data": None}), (200, [])], ids=str)
def test_something_else_than_vllm_is_told(engine, fake, answer):
    fake.before = lambda path, body: answer if path == "/v1/models" else None
    with pytest.raises(BadAnswer, match="is it a vLLM server"):
        engine.sample("left", prompts_of(1), uniforms(0, 1, 4))


def test_it_tells_how_it_samples(engine):
    info = engine.info("left")
    assert info.samples_from_a_copy
    engine.sample("left", prompts_of(1), uniforms(0, 1, 4))
    assert engine.info("left").sampling.startswith("vllm at http://127.0.0.1")


# -- whole runs -----------------------------------------------------------------------------------------------


def episodes(folder: Path) -> list[Any]:
    return [read_episodes(path) for path in sorted(RunFolder.read(folder).episodes.iterdir())]


def trained(folder: Path, fake: FakeVllm, *changes: str) -> list[dict[str, Any]]:
    with Running(fake) as running:
        team_file = loads(TEAM, "vllm", (*LEARNS, *own(running.url, folder.parent / "weights"), *changes))
        return list(train(team_file, folder))


@pytest.fixture(scope="module")
def learning() -> Any:
    return transformer(loads(TEAM, "vllm", LEARNS))


@pytest.mark.long
def test_tokens_that_are_trained_on_are_those_that_were_sampled(learning, tmp_path):
    written: list[tuple[list[int], list[int]]] = []

    def noted(folder: str | None, body: dict[str, Any]) -> Any:
        found = learning(folder, body)
        written.append((body["prompt"], found[0]))
        return found

    fake = FakeVllm("tiny", noted)
    records = trained(tmp_path / "run", fake)
    turns = [turn for batch in episodes(tmp_path / "run") for episode in batch.episodes for turn in episode.turns]
    assert len(turns) == 3 * 16 * 3
    assert all((turn.context_ids.tolist(), turn.token_ids.tolist()) in written for turn in turns)
    start, updates = records[0], [r for r in records if r["kind"] == "update"]
    assert all(told.startswith("vllm at http://127.0.0.1") for told in start["samplers"].values())
    assert len({update["version_after"] for update in updates}) == 3
    for update in updates:
        assert 0 < update["mismatch_largest"] < 1e-4, "the distance of sampler and learner is told, and small"


@pytest.mark.slow
def test_a_run_whose_server_forgets_goes_on_from_its_last_commit_to_the_same_bits(learning, tmp_path):
    undisturbed = trained(tmp_path / "one" / "run", FakeVllm("tiny", learning))
    fake, struck = FakeVllm("tiny", learning), []

    def strike(path: str, body: dict[str, Any]) -> None:
        if path == "/v1/completions" and len(fake.given) == 4 and not struck:  # after the first update
            struck.append(time.monotonic())
            fake.adapters.clear()

    fake.before = strike
    records = trained(tmp_path / "two" / "run", fake)
    assert struck
    (resumed,) = [r for r in records if r["kind"] == "resume"]
    assert "does not have" in resumed["lost"]["why"]
    assert len(set(versions(records))) == 3
    assert versions(records) == versions(undisturbed)


@pytest.mark.slow
@pytest.mark.cluster
def test_it_goes_round_an_engine_over_workers_as_well(learning, tmp_path, kept):
    shards = "cluster.shards=2"
    alone = trained(tmp_path / "one" / "run", FakeVllm("tiny", learning), shards)
    workers = ("cluster.engine=ray", "cluster.workers=2", shards)
    found = trained(tmp_path / "two" / "run", FakeVllm("tiny", learning), *workers)
    assert len(set(versions(found))) == 3
    assert versions(found) == versions(alone)
    assert all(told.startswith("vllm") for told in found[0]["samplers"].values())


def versions(records: list[dict[str, Any]]) -> list[str]:
    return [r["version_after"] for r in records if r["kind"] == "update"]


# -- team files -----------------------------------------------------------------------------------------------

REFUSED = {
    ("sampling.engine=vllm",): "sampling.engine: vllm needs servers",
    ("sampling.engine=vllm", "sampling.vllm.python=py", "sampling.vllm.urls=[http://a:1]"): "give one",
    ("sampling.engine=vllm", "sampling.vllm.urls=[a:1]"): "must be the address of a server, such as http://host:8000",
    ("sampling.engine=vllm", "sampling.vllm.urls=[http://a:1]", "team.train=full"): "trains all its weights",
    ("sampling.engine=vllm", "sampling.vllm.python=py", "team.model=tabular", "team.train=full"): "is a table",
    ("sampling.engine=vllm", "sampling.vllm.python=py", "team.lora.rank=600"): "up to rank 512",
}


@pytest.mark.parametrize("changes", REFUSED, ids=lambda changes: changes[-1])
def test_what_cannot_be_sampled_with_vllm_is_refused(changes):
    with pytest.raises(ConfigError, match=REFUSED[changes]):
        loads(TEAM, "vllm", changes)


def test_a_model_that_no_server_can_have_is_refused(tmp_path):
    text = TEAM.replace("{name: right}", "{name: right, train: full, frozen: true}")
    with pytest.raises(UserError, match="agent 'right' has a model of its own"):
        build(loads(text, "vllm", own("http://a:1", tmp_path)))


def test_a_run_goes_on_with_other_servers_and_not_with_another_sampler():
    before, other, plain = (
        loads(TEAM, "vllm", changes)
        for changes in (own("http://a:1", Path("w")), own("http://b:2", Path("x")), ("sampling.engine=plain",))
    )
    assert differences(before, other, MAY_CHANGE) == []
    assert differences(before, plain, MAY_CHANGE) == ["sampling.engine"]


def test_paths_are_relative_to_the_team_file(tmp_path):
    changes = ("sampling.engine=vllm", "sampling.vllm.python=env/bin/python", "sampling.vllm.folder=w")
    found = loads(TEAM, "vllm", changes).anchored(tmp_path).sampling.vllm
    assert (found.python, found.folder) == (str(tmp_path / "env/bin/python"), str(tmp_path / "w"))


def test_an_environment_that_is_not_there_is_told_before_anything_is_sampled(tmp_path):
    team_file = loads(TEAM, "vllm", ("sampling.engine=vllm", "sampling.vllm.python=no/python")).anchored(tmp_path)
    with pytest.raises(UserError, match=r"sampling\.vllm\.python: there is no Python at .*no/python; `make vllm-env`"):
        build(team_file)


def test_a_frozen_agent_that_trains_nothing_speaks_as_the_base(tmp_path):

    save_pretrained(*tiny_model(TinyShape(1, 16, 2), seed=0), tmp_path / "model")
    text = TEAM.replace("{name: right}", "{name: right, train: full, frozen: true}").replace(
        "tiny, train", "MODEL, train"
    )
    text = text.replace("MODEL", str(tmp_path / "model"))
    fake = FakeVllm(str(tmp_path / "model"), letters, name="its-name")
    with Running(fake) as running:
        engine = build(loads(text, "vllm", own(running.url, tmp_path / "weights"))).engine
        samples = engine.sample("right", prompts_of(2), uniforms(0, 2, 4))
        engine.close()
    assert fake.given == []
    version = samples[0].version
    assert {(a["model"], a["cache_salt"]) for a in fake.asked[1:]} == {("its-name", f"right-{version}")}
