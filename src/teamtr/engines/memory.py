"""Memory of loaded models: sizes for the estimate (``engines.estimate``), and a rehearsal of the longest step.

Weights are counted. Activations per token are measured on the model itself, from what autograd saves for a short text.
``rehearse`` then takes the longest step that the demand allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np
import torch

from teamtr.batches import AgentBatch
from teamtr.engines import card, estimate
from teamtr.engines.estimate import Held, Rows, Served, Trained
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.paged.one_copy import largest_cast
from teamtr.engines.paged.pool import architecture
from teamtr.engines.paged.row_adapters import adapter_numbers
from teamtr.engines.passes import head_chunk
from teamtr.engines.slices import is_spread, own
from teamtr.engines.torch.attention import AttentionShape, Unsupported, text_config
from teamtr.engines.torch.head import cast_rows
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.row_scaled import row_scaled_in
from teamtr.errors import UserError
from teamtr.ports import GB, Demand, Lengths, MemoryPlan, Rehearsal
from teamtr.types import Ids

PROBE_TOKENS = 64
"""Tokens of the shorter of two measured texts of one row."""
SPREAD_TOKENS = 16
"""Tokens of each row in the shorter of two measured texts of two rows, which share their first token."""


def transformers_of(learners: Mapping[str, PolicyLearner]) -> dict[str, PolicyLearner]:
    return {name: learner for name, learner in learners.items() if isinstance(learner.policy, TransformerPolicy)}


def drop_halves(learners: Mapping[str, PolicyLearner]) -> None:
    """Drop the half-precision copies of frozen bases in precisions that no agent computes in any more."""
    policies = [_policy(learner) for learner in transformers_of(learners).values()]
    for fused in {id(policy.fused): policy.fused for policy in policies if policy.fused is not None}.values():
        fused.keep_halves({policy.dtype for policy in policies if policy.fused is fused})


def plan(learners: Mapping[str, PolicyLearner], demand: Demand) -> MemoryPlan:
    """The memory plan of these models."""
    transformers = transformers_of(learners)
    device = next((learner.policy.device for learner in transformers.values()), torch.device("cpu"))
    available = available_bytes(device)
    found = estimate.settled(held(transformers, list(demand.messages)), demand, available)
    return MemoryPlan(estimate.items(found, demand), available, recomputed=estimate.recomputed(found))


def available_bytes(device: torch.device) -> int | None:
    """Bytes of this device that a team may use; None on a CPU, where memory is not counted."""
    return card.free_bytes(device) + torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def held(learners: Mapping[str, PolicyLearner], trainable: Sequence[str]) -> Held:
    """The models of a team, with sizes counted on the models themselves."""
    weights, adapters = _counted(learners)
    policies = [_policy(learner) for learner in learners.values()]
    # Agents of one base may compute in different precisions.
    halves = {(id(policy.model), policy.dtype): policy.frozen_half_bytes() for policy in policies}
    return Held(
        who=estimate.in_words(learners),
        weights=weights,
        adapters=adapters,
        halves=sum(halves.values()),
        served=tuple(_served(learners)),
        trained=tuple(trained(learners[name]) for name in trainable if name in learners),
        on_card=any(policy.device.type == "cuda" for policy in policies),
        passing=max(map(_passing, policies), default=0),
        cast=max(map(_cast, policies), default=0),
    )


def _passing(policy: TransformerPolicy) -> int:
    """Memory of the largest partitioned layer while it is gathered; 0 if this process holds all layers whole."""
    layers = getattr(policy.causal_lm.get_decoder(), "layers", ())
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters() if is_spread(p)) for layer in layers]
    half = policy.precision in ("fp16", "bf16")
    return estimate.passing_bytes(max(sizes, default=0), trained=policy.adapter is None, half=half)


def _cast(policy: TransformerPolicy) -> int:
    """Memory to cast a layer of a base that is kept in reduced precision; 0 if it is float32."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
    head = policy.causal_lm.get_output_embeddings().weight
    short = [p for p in policy.causal_lm.parameters() if p.ndim == 2 and p.dtype in names and p is not head]
    at_once = min(len(head), cast_rows(head.shape[1])) * head.shape[1] if head.dtype in names else 0
    words = policy.causal_lm.get_input_embeddings().weight  # embedding: looked up, and cast row by row
    sizes = [
        estimate.cast_bytes(p.numel() if p is not words else 0, at_once, policy.precision, kept=names[p.dtype])
        for p in short
    ]
    return max(sizes, default=0)


