"""Makes run folders without training: records as ``run.train`` writes them, with chosen numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.analysis.report.parts import (
    Axis,
    Chart,
    Code,
    Facts,
    Grid,
    Group,
    Multiples,
    Nothing,
    Part,
    Table,
    Text,
    Toned,
    dots,
)
from teamtr.batches import RolloutBatch
from teamtr.store import batch_name, write_episodes
from teamtr.store.log import decode, encode
from teamtr.types import Episode, Message, Problem, Reply, Turn, Verdict

TEAM = """\
name: {name}
seed: {seed}
task: {{name: code}}
team:
  model: tiny
  agents:
{agents}
plan: {{preset: {preset}, stages: {stages}, problems: {problems}, group_size: {group}}}
"""
HOSTILE = (
    "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
    "\u202egnp.exe\u2066 \u2028 <!-- ]]> javascript:alert(1) & \ud83d \x07"
)


def made_batch(
    agents: Sequence[str],
    *,
    problems: int = 4,
    group: int = 4,
    tokens: int = 3,
    seed: int = 0,
    said: str | None = None,
    environment: bool = False,
) -> RolloutBatch:
    """A batch of problems "p0", "p1", ... with random rewards, and messages of this many tokens."""
    rng = np.random.default_rng(seed)
    episodes = []
    for p in range(problems):
        for g in range(group):
            right = bool(rng.random() < 0.5)
            turns = tuple(
                Turn(
                    agent=agent,
                    round=0,
                    context_ids=np.array([p, *rng.integers(0, 3, 1)], dtype=np.int32),
                    token_ids=rng.integers(0, 500, tokens).astype(np.int32),
                    sampler_logprobs=-rng.exponential(size=tokens).astype(np.float32),
                    finish="stop",
                    agent_version=f"{a:032x}",
                    text=f"{said or 'word ' * (tokens // 2)}{p}",
                )
                for a, agent in enumerate(agents)
            )
            replies = (Reply((Message("world", said or "you stand in a room"),)),) if environment else ()
            verdict = Verdict("right" if right else "wrong", float(right))
            answer = f"{said or 'answer'}"
            episodes.append(Episode(f"p{p}", g, turns, answer, verdict, "0" * 32, replies))
    made = tuple(
        Problem(f"p{p}", said or f"problem {p}", "wanted", {agents[0]: said or "hint"}) for p in range(problems)
    )
    return RolloutBatch(made, tuple(episodes), group)


def health_record(agent: str, **changes: Any) -> dict[str, Any]:
    """The health of a batch in which only this agent spoke and nothing is bad."""
    own = {
        "messages": 16,
        "limit": 8,
        "mean": 3.5,
        "p95": 6.0,
        "shortest": 2,
        "longest": 7,
        "cut": 0.125,
        "ended_mean": 3.0,
        "entropy": 0.75,
        "reward": 0.25,
    }
    record = {
        "messages": own,
        "agents": {agent: own},
        "groups": 4,
        "without_signal": 0.25,
        "unparsed": 0.0625,
        "ungraded": 0.0,
        "success": 0.25,
        "reward_deviation": 0.4,
        "kl_share": 0.8,
    }
    return {**record, **changes}


def update_record(number: int, stage: int, step: int, agent: str, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "update",
        "update": number,
        "stage": stage,
        "step": step,
        "agent": agent,
        "outcome": "accepted",
        "reason": "",
        "radius": 0.01,
        "unit": "message",
        "kl_full": 0.006,
        "kl_upper": 0.008,
        "kl_k1": 0.007,
        "kl_k3": 0.0065,
        "kl_rejected": None,
        "noise_floor": 1e-9,
        "surrogate": 0.05,
        "zeta_norm": 0.1,
        "zeta_clip": 0.0,
        "zeta_ratio": 0.0,
        "ratio_clip_rate": 0.02,
        "advantage_clip_rate": 0.0,
        "mismatch_sampler": 1e-6,
        "beta": 0.1,
        "backtracks": number % 2,
        "steps": 4,
        "fraction": 1.0,
        "certificates": [
            {"kind": "turn_aware", "terms": {"surrogate": 0.01}, "lower_bound": 0.001 * number},
            {"kind": "single_step", "terms": {"occupancy": -1.0, "estimation": -1.0}, "lower_bound": -2.0},
        ],
        "version_before": "a" * 32,
        "version_after": "b" * 32,
        "tokens": {"scored": 100, "trained": 50},
        "seconds": {"score": 0.1, "train": 0.5},
        "reward": 0.2 + 0.001 * number,
        "success": 0.2 + 0.001 * number,
        "health": health_record(agent),
        "grader_failures": {},
        "exact_success": None,
        "measured_before": None
        if step == 0
        else {"update": number - 1, "estimate": 0.01, "lower": -0.01, "upper": 0.03, "confidence": 0.95},
        "episodes_total": 100 * number,
        "sampled_tokens_total": 1000 * number,
        "time": 1e9 + number,
    }
    return {**record, **changes}


def eval_record(stage: int, success: float, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "eval",
        "stage": stage,
        "updates": 0,
        "problems": 16,
        "samples": 4,
        "confidence": 0.95,
        "avg_at_k": success,
        "avg_interval": [success - 0.05, success + 0.05],
        "pass_at_k": {"1": success, "4": min(1.0, success + 0.1)},
        "pass_hat_k": {"1": success, "4": max(0.0, success - 0.1)},
        "majority_at_k": success,
        "consensus_on_correct": success / 2,
        "mean_reward": success,
        "verdicts": {"right": 40, "wrong": 24},
        "tokens": 448,
        "seconds": 0.1,
    }
    return {**record, **changes}


def gap_record(estimate: float) -> dict[str, Any]:
    """A stale gap as a probe logs it, with an interval over nine problems from a standard error of 0.01."""
    width = 2.306 * 0.01  # Student's t with eight degrees of freedom
    interval = {"lower": estimate - width, "upper": estimate + width}
    return {"estimate": estimate, **interval, "confidence": 0.95, "method": "t", "problems": 9}


def probe_record(episodes: int = 16, *, tokens: int = 3) -> dict[str, Any]:
    """A probe as ``run.train`` logs it, with KLs by token for the first turn of every second episode."""
    rows = {key: [0.6, 0.3, 0.05, 0.05] for key in ("before_R", "after_R", "moved_R")}
    kl = [round(0.02 * (k + 1), 4) for k in range(tokens)]
    sampled = {
        "messages": episodes,
        "positions": episodes * tokens,
        "exact": 0.006,
        "k1": 0.009,
        "k3": 0.007,
        "draws": [{"share": q, "k1": [0.008, 0.011], "k3": [0.007, 0.007]} for q in (0.25, 0.5)],
        "tokens": [{"episode": e, "turn": 0, "kl": kl} for e in range(0, episodes, 2)],
    }
    stretched = {"times": 3.0, "kl": 0.055, "moved_R": [0.9, 0.8, 0.7, 0.1], "flipped": 0.11}
    weights = {"effective_share": 0.9, "p95": 1.2, "p99": 1.4, "largest": 2.0, "above_ten": 0.0}
    return {
        "fresh": 0.05,
        "stale": 0.03,
        "gap": gap_record(0.02),
        "weights": {**weights, "total_variation": 0.04, "total_variation_error": 0.002},
        "token_shift": {**rows, "flipped": 0.02, "positions": 64, "stretched": stretched, "sampled_kl": sampled},
        "seconds": 0.1,
    }


def swap_record(stage: int, **changes: Any) -> dict[str, Any]:
    """A swap of the speaker before this stage, as ``swap.swap`` logs it."""
    curve = [
        {"step": 25 * k, "kl": 2.0 * 0.3**k, "upper": 2.4 * 0.3**k, "train_kl": 1.8 * 0.3**k, "learning_rate": 1e-3}
        for k in range(6)
    ]
    record = {
        "kind": "swap",
        "updates": 3 * stage,
        "stage": stage,
        "agent": "speaker",
        "mode": "aligned",
        "certified": False,
        "from": {"run": "/somebody/runs/old-team", "model": "tiny", "version": {}},
        "to": {"model": "/somebody/models/wider", "version": {}},
        "protocol": {
            "items": [
                {"point": "token ids", "ok": True, "note": "1,000 strings"},
                {"point": "chat template", "ok": False, "note": "renders the same talk to other text"},
            ],
            "exact_kl": True,
        },
        "success": {"before": 0.96, "at_swap": 0.36, "after": 0.95},
        "intervals": {"before": [0.9, 0.99], "at_swap": [0.3, 0.4], "after": [0.9, 0.98]},
        "shock": 0.01,
        "direct_shock": 0.60,
        "alignment": {
            "loss": "kl_old_to_new",
            "unit": "message",
            "probes": 500,
            "held_out": 100,
            "steps": 125,
            "kl": 0.0049,
            "kl_upper": 0.0058,
            "radius": 0.01,
            "within_radius": True,
            "curve": curve,
            "surrogate": -0.002,
            "steps_in_all": 225,
            "unseen": {"messages": 120, "kl": 0.0052, "kl_upper": 0.0061},
        },
        "floors": {"speaker": 1e-9},
        "time": 1e9,
    }
    return {**record, **changes}


def write_log(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    (folder / "log.jsonl").write_bytes(b"".join(encode(record, "record") + b"\n" for record in records))


def made_run(
    folder: Path,
    *,
    stages: int = 3,
    agents: Sequence[str] = ("left", "right", "speaker"),
    name: str = "made",
    preset: str = "teamtr",
    reused: bool = False,
    seed: int = 0,
    batches: Sequence[RolloutBatch] | None = None,
    batch_stages: int | None = None,
    gain: float = 0.5,
    progress: dict[str, Any] | None = None,
) -> Path:
    """A finished run. ``batches`` are stored cyclically, one per update of the first ``batch_stages`` stages.

    ``reused``: logged as by a plan that samples once per stage, so that later updates of a stage have no certificate.
    """
    (folder / "episodes").mkdir(parents=True)
    (folder / "checkpoints" / "commits" / "000001").mkdir(parents=True)
    entries = "\n".join(f"    - {{name: {agent}}}" for agent in agents)
    team = TEAM.format(name=name, seed=seed, agents=entries, preset=preset, stages=stages, problems=4, group=4)
    (folder / "team.yaml").write_text(team)
    start = {"kind": "start", "floors": dict.fromkeys(agents, 1e-9), "name": name, "stages": stages, "time": 1e9}
    records: list[dict[str, Any]] = [{**start, "agents": list(agents), "threads": 1}, eval_record(0, 0.2)]
    number = 0
    for stage in range(stages):
        for step, agent in enumerate(agents):
            number += 1
            sampled = {"sampled_tokens_total": 1000 * (stage + 1), "measured_before": None} if reused else {}
            none_issued = {"certificates": []} if reused and step else {}
            records.append(update_record(number, stage, step, agent, **sampled, **none_issued))
        records.append({"kind": "stage", "stage": stage, "updates": number})
        records.append(eval_record(stage + 1, 0.2 + gain * (stage + 1) / stages))
    write_log(folder, records)
    account = {
        "episodes": 100 * number,
        "tokens": {agent: {"sampled": 900, "prompt": 9000, "trained": 50} for agent in agents},
        "seconds": {agent: {"sample": 2.0, "train": 3.0} for agent in agents},
    }
    commit = {"progress": {"account": account, "number": number, **(progress or {})}, "agents": {}}
    (folder / "checkpoints" / "commits" / "000001" / "team.json").write_bytes(encode(commit, "commit"))
    _store(folder, batches if batches is not None else [made_batch(agents)], len(agents), batch_stages or stages)
    return folder


def _store(folder: Path, batches: Sequence[RolloutBatch], steps: int, stages: int) -> None:
    """Writes each distinct batch once and hard-links it afterwards, to save disk space."""
    written: dict[int, Path] = {}
    for k in range(steps * stages if batches else 0):
        path = folder / "episodes" / batch_name(k // steps, k % steps)
        which = k % len(batches)
        if which in written:
            os.link(written[which], path)
        else:
            write_episodes(path, batches[which])
            written[which] = path


# -- the same run with a changed log --------------------------------------------------------------------------------

SHIFT = {"before_R": [0.7, 0.2, 0.1], "after_R": [0.6, 0.3, 0.1], "moved_R": [0.1, 0.3, 0.01], "flipped": 0.02}


def small_probe(step: int, gap: float) -> dict[str, Any]:
    weights = {"effective_share": 0.9 - 0.1 * step, "p99": 2.0, "largest": 5.0, "total_variation": 0.05 * step}
    moved = {
        "fresh": 0.1,
        "stale": 0.1 - gap,
        "gap": gap_record(gap),
        "weights": {**weights, "total_variation_error": 0.01},
    }
    return {**(moved if step else {}), "token_shift": {**SHIFT, "positions": 64}}


def changed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """Apply ``change`` to every record of the run's log; records for which it returns None are removed."""
    records = [decode(line) for line in (folder / "log.jsonl").read_bytes().splitlines()]
    write_log(folder, [new for record in records if (new := change(record)) is not None])
    return folder


