"""Shared fixtures and small engines. torch uses one thread, since tests run beside other work.

The xdist controller, which runs no tests, imports this file too, so heavy imports are made where they are used.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from teamtr.engines.sampling import TokenSampler

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from kept_workers import KeptWorkers
    from teamtr.batches import AgentBatch
    from teamtr.engines.learner import PolicyLearner

# No deadline, since the time of an example depends on the machine. Every run tries the same examples, so that failures
# are reproducible; ``make fuzz`` draws others.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LORA = SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")
FEW = SimpleNamespace(rank=4, alpha=8.0, targets=["q_proj", "down_proj"])
"""An adapter on few layers; the others have none."""


def make_policy(
    kind: str, *, seed: int = 0, temperature: float = 1.0, lora: Any = LORA, spread: Callable[[Any], None] | None = None
):
    """A small policy of the given kind. ``spread`` is applied to the model, to distribute it over processes."""
    import torch

    from teamtr.engines.tabular import TabularPolicy
    from teamtr.engines.torch.fused_lora import fuse_lora
    from teamtr.engines.torch.loading import TinyShape, share_base, tiny_model
    from teamtr.engines.torch.policy import TransformerPolicy

    if kind == "tabular":
        return TabularPolicy(6, end_ids=frozenset({0, 1}), rows=512, spread=1.0, seed=seed, temperature=temperature)
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=seed)
    with torch.no_grad():  # an untrained model is almost uniform; sharpen it, so that tests notice errors
        model.get_input_embeddings().weight.mul_(15.0)
    if kind == "full":
        if spread is not None:
            spread(model)
        return TransformerPolicy(model, tokenizer, temperature=temperature)
    shared = share_base(model, {"agent": lora, "other": lora}, seed=seed)
    if spread is not None:
        spread(shared)
    policy = TransformerPolicy(shared, tokenizer, adapter="agent", temperature=temperature, fused=fuse_lora(shared))
    with torch.no_grad():  # a new adapter changes nothing; perturb it, so that tests notice it
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in policy.parameters().values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def make_learner(
    kind: str, *, micro_batch: int = 8, seed: int = 0, temperature: float = 1.0, keep_initial: bool = False
) -> PolicyLearner:
    from teamtr.engines.learner import PolicyLearner

    policy = make_policy(kind, seed=seed, temperature=temperature)
    return PolicyLearner("agent", policy, micro_batch=micro_batch, keep_initial=keep_initial)


def make_batch(
    learner: PolicyLearner, *, problems: int = 4, group: int = 2, max_tokens: int = 4, seed: int = 0
) -> AgentBatch:
    """Messages sampled from the learner's policy, for prompts of different lengths."""
    from teamtr.batches import AgentBatch
    from teamtr.randomness import uniforms

    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 6, size=problems)
    prompts = [rng.integers(2, 6, size=n).astype(np.int32) for n in lengths for _ in range(group)]
    noise_BT = uniforms(seed, len(prompts), max_tokens)
    samples = learner.policy.sample(prompts, noise_BT, TokenSampler(learner.policy.temperature))
    count = len(prompts)
    return AgentBatch(
        agent="agent",
        prompts=tuple(prompts),
        messages=tuple(s.token_ids for s in samples),
        sampler_logprobs=tuple(s.logprobs for s in samples),
        episode_M=np.arange(count),
        problem_M=np.arange(count) // group,
        turn_M=np.zeros(count, dtype=np.int64),
    )


@pytest.fixture(scope="session", autouse=True)
def taught(tmp_path_factory) -> Path:
    """The cache of trained tiny bases, shared by all workers of this session. Also limits torch to one thread."""
    import torch

    from taught import remember_teaching

    torch.set_num_threads(1)
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "taught"
    remember_teaching(folder)
    return folder


@pytest.fixture(scope="session")
def ray_here() -> Iterator[KeptWorkers]:
    """One Ray cluster for all tests of this process, started by the first that requests it."""
    ray = pytest.importorskip("ray", reason="needs teamtr[ray]")
    from kept_workers import KeptWorkers

    workers = KeptWorkers()
    yield workers
    workers.drop()
    ray.shutdown()


@pytest.fixture
def kept(ray_here) -> Iterator[KeptWorkers]:
    """Teams over workers reuse workers that earlier tests have left idle."""
    with ray_here.at_work() as workers:
        yield workers


@pytest.fixture
def no_kept(ray_here) -> None:
    """Teams over workers start new workers, as outside tests, in the same Ray cluster."""
    ray_here.connect()
    ray_here.drop()


@pytest.fixture
def new_section(tmp_path, monkeypatch) -> Iterator[None]:
    """Adds the section of tests/new_section.py as a file in the folder of sections. It and all other sections that the
    test registers are removed at the end."""
    from teamtr.analysis.report import section, sections

    section.sections()
    monkeypatch.setattr(section, "_registered", dict(section._registered))
    folder = tmp_path / "sections"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("new_section.py"), folder / "lengths.py")
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(folder)])
    section._load_built_in.cache_clear()
    section.sections()
    yield
    del sys.modules["teamtr.analysis.report.sections.lengths"]


@pytest.fixture(params=["tabular", "full", "lora"])
def kind(request) -> str:
    """Parametrizes a test over every kind of policy."""
    return request.param