def _counted(learners: Mapping[str, PolicyLearner]) -> tuple[int, int]:
    """Bytes of bases, including the scales of int8 weights, and of adapters. Each tensor counts once, however many
    agents share it."""
    seen: dict[int, int] = {}
    adapters = 0
    for learner in learners.values():
        model = _policy(learner).causal_lm
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen[id(parameter)] = own(parameter).numel() * parameter.element_size()
                adapters += seen[id(parameter)] if "lora_" in name else 0
        seen |= {id(found.scales): found.scales.nbytes for _, found in row_scaled_in(model)}
    return sum(seen.values()) - adapters, adapters


def _served(learners: Mapping[str, PolicyLearner]) -> Iterator[Served]:
    """One entry per architecture, or per base that a server reads in place."""
    by_server: dict[str, list[str]] = {}
    for name, learner in learners.items():
        model, pool = _policy(learner).causal_lm, _policy(learner).serving
        by_server.setdefault(architecture(model) if pool is None else pool.key_of(model), []).append(name)
    for names in by_server.values():
        policy = _policy(learners[names[0]])
        keys, pool = 2 * _attention_widths(policy)[1], policy.serving
        if pool is None:
            features = text_config(policy.causal_lm).hidden_size * torch.float32.itemsize
            keeps = learners[names[0]].kept.budget > 0
            yield Served(tuple(names), keys * torch.float32.itemsize, feature_bytes=features if keeps else 0)
            continue
        size, model = pool.dtype.itemsize, policy.causal_lm
        shared, scaled = pool.shared_of(model), dict(row_scaled_in(model))
        scales = sum(scaled[weight].scales.nbytes for weight in shared.values() if weight in scaled)
        numbers = sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
        yield Served(
            tuple(names),
            keys * size,
            pool.precision,
            (numbers - sum(weight.numel() for weight in shared.values())) * size,
            pool.page_budget(model),
            sum(weight.nbytes for weight in shared.values()) + scales,
            adapter_numbers(model) * size if pool.applies_by_row(model) else 0,
            text_config(model).hidden_size * size if pool.keeps else 0,
            estimate.cast_bytes(largest_cast(model, shared), 0, pool.precision, kept="int8"),
        )


def trained(learner: PolicyLearner) -> Trained:
    """The sizes of the agent's model during its update."""
    policy = _policy(learner)
    config = text_config(policy.causal_lm)
    width = 2 if policy.precision in ("fp16", "bf16") else 4
    kept = activation_bytes_per_token(learner)
    return Trained(
        agent=learner.agent,
        trained_bytes=sum(own(p).numel() * p.element_size() for p in policy.parameters().values()),
        precision=policy.precision,
        micro_batch=learner.passes.micro_batch,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        head_chunk=head_chunk(policy.device, config.vocab_size),
        kept_bytes_per_token=kept,
        copy_bytes_per_token=2 * sum(_attention_widths(policy)) * width,
        packs=policy.packs,
        recompute=learner.passes.recompute if learner.passes.may_recompute else "never",
        recomputes=policy.recomputes,
        kept_features=learner.kept.budget,
        spread_bytes_per_token=max(0.0, _spread_bytes_per_token(learner) - kept),
    )


def _attention_widths(policy: TransformerPolicy) -> tuple[int, int]:
    """Elements of the queries of one token, and of its keys, summed over layers."""
    config = text_config(policy.causal_lm)
    try:
        shape = AttentionShape.of(config)
    except Unsupported:  # layers differ: assume the width of their inputs
        return (config.num_hidden_layers * config.hidden_size,) * 2
    return shape.layers * shape.heads * shape.dim, shape.layers * shape.kv_heads * shape.dim


def activation_bytes_per_token(learner: PolicyLearner) -> float:
    """Bytes that autograd saves for one token between forward and backward pass: the difference between two texts,
    since weights in half precision are saved as well, however short the text."""
    text = _text(learner, 2 * PROBE_TOKENS)
    short, long = (
        kept_for_backward(learner, [text[: tokens - 1]], [text[tokens - 1 : tokens]])
        for tokens in (PROBE_TOKENS, 2 * PROBE_TOKENS)
    )
    return (long - short) / PROBE_TOKENS