def probed(folder: Path, gap: float = 0.02) -> Path:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "update":
            record["probe"] = small_probe(record["step"], gap * record["step"])
        if record["kind"] == "stage":
            record |= {"measured": 0.02, "certified_of_measured": 0.005 * (record["stage"] + 1)}
        return record

    return changed(folder, change)


SHARES = (0.9, 0.6)
"""Effective shares of the rollouts before the second and the third update of a stage."""


def rollout_record(plan: str, step: int, stage: int = 0) -> dict[str, Any]:
    """The source of an update's rollouts as ``session.train`` logs it, for the plans "fresh", "naive", "reweighted",
    "auto" and "partial". The last two need a share of 0.7, which the third update does not have."""
    chosen = {"action": "sample", "reason": "a stage begins", "share": None, "needed": None, "cut": 0.0, "partly": None}
    if step == 0:
        return chosen
    if plan == "fresh":
        return {**chosen, "reason": "before every update"}
    share = SHARES[step - 1]
    if plan == "naive":
        return {**chosen, "action": "reuse", "reason": "the plan samples at the start of a stage", "share": share}
    needed = 0.0 if plan == "reweighted" else 0.7
    chosen |= {"share": share, "needed": needed, "cut": 0.01 * step}
    if share >= needed:
        return {**chosen, "action": "reuse", "reason": f"worth {share:.0%} of new ones"}
    chosen["reason"] = f"worth {share:.0%} of new ones, needed {needed:.0%} (the least that the plan allows)"
    bias = {"estimate": 0.1 * stage, "lower": 0.1 * stage - 0.3, "upper": 0.1 * stage + 0.3}
    return chosen if plan == "auto" else {**chosen, "action": "redraw", "partly": {"kept": 0.75, "bias": bias}}


