"""The data of a report: plain values computed once, used by every format (HTML, Markdown, JSON, live page)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from teamtr.analysis.diagnostics.order import order_of
from teamtr.analysis.diagnostics.tracking import gains, stale_updates
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import computed, sections
from teamtr.evaluation.best import are_comparable, best_of, out_of_patience
from teamtr.records import Record, accepted, mapping, mappings, number, of_kind, updates_before, whole
from teamtr.reports import HeldOut, was_skipped

FORMAT = 1
_NUMBERS = [
    "radius",
    "kl_full",
    "kl_upper",
    "kl_k1",
    "kl_k3",
    "kl_rejected",
    "noise_floor",
    "surrogate",
    "beta",
    "step_scale",
    "fraction",
    "reward",
    "success",
    "ratio_clip_rate",
    "advantage_clip_rate",
    "mismatch_sampler",
    "time",
]
_COUNTS = [
    "update",
    "stage",
    "step",
    "backtracks",
    "steps",
    "messages",
    "groups",
    "groups_without_signal",
    "groups_aside",
    "messages_measured",
    "sampled_tokens_total",
]


def summarise(reading: Reading) -> dict[str, Any]:
    """The shared data, the data computed by each section, and the answers to the sections' questions."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "run": run_facts(reading),
        "notes": list(reading.notes),
        "evals": eval_rows(reading.records),
        "updates": update_rows(reading.updates),
        "grader_failures": dict(mapping(reading.updates[-1], "grader_failures")) if reading.updates else {},
    }
    data |= computed(reading)
    data["headlines"] = [asdict(section.answer(data)) for section in sections() if section.answer is not None]
    return data


def run_facts(reading: Reading) -> dict[str, Any]:
    """Name, state, team and settings of a run."""
    begun = of_kind(reading.records, "start") + of_kind(reading.records, "resume")
    first: Record = begun[0] if begun else {}
    last: Record = begun[-1] if begun else {}
    updates, plan = reading.updates, reading.plan
    times = [t for r in [*begun, *updates] if (t := number(r, "time")) is not None]
    logged = last.get("agents")
    seen = dict.fromkeys(str(u.get("agent")) for u in updates)
    names = [str(name) for name in (logged if isinstance(logged, list | tuple) and logged else seen)]
    ended = {str(r.get("kind")) for r in reading.records[-1:]} & {"finished", "stopped"}
    stages, done = whole(last, "stages"), stages_done(reading.records)
    held_out = evaluated_checkpoints(reading.records)
    early = _stopped_early(reading, held_out) and (stages is None or done < stages)
    finished = "finished" in ended or early or (stages is not None and done >= stages)
    best = best_of(held_out)
    return {
        "name": str(last.get("name") or reading.folder.name),
        "folder": reading.folder.name,
        "state": _state(finished, "stopped" in ended, reading.is_in_use),
        "stages": stages,
        "stages_done": done,
        "stopped_early": early,
        "best": None if best is None else asdict(best),
        "agents": names,
        "preset": None if reading.team_file is None else reading.team_file.plan.preset,
        "seed": None if reading.team_file is None else reading.team_file.seed,
        "fresh": None if plan is None else not plan.reuses_rollouts,
        "gated": None if plan is None else plan.region.gate,
        "order": order_of(updates),
        "started": times[0] if times else None,
        "seconds": seconds_at_work(reading.records),
        "resumed": len(of_kind(reading.records, "resume")),
        "floors": dict(mapping(first, "floors")),
        "first_seconds": dict(mapping(first, "seconds")),
        "samplers": dict(mapping(last, "samplers")),
        "precisions": dict(mapping(last, "precisions")),
        "threads": whole(last, "threads"),
    }


def stages_done(records: Sequence[Record]) -> int:
    """The number of stages that are over, from the last one that is. A stage that was left by a swap has no record."""
    closed = of_kind(records, "stage")
    numbers = [number for record in closed if (number := whole(record, "stage")) is not None]
    return max([len(closed), *(number + 1 for number in numbers)])


def seconds_at_work(records: Sequence[Record]) -> float | None:
    """Wall-clock seconds of all training commands of a run, each from its first record to its last update or
    evaluation, without the pauses between them; None if no record has a time."""
    commands: list[list[float]] = []
    for record in records:
        kind, now = record.get("kind"), number(record, "time")
        if kind == "eval" and commands:  # its record has no time; that of a later update includes it
            commands[-1][-1] += number(record, "seconds") or 0.0
        elif now is not None and (kind in ("start", "resume") or (kind == "update" and not commands)):
            commands.append([now, now])
        elif now is not None and kind == "update":
            commands[-1][-1] = now
    return sum(max(end - begun, 0.0) for begun, end in commands) if commands else None