def _spread_bytes_per_token(learner: PolicyLearner) -> float:
    """Bytes saved per additional token of two rows that share their first one, so that tokens are spread to rows. 0 if
    rows are padded, because then nothing is shared."""
    if not _policy(learner).packs:
        return 0.0
    text = _text(learner, 4 * SPREAD_TOKENS)

    def kept(tokens: int) -> int:
        rows = [np.concatenate([text[:1], text[first : first + tokens - 1]]) for first in (1, tokens)]
        return kept_for_backward(learner, [row[:-1] for row in rows], [row[-1:] for row in rows])

    # The shared token is in both measurements and cancels.
    return (kept(2 * SPREAD_TOKENS) - kept(SPREAD_TOKENS)) / (2 * SPREAD_TOKENS)


def _text(learner: PolicyLearner, tokens: int) -> Ids:
    text: Ids = np.arange(2, 2 + tokens, dtype=np.int32) % text_config(_policy(learner).causal_lm).vocab_size
    return text


def kept_for_backward(learner: PolicyLearner, prompts: Sequence[Ids], messages: Sequence[Ids]) -> int:
    """Bytes that autograd holds after a forward pass over these rows without recomputation."""
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep the graph, and thus itself, alive forever

    policy = learner.policy
    before, policy.recomputes = policy.recomputes, False
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(see, lambda t: t), policy.computing():
            features = policy.features(prompts, messages)
    finally:
        policy.recomputes = before
    del features
    return sum(kept.values())


def _policy(learner: PolicyLearner) -> TransformerPolicy:
    assert isinstance(learner.policy, TransformerPolicy)
    return learner.policy


def peak_bytes() -> int | None:
    """Peak of allocated bytes since the last rehearsal; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def rehearse(learners: Mapping[str, PolicyLearner], demand: Demand) -> Rehearsal:
    """Reserve the memory for sampling; then, for every trainable agent, score as much as is ever scored at once, take
    the longest step, and undo it. The peak is reset afterwards. Only the loss scale that the step found is kept, for
    agents that have taken none, so that their first step need not compute what overflows again.

    If the estimate says that a single message does not fit otherwise, activations are recomputed from here on. If
    memory runs out, the micro-batch is lowered here and not in the middle of a run. An agent is skipped if its update
    takes no more memory than that of one that fitted with its configured micro-batch. Processes that share the learner
    rehearse the same agents with the same messages, whichever of them has less memory, because each waits for results
    of the others.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _settle(learners, demand)
    for name, learner in transformers_of(learners).items():
        lengths = demand.lengths[name]
        _policy(learner).reserve(demand.episodes, lengths.prompt, lengths.message)
    fitted: list[str] = []
    scales: dict[str, float] = {}  # of first steps
    for name in sorted(demand.messages, key=lambda name: demand.lengths[name].whole, reverse=True):
        learner, asked = learners[name], learners[name].passes.micro_batch
        shards, processes = learner.passes.shards, learner.passes.shards.processes
        no_more = [other for other in fitted if _takes_no_more(learners, demand, name, other)]
        if shards.least(bool(no_more)):
            least = shards.least(min((scales[other] for other in no_more if other in scales), default=inf))
            learner.optimizer.begin_at(min(least, learner.optimizer.loss_scale))
            continue
        most = -int(shards.least(-asked))  # the largest of all processes: one of them may have run out of memory before
        rows = Rows.of(name, most, demand)
        batch = _longest_batch(name, demand.lengths[name], rows.scored, processes)
        before = learner.snapshot()
        try:
            with _old_policy_of_the_rest(learner, demand, rows.scored):
                learner.begin(batch, reference=demand.objective.has_reference)
                step, ones = np.arange(rows.trained * processes), np.ones(rows.trained * processes)
                learner.step(step, ones, demand.objective, beta=1.0, learning_rate=0.0)
                learner.measure()
            scale = learner.optimizer.loss_scale
        finally:
            learner.restore(before)
            learner.end()
        if not learner.optimizer.steps:
            scales[name] = scale
            learner.optimizer.begin_at(scale)
        if learner.passes.micro_batch == asked:
            fitted.append(name)
    recomputed = tuple(name for name in demand.messages if learners[name].policy.recomputes)
    found = Rehearsal({name: learners[name].passes.micro_batch for name in demand.messages}, peak_bytes(), recomputed)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return found


