"""What every engine promises (``ports.Engine``): the same suite for the local one, for one in another process, for one
over two, also where each of them holds a part of the base, for one whose agents live in two groups, and for one whose
messages a server samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from fake_vllm import FakeVllm, Running, transformer
from remote_engine import remote_engine
from teamtr.answers import Ended, Wanted
from teamtr.batches import AgentBatch
from teamtr.config import loads, recipe_text
from teamtr.engines.cluster.groups import GroupedEngine
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.local import LocalEngine
from teamtr.errors import UserError
from teamtr.ports import Engine, Learner
from teamtr.randomness import uniforms
from teamtr.session.build import Parts, Session, build
from teamtr.session.memory import demand_of
from teamtr.session.models import Models, local_engine
from teamtr.session.train import train
from teamtr.theory.objective import Objective

TEAM = """
name: port
task: {name: code, half_length: 1}
team: {model: tiny, train: TRAIN, max_tokens: 4, agents: [{name: left}, {name: right}, {name: speaker}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {problems: 2, group_size: 2}
learner: {micro_batch: 8, score: SCORE}
"""
MAKERS = {"local": local_engine, "remote": remote_engine}
HELD = (("left", "right"), ("speaker",))
GROUPS = (
    *("cluster.engine=ray", "cluster.shards=2", "team.agents.speaker.train=full"),  # whose base is another group's too
    "cluster.groups=[{agents: [left, right], workers: 2}, {agents: [speaker]}]",
)


def grouped_engine(team_file, task, plan, player, *, taught: bool = True) -> Models:
    """Two groups in this process."""
    groups = [local_engine(team_file, task, plan, player, taught=taught, held=held) for held in HELD]
    agents = team_file.team.names
    codecs = {name: codec for models in groups for name, codec in models.codecs.items()}
    return Models(GroupedEngine([models.engine for models in groups], ("first", "second"), agents), codecs)


WHERE = {**MAKERS, "grouped": grouped_engine}
WORKERS = ("cluster.engine=ray", "cluster.workers=2", "cluster.shards=2")
ON_RAY = {"ray": WORKERS, "sharded": (*WORKERS, "cluster.shard_base=true"), "groups": GROUPS}
REMOTE = [
    pytest.param("remote-full", marks=(pytest.mark.long, pytest.mark.slow)),
    pytest.param("remote-lora", marks=pytest.mark.long),
    pytest.param("groups-full", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("groups-lora", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("ray-full", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("ray-lora", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("sharded-full", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("sharded-lora", marks=(pytest.mark.cluster, pytest.mark.long, pytest.mark.slow)),
    pytest.param("vllm-lora", marks=(pytest.mark.long, pytest.mark.slow)),  # tests/contract/test_vllm.py is quick
]


@pytest.fixture(scope="module", params=["local-full", "local-lora", "grouped-full", *REMOTE])
def session(request: Any) -> Iterator[Session]:
    where, train_kind = request.param.split("-")
    text = TEAM.replace("TRAIN", train_kind).replace("SCORE", "own" if where in ("vllm", "sharded") else "sampler")
    if where == "vllm":
        with Running(FakeVllm("tiny", transformer(loads(text, "port")))) as running:
            built = build(loads(text, "port", ("sampling.engine=vllm", f"sampling.vllm.urls=[{running.url}]")))
            yield built
            built.engine.close()
        return
    if where in ON_RAY:
        with request.getfixturevalue("ray_here").at_work():
            built = build(loads(text, "port", ON_RAY[where]))
            yield built
            built.engine.close()
        return
    built = build(loads(text, name="port"), parts=Parts(make_engine=WHERE[where]))
    yield built
    built.engine.close()


def prompts_of(session: Session, count: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 60, size=3 + k % 3).astype(np.int32) for k in range(count)]


def batch_of(session: Session, agent: str = "left", count: int = 8) -> AgentBatch:
    prompts = prompts_of(session, count)
    samples = session.engine.sample(agent, prompts, uniforms(3, count, 4))
    return AgentBatch(
        agent,
        tuple(prompts),
        tuple(s.token_ids for s in samples),
        tuple(s.logprobs for s in samples),
        np.arange(count),
        np.arange(count) // 2,
        np.zeros(count, dtype=np.int64),
    )


def step(learner: Learner, rows: int = 8, learning_rate: float = 1e-2) -> None:
    advantages = np.where(np.arange(rows) % 2, 1.0, -1.0)
    assert learner.step(np.arange(rows), advantages, Objective(), beta=0.1, learning_rate=learning_rate).applied


def test_it_is_an_engine(session: Session):
    assert isinstance(session.engine, Engine)
    assert isinstance(session.engine.learner("left"), Learner)
    assert session.engine.agents == ("left", "right", "speaker")


@pytest.mark.long
def test_a_batch_split_by_rows_says_the_same_tokens(session: Session):
    prompts, noise = prompts_of(session, 32), uniforms(5, 32, 4)
    whole = session.engine.sample("left", prompts, noise)
    for size in (1, 5, 16):
        parts = [
            sample
            for start in range(0, 32, size)
            for sample in session.engine.sample("left", prompts[start : start + size], noise[start : start + size])
        ]
        for a, b in zip(whole, parts, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_no_message_is_longer_than_its_noise(session: Session):
    for tokens in (1, 3):
        samples = session.engine.sample("left", prompts_of(session), uniforms(5, 8, tokens))
        assert max(len(s.token_ids) for s in samples) <= tokens
    assert session.engine.sample("left", [], uniforms(5, 0, 3)) == []


def test_every_message_is_heard_of_once_and_is_what_is_returned(session: Session):
    heard: list[tuple[int, Any]] = []
    told = session.engine.sample("left", prompts_of(session), uniforms(5, 8, 3), heard=lambda *one: heard.append(one))
    assert sorted(row for row, _ in heard) == list(range(8))
    plain = session.engine.sample("left", prompts_of(session), uniforms(5, 8, 3))
    for row, sample in heard:
        for same in (told[row], plain[row]):
            assert sample.token_ids.tolist() == same.token_ids.tolist()
            assert sample.logprobs.tolist() == same.logprobs.tolist()
            assert (sample.finish, sample.version) == (same.finish, same.version)


def test_every_token_is_followed_in_order_and_a_row_that_is_not_wanted_may_end(session: Session):
    """An engine that knows a message only whole tells it whole, and cannot end it earlier."""
    prompts, noise = prompts_of(session), uniforms(5, 8, 6)
    plain = session.engine.sample("left", prompts, noise)
    told: dict[int, list[int]] = {row: [] for row in range(8)}
    ended: list[int] = []

    def follow(row: int, before: int, token_ids: Any) -> bool:
        assert before == len(told[row])
        assert row not in ended
        told[row] += token_ids.tolist()
        return row % 2 == 0 or len(told[row]) < 2

    found = session.engine.sample("left", prompts, noise, heard=lambda row, _: ended.append(row), follow=follow)
    assert sorted(ended) == list(range(8))
    assert any(len(sample.token_ids) > 2 for sample in plain[1::2])
    here = session.engine.groups if isinstance(session.engine, GroupedEngine) else (session.engine,)
    for row, (sample, expected) in enumerate(zip(found, plain, strict=True)):
        written = len(sample.token_ids)
        assert told[row] == sample.token_ids.tolist() == expected.token_ids.tolist()[:written]
        np.testing.assert_allclose(sample.logprobs, expected.logprobs[:written], atol=1e-5)
        assert sample.finish == ("length" if written < len(expected.token_ids) else expected.finish)
        if all(isinstance(engine, LocalEngine) for engine in here):  # which tell token by token
            assert written == len(expected.token_ids) if row % 2 == 0 else written <= 2


def test_a_stream_takes_rows_of_several_agents_while_it_runs_and_says_what_batches_say(session: Session):
    engine, prompts, noise = session.engine, prompts_of(session, 6), uniforms(5, 6, 4)
    expected = {agent: engine.sample(agent, prompts, noise) for agent in ("left", "right")}
    wanted = [Wanted(agent, prompts[k], noise[k]) for k in range(6) for agent in ("left", "right")]
    waves, found = [wanted[:5], wanted[5:9], wanted[9:]], {}

    def more(ended: Sequence[Ended]) -> Sequence[Wanted]:
        assert not found.keys() & {one.row for one in ended}, "a message that was told is final"
        found.update({one.row: one.sample for one in ended})
        return waves.pop(0) if waves and (ended or not found) else []

    engine.stream(more)
    assert sorted(found) == list(range(12))
    for row, sample in found.items():
        same = expected[wanted[row].agent][row // 2]
        assert (sample.token_ids.tolist(), sample.finish) == (same.token_ids.tolist(), same.finish)
        assert sample.version == same.version == engine.version(wanted[row].agent)
        np.testing.assert_allclose(sample.logprobs, same.logprobs, atol=1e-5)


def test_every_sample_names_the_weights_that_wrote_it(session: Session):
    engine, learner = session.engine, session.engine.learner("left")
    before, old = learner.snapshot(), learner.version()
    assert {s.version for s in engine.sample("left", prompts_of(session), uniforms(0, 8, 2))} == {old}
    learner.begin(batch_of(session))
    step(learner)
    new = learner.version()
    engine.publish("left", new)
    assert new != old
    assert {s.version for s in engine.sample("left", prompts_of(session), uniforms(0, 8, 2))} == {new}
    assert engine.version("left") == new
    learner.restore(before)
    learner.end()
    assert engine.version("left") == old


def test_weights_that_no_learner_holds_cannot_be_published(session: Session):
    with pytest.raises(RuntimeError, match="cannot be published"):
        session.engine.publish("left", "0" * 32)


def test_the_learner_scores_what_the_sampler_wrote(session: Session):
    learner, batch = session.engine.learner("left"), batch_of(session)
    logp_M = learner.begin(batch)
    np.testing.assert_allclose(logp_M, [x.sum() for x in batch.sampler_logprobs], atol=1e-4)
    np.testing.assert_allclose(logp_M, [x.sum() for x in learner.token_logprobs()], atol=1e-9)
    found = learner.measure()
    assert not found.full_M.any()
    assert not found.log_ratio_M.any()
    learner.end()


def test_a_step_is_measured_moved_back_along_and_undone_to_the_bit(session: Session):
    learner, batch = session.engine.learner("left"), batch_of(session)
    before, print_before = learner.snapshot(), learner.fingerprint()
    learner.begin(batch)
    step(learner)
    whole, tried = learner.measure(), learner.snapshot()
    assert whole.full_M.mean() > 0
    np.testing.assert_allclose([x.sum() for x in learner.token_kls()], whole.full_M, rtol=1e-5, atol=1e-8)
    some = learner.measure(np.array([1, 4]))
    np.testing.assert_allclose(some.full_M, whole.full_M[[1, 4]], rtol=1e-4, atol=1e-7)
    shift = learner.token_shift()
    assert shift.positions == batch.lengths_M.sum()
    learner.move(before, tried, 0.5)
    half = learner.measure()
    share = half.full_M.mean() / whole.full_M.mean()
    assert 0.15 < share < 0.45, "KL falls with about the square of the way"
    learner.restore(tried)
    np.testing.assert_array_equal(learner.measure().full_M, whole.full_M)
    learner.restore(before)
    assert learner.fingerprint() == print_before
    assert not learner.measure().full_M.any()
    learner.end()


def test_drafts_are_verified(session: Session):
    learner, batch = session.engine.learner("left"), batch_of(session, count=48)
    before, rng = learner.snapshot(), np.random.default_rng(0)
    noise = rng.random(int(batch.lengths_M.sum())), rng.random(len(batch))
    learner.begin(batch)
    same = learner.verify(*noise)
    assert (same.kept_M == batch.lengths_M).all()
    assert (same.next_M == -1).all()
    learner.perturb(2.0, seed=0)
    other = learner.verify(*noise)
    cut_M = other.kept_M < batch.lengths_M
    assert cut_M.any()
    assert ((other.next_M >= 0) == cut_M).all()
    learner.end()
    learner.restore(before)


def test_a_perturbation_is_seen_and_named_by_its_seed(session: Session):
    learner = session.engine.learner("right")
    before, versions = learner.snapshot(), []
    for seed in (1, 1, 2):
        learner.perturb(1e-2, seed)
        versions.append(learner.version())
        learner.restore(before)
    assert versions[0] == versions[1] != versions[2]
    assert learner.version() not in versions


def test_what_is_set_aside_is_written_beside_sampling_as_it_would_be_alone(session: Session, tmp_path: Path):
    """By another thread, until all is sampled; engines that answer one call at a time decline."""
    learner = session.engine.learner("speaker")
    before = learner.snapshot()
    learner.begin(batch_of(session, "speaker"))
    step(learner)
    learner.end()
    kept, said = learner.fingerprint(), sampled(session)
    learner.save(tmp_path / "alone")
    aside = learner.set_aside()
    if aside is None:
        assert not isinstance(learner, PolicyLearner)
    else:
        begun, over = Event(), Event()

        def write() -> list[str]:
            prints = []
            begun.set()
            while not prints or not over.is_set():
                prints.append(aside.fingerprint())
                aside.save(tmp_path / f"beside-{len(prints)}")
            return prints

        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write)
            assert begun.wait(60)
            assert all(sampled(session) == said for _ in range(3))
            over.set()
            prints = written.result()
        assert set(prints) == {kept}
        alone = contents(tmp_path / "alone")
        assert all(contents(tmp_path / f"beside-{k + 1}") == alone for k in range(len(prints)))
    learner.restore(before)


def sampled(session: Session) -> list[tuple[str, bytes, bytes]]:
    """What all agents say."""
    found = []
    for agent in session.engine.agents:
        for one in session.engine.sample(agent, prompts_of(session), uniforms(3, 8, 4)):
            found.append((one.version, one.token_ids.tobytes(), one.logprobs.tobytes()))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_saved_is_loaded_to_the_bit(session: Session, tmp_path: Path):
    learner = session.engine.learner("speaker")
    before = learner.snapshot()
    learner.begin(batch_of(session, "speaker"))
    step(learner)
    learner.save(tmp_path / "agent")
    kept, version = learner.fingerprint(), learner.version()
    learner.restore(before)
    assert learner.fingerprint() != kept
    learner.load(tmp_path / "agent")
    assert (learner.fingerprint(), learner.version()) == (kept, version)
    learner.restore(before)
    learner.end()


def test_tokens_are_counted(session: Session):
    learner, batch = session.engine.learner("left"), batch_of(session)
    before, spent = learner.snapshot(), dict(learner.tokens)
    size = sum(len(p) + len(m) for p, m in zip(batch.prompts, batch.messages, strict=True))
    learner.begin(batch)
    assert learner.tokens["scored"] == spent["scored"] + size
    step(learner)
    assert learner.tokens["trained"] == spent["trained"] + size
    learner.restore(before)
    learner.end()


def test_an_engine_tells_of_its_models_and_takes_another_precision(session: Session):
    info = session.engine.info("left")
    assert (info.precision, info.precisions, info.device) == ("fp32", ("fp32",), "cpu")
    assert info.sampling.startswith("vllm" if info.samples_from_a_copy else "plain")
    assert info.reference_version is None
    samples = session.engine.sample("left", prompts_of(session, 200), uniforms(1, 200, 8))
    stopped = {int(s.token_ids[-1]) for s in samples if s.finish == "stop"}
    assert stopped
    assert stopped <= info.end_ids
    session.engine.set_precision("left", "bf16")
    assert session.engine.info("left").precision == "bf16"
    session.engine.set_precision("left", "fp32")


def test_memory_is_planned_and_rehearsed_without_a_trace(session: Session):
    demand = demand_of(session)
    plan = session.engine.memory_plan(demand)
    assert plan.total > 0
    assert plan.available is None
    assert plan.fits
    messages = {name: 10 * count for name, count in demand.messages.items()}
    larger = replace(demand, episodes=10 * demand.episodes, messages=messages)
    assert session.engine.memory_plan(larger).total > plan.total
    before = {name: session.engine.learner(name).fingerprint() for name in session.engine.agents}
    found = session.engine.rehearse(demand)
    assert set(found.micro_batch) == {"left", "right", "speaker"}
    assert {name: session.engine.learner(name).fingerprint() for name in session.engine.agents} == before


def test_what_goes_wrong_there_is_told_here(session: Session):
    with pytest.raises((RuntimeError, AssertionError), match=r"call begin\(batch\) first"):
        session.engine.learner("left").measure()


def test_scores_of_the_sampler_are_the_learners_own_wherever_rows_were_sampled(session: Session):
    """Rows go to workers in neighboring parts when they are sampled, and by problem when they are scored: what another
    one sampled is computed."""
    engine, learner = session.engine, session.engine.learner("left")
    if session.team_file.sampling.engine == "vllm":
        with pytest.raises(UserError, match=r"learner\.score: sampler"):
            engine.keep_scores("left")
    if session.team_file.learner.score == "own":
        return
    engine.keep_scores("left")
    batch = batch_of(session)
    engine.keep_scores(None)
    scored, found = [], []
    for from_sampler in (True, False):
        logp_M, before = learner.begin(batch, from_sampler=from_sampler), learner.snapshot()
        scored.append(learner.sampler_scored)
        learner.perturb(1e-2, seed=1)
        found.append((logp_M, learner.measure().full_M))
        learner.restore(before)
        learner.end()
    workers = session.team_file.cluster.parts
    assert scored == [len(batch) // workers, 0]
    for kept, own, within in zip(*found, (1e-5, 1e-6), strict=True):
        np.testing.assert_allclose(kept, own, atol=within)
    engine.keep_scores("left")
    batch = batch_of(session)
    engine.publish("left", learner.version())
    learner.begin(batch, from_sampler=True)
    assert learner.sampler_scored == 0, "whoever publishes forgets, everywhere"
    learner.end()
    engine.keep_scores(None)


# -- whole runs --------------------------------------------------------------------------------------------------


def versions(folder: Path, make_engine: Any, *overrides: str) -> list[str]:
    team_file = loads(recipe_text("code-exchange"), "demo", overrides)
    records = list(train(team_file, folder, parts=Parts(make_engine=make_engine)))
    return [r["version_after"] for r in records if r["kind"] == "update"]


@pytest.mark.slow
def test_the_demo_in_another_process_ends_with_the_same_bits(tmp_path: Path):
    small = ("plan.problems=8", "plan.group_size=8", "tiny.warmup_steps=15", "eval.every=1", "diagnostics.every=1")
    here = versions(tmp_path / "here", local_engine, "plan.stages=2", *small)
    versions(tmp_path / "there", remote_engine, "plan.stages=1", *small)
    there = versions(tmp_path / "there", remote_engine, "plan.stages=2", *small)
    assert len(set(here)) > 3
    assert here[3:] == there, "also when it is resumed"


@pytest.mark.slow
def test_the_whole_demo_in_another_process_ends_with_the_same_bits(tmp_path: Path):
    """As ``make demo`` trains it."""
    here, there = (versions(tmp_path / name, maker) for name, maker in MAKERS.items())
    assert len(here) == 150
    assert here == there
