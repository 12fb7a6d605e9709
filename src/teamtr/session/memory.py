"""What a team needs on its device, before anything runs: weights, keys and values, optimizer, the worst step.

Sizes that follow from shapes are computed; what one token's activations take is measured on the model itself, by
looking at what autograd saves for a short text. ``rehearse`` then takes the longest step that the team file allows,
so that a run which does not fit says so in its first minute and not in its third hour. A run logs the peak of every
stage beside the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from teamtr.chat import render
from teamtr.engines.learner import PolicyLearner, head_chunk
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.blocks import Pool
from teamtr.engines.paged.pool import architecture
from teamtr.engines.paged.sampler import PAGE, SIZES
from teamtr.engines.torch.attention import AttentionShape, Unsupported, text_config
from teamtr.engines.torch.packing import common_beginning
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.evaluation.evaluate import PROBLEMS_IN_A_RUN, SAMPLES_IN_A_RUN
from teamtr.session import checks as preflight
from teamtr.session.build import Session, device_of
from teamtr.tasks.benchmarks.arbench.endpoint import EndpointPlayer
from teamtr.tasks.players import PolicyPlayer
from teamtr.team import Agent
from teamtr.types import AgentBatch, Ids, Problem, Situation

History = list[tuple[str, str]]

GB = 2**30
PROBE_TOKENS = 64
WORDS_OF_A_LINE = 8
"""Tokens that a transcript adds to each message: the author's name and line breaks."""
PROBLEMS_LOOKED_AT = 256
PLAYER = "the player"
"""A model beside the team that plays the other roles of an interactive task."""
WORKSPACES = 4 * (32 << 20)
"""What matrix products keep on a card: 32 MB (measured on an H200) for each of two threads, forward and backward, and
two streams, running and capturing."""


@dataclass(frozen=True)
class Item:
    """One thing that takes memory."""

    what: str
    bytes: int
    why: str = ""

    @property
    def gb(self) -> float:
        return self.bytes / GB