def evaluated_checkpoints(records: Sequence[Record]) -> list[HeldOut]:
    """The evaluations of this run on the newest problems, in order; those before a swap belong to another run."""
    found: list[HeldOut] = []
    before: list[str] = []
    for record in records:
        if record.get("kind") == "swap":
            found = []
        success, stage = number(record, "avg_at_k"), whole(record, "stage")
        if record.get("kind") == "eval" and success is not None and stage is not None:
            asked = _asked(record)
            if not are_comparable(asked, before):
                found = []
            before = asked
            found.append(HeldOut(updates_before(record), stage, success))
    return found


def _asked(record: Record) -> list[str]:
    """The names of the problems of an evaluation; empty if its record does not have them."""
    ids = record.get("problem_ids")
    return [str(name) for name in ids] if isinstance(ids, list | tuple) else []


def _stopped_early(reading: Reading, held_out: Sequence[HeldOut]) -> bool:
    """Whether ``eval.patience`` ended the run: no update followed the evaluation that exhausted it."""
    patience = None if reading.team_file is None else reading.team_file.eval.patience
    updates = updates_before(reading.updates[-1]) if reading.updates else 0
    return out_of_patience(held_out, patience) and held_out[-1].updates >= updates


def _state(is_finished: bool, is_stopped: bool, is_in_use: bool) -> str:
    """The state of the run, from the log and, if that does not say, from whether a process uses the folder."""
    if is_finished:
        return "finished"
    if is_in_use:
        return "running"
    return "stopped" if is_stopped else "interrupted"


def eval_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Evaluations, with the tokens sampled for training up to each. ``problem_set`` is the same number for evaluations
    on the same problems, one after the other."""
    rows: list[dict[str, Any]] = []
    tokens, problem_set, before = 0, 0, list[str]()
    for record in records:
        if record.get("kind") == "update":
            tokens = whole(record, "sampled_tokens_total") or tokens
        if record.get("kind") != "eval" or number(record, "avg_at_k") is None:
            continue
        asked = _asked(record)
        problem_set += not are_comparable(asked, before)
        before = asked
        interval = record.get("avg_interval")
        ends = [number({"x": x}, "x") for x in interval] if isinstance(interval, list | tuple) else []
        rows.append(
            {
                "stage": whole(record, "stage"),
                "sampled_tokens": tokens,
                "success": number(record, "avg_at_k"),
                "low": ends[0] if len(ends) == 2 else None,
                "high": ends[1] if len(ends) == 2 else None,
                "majority": number(record, "majority_at_k"),
                "consensus": number(record, "consensus_on_correct"),
                "pass_at_k": {k: number(record["pass_at_k"], k) for k in mapping(record, "pass_at_k")},
                "pass_hat_k": {k: number(record["pass_hat_k"], k) for k in mapping(record, "pass_hat_k")},
                "problems": whole(record, "problems"),
                "samples": whole(record, "samples"),
                "confidence": number(record, "confidence"),
                "verdicts": dict(mapping(record, "verdicts")),
                "problem_set": problem_set,
            }
        )
    return rows


def update_rows(updates: Sequence[Record]) -> list[dict[str, Any]]:
    gained, stale = gains(updates), stale_updates(updates)
    rows = []
    for update in updates:
        row: dict[str, Any] = {key: whole(update, key) for key in _COUNTS}
        row |= {key: number(update, key) for key in _NUMBERS}
        row |= {key: str(update.get(key) or "") for key in ("agent", "outcome", "reason", "unit")}
        row |= {key: str(update.get(key) or "")[:8] for key in ("version_before", "version_after")}
        row["bounds"] = {str(c.get("kind")): number(c, "lower_bound") for c in mappings(update, "certificates")}
        gain = gained.get(row["update"]) if row["update"] is not None else None
        row["gain"] = None if gain is None else asdict(gain)
        exact = update.get("exact_success")
        row["exact_success"] = exact[1] if isinstance(exact, list | tuple) and len(exact) == 2 else None
        row["seconds"] = sum(number(update["seconds"], phase) or 0.0 for phase in mapping(update, "seconds"))
        row["stale"] = row["update"] in stale
        row["kept"], row["skipped"] = accepted(update), was_skipped(update.get("outcome"))
        row["outside"] = row["kept"] and _outside(update)
        rows.append(row)
    return rows


def _outside(update: Record) -> bool:
    """Whether the upper bound is outside the radius; a bound that is not finite is outside."""
    upper, radius = update.get("kl_upper"), number(update, "radius")
    if radius is None or not isinstance(upper, int | float):
        return False
    return not upper <= radius * (1 + 1e-9)