def _takes_no_more(learners: Mapping[str, PolicyLearner], demand: Demand, name: str, other: str) -> bool:
    """Whether an update of this agent takes at most as much memory as one of the other: an adapter of the same size on
    the same layers of the same base, computed in the same way, with no longer and no more messages."""
    one, two = learners[name], learners[other]
    if not (isinstance(one.policy, TransformerPolicy) and isinstance(two.policy, TransformerPolicy)):
        return False

    def computed(learner: PolicyLearner, policy: TransformerPolicy) -> tuple[Any, ...]:
        # By layer: autograd saves nothing of what precedes the first adapted layer, whatever the size of the adapter.
        name_in_keys, parameters = f".{policy.adapter}.weight", policy.parameters()
        sizes = {key.removesuffix(name_in_keys): own(parameter).shape for key, parameter in parameters.items()}
        how = policy.precision, policy.recomputes, policy.packs
        return sizes, how, learner.passes.micro_batch, learner.kept.budget

    def asked(agent: str) -> tuple[int, ...]:
        lengths = demand.lengths[agent]
        sizes = lengths.prompt, lengths.prompt - lengths.shared, lengths.message
        return *sizes, demand.messages[agent], demand.checked[agent]

    same = one.policy.causal_lm is two.policy.causal_lm and computed(one, one.policy) == computed(two, two.policy)
    return same and all(a <= b for a, b in zip(asked(name), asked(other), strict=True))


def _settle(learners: Mapping[str, PolicyLearner], demand: Demand) -> None:
    """Enable recomputation where the estimate requires it, with micro-batches that fit according to it."""
    transformers = transformers_of(learners)
    devices = [learner.policy.device for learner in transformers.values()]
    available = available_bytes(devices[0]) if devices else None
    if available is None:
        return
    found = estimate.settled(held(transformers, list(demand.messages)), demand, available)
    for one in found.trained:
        passes = learners[one.agent].passes
        if one.recomputes and passes.policy.recompute_activations():
            passes.micro_batch = estimate.lowered_to_fit(found, one, demand, available)


@contextmanager
def _old_policy_of_the_rest(learner: PolicyLearner, demand: Demand, rehearsed: int) -> Iterator[None]:
    """Context in which as much GPU memory is allocated as an update keeps for the messages that are not in the
    rehearsal."""
    held = None
    if isinstance(learner.policy, TransformerPolicy) and learner.policy.device.type != "cpu":
        width = text_config(learner.policy.causal_lm).hidden_size
        lengths, messages = demand.lengths[learner.agent], demand.messages[learner.agent]
        rest = max(0, messages - rehearsed) * estimate.old_policy_bytes(lengths, width)
        rest += estimate.kept_feature_bytes(learner.kept.budget, messages, lengths, width)
        try:
            held = torch.empty(rest, dtype=torch.uint8, device=learner.policy.device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"what an update of {learner.agent} keeps of the policy before it, {rest / GB:.2g} GB, does not fit "
                "beside weights and pages; lower plan.problems, plan.group_size, max_tokens or sampling.memory_gb"
            ) from error
    yield
    del held


def _longest_batch(agent: str, lengths: Lengths, each: int, processes: int) -> AgentBatch:
    """This many messages per process, each process's in one shard, of maximal length and with no more in common than
    they must have."""
    rng, count = np.random.default_rng(0), each * processes
    beginning = rng.integers(2, 64, size=lengths.shared).astype(np.int32)

    def rows(length: int) -> tuple[Ids, ...]:
        return tuple(rng.integers(2, 64, size=length).astype(np.int32) for _ in range(count))

    return AgentBatch(
        agent=agent,
        prompts=tuple(np.concatenate([beginning, row]) for row in rows(lengths.prompt - lengths.shared)),
        messages=rows(lengths.message),
        sampler_logprobs=tuple(np.zeros(lengths.message, dtype=np.float32) for _ in range(count)),
        episode_M=np.arange(count),
        problem_M=np.arange(count) % processes,
        turn_M=np.zeros(count, dtype=np.int64),
    )
