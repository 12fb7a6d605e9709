"""The data of a report: plain values computed once, which every form (HTML, Markdown, JSON, live page) shows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from teamtr.analysis.diagnostics.accounting import overhead, spent_by_agent
from teamtr.analysis.diagnostics.coordination import coordination
from teamtr.analysis.diagnostics.kl_reliability import kl_reliability
from teamtr.analysis.diagnostics.order import order_of
from teamtr.analysis.diagnostics.probes import probed, stale_gap_by_stage
from teamtr.analysis.diagnostics.stability import stability
from teamtr.analysis.diagnostics.subsampling import subsample_reliability
from teamtr.analysis.diagnostics.tracking import Tracking, certificate_tracking, gains, stale_updates
from teamtr.analysis.diagnostics.zeta import zeta_proxy
from teamtr.analysis.report.headlines import headlines
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.swaps import swap_rows
from teamtr.records import Record, accepted, mapping, mappings, number, of_kind, whole
from teamtr.reports import was_skipped
from teamtr.theory.weights import weight_degeneracy

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
    """Everything but the conversations and what needs them (``staleness``, ``example``: null until they are read)."""
    updates = reading.updates
    tracking = certificate_tracking(updates)
    stable = stability(updates, reading.evals)
    zeta = zeta_proxy(updates)
    data: dict[str, Any] = {
        "format": FORMAT,
        "run": run_facts(reading),
        "notes": list(reading.notes),
        "evals": eval_rows(reading.records),
        "updates": update_rows(updates),
        "certificates": {kind: _tracking(found) for kind, found in tracking.items()},
        "kl_reliability": [asdict(estimator) for estimator in kl_reliability(updates)],
        "kl_subsamples": [asdict(subsample) for subsample in subsample_reliability(updates)],
        "stability": asdict(stable),
        "coordination": [{**asdict(c), "alone": c.alone} for c in coordination(reading.evals)],
        "zeta": None if zeta is None else asdict(zeta),
        "weights": _weights(reading),
        "probes": _probes(updates),
        "staleness": None,
        "example": None,
        "swaps": swap_rows(reading.records),
        "cost": _cost(reading),
        "grader_failures": dict(mapping(updates[-1], "grader_failures")) if updates else {},
        "reproduce": _reproduce(reading),
        "batches": [{"name": b.name, "stage": b.stage, "step": b.step} for b in reading.batches],
    }
    data["headlines"] = headlines(data)
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
    stages, done = whole(last, "stages"), len(of_kind(reading.records, "stage"))
    finished = "finished" in ended or (stages is not None and done >= stages)
    return {
        "name": str(last.get("name") or reading.folder.name),
        "folder": reading.folder.name,
        "state": "finished" if finished else "stopped" if "stopped" in ended else "running or interrupted",
        "stages": stages,
        "stages_done": done,
        "agents": names,
        "preset": None if reading.team_file is None else reading.team_file.plan.preset,
        "seed": None if reading.team_file is None else reading.team_file.seed,
        "fresh": None if plan is None else not plan.reuses_rollouts,
        "gated": None if plan is None else plan.region.gate,
        "order": order_of(updates),
        "started": times[0] if times else None,
        "seconds": times[-1] - times[0] if times else None,
        "resumed": len(of_kind(reading.records, "resume")),
        "floors": dict(mapping(first, "floors")),
        "samplers": dict(mapping(last, "samplers")),
        "precisions": dict(mapping(last, "precisions")),
        "threads": whole(last, "threads"),
    }


def eval_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Evaluations with the tokens that training had sampled by then."""
    rows, tokens = [], 0
    for record in records:
        if record.get("kind") == "update":
            tokens = whole(record, "sampled_tokens_total") or tokens
        if record.get("kind") != "eval" or number(record, "avg_at_k") is None:
            continue
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
                "problems": whole(record, "problems"),
                "samples": whole(record, "samples"),
                "confidence": number(record, "confidence"),
                "verdicts": dict(mapping(record, "verdicts")),
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
    """Whether the upper bound is not within the radius; one that is not a finite number is not."""
    upper, radius = update.get("kl_upper"), number(update, "radius")
    if radius is None or not isinstance(upper, int | float):
        return False
    return not upper <= radius * (1 + 1e-9)


def _tracking(found: Tracking) -> dict[str, Any]:
    return {
        "count": len(found.updates),
        "exact": bool(found.gains) and all(gain.exact for gain in found.gains),
        "rank_correlation": found.rank_correlation,
        "violations": found.violations,
        "violation_rate": found.violation_rate,
        "positive": found.positive,
        "not_applicable": found.not_applicable,
    }


def _probes(updates: Sequence[Record]) -> dict[str, Any] | None:
    found = probed(updates)
    if not found:
        return None
    by_stage = {stage: asdict(gap) for stage, gap in stale_gap_by_stage(found).items()}
    return {"updates": [asdict(one) for one in found], "by_stage": by_stage}


def _weights(reading: Reading) -> dict[str, Any] | None:
    """Of the newest commit: only there are trajectory weights stored, and only when rollouts are reused."""
    logs = reading.progress.get("log_weights")
    try:
        return None if not logs else {"update": whole(reading.progress, "number"), **asdict(weight_degeneracy(logs))}
    except (ValueError, TypeError):
        return None


def _cost(reading: Reading) -> dict[str, Any]:
    updates = reading.updates
    tokens, seconds = mapping(reading.account, "tokens"), mapping(reading.account, "seconds")
    found = overhead(updates, seconds or None)
    last: Record = updates[-1] if updates else {}
    return {
        "complete": bool(seconds),
        "tokens": _table(tokens) or spent_by_agent(updates, "tokens"),
        "seconds": _table(seconds) or spent_by_agent(updates, "seconds"),
        "sampled_tokens": whole(last, "sampled_tokens_total") or 0,
        "episodes": whole(last, "episodes_total") or 0,
        "eval_tokens": sum(whole(r, "tokens") or 0 for r in reading.evals),
        "eval_seconds": sum(number(r, "seconds") or 0.0 for r in reading.evals),
        "overhead": {**asdict(found), "token_ratio": found.token_ratio, "seconds_ratio": found.seconds_ratio},
    }


def _table(table: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {agent: {p: number(phases, p) or 0.0 for p in phases} for agent, phases in table.items() if phases}


def _reproduce(reading: Reading) -> dict[str, Any]:
    from teamtr.version import __version__

    name = reading.folder.name
    again = shlex.quote(f"{name}-again")
    return {
        "version": __version__,
        "commands": [
            "# beside the run folder",
            f"teamtr train {shlex.quote(f'{name}/team.yaml')} --out {again}",
            f"teamtr report {again}",
        ],
        "team_file": reading.team_text,
    }
