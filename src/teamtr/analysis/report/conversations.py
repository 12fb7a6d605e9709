"""Selection and encoding of the stored conversations in a report.

A run may store a hundred thousand episodes; a file that opens quickly can contain a few thousand. Whole stages are
selected (the first, the last, and evenly spaced ones), and whole groups within a batch, so that siblings stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from teamtr.analysis.diagnostics.probes import TokenKls
from teamtr.analysis.report.reading import BatchFile
from teamtr.batches import RolloutBatch
from teamtr.presets import Plan
from teamtr.rollout.shaping import trained_returns_PG
from teamtr.types import Episode, Floats, Message, conversation

Spell = Callable[[str, int], str | None]
"""The text of an agent's token; None if its tokenizer is not stored."""
LONGEST_TEXT = 20_000
LONGEST_TOKENS = 2_000


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced positions of ``count``, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)}) if most > 1 else [count - 1]


def choose_batches(batches: Sequence[BatchFile], most: int) -> list[BatchFile]:
    """Batches of as many whole stages as fit, evenly spaced; at least of the first and the last stage."""
    stages: dict[int, list[BatchFile]] = {}
    for batch in batches:
        stages.setdefault(batch.stage, []).append(batch)
    if not stages:
        return []
    ordered = list(stages.values())
    widest = max(len(group) for group in ordered)
    return [batch for k in evenly(len(ordered), max(most // widest, 2)) for batch in ordered[k]]


def choose_groups(
    batch: RolloutBatch, most_episodes: int, keep: Sequence[str] = (), probed: Sequence[int] = ()
) -> list[int]:
    """Positions of the groups to include: first problems named in ``keep`` (to follow them across stages), then the
    extremes (most mixed, lowest and highest mean reward), then groups of ``probed`` episodes up to a quarter of the
    total, then evenly spaced ones."""
    most = max(most_episodes // batch.group_size, 1)
    if len(batch.problems) <= most:
        return list(range(len(batch.problems)))
    rewards_PG = np.array([e.reward for e in batch.episodes]).reshape(len(batch.problems), -1)
    finite_PG = np.where(np.isfinite(rewards_PG), rewards_PG, 0.0)
    mean_P, spread_P = finite_PG.mean(axis=1), finite_PG.std(axis=1)
    extremes = [int(spread_P.argmax()), int(mean_P.argmin()), int(mean_P.argmax())]
    wanted = set(keep)
    followed = [p for p, problem in enumerate(batch.problems) if problem.id in wanted]
    room = max(most - len(extremes), 1)
    measured = list(dict.fromkeys(e // batch.group_size for e in probed))[: max(most // 4, 1)]
    # Followed problems fill the remaining places: probed groups of this batch have priority over the last of them.
    followed = followed[: max(room - len(measured), 1)]
    chosen = dict.fromkeys([*followed, *extremes, *measured, *evenly(len(batch.problems), most)])
    return sorted(list(chosen)[:most])


def mean_length(batch: RolloutBatch) -> float:
    """Mean tokens per episode in a page: sampled tokens, plus messages of the environment and tools at four characters
    per token."""
    sampled = sum(min(len(t.token_ids), LONGEST_TOKENS) for e in batch.episodes for t in e.turns)
    heard = sum(min(len(m.text), LONGEST_TEXT) for e in batch.episodes for m in _said_by_others(e))
    return (sampled + heard / 4) / max(len(batch.episodes), 1)


def advantages_PG(batch: RolloutBatch, plan: Plan | None, limits: Mapping[str, int]) -> Floats | None:
    """The advantages that training used. None if the plan is not known, if it punishes long messages and an agent's
    limit is not known, or if advantages differ between agents. ``limits``: maximum tokens of a message, by agent."""
    if plan is None or plan.credit not in ("team", "crossed") or any(episode.crossed for episode in batch.episodes):
        return None
    spoken = {turn.agent for episode in batch.episodes for turn in episode.turns}
    if plan.overlong.punishes and not spoken <= set(limits):
        return None
    returns_PG = trained_returns_PG(batch, plan, limits)
    found = plan.advantage.estimate(returns_PG)
    return found.values_PG


def batch_payload(
    file: BatchFile,
    batch: RolloutBatch,
    groups: Sequence[int],
    plan: Plan | None,
    limits: Mapping[str, int],
    spell: Spell,
    kls: TokenKls | None = None,
) -> dict[str, Any]:
    """These groups as plain values, for a page. ``kls``: KLs of tokens from the probe of this batch's update."""
    known = kls or {}
    values_PG = advantages_PG(batch, plan, limits)
    size = batch.group_size
    episodes = [
        {
            **_episode(batch.episodes[p * size + g], {t: x for (e, t), x in known.items() if e == p * size + g}),
            "problem": k,
            "sibling": g,
            "advantage": None if values_PG is None else round(float(values_PG[p, g]), 4),
        }
        for k, p in enumerate(groups)
        for g in range(size)
    ]
    return {
        "name": file.name,
        "stage": file.stage,
        "step": file.step,
        "stored": len(batch.episodes),
        "probed": len(known),
        "problems": [_problem(batch.problems[p]) for p in groups],
        "episodes": episodes,
        "pieces": _pieces(episodes, spell),
    }


def disagree(episode: Episode) -> bool:
    """Whether the agents' last messages differ."""
    last = {turn.agent: " ".join(turn.text.split()) for turn in episode.turns}
    return len(set(last.values())) > 1


def _said_by_others(episode: Episode) -> list[Message]:
    """The messages of the environment and of tools, which are not trained on."""
    replied = [message for reply in episode.replies for message in reply.messages]
    return replied + [message for turn in episode.turns for message in turn.results]


def _problem(problem: Any) -> dict[str, Any]:
    return {
        "id": problem.id,
        "prompt": problem.prompt[:LONGEST_TEXT],
        "answer": None if problem.answer is None else str(problem.answer)[:LONGEST_TEXT],
        "private": {name: text[:LONGEST_TEXT] for name, text in problem.private.items()},
    }


def _episode(episode: Episode, kls: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    heard = {id(message) for message in _said_by_others(episode)}
    said: list[dict[str, Any]] = []
    turns = iter(enumerate(episode.turns))
    for message in conversation(episode.turns, episode.replies):
        entry: dict[str, Any] = {"who": message.author, "text": message.text[:LONGEST_TEXT]}
        if len(message.text) > LONGEST_TEXT:
            entry["cut"] = len(message.text) - LONGEST_TEXT
        if id(message) in heard:
            entry["environment"] = True
        else:
            number, turn = next(turns)
            entry |= {
                "round": turn.round,
                "finish": turn.finish,
                "version": turn.agent_version[:8],
                "context": len(turn.context_ids),
                "ids": turn.token_ids[:LONGEST_TOKENS].tolist(),
                "logprobs": turn.sampler_logprobs[:LONGEST_TOKENS].astype(np.float64).round(3).tolist(),
            }
            if number in kls:
                entry["kl"] = [float(f"{x:.3g}") for x in kls[number][:LONGEST_TOKENS]]
        said.append(entry)
    return {
        "said": said,
        "answer": episode.answer[:LONGEST_TEXT],
        "verdict": episode.verdict.kind,
        "reward": float(episode.reward),
        "disagree": disagree(episode),
    }


def _pieces(episodes: Sequence[Mapping[str, Any]], spell: Spell) -> dict[str, dict[str, str]]:
    """The texts of the occurring tokens, by agent."""
    used: dict[str, set[int]] = {}
    for episode in episodes:
        for entry in episode["said"]:
            used.setdefault(entry["who"], set()).update(entry.get("ids", ()))
    spelt = {who: {str(i): spell(who, i) for i in sorted(ids)} for who, ids in used.items()}
    return {who: {i: text for i, text in table.items() if text is not None} for who, table in spelt.items()}
