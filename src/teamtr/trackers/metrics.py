"""Log records as flat metrics, with the same names in every tracker; docs/trackers.md lists them from ``METRICS``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from teamtr.records import accepted, mapping, mappings


@dataclass(frozen=True)
class Metric:
    """A metric's name, and the path to its number in a record of this kind. AGENT stands for an agent's name
    (``agent.NAME`` if the name alone is a group of other metrics): the agent that was updated, or every agent if the
    path has ``EACH``. A name that ends in a slash stands for one metric per entry of a mapping."""

    name: str
    kind: str
    path: tuple[str, ...]
    meaning: str


def _agent(name: str, meaning: str, *path: str) -> Metric:
    return Metric(f"AGENT/{name}", "update", path or (name,), meaning)


EACH = "EACH"
"""In a path: every agent of the mapping at this place, not only the one that was updated."""


def _every(name: str, meaning: str, key: str = "") -> Metric:
    return Metric(f"AGENT/{name}", "update", ("health", "agents", EACH, key or name), meaning)


def _trl(name: str, meaning: str, *path: str) -> Metric:
    return Metric(f"train/{name}", "update", path, f"as TRL names it: {meaning}")


_TRL = (
    _trl("reward_std", "standard deviation of the batch's rewards", "health", "reward_deviation"),
    _trl("frac_reward_zero_std", "share of groups whose rewards are all equal", "health", "without_signal"),
    _trl("completions/mean_length", "mean length of the team's messages, tokens", "health", "messages", "mean"),
    _trl("completions/min_length", "the shortest", "health", "messages", "shortest"),
    _trl("completions/max_length", "the longest", "health", "messages", "longest"),
    _trl("completions/clipped_ratio", "share of messages that ended at the limit", "health", "messages", "cut"),
    _trl("completions/mean_terminated_length", "mean length of those that did not", "health", "messages", "ended_mean"),
    _trl("entropy", "entropy of the team's tokens, nats per token", "health", "messages", "entropy"),
    _trl("kl", "KL to the run's initial policy of the agent that was updated, nats per token", "kl_reference"),
)

METRICS = (
    Metric("train/stage", "update", ("stage",), "the stage of the update"),
    Metric("train/reward", "update", ("reward",), "mean reward of the update's training batch"),
    Metric("train/success", "update", ("success",), "share of its episodes that succeeded"),
    Metric("train/punishment", "update", ("punishment",), "how much overlong messages lowered its mean return"),
    Metric(
        "train/reward_part/", "update", ("rewards", "parts"), "mean of each part of its rewards, with the part's weight"
    ),
    Metric(
        "train/exact_success",
        "update",
        ("exact_after",),
        "exact success, without sampling noise, where it can be computed",
    ),
    Metric("train/sampled_tokens", "update", ("sampled_tokens_total",), "tokens sampled for training so far"),
    Metric("train/episodes", "update", ("episodes_total",), "episodes sampled for training so far"),
    Metric("train/unparsed", "update", ("health", "unparsed"), "share of its answers in which the grader found none"),
    Metric("train/ungraded", "update", ("health", "ungraded"), "share of its answers on which the grader failed"),
    *_TRL,
    _every("length", "mean length of the agent's messages, tokens", "mean"),
    _every("length_p95", "95th percentile of the same", "p95"),
    _every("cut", "share of them that ended at the token limit"),
    _every("entropy", "entropy of its tokens, by the sampler's own log-probabilities, nats per token"),
    _every("reward", "mean reward of the episodes in which it spoke"),
    Metric(
        "AGENT/own_reward",
        "update",
        ("rewards", "agents", EACH),
        "mean of what it earned by itself, where rewards are of agents or turns",
    ),
    _agent("kl_share", "upper bound of the kept update's KL as a share of the radius", "health", "kl_share"),
    _agent("kept", "1 when the update was kept, 0 when it was restored or skipped"),
    _agent("kl", "exact KL of the kept update, nats per message", "kl_full"),
    _agent("kl_upper", "its upper confidence bound, which the gate compares with the radius, in the radius's unit"),
    _agent("kl_k1", "the paper's sampled estimate of it, nats per message"),
    _agent("kl_k3", "its non-negative variant, nats per message"),
    _agent("kl_reference", "KL from the kept policy to the run's initial policy, nats per token"),
    _agent("kl_rejected", "upper bound of the first candidate, if it was outside the region"),
    _agent("radius", "the radius"),
    _agent("noise_floor", "KL that rounding alone produces"),
    _agent("surrogate", "surrogate gain of the kept step, units of the normalized advantage"),
    _agent("beta", "weight of the KL penalty"),
    _agent("step_scale", "scale of the step that the agent remembers"),
    _agent("backtracks", "backtracking tries"),
    _agent("ratio_clip_rate", "share of messages whose likelihood ratio was clipped"),
    _agent("advantage_clip_rate", "share of advantages that were clipped"),
    _agent(
        "explained_variance",
        "share of the variance of returns that the critic knew before the update; plans with a critic only",
        "critic",
        "explained_variance",
    ),
    _agent("value_error", "root mean square error of the critic's values, units of reward", "critic", "value_error"),
    _agent(
        "mismatch_sampler", "mean distance between the sampler's and the learner's log-probabilities, nats per token"
    ),
    _agent(
        "mismatch_kl",
        "exact KL from the sampler's features to the learner's own of the same weights, in the radius's unit; with "
        "learner.score: sampler only",
    ),
    _agent("zeta_norm", "zeta proxy: normalization"),
    _agent("zeta_clip", "zeta proxy: clipped advantages"),
    _agent("zeta_ratio", "zeta proxy: clipped ratios"),
    _agent("bound/", "certified lower bound of the step's gain, by kind of certificate", "bounds"),
    _agent(
        "stale_gap",
        "surrogate on fresh rollouts minus that on rollouts of the team that began the stage",
        "probe",
        "gap",
        "estimate",
    ),
    _agent(
        "ess_share",
        "ESS/B if the stage's first rollouts were importance-weighted",
        "probe",
        "weights",
        "effective_share",
    ),
    _agent("new_rollouts", "1 when the update learned from new rollouts, 0 when from old or redrawn ones"),
    _agent(
        "rollout_share",
        "ESS/B of the rollouts that were there, if the plan reuses them: what they were still worth beside new ones",
        "rollouts",
        "share",
    ),
    _agent("weight_cut", "share of their importance weights that truncation took", "rollouts", "cut"),
    _agent("redraw_kept", "share of the tokens that stayed when rollouts were redrawn", "rollouts", "partly", "kept"),
    _agent(
        "redraw_bias",
        "mean reward of redrawn episodes minus that of new ones of the same problems",
        "rollouts",
        "partly",
        "bias",
        "estimate",
    ),
    _agent("tokens/", "tokens of the update by phase", "tokens"),
    _agent("seconds/", "seconds of the update by phase", "seconds"),
    Metric("eval/success", "eval", ("avg_at_k",), "held-out success, avg@K"),
    Metric("eval/success_low", "eval", ("low",), "lower end of its interval"),
    Metric("eval/success_high", "eval", ("high",), "upper end of its interval"),
    Metric("eval/pass_at/", "eval", ("pass_at_k",), "unbiased pass@k, by k"),
    Metric("eval/pass_hat/", "eval", ("pass_hat_k",), "unbiased pass^k (all of k samples are right), by k"),
    Metric("eval/majority", "eval", ("majority_at_k",), "success of the majority answer"),
    Metric(
        "eval/consensus",
        "eval",
        ("consensus_on_correct",),
        "share of episodes in which every agent that states an answer states the right one",
    ),
    Metric("eval/reward", "eval", ("mean_reward",), "mean reward"),
    Metric("eval/tokens", "eval", ("tokens",), "tokens sampled by this evaluation"),
    Metric("eval/seconds", "eval", ("seconds",), "its duration"),
    Metric("stage/kept", "stage", ("accepted",), "updates of the stage that were kept"),
    Metric("stage/measured_gain", "stage", ("measured",), "gain measured by later batches of the stage"),
    Metric(
        "stage/certified", "stage", ("certified_of_measured",), "certified lower bounds of the same updates, summed"
    ),
)
_NUMBER_OF = {"update": "update", "eval": "stage", "stage": "stage"}
_GROUPS = {metric.name.partition("/")[0] for metric in METRICS} - {"AGENT"}


@dataclass(frozen=True)
class Point:
    """The numbers of one record. ``number`` grows with every record of the same ``kind``; ``step`` counts updates."""

    kind: str
    number: int
    step: int
    seconds: float
    values: Mapping[str, float]


def point(record: Mapping[str, Any]) -> Point | None:
    """The finite numbers of an update, an evaluation or a stage; None for other records. Never raises, because a log
    may hold what another version wrote."""
    if not isinstance(record, Mapping):
        return None
    kind = str(record.get("kind"))
    number, step = record.get(_NUMBER_OF.get(kind, "")), record.get("update", record.get("updates", 0))
    if not isinstance(number, int) or not isinstance(step, int):
        return None
    prepared, agent = _prepared(record), str(record.get("agent"))
    values: dict[str, float] = {}
    for metric in METRICS:
        if metric.kind == kind:
            for name, found in _by_agent(prepared, metric.path, agent):
                values.update(_numbers(metric.name.replace("AGENT", _group(name)), found))
    seconds = _finite(record.get("time"))
    return Point(kind, number, step, time.time() if seconds is None else seconds, values)


def _by_agent(record: Mapping[str, Any], path: tuple[str, ...], agent: str) -> Iterator[tuple[str, Any]]:
    """Pairs of an agent and its value at this path: of the agent that was updated, or of each one."""
    if EACH not in path:
        yield agent, _at(record, path)
        return
    place = path.index(EACH)
    every = _at(record, path[:place])
    for name, found in every.items() if isinstance(every, Mapping) else ():
        yield str(name), _at(found, path[place + 1 :])


def _group(agent: str) -> str:
    return f"agent.{agent}" if agent in _GROUPS else agent  # agents' names have no dots


def _prepared(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with numbers from lists put under names of their own."""
    exact, interval = record.get("exact_success"), record.get("avg_interval")
    action = mapping(record, "rollouts").get("action")
    low, high = interval if isinstance(interval, list | tuple) and len(interval) == 2 else (None, None)
    return {
        **record,
        "kept": accepted(record),
        "exact_after": exact[-1] if isinstance(exact, list | tuple) and exact else None,
        "bounds": {str(c["kind"]): c.get("lower_bound") for c in mappings(record, "certificates") if "kind" in c},
        "new_rollouts": None if action is None else action == "sample",
        "low": low,
        "high": high,
    }


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if name.endswith("/"):
        for key, item in value.items() if isinstance(value, Mapping) else ():
            yield from _numbers(f"{name}{key}", item)
    elif (found := _finite(value)) is not None:
        yield name, found


def _finite(value: Any) -> float | None:
    try:
        found = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:  # an integer too large for a float
        return None
    return found if math.isfinite(found) else None
