"""What a demand takes on the device, before anything runs: weights, keys and values, optimizer, the worst step.

Sizes that follow from shapes are computed; what one token's activations take is measured on the model itself, by
looking at what autograd saves for a short text. ``rehearse`` then takes the longest step that the demand allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from teamtr.engines import card
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.pool import architecture
from teamtr.engines.paged.sampler import PAGE, SIZES
from teamtr.engines.passes import head_chunk
from teamtr.engines.slices import own
from teamtr.engines.torch.attention import AttentionShape, Unsupported, text_config
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.ports import GB, Demand, Lengths, MemoryItem, MemoryPlan, Rehearsal
from teamtr.types import PLAYER, AgentBatch, Ids

PROBE_TOKENS = 64
WORKSPACES = 4 * (32 << 20)
"""What matrix products keep on a card: 32 MB (measured on an H200) for each of two threads, forward and backward, and
two streams, running and capturing."""


def transformers_of(learners: Mapping[str, PolicyLearner]) -> dict[str, PolicyLearner]:
    return {name: learner for name, learner in learners.items() if isinstance(learner.policy, TransformerPolicy)}


def plan(learners: Mapping[str, PolicyLearner], demand: Demand) -> MemoryPlan:
    """The plan of these models."""
    transformers = transformers_of(learners)
    device = next((learner.policy.device for learner in transformers.values()), torch.device("cpu"))
    available = None
    if device.type == "cuda":
        available = card.free_bytes(device) + torch.cuda.memory_allocated(device)
    items = [*_weights(transformers), *_pages(transformers, demand)]
    trained = [transformers[name] for name in demand.messages if name in transformers]
    if trained:
        items += _largest(_optimizer(learner) for learner in trained)
        items += _largest(_reference(learner, demand) for learner in trained)
        items += _largest(_worst_step(learner, demand) for learner in trained)
    if device.type == "cuda":
        items.append(MemoryItem("libraries", WORKSPACES, "workspaces of matrix products"))
    return MemoryPlan(tuple(items), available)


def _weights(learners: Mapping[str, PolicyLearner]) -> Iterator[MemoryItem]:
    """Every tensor once, however many agents share it."""
    seen: dict[int, int] = {}
    adapters = 0
    for learner in learners.values():
        for name, parameter in _policy(learner).causal_lm.named_parameters():
            if id(parameter) not in seen:
                seen[id(parameter)] = own(parameter).numel() * parameter.element_size()
                adapters += seen[id(parameter)] if "lora_" in name else 0
    who = f"{len(learners)} agents" if PLAYER not in learners else f"{len(learners) - 1} agents and {PLAYER}"
    yield MemoryItem("weights", sum(seen.values()) - adapters, f"{who}, shared ones once")
    if adapters:
        yield MemoryItem("adapters", adapters)
    policies = [_policy(learner) for learner in learners.values()]
    halves = {id(policy.model): policy.frozen_half_bytes() for policy in policies}
    if any(halves.values()):
        yield MemoryItem("base in half precision", sum(halves.values()), "for training adapters on it")


def _pages(learners: Mapping[str, PolicyLearner], demand: Demand) -> Iterator[MemoryItem]:
    """Sampling copies and keys and values, per architecture; nothing on the plain path but what its cache grows to."""
    episodes, lengths = demand.episodes, demand.lengths
    by_server: dict[str, list[str]] = {}
    for name, learner in learners.items():
        by_server.setdefault(architecture(_policy(learner).causal_lm), []).append(name)
    for names in by_server.values():
        policy = _policy(learners[names[0]])
        tokens = max(lengths[name].whole for name in names)
        if policy.serving is None:
            size = 2 * _attention_widths(policy)[1] * torch.float32.itemsize
            yield MemoryItem(
                "keys and values", episodes * tokens * size, f"{episodes} rows of {tokens} tokens, plain path"
            )
            continue
        dtype, shape = policy.serving.dtype, AttentionShape.of(text_config(policy.causal_lm))
        weights = sum(p.numel() for n, p in policy.causal_lm.named_parameters() if "lora_" not in n) * dtype.itemsize
        yield MemoryItem("sampling copy", weights, policy.serving.precision)
        page = Pool.bytes_per_page(shape, PAGE, dtype)
        wanted = (min(episodes, SIZES[-1]) * -(-tokens // PAGE) + 1) * page
        taken = min(4 * wanted, policy.serving.page_budget(policy.causal_lm))
        yield MemoryItem("keys and values", taken, f"{wanted / GB:.2g} GB for a batch; the rest is found again later")


def _optimizer(learner: PolicyLearner) -> MemoryItem:
    """Gradients (in float16 those of a micro-batch beside those of the step), two moments, and the two snapshots that
    the gate may go back to (weights and moments each)."""
    trainable = sum(own(p).numel() * p.element_size() for p in learner.policy.parameters().values())
    times = 10 if learner.policy.precision == "fp16" else 9
    return MemoryItem(
        "gradients, moments, snapshots", times * trainable, f"of the agent being updated ({learner.agent})"
    )


def _reference(learner: PolicyLearner, demand: Demand) -> MemoryItem:
    """The old policy's last hidden states of every message token."""
    messages, lengths = demand.messages[learner.agent], demand.lengths[learner.agent]
    size = messages * _reference_bytes(learner, lengths)
    return MemoryItem("old policy", size, f"{messages} messages of {lengths.message} tokens")


