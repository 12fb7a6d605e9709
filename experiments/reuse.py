"""Does a real language model need fresh rollouts? Fresh, naive, reweighted, auto and partial on two tasks.

    python experiments/reuse.py --model FOLDER --out OUT [--plans teamtr,auto] [--seeds 0,1]
    python experiments/reuse.py --runs reproduced/main-results-small --out OUT [--plans teamtr,auto] [--seeds 0,1]

With a model: eight adapters on one base play a blind game (``words.py``): exactly one must say Yes. Success is exact.
Every run is a ``teamtr train`` in its own process, at most ``--at-once`` of them in parallel on one GPU, all plans of
the first seed first, until all have finished or ``--limit`` seconds are over. The same command resumes unfinished runs;
with ``--read`` it only reads their logs.

With runs: reads runs that ``teamtr reproduce main-results --scale small`` has trained (a solver, a checker and a
finaliser, each an adapter, on GSM8K). Success is sampled on held-out questions.

A table compares the plans at equal updates, equal sampled tokens and equal seconds of training, over the seeds that all
plans have finished (if there is none, started). Writes the table to OUT as TASK.txt, with all curves as TASK.json, and
the logs as TASK-logs.tar.gz; to use ``--read`` elsewhere, unpack these in OUT.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from beside import Point, Record, Run, between, clocked, read, train
from words import SYSTEM_PROMPT

from teamtr.theory.intervals import mean_interval


@dataclass(frozen=True)
class Reproduced:
    """A run of ``teamtr reproduce``."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def finished(self) -> bool:
        records = list(read(self.log))
        stages = [record["stages"] for record in records if record["kind"] in ("start", "resume")]
        return bool(stages) and sum(record["kind"] == "stage" for record in records) >= stages[-1]


Runs = dict[str, dict[int, Run | Reproduced]]
Curves = dict[str, dict[int, list[Point]]]
"""By plan, then by seed, like ``Runs``."""

PLANS = ("teamtr", "naive_sequential", "reweighted", "auto", "partial")
FRESH = "teamtr"
LEVELS = ("updates", "tokens", "seconds")
NAMES = {"naive_sequential": "naive-once-a-stage"}
"""Names of plans in ``teamtr reproduce main-results``, where they differ from the preset's name."""
AGENTS = 8

WORDS = """\
name: words
task: {{name: "python:{here}/words.py:Words", options: {{agents: {agents}}}}}
team:
  model: {model}
  train: lora
  lora: {{rank: 8, alpha: 16}}
  max_tokens: 2 # a word and the end
  system_prompt: {system_prompt}
  agents: [{names}]
plan:
  stages: 8
  problems: 32
  group_size: 16
  radius_nats_per_message: 0.1
  clip: 1 # the ratio of a rare word passes 1.2 at a KL of 0.003: the radius is to hold the update, not the clip
learner: {{learning_rate: 1e-3, epochs: 2, minibatches: 2, micro_batch: 256}}
sampling: {{compiled: false, memory_gb: 0.5}}
eval: {{every: 0}} # success is exact after every update
store: {{episodes: false}}
"""


def team_file(model: str) -> str:
    """The team file of the game, for a model folder (or "tiny")."""
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    names = ", ".join(f"{{name: a{k + 1}, sees: blind}}" for k in range(AGENTS))
    told = json.dumps(SYSTEM_PROMPT.format(agents=AGENTS))
    return WORDS.format(
        here=Path(__file__).resolve().parent, model=model, agents=AGENTS, names=names, system_prompt=told
    )


def runs_of(a: argparse.Namespace) -> Runs:
    """The run of every plan and seed. Runs differ only in plan and seed."""
    if a.runs is not None:
        return {
            plan: {seed: Reproduced(a.runs / "runs" / f"{NAMES.get(plan, plan)}-seed{seed}") for seed in a.seeds}
            for plan in a.plans
        }
    team = team_file(a.model)
    alike = [*a.set, *([] if a.stages is None else [f"plan.stages={a.stages}"])]
    return {
        plan: {
            seed: Run(a.out / "words" / f"{plan}-seed{seed}", team, (*alike, f"seed={seed}", f"plan.preset={plan}"))
            for seed in a.seeds
        }
        for plan in a.plans
    }


# -- reading logs ---------------------------------------------------------------------------------------------


