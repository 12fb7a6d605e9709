"""Three SmolLM2 learn to add: TeamTR, naive sequential and a single agent with GRPO at equal sampled tokens.

    python experiments/smollm2.py --model FOLDER --out OUT [--radii 0.05,0.5] [--seeds 0,1,2] [--limit 400]

Every run is a ``teamtr train`` of the recipe ``smollm2-sums`` in its own process. All run in parallel on one GPU (a
model this small does not fill it), until they have finished or ``--limit`` seconds are over. The same command resumes
unfinished runs; with ``--read`` it only reads their logs. The table shows held-out success with a bootstrap interval
over problems at the end of each run, and, interpolated between evaluations, at the largest number of sampled tokens
that all runs have reached.

Fifteen processes on one GPU wait for each other. If the CUDA multi-process service is available, start it first
(``nvidia-cuda-mps-control -d``).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside import Point, Run, between, evaluated, read, train

from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.paint import painted

AGENTS = 3
SETTINGS = ("sampling.memory_gb=2", "store.episodes=false")


@dataclass(frozen=True)
class Method:
    """A method. ``stages`` and ``every`` (stages between evaluations) make all methods sample about as many tokens."""

    name: str
    preset: str
    radius: float | None
    stages: int
    every: int
    alone: bool = False


def methods(radii: list[float], stages: int) -> list[Method]:
    """The methods, with as many stages as an equal number of tokens allows.

    A fresh stage samples one batch per agent, a stale stage one batch, and a single agent's stage a third of a batch.
    """
    every = max(1, stages // 6)
    found = [Method(f"teamtr-{r:g}", "teamtr", r, stages, every) for r in radii]
    found += [Method(f"naive-{r:g}", "naive_sequential", r, AGENTS * stages, AGENTS * every) for r in radii]
    per_single = AGENTS * AGENTS
    found.append(Method("single-grpo", "grpo", None, per_single * stages, per_single * every, alone=True))
    found += [
        Method(f"single-teamtr-{r:g}", "teamtr", r, per_single * stages, per_single * every, alone=True) for r in radii
    ]
    return found


def team_file(model: str, alone: bool) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.compat import StringIO

    from teamtr.config import recipe_text

    yaml, text = YAML(), StringIO()
    team = yaml.load(recipe_text("smollm2-sums"))
    team["team"]["model"] = model
    if alone:
        team["team"]["agents"] = team["team"]["agents"][:1]
        team["team"]["answer"] = "last"
    yaml.dump(team, text)
    return text.getvalue()


def run_of(method: Method, seed: int, a: argparse.Namespace) -> Run:
    rate = a.grpo_learning_rate if method.preset == "grpo" else a.learning_rate
    changes = [
        *SETTINGS, f"seed={seed}", f"plan.preset={method.preset}", f"plan.stages={method.stages}",
        f"eval.every={method.every}", f"learner.learning_rate={rate}",
    ]  # fmt: skip
    if method.radius is not None:
        changes.append(f"plan.radius_nats_per_message={method.radius}")
    folder = a.out / f"{method.name}-seed{seed}"
    return Run(folder, team_file(str(a.model), method.alone), tuple(changes))


def curve(folder: Path) -> list[Point]:
    """Evaluations of one run, each with the tokens sampled for training before it."""
    return evaluated(read(folder / "run" / "log.jsonl"))


def summary(all_methods: list[Method], a: argparse.Namespace) -> dict[str, Any]:
    curves = {m.name: {seed: curve(a.out / f"{m.name}-seed{seed}") for seed in a.seeds} for m in all_methods}
    ends = [c[-1]["tokens"] for runs in curves.values() for c in runs.values() if c]
    common = min(ends, default=0)
    table = {}
    for name, runs in curves.items():
        found = [c for c in runs.values() if c]
        table[name] = {
            "before": [c[0]["success"] for c in found],
            "at_common_tokens": [between(c, common) for c in found],
            "last": [c[-1]["success"] for c in found],
            "interval_of_last": [c[-1]["interval"] for c in found],
            "tokens": [c[-1]["tokens"] for c in found],
        }
    return {"common_tokens": common, "table": table, "curves": curves}


def region(folder: Path) -> dict[str, Any]:
    """Counts of kept updates, KL and certificates of one run."""
    log = folder / "run" / "log.jsonl"
    records = list(read(log))
    kept = [r for r in records if r["kind"] == "update" and r["outcome"].startswith("accepted")]
    certificates = [c for r in kept for c in r["certificates"] if c["kind"] == "turn_aware"]
    return {
        "updates": sum(r["kind"] == "update" for r in records),
        "kept": len(kept),
        "outside": sum(not r["kl_upper"] <= r["radius"] for r in kept),
        "kl": sum(r["kl_full"] for r in kept) / max(1, len(kept)),
        "largest_floor": max((r["noise_floor"] for r in kept), default=0.0),
        "certificates": len(certificates),
        "positive_certificates": sum(c["lower_bound"] > 0 for c in certificates),
    }


def drawing(found: dict[str, Any]) -> Drawing:
    """Learning curves by sampled tokens and by updates: mean over seeds, lowest and highest."""
    panels = []
    for key, unit in (("tokens", 1000.0), ("updates", 1.0)):
        series = []
        for name, runs in found["curves"].items():
            rows = list(zip(*(c for c in runs.values() if c), strict=False))  # evaluations that all seeds have
            success = [[100 * p["success"] for p in row] for row in rows]
            series.append(
                Series(
                    name,
                    tuple(sum(p[key] for p in row) / len(row) / unit for row in rows),
                    tuple(sum(row) / len(row) for row in success),
                    tuple(min(row) for row in success),
                    tuple(max(row) for row in success),
                )
            )
        label = "tokens sampled for training (thousands)" if key == "tokens" else "updates of one agent"
        panels.append(Panel(f"by {key}", label, "held-out success (%)", tuple(series)))
    caption = "Sums of two one-digit numbers, sampled at temperature 0.5. Mean of three seeds, lowest to highest."
    return Drawing(tuple(panels), caption, "a curve that rises early")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--radii", type=lambda t: [float(x) for x in t.split(",")], default=[0.05, 0.5])
    parser.add_argument("--seeds", type=lambda t: [int(x) for x in t.split(",")], default=[0, 1, 2])
    parser.add_argument("--only", default="", help="run methods whose name begins with one of these, comma-separated")
    parser.add_argument("--stages", type=int, default=12, help="of TeamTR; the others get as many as tokens allow")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--grpo-learning-rate", type=float, default=5e-5)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for all runs together")
    parser.add_argument("--read", action="store_true", help="run nothing, read the logs")
    parser.add_argument("--figure", type=Path, help="draw learning curves here (SVG; needs matplotlib)")
    a = parser.parse_args()
    wanted = [m for m in methods(a.radii, a.stages) if m.name.startswith(tuple(a.only.split(",")))]
    if not a.read:
        train([run_of(m, seed, a) for seed in a.seeds for m in wanted], limit=a.limit)
    found = summary(wanted, a)
    found["region"] = {m.name: [region(a.out / f"{m.name}-seed{seed}") for seed in a.seeds] for m in wanted}
    if a.figure:
        a.figure.write_bytes(painted("Three SmolLM2 learn to add", drawing(found)))
    (a.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"at {found['common_tokens']:,} sampled tokens, held-out success by seed")
    for name, row in found["table"].items():
        shown = {key: [round(100 * x) for x in row[key]] for key in ("before", "at_common_tokens", "last")}
        print(f"{name:<22} {shown}  tokens {row['tokens']}")


if __name__ == "__main__":
    main()