def chosen(folder: Path, plan: str) -> Path:
    """Add the source of rollouts to the log. A whole batch takes 1,000 tokens in the first stage and 100 more in every
    later one, a redrawn batch 200."""
    total = 0

    def change(record: dict[str, Any]) -> dict[str, Any]:
        nonlocal total
        if record["kind"] == "update":
            record["rollouts"] = rollout_record(plan, record["step"], record["stage"])
            total += {"sample": 1000 + 100 * record["stage"], "redraw": 200}.get(record["rollouts"]["action"], 0)
            record["sampled_tokens_total"] = total
        return record

    return changed(folder, change)


def swapped(folder: Path, mode: str) -> Path:
    record = {"kind": "swap", "updates": 3, "stage": 1, "agent": "speaker", "mode": mode, "shock": 0.25}
    record |= {"direct_shock": 0.25, "success": {"before": 0.5, "at_swap": 0.25}, "intervals": {}}
    path = made_run(folder)
    records = [decode(line) for line in (path / "log.jsonl").read_bytes().splitlines()]
    write_log(path, [*records[:7], record, *records[7:]])
    return path


def hostile_parts() -> list[Part]:
    """Every kind of part, with hostile text in every text field."""
    rows = [{"x": k, "y": k} for k in range(3)]
    chart = Chart(
        HOSTILE,
        Axis(HOSTILE),
        Axis(HOSTILE),
        [dots(rows, "x", "y", tip=lambda row: HOSTILE, label=HOSTILE)],
        HOSTILE,
        levels=[(1.0, HOSTILE)],
    )
    table = Table([HOSTILE, "b"], [[HOSTILE, Toned(HOSTILE, "bad")]], HOSTILE, HOSTILE)
    empty = replace(chart, series=[], nothing=HOSTILE)
    parts = [Facts((Toned(HOSTILE),)), Text(HOSTILE), Nothing(HOSTILE), Code(HOSTILE), Code(HOSTILE, HOSTILE), table]
    return [Group(HOSTILE, HOSTILE, "agent-0", [*parts, Grid([chart, empty]), Multiples([chart], HOSTILE, table)])]