def _reference_bytes(learner: PolicyLearner, lengths: Lengths) -> int:
    """Of one message."""
    return int(lengths.message * text_config(_policy(learner).causal_lm).hidden_size * 4)


@dataclass(frozen=True)
class Rows:
    """Most messages that are computed at once."""

    scored: int
    trained: int
    """With all that the way back needs."""

    @staticmethod
    def of(learner: PolicyLearner, demand: Demand) -> Rows:
        messages, checked = max(1, demand.messages[learner.agent]), demand.checked[learner.agent]
        step = -(-messages // min(demand.minibatches, messages))
        return Rows(min(learner.passes.micro_batch, max(messages, checked)), min(learner.passes.micro_batch, step))


def _worst_step(learner: PolicyLearner, demand: Demand) -> MemoryItem:
    lengths = demand.lengths[learner.agent]
    rows, config = Rows.of(learner, demand), text_config(_policy(learner).causal_lm)
    # Going back through a layer makes gradients of what it kept, and of what came in between.
    trained = (1 + 2 / config.num_hidden_layers) * kept_bytes(learner, lengths, rows.trained)
    # Without a way back, what one layer makes, and what the one before it gave.
    scored = 2 / config.num_hidden_layers * kept_bytes(learner, lengths, rows.scored)
    vocabulary = config.vocab_size
    positions = min(rows.scored * lengths.message, head_chunk(learner.policy.device, vocabulary))
    logits = 4 * positions * vocabulary * 4  # new, old, and the gradients of both passes
    alike = f", {lengths.shared} of them common" if lengths.shared else ""
    what = f"{rows.trained} messages" if trained >= scored else f"{rows.scored} messages, scored,"
    why = f"{what} of {lengths.whole} tokens{alike} ({learner.agent}); out of memory halves it"
    return MemoryItem("worst step", int(max(trained, scored)) + logits, why)


def kept_bytes(learner: PolicyLearner, lengths: Lengths, rows: int) -> float:
    """What autograd keeps of rows as long as can be: all that a token needs, common beginnings once, and what attention
    keeps of whole rows (queries, keys, values and its answer) for every copy."""
    if not _policy(learner).packs:  # padded rows share nothing
        lengths = replace(lengths, shared=0)
    distinct = lengths.distinct(rows)
    copies = rows * lengths.whole - distinct
    return distinct * activation_bytes_per_token(learner) + copies * _attention_bytes_per_token(learner)


def _attention_bytes_per_token(learner: PolicyLearner) -> int:
    width = 2 if learner.policy.precision in ("fp16", "bf16") else 4
    return 2 * sum(_attention_widths(_policy(learner))) * width


def _attention_widths(policy: TransformerPolicy) -> tuple[int, int]:
    """How many numbers the queries of one token have, and its keys, in all layers together."""
    config = text_config(policy.causal_lm)
    try:
        shape = AttentionShape.of(config)
    except Unsupported:  # layers differ; about as wide as what they read
        return (config.num_hidden_layers * config.hidden_size,) * 2
    return shape.layers * shape.heads * shape.dim, shape.layers * shape.kv_heads * shape.dim


def activation_bytes_per_token(learner: PolicyLearner) -> float:
    """What autograd keeps of one token between forward and backward: the difference that more text makes, since
    weights in half precision are kept as well, however short the text."""
    text: Ids = np.arange(2, 2 + 2 * PROBE_TOKENS, dtype=np.int32) % text_config(_policy(learner).causal_lm).vocab_size
    short, long = (
        kept_for_backward(learner, [text[: tokens - 1]], [text[tokens - 1 : tokens]])
        for tokens in (PROBE_TOKENS, 2 * PROBE_TOKENS)
    )
    return (long - short) / PROBE_TOKENS


def kept_for_backward(learner: PolicyLearner, prompts: Sequence[Ids], messages: Sequence[Ids]) -> int:
    """Bytes that autograd holds after the forward pass over these rows."""
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(see, lambda t: t), learner.policy.computing():
        features = learner.policy.features(prompts, messages)
    del features
    return sum(kept.values())


def _policy(learner: PolicyLearner) -> TransformerPolicy:
    assert isinstance(learner.policy, TransformerPolicy)
    return learner.policy


def _largest(items: Iterator[MemoryItem]) -> list[MemoryItem]:
    return [max(items, key=lambda item: item.bytes)]


def peak_bytes() -> int | None:
    """The most that was in use since the last rehearsal; None without a card."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def rehearse(learners: Mapping[str, PolicyLearner], demand: Demand) -> Rehearsal:
    """Reserve what sampling takes, then score as much as is ever scored at once and take the longest step of every
    trainable agent, and undo it. The peak is counted anew afterwards.

    Running out of memory halves the micro-batch here and not in the middle of a run.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for name, learner in transformers_of(learners).items():
        lengths = demand.lengths[name]
        _policy(learner).reserve(demand.episodes, lengths.prompt, lengths.message)
    for name in demand.messages:
        learner, rows = learners[name], Rows.of(learners[name], demand)
        batch = _longest_batch(name, demand.lengths[name], rows.scored)
        before = learner.snapshot()
        try:
            with _old_policy_of_the_rest(learner, demand, len(batch)):
                learner.begin(batch, reference=demand.objective.has_reference)
                step, ones = np.arange(rows.trained), np.ones(rows.trained)
                learner.step(step, ones, demand.objective, beta=1.0, learning_rate=0.0)
                learner.measure()
        finally:
            learner.restore(before)
            learner.end()
    found = Rehearsal({name: learners[name].passes.micro_batch for name in demand.messages}, peak_bytes())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return found


@contextmanager
def _old_policy_of_the_rest(learner: PolicyLearner, demand: Demand, rehearsed: int) -> Iterator[None]:
    """Within, as much of the card is taken as an update keeps of the messages that the rehearsal does not have."""
    held = None
    if isinstance(learner.policy, TransformerPolicy) and learner.policy.device.type != "cpu":
        each = _reference_bytes(learner, demand.lengths[learner.agent])
        rest = max(0, demand.messages[learner.agent] - rehearsed) * each
        try:
            held = torch.empty(rest, dtype=torch.uint8, device=learner.policy.device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"what an update of {learner.agent} keeps of the policy before it, {rest / GB:.2g} GB, does not fit "
                "beside weights and pages; lower plan.problems, plan.group_size, max_tokens or sampling.memory_gb"
            ) from error
    yield
    del held


def _longest_batch(agent: str, lengths: Lengths, count: int) -> AgentBatch:
    """So many messages, as long as can be, and no more alike than they must be."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(2, 64, size=lengths.shared).astype(np.int32)

    def rows(length: int) -> tuple[Ids, ...]:
        return tuple(rng.integers(2, 64, size=length).astype(np.int32) for _ in range(count))

    return AgentBatch(
        agent=agent,
        prompts=tuple(np.concatenate([beginning, row]) for row in rows(lengths.prompt - lengths.shared)),
        messages=rows(lengths.message),
        sampler_logprobs=tuple(np.zeros(lengths.message, dtype=np.float32) for _ in range(count)),
        episode_M=np.arange(count),
        problem_M=np.arange(count),
        turn_M=np.zeros(count, dtype=np.int64),
    )
