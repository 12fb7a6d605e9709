"""Sampling with vLLM itself: the environment that ``make vllm-env`` makes, on this machine's CPU.

A server takes half a minute to start, so that tests share one where they can.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from teamtr.answers import Decoding, Sample
from teamtr.batches import AgentBatch
from teamtr.config import TeamFile, loads
from teamtr.engines.sampling import keep_likely
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.vllm.client import Client, Drawing
from teamtr.engines.vllm.engine import VllmEngine
from teamtr.engines.vllm.server import Launch, Server
from teamtr.ports import EngineLost
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.session.export import export
from teamtr.session.exported import vllm_lines
from teamtr.session.models import save_pretrained
from teamtr.session.resume import StoredRun
from teamtr.session.train import train
from teamtr.store import RunFolder, read_episodes

PYTHON = Path(os.environ.get("VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no environment with vLLM ({PYTHON}): make vllm-env"),
]

TEAM = """
name: vllm
task: {name: roles}
team: {model: tiny, train: lora, max_tokens: 3, agents: [{name: a1}, {name: a2}]}
tiny: {heads: 2, warmup_steps: 30, warmup_learning_rate: 1e-2}
plan: {problems: 4, group_size: 8, stages: 1, preset: teamtr, radius_nats_per_message: 0.05}
sampling: {engine: vllm, temperature: 0.9, memory_gb: 0.5, vllm: {context_tokens: 256, start_s: 580}}
eval: {every: 0}
"""
CLOSE = 2e-4
"""Nats per token: 5e-6 was measured with this model, 6e-5 with SmolLM2-135M."""


def team(*changes: str) -> TeamFile:
    return loads(TEAM, "vllm", (f"sampling.vllm.python={PYTHON}", *changes))


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    made = build(team("tiny.warmup_steps=0")).engine  # it knows nothing, and says long messages of all letters
    assert isinstance(made, VllmEngine)
    yield made
    made.close()


def prompts_of(count: int, tokens: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 60, size=tokens + k % 7).astype(np.int32) for k in range(count)]


def gaps(engine: Any, agent: str, prompts: list[np.ndarray], samples: list[Sample]) -> np.ndarray:
    """Between the sampler's log-probabilities and the learner's, token by token."""
    number, learner = np.arange(len(prompts)), engine.learner(agent)
    tokens, logprobs = tuple(s.token_ids for s in samples), tuple(s.logprobs for s in samples)
    learner.begin(AgentBatch(agent, tuple(prompts), tokens, logprobs, number, number, 0 * number))
    found = [np.abs(ours - theirs) for ours, theirs in zip(learner.token_logprobs(), logprobs, strict=True)]
    learner.end()
    return np.concatenate(found)


def test_the_learner_scores_what_vllm_wrote_also_after_new_weights(engine):
    prompts, noise = prompts_of(32), uniforms(1, 32, 12)
    learner = engine.learner("a1")
    before = learner.snapshot()
    said = []
    for seed in range(3):
        samples = engine.sample("a1", prompts, noise)
        assert {sample.version for sample in samples} == {learner.version()}
        assert gaps(engine, "a1", prompts, samples).max() < CLOSE
        said.append([sample.token_ids.tolist() for sample in samples])
        learner.perturb(3.0, seed)  # far: keys and values of the old weights would show
        engine.publish("a1", learner.version())
    assert said[0] != said[1] != said[2]
    ends = {int(s.token_ids[-1]) for s in samples if s.finish == "stop"}
    assert ends <= engine.info("a1").end_ids
    learner.restore(before)


def test_a_message_says_the_same_in_other_company(engine):
    prompts, noise = prompts_of(32), uniforms(2, 32, 12)
    whole = engine.sample("a1", prompts, noise)
    assert len({tuple(sample.token_ids.tolist()) for sample in whole}) > 16
    for size in (1, 5):
        parts = [s for k in range(0, 32, size) for s in engine.sample("a1", prompts[k : k + size], noise[k : k + size])]
        same = np.mean([a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(whole, parts, strict=True)])
        assert same > 0.9, "all, wherever it was tried; vLLM does not promise it"


@pytest.mark.parametrize(
    "drawn",
    [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1.5}, {"top_p": 0.7, "top_k": 5}],
    ids=str,
)
def test_log_probabilities_are_those_of_what_was_drawn_from(engine, drawn):
    policy, prompts = engine.learner("a1").policy, prompts_of(16)
    for prompt, sample in zip(
        prompts, engine.sample("a1", prompts, uniforms(3, 16, 8), decoding=Decoding(**drawn)), strict=True
    ):
        scale = policy.temperature / drawn.get("temperature", policy.temperature)
        with torch.no_grad():
            logits = policy.head()(policy.features([prompt], [sample.token_ids])) * scale
        logp = torch.log_softmax(keep_likely(logits, drawn.get("top_p", 1.0), drawn.get("top_k", 0)), -1)
        told = logp[torch.arange(len(sample.token_ids)), torch.as_tensor(sample.token_ids, dtype=torch.long)]
        np.testing.assert_allclose(sample.logprobs, told.numpy(), atol=CLOSE)


def test_greedy_messages_are_those_of_our_own_sampler(engine):
    prompts, noise = prompts_of(16), uniforms(4, 16, 8)
    theirs = engine.sample("a1", prompts, noise, decoding=Decoding(0.0))
    ours = engine.inner.sample("a1", prompts, noise, decoding=Decoding(0.0))
    assert [s.token_ids.tolist() for s in theirs] == [s.token_ids.tolist() for s in ours]
    assert not any(s.logprobs.any() for s in theirs)


def test_weights_that_the_server_was_not_given_cannot_speak(engine):
    engine.sample("a2", prompts_of(1), uniforms(0, 1, 2))
    host = engine.hosts["a2"]
    host.client.unload_adapter(f"a2-{engine.version('a2')}")
    with pytest.raises(EngineLost, match="does not have a2-"):
        engine.sample("a2", prompts_of(1), uniforms(0, 1, 2))
    host.loaded.clear()


# -- whole runs -----------------------------------------------------------------------------------------------


def updates(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "update"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> tuple[Path, list[dict[str, Any]], list[Sample]]:
    """A stage of two agents, with every message that came from vLLM."""
    folder, said, message = tmp_path_factory.mktemp("run") / "run", [], Client.message

    def noted(client: Client, *arguments: Any) -> Sample:
        said.append(message(client, *arguments))
        return said[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "message", noted)
        records = list(train(team(), folder))
    return folder, records, said


def test_tokens_that_are_trained_on_are_those_that_were_sampled(undisturbed):
    folder, records, said = undisturbed
    sampled = {(tuple(s.token_ids.tolist()), tuple(s.logprobs.tolist())) for s in said}
    batches = [read_episodes(path) for path in RunFolder.read(folder).episodes.iterdir()]
    turns = [turn for batch in batches for episode in batch.episodes for turn in episode.turns]
    assert len(turns) == 2 * 32 * 2
    assert all((tuple(t.token_ids.tolist()), tuple(t.sampler_logprobs.tolist())) in sampled for t in turns)
    assert records[0]["samplers"] == {"a1": "vllm fp32", "a2": "vllm fp32"}
    assert [update["outcome"] for update in updates(records)] == ["accepted", "accepted"]
    assert all(update["mismatch_largest"] < CLOSE for update in updates(records))


def test_a_server_that_is_killed_in_the_middle_changes_nothing(undisturbed, tmp_path, monkeypatch):
    asked, message = [], Client.message

    def killing(client: Client, *arguments: Any) -> Sample:
        asked.append(1)
        if len(asked) == 150:  # in the rollouts after the first update; 64 before each, and 64 before all
            for process in psutil.Process().children(recursive=True):
                if process.cmdline()[0].startswith("VLLM::"):  # whoever computes
                    process.kill()
        return message(client, *arguments)

    monkeypatch.setattr(Client, "message", killing)
    records = list(train(team(), tmp_path / "run"))
    (resumed,) = [record for record in records if record["kind"] == "resume"]
    assert "vLLM" in resumed["lost"]["why"]
    found, wanted = ([u["version_after"] for u in updates(r)] for r in (records, undisturbed[1]))
    assert found == wanted


def test_two_bases_and_all_weights_of_an_agent(tmp_path):
    """One agent has an adapter on a model in a folder, the other trains all weights of another: two servers."""
    save_pretrained(*tiny_model(TinyShape(1, 64, 2), seed=5), tmp_path / "model")
    text = TEAM.replace("{name: a1}", f"{{name: a1, model: {tmp_path / 'model'}}}")
    text = text.replace("{name: a2}", "{name: a2, train: full}")
    engine: Any = build(loads(text, "vllm", (f"sampling.vllm.python={PYTHON}",))).engine
    prompts, noise = prompts_of(16), uniforms(1, 16, 8)
    try:
        for moved in (False, True):
            for agent in ("a1", "a2"):
                if moved:
                    engine.learner(agent).perturb(0.1, 1)
                    engine.publish(agent, engine.version(agent))
                samples = engine.sample(agent, prompts, noise)
                assert gaps(engine, agent, prompts, samples).max() < CLOSE
    finally:
        engine.close()


def test_the_start_line_of_an_export_serves_every_adapter_under_its_name(tmp_path):
    """The very line: ours only adds what a CPU needs."""
    team_file = team("sampling.engine=plain", "sampling.memory_gb=null")
    for _ in train(team_file, tmp_path / "run"):
        pass
    written = export(tmp_path / "run", tmp_path / "out")
    (line,) = vllm_lines(written)
    program, verb, base, *arguments = shlex.split(line)
    assert (program, verb) == ("vllm", "serve")
    cpu = ["--enforce-eager", "--max-model-len=256", "--kv-cache-memory-bytes=500000000", "--dtype=float32"]
    told = [*cpu, "--logprobs-mode=processed_logprobs", "--generation-config=vllm"]
    launch = Launch(str(PYTHON), told, {"TORCHDYNAMO_DISABLE": "1"}, start_s=580.0)
    (tmp_path / "server").mkdir()
    server = Server(launch, tmp_path / "server", base, arguments)
    try:
        assert {served.name for served in server.client.models()} >= {"a1", "a2"}
        session, _ = StoredRun.read(tmp_path / "run").build()
        prompts, noise = prompts_of(4), uniforms(5, 4, 3)
        for agent in ("a1", "a2"):
            ends = session.engine.info(agent).end_ids
            theirs = server.client.sample(prompts, [3] * 4, [1] * 4, Drawing(agent, "exported", ends, temperature=0.0))
            ours = session.engine.sample(agent, prompts, noise, decoding=Decoding(0.0))
            assert [s.token_ids.tolist() for s in theirs] == [s.token_ids.tolist() for s in ours]
    finally:
        server.close()