def points(records: Iterable[Record]) -> list[Point]:
    """The team's success after every update if it is exact, else at every evaluation. Success is the mean of
    ``units``: one number per held-out problem, or the one exact number."""
    found: list[Point] = []
    place = {"updates": 0, "tokens": 0, "seconds": 0.0}
    for record, seconds in clocked(records):
        if record["kind"] == "update":
            exact = record.get("exact_success")
            if exact is not None and not found:
                found.append({**place, "success": exact[0], "units": [exact[0]]})
            place = {"updates": record["update"], "tokens": record["sampled_tokens_total"], "seconds": seconds}
            if exact is not None:
                found.append({**place, "success": exact[1], "units": [exact[1]]})
        elif record["kind"] == "eval":
            found.append({**place, "success": record["avg_at_k"], "units": record["success_P"]})
    return found


def choices(records: Iterable[Record]) -> dict[str, Any]:
    """Counts of a run's updates, and the source of their episodes."""
    updates = [record for record in records if record["kind"] == "update"]
    told = [update["rollouts"] for update in updates if update.get("rollouts")]
    shares = [one["share"] for one in told if one.get("share") is not None]
    partly = [one["partly"] for one in told if one.get("partly")]
    biases = [one["bias"]["estimate"] for one in partly if one.get("bias")]
    return {
        "updates": len(updates),
        "kept": sum(update["outcome"].startswith("accepted") for update in updates),
        "outside": sum(not update["kl_upper"] <= update["radius"] for update in updates),
        "actions": dict(Counter(one["action"] for one in told)),
        "mean_share": float(np.mean(shares)) if shares else None,
        "least_share": min(shares, default=None),
        "redrawn_kept": float(np.mean([one["kept"] for one in partly])) if partly else None,
        "redrawn_bias": float(np.mean(biases)) if biases else None,
    }


# -- the table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval, which is None for fewer than two numbers."""

    mean: float
    interval: tuple[float, float] | None

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        if len(values) < 2:
            return Estimate(float(np.mean(values)), None)
        found = mean_interval(values)
        return Estimate(found.estimate, (found.lower, found.upper))

    def shown(self, sign: str = "") -> str:
        text = f"{100 * self.mean:{sign}.1f}"
        return text if self.interval is None else f"{text} ({' to '.join(f'{100 * x:.1f}' for x in self.interval)})"


def units_at(curve: Sequence[Point], at: float, key: str) -> list[float]:
    """The units of a curve where ``key`` is ``at``, each interpolated linearly between the two neighboring points."""
    return [
        between([{key: point[key], "success": point["units"][k]} for point in curve], at, key)
        for k in range(len(curve[0]["units"]))
    ]


def sampled(curves: Sequence[Sequence[Point]], at: float, key: str) -> np.ndarray:
    """The sample that a plan's success averages: one value per seed if exact, else per problem (its mean over
    seeds)."""
    units_SU = np.array([units_at(curve, at, key) for curve in curves])
    return units_SU[:, 0] if units_SU.shape[1] == 1 else units_SU.mean(axis=0)


def counted(curves: dict[str, dict[int, list[Point]]], runs: Runs, seeds: Sequence[int]) -> list[int]:
    """The seeds to compare: those that all plans have finished, or if there is none, those that all have started."""
    begun = [seed for seed in seeds if all(len(curves[plan][seed]) > 1 for plan in curves)]
    whole = [seed for seed in begun if all(runs[plan][seed].finished for plan in runs)]
    return whole or begun


def summary(runs: Runs, seeds: Sequence[int]) -> dict[str, Any]:
    """Every plan at equal updates, tokens and seconds, with paired differences to the fresh plan by problem or seed."""
    records = {plan: {seed: list(read(run.log)) for seed, run in own.items()} for plan, own in runs.items()}
    curves = {plan: {seed: points(found) for seed, found in own.items()} for plan, own in records.items()}
    compared = counted(curves, runs, seeds)
    found: dict[str, Any] = {"seeds": compared, "levels": {}, "table": {plan: {} for plan in runs}}
    for key in LEVELS if compared else ():
        at = min(curves[plan][seed][-1][key] for plan in runs for seed in compared)
        found["levels"][key] = at
        units = {plan: sampled([curves[plan][seed] for seed in compared], at, key) for plan in runs}
        for plan in runs:
            found["table"][plan][key] = vars(Estimate.of(units[plan]))
            if FRESH in runs and plan != FRESH:
                found["table"][plan][f"{key}_minus_fresh"] = vars(Estimate.of(units[plan] - units[FRESH]))
    for plan in runs if compared else ():
        ends = [curves[plan][seed][-1] for seed in compared]
        found["table"][plan]["before"] = float(np.mean([curves[plan][seed][0]["success"] for seed in compared]))
        found["table"][plan]["end"] = {key: float(np.mean([end[key] for end in ends])) for key in ("success", *LEVELS)}
    found["choices"] = {
        plan: {str(seed): choices(own) for seed, own in of_plan.items()} for plan, of_plan in records.items()
    }
    found["curves"] = {plan: {str(seed): own for seed, own in of_plan.items()} for plan, of_plan in curves.items()}
    return found