@dataclass(frozen=True)
class MemoryPlan:
    """What is needed, and what the device has (None on a CPU)."""

    items: tuple[Item, ...]
    available: int | None

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.available is None or self.total <= self.available

    def as_record(self) -> dict[str, Any]:
        return {
            "items": [{"what": i.what, "gb": i.gb, "why": i.why} for i in self.items],
            "total_gb": self.total / GB,
            "available_gb": None if self.available is None else self.available / GB,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Lengths:
    """Most tokens that one agent reads and says at once, and how many of them all its prompts begin with."""

    prompt: int
    message: int
    shared: int = 0

    @property
    def whole(self) -> int:
        return self.prompt + self.message

    def distinct(self, rows: int) -> int:
        """Tokens of so many rows, common beginnings once."""
        return self.shared + rows * (self.whole - self.shared)


def longest(session: Session) -> dict[str, Lengths]:
    """Of every agent: its longest first prompt among some problems, and all that may have been said before it; of a
    model that plays the other roles, as much as the longest of these."""
    problems = (session.task.problems("train") or session.task.problems("test"))[:PROBLEMS_LOOKED_AT]
    openings, player = _openings(session, problems), _player(session)
    router, found = session.context.router, {}
    speakers = [name for _, name in filter(None, map(router.next, range(router.horizon)))]
    said = [session.team[name].max_tokens + WORDS_OF_A_LINE for name in speakers]
    for agent in session.team:
        alone = [_prompt(session, agent, problem, []) for problem in problems]
        first, before = alone, 0
        if openings:
            first = [_prompt(session, agent, *told) for told in zip(problems, openings, strict=True)]
        if turns := [t for t, name in enumerate(speakers) if name == agent.name]:
            before = sum(said[: turns[-1]])
            if openings:  # every later reply as long as the opening, and what a player may say
                reply = max(len(a) - len(b) for a, b in zip(first, alone, strict=True)) + WORDS_OF_A_LINE
                reply += 0 if player is None else player.max_tokens
                before += reply * sum(router.opens_round(t) for t in range(1, turns[-1] + 1))
        shared = min(common_beginning(first[0], prompt) for prompt in first)
        found[agent.name] = Lengths(max(map(len, first)) + before, agent.max_tokens, shared)
    if isinstance(player, PolicyPlayer):
        name, prompt = _player_name(session, player), max(one.prompt for one in found.values())
        message = max(player.max_tokens, found[name].message if name in found else 0)
        found[name] = Lengths(prompt, message)
    return found


def _prompt(session: Session, agent: Agent, problem: Problem, history: History) -> Ids:
    context = session.context
    chat = render(
        agent=agent.name, system_prompt=agent.system_prompt, problem=problem, history=history, style=context.history
    )
    return context.codecs[agent.name].encode(chat)


def _openings(session: Session, problems: Sequence[Problem]) -> list[History]:
    """What an interactive task's environment says before anyone speaks; nothing for other tasks."""
    environment = session.task.environment
    if environment is None:
        return []
    situations = [Situation(problem, (), (), session.context.router.rounds - 1) for problem in problems]
    replies = environment.reply(situations, seed=0)
    return [[(message.author, message.text) for message in reply.messages] for reply in replies]


def _player(session: Session) -> PolicyPlayer | EndpointPlayer | None:
    player = session.task.player
    return player if isinstance(player, (PolicyPlayer, EndpointPlayer)) else None


def _player_name(session: Session, player: PolicyPlayer) -> str:
    """An agent of the team under its own name; a model beside the team under one that no agent can have."""
    return player.agent if player.sampler is session.engine else PLAYER


def _speakers(session: Session) -> dict[str, PolicyLearner]:
    """All that speak through transformers: the agents, and a model of its own that plays the other roles."""
    found = dict(session.engine.learners)
    player = _player(session)
    if isinstance(player, PolicyPlayer) and isinstance(player.sampler, LocalEngine):
        found[_player_name(session, player)] = player.sampler.learner(player.agent)
    return {name: learner for name, learner in found.items() if isinstance(learner.policy, TransformerPolicy)}


def plan_memory(session: Session) -> MemoryPlan:
    """The plan of a built team."""
    transformers = _speakers(session)
    device = next((learner.policy.device for learner in transformers.values()), torch.device("cpu"))
    available = None
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        available = free + torch.cuda.memory_reserved(device)
    lengths = longest(session)
    items = [*_weights(transformers), *_pages(session, transformers, lengths)]
    trained = [transformers[n] for n in session.team.trainable if n in transformers]
    if trained:
        items += _largest(_optimizer(learner) for learner in trained)
        items += _largest(_reference(session, learner, lengths[learner.agent]) for learner in trained)
        items += _largest(_worst_step(session, learner, lengths[learner.agent]) for learner in trained)
    if device.type == "cuda":
        items.append(Item("libraries", WORKSPACES, "workspaces of matrix products"))
    return MemoryPlan(tuple(items), available)


def _weights(learners: Mapping[str, PolicyLearner]) -> Iterator[Item]:
    """Every tensor once, however many agents share it."""
    seen: dict[int, int] = {}
    adapters = 0
    for learner in learners.values():
        for name, parameter in _policy(learner).causal_lm.named_parameters():
            if id(parameter) not in seen:
                seen[id(parameter)] = parameter.numel() * parameter.element_size()
                adapters += seen[id(parameter)] if "lora_" in name else 0
    who = f"{len(learners)} agents" if PLAYER not in learners else f"{len(learners) - 1} agents and {PLAYER}"
    yield Item("weights", sum(seen.values()) - adapters, f"{who}, shared ones once")
    if adapters:
        yield Item("adapters", adapters)
    policies = [_policy(learner) for learner in learners.values()]
    halves = {id(policy.model): policy.frozen_half_bytes() for policy in policies}
    if any(halves.values()):
        yield Item("base in half precision", sum(halves.values()), "for training adapters on it")


def _pages(session: Session, learners: Mapping[str, PolicyLearner], lengths: Mapping[str, Lengths]) -> Iterator[Item]:
    """Sampling copies and keys and values, per architecture; nothing on the plain path but what its cache grows to."""
    episodes = _rows_at_once(session)
    by_server: dict[str, list[str]] = {}
    for name, learner in learners.items():
        by_server.setdefault(architecture(_policy(learner).causal_lm), []).append(name)
    for names in by_server.values():
        policy = _policy(learners[names[0]])
        tokens = max(lengths[name].whole for name in names)
        if policy.serving is None:
            size = 2 * _attention_widths(policy)[1] * torch.float32.itemsize
            yield Item("keys and values", episodes * tokens * size, f"{episodes} rows of {tokens} tokens, plain path")
            continue
        dtype, shape = policy.serving.dtype, AttentionShape.of(text_config(policy.causal_lm))
        weights = sum(p.numel() for n, p in policy.causal_lm.named_parameters() if "lora_" not in n) * dtype.itemsize
        yield Item("sampling copy", weights, policy.serving.precision)
        page = Pool.bytes_per_page(shape, PAGE, dtype)
        wanted = (min(episodes, SIZES[-1]) * -(-tokens // PAGE) + 1) * page
        taken = min(4 * wanted, policy.serving.page_budget(policy.causal_lm))
        yield Item("keys and values", taken, f"{wanted / GB:.2g} GB for a batch; the rest is found again later")


def _rows_at_once(session: Session) -> int:
    """Most episodes that are played at once: a batch, the check before the run, or an evaluation during it."""
    most = max(session.team_file.plan.problems * session.plan.group_size, _checked(session))
    settings = session.team_file.eval
    if not settings.every:
        return most
    problems = len(session.task.problems("test")[: settings.problems or PROBLEMS_IN_A_RUN])
    return max(most, problems * (settings.samples or SAMPLES_IN_A_RUN))


def _checked(session: Session) -> int:
    """Episodes of the check before the run."""
    return preflight.GROUP * min(preflight.PROBLEMS, len(session.task.problems("train")))


def _optimizer(learner: PolicyLearner) -> Item:
    """Gradients (in float16 those of a micro-batch beside those of the step), two moments, and the two snapshots that
    the gate may go back to (weights and moments each)."""
    trainable = sum(p.numel() * p.element_size() for p in learner.policy.parameters().values())
    times = 10 if learner.policy.precision == "fp16" else 9
    return Item("gradients, moments, snapshots", times * trainable, f"of the agent being updated ({learner.agent})")


def _reference(session: Session, learner: PolicyLearner, lengths: Lengths) -> Item:
    """The old policy's last hidden states of every message token."""
    messages = _messages(session, learner.agent)
    size = messages * _reference_bytes(learner, lengths)
    return Item("old policy", size, f"{messages} messages of {lengths.message} tokens")


def _messages(session: Session, agent: str) -> int:
    """That an update of this agent learns from, at most."""
    episodes = session.team_file.plan.problems * session.plan.group_size
    return episodes * session.context.router.turns_of(agent)


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
    def of(session: Session, learner: PolicyLearner) -> Rows:
        messages = max(1, _messages(session, learner.agent))
        checked = _checked(session) * session.context.router.turns_of(learner.agent)
        step = -(-messages // min(session.team_file.learner.minibatches, messages))
        return Rows(min(learner.micro_batch, max(messages, checked)), min(learner.micro_batch, step))


def _worst_step(session: Session, learner: PolicyLearner, lengths: Lengths) -> Item:
    rows, config = Rows.of(session, learner), text_config(_policy(learner).causal_lm)
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
    return Item("worst step", int(max(trained, scored)) + logits, why)


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


def _largest(items: Iterator[Item]) -> list[Item]:
    return [max(items, key=lambda item: item.bytes)]


def before_training(session: Session) -> dict[str, Any] | None:
    """On a card, the plan beside what the longest step really took; the peak is then counted anew. None elsewhere."""
    if device_of(session.team_file).type != "cuda":
        return None
    found = {"planned_gb": plan_memory(session).total / GB, **rehearse(session)}
    torch.cuda.reset_peak_memory_stats()
    return found


def peak_gb() -> float | None:
    """The most that was in use since ``before_training``; None without a card."""
    return torch.cuda.max_memory_allocated() / GB if torch.cuda.is_available() else None


def rehearse(session: Session) -> dict[str, Any]:
    """Reserve what sampling takes, then score as much as is ever scored at once and take the longest step of every
    trainable agent, and undo it; returns the micro-batch that fits, and the peak.

    Running out of memory halves the micro-batch here and not in the middle of a run.
    """
    lengths = longest(session)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    episodes = _rows_at_once(session)
    for name, learner in _speakers(session).items():
        _policy(learner).reserve(episodes, lengths[name].prompt, lengths[name].message)
    for name in session.team.trainable:
        learner = session.engine.learner(name)
        rows = Rows.of(session, learner)
        batch = _longest_batch(name, lengths[name], rows.scored)
        before = learner.snapshot()
        try:
            with _old_policy_of_the_rest(session, learner, lengths[name], len(batch)):
                learner.begin(batch, reference=session.plan.objective.has_reference)
                step, ones = np.arange(rows.trained), np.ones(rows.trained)
                learner.step(step, ones, session.plan.objective, beta=1.0, learning_rate=0.0)
                learner.measure()
        finally:
            learner.restore(before)
            learner.end()
    return {
        "micro_batch": {name: session.engine.learner(name).micro_batch for name in session.team.trainable},
        "peak_gb": peak_gb(),
    }


@contextmanager
def _old_policy_of_the_rest(
    session: Session, learner: PolicyLearner, lengths: Lengths, rehearsed: int
) -> Iterator[None]:
    """Within, as much of the card is taken as an update keeps of the messages that the rehearsal does not have."""
    held = None
    if isinstance(learner.policy, TransformerPolicy) and learner.policy.device.type != "cpu":
        rest = max(0, _messages(session, learner.agent) - rehearsed) * _reference_bytes(learner, lengths)
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