def text(task: str, found: dict[str, Any]) -> str:
    """The table in Markdown, with a line on the choices of each run."""
    if not found["seeds"]:
        return f"{task}: no seed that all plans have begun\n"
    unit = "seeds" if task == "words" else "problems"
    levels = found["levels"]
    lines = [
        f"{task}, seeds {', '.join(map(str, found['seeds']))}: success in %, with intervals at 95 % over {unit}",
        f"at {levels['updates']} updates, {levels['tokens']:,} sampled tokens, {levels['seconds']:.0f} s of training",
        "",
        "| plan | before | equal updates | minus fresh | equal tokens | minus fresh | equal seconds | minus fresh "
        "| at the end | updates | tokens | seconds |",
        "|" + "---|" * 12,
    ]
    for plan, row in found["table"].items():
        cells = [plan, f"{100 * row['before']:.1f}"]
        for key in LEVELS:
            apart = row.get(f"{key}_minus_fresh")
            cells += [Estimate(**row[key]).shown(), "" if apart is None else Estimate(**apart).shown("+")]
        end = row["end"]
        cells += [
            f"{100 * end['success']:.1f}",
            f"{end['updates']:.0f}",
            f"{end['tokens']:,.0f}",
            f"{end['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for plan, of_plan in found["choices"].items():
        lines += [f"{plan} seed {seed}: {_told(one)}" for seed, one in of_plan.items() if one["updates"]]
    return "\n".join(lines) + "\n"


def _told(one: dict[str, Any]) -> str:
    actions = ", ".join(f"{count} x {action}" for action, count in one["actions"].items())
    parts = [f"{one['kept']} of {one['updates']} updates kept, {one['outside']} outside their radius", actions]
    if one["mean_share"] is not None:
        parts.append(f"effective share {one['mean_share']:.2f}, least {one['least_share']:.2f}")
    if one["redrawn_kept"] is not None:
        parts.append(f"redrawing kept {one['redrawn_kept']:.0%} of the tokens")
    if one["redrawn_bias"] is not None:
        parts.append(f"bias {one['redrawn_bias']:+.3f}")
    return "; ".join(part for part in parts if part)


def write(a: argparse.Namespace, runs: Runs, failed: Sequence[str]) -> str:
    """Write the table, the curves and the logs to OUT; returns the table."""
    task = "words" if a.runs is None else "gsm8k"
    a.out.mkdir(parents=True, exist_ok=True)
    found = {**summary(runs, a.seeds), "failed": list(failed)}
    shown = text(task, found) + "".join(f"failed: {line}\n" for line in failed)
    (a.out / f"{task}.json").write_text(json.dumps(found) + "\n")
    (a.out / f"{task}.txt").write_text(shown)
    with tarfile.open(a.out / f"{task}-logs.tar.gz", "w:gz") as logs:
        for run in (run for own in runs.values() for run in own.values()):
            for file in (run.log, *((run.output, run.marker) if isinstance(run, Run) else ())):
                if file.exists():
                    logs.add(file, str(file.relative_to(a.out if a.runs is None else a.runs)))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a folder: train teams of it on the game")
    source.add_argument("--runs", type=Path, help="a folder that `teamtr reproduce main-results` made: read its runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=lambda t: t.split(","), default=list(PLANS))
    parser.add_argument("--seeds", type=lambda t: [int(x) for x in t.split(",")], default=[0, 1, 2])
    parser.add_argument("--stages", type=int, help="default: 8")
    parser.add_argument("--at-once", type=int, default=5, help="runs beside each other")
    parser.add_argument("--set", action="append", default=[], help="a setting of the team file, such as device=cpu")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all runs together")
    parser.add_argument("--read", action="store_true", help="run nothing, read the logs")
    a = parser.parse_args()
    runs = runs_of(a)
    in_order = [runs[plan][seed] for seed in a.seeds for plan in a.plans]
    to_train = [] if a.read else [run for run in in_order if isinstance(run, Run)]
    failed = train(to_train, limit=a.limit, at_once=a.at_once)
    print(write(a, runs, failed), end="")


if __name__ == "__main__":
    main()
