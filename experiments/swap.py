"""Swap one agent of a trained team for a larger model that never saw the team: aligned, direct, or train anew.

    python experiments/swap.py --out runs/swap --seeds 3 --stages 20

For every seed a team of tiny models is trained on code exchange (a run that is there is taken as it is), one agent is
replaced by a larger tiny model that knows only the form of the task's messages, in three ways, and each new run trains
for the same number of stages. Writes ``swap.json`` (table, curves, alignment) and prints the table. Started again, it
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teamtr import run as runs
from teamtr.build import build
from teamtr.config import load_team_file, loads, recipe_text
from teamtr.store import RunFolder
from teamtr.swap import Request, swap
from teamtr.swap.request import Mode

MODES: tuple[Mode, ...] = ("aligned", "direct", "reset")
NAMES = {"aligned": "aligned (Stage-0)", "direct": "direct", "reset": "train anew"}
EVAL = ("eval.every=5", "eval.samples=16")
TRAINED = 0.85
"""What a team must reach before one of its agents is replaced."""


def trained_team(folder: Path, seed: int) -> None:
    """A team that solves the task; trains it unless it is there."""
    team_file = loads(recipe_text("code-exchange"), "code-exchange", [f"seed={seed}"])
    for _ in runs.train(team_file, folder):
        pass
    success = [r["avg_at_k"] for r in RunFolder.read(folder).log.read() if r["kind"] == "eval"][-1]
    if success < TRAINED:
        raise SystemExit(f"{folder}: the team reached {success:.2f}, less than {TRAINED}; train it longer")


def newcomer(folder: Path, seed: int, layers: int, width: int) -> None:
    """A larger model with other first weights and the same warm-up in the form of messages; it never saw the team."""
    if folder.exists():
        return
    overrides = [f"seed={1000 + seed}", f"tiny.layers={layers}", f"tiny.width={width}"]
    workshop = build(loads(recipe_text("code-exchange"), "code-exchange", overrides))
    folder.mkdir(parents=True)
    workshop.engine.learner("speaker").policy.save_weights(folder)


def swap_and_train(team: Path, model: Path, folder: Path, *, agent: str, mode: Mode, stages: int) -> dict[str, Any]:
    """One arm: the swap, the same number of stages after it, and what the log says."""
    request = Request(agent=agent, model=str(model), mode=mode, train="full", stages=stages, eval_samples=16)
    *_, record = swap(team, request, folder)
    for _ in runs.train(load_team_file(folder / "team.yaml", EVAL), folder):
        pass
    first = record["stage"]
    log = RunFolder.read(folder).log.read()
    later = [r for r in log if r["kind"] == "update" and r["stage"] >= first]
    evals = [(r["stage"] - first, r["avg_at_k"]) for r in log if r["kind"] == "eval" and r["stage"] > first]
    by_stage = {s: [r["success"] for r in later if r["stage"] == first + s] for s in range(stages)}
    return {
        **{key: record[key] for key in ("success", "shock", "alignment")},
        "final": evals[-1][1],
        "evals": evals,
        "training_success": [sum(found) / len(found) for found in by_stage.values()],
        "updates": len(later),
        "accepted": sum(r["outcome"].startswith("accepted") for r in later),
        "out_of_region": sum(r["outcome"].startswith("accepted") and not r["kl_upper"] <= r["radius"] for r in later),
    }


def table(results: dict[int, dict[str, Any]]) -> str:
    """One row per arm: means over seeds in points of per cent."""

    def mean(values: Sequence[float]) -> str:
        spread = f" ({100 * min(values):.1f} to {100 * max(values):.1f})" if len(values) > 1 else ""
        return f"{100 * sum(values) / len(values):.1f}{spread}"

    lines = ["| swap | before | installed | shock | final | held-out KL (upper) |", "|---|---|---|---|---|---|"]
    for mode in MODES:
        arms = [arms[mode] for arms in results.values() if mode in arms]
        if not arms:
            continue
        installed = [a["success"].get("after", a["success"]["at_swap"]) for a in arms]
        bounds = [f"{a['alignment']['kl_upper']:.4f}" for a in arms if a["alignment"]]
        cells = (
            NAMES[mode],
            mean([a["success"]["before"] for a in arms]),
            mean(installed),
            mean([a["shock"] for a in arms]),
            mean([a["final"] for a in arms]),
            ", ".join(bounds) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(results: dict[int, dict[str, Any]], path: Path) -> None:
    """Held-out success against stages after the swap: mean over seeds, and every seed thin."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for mode, colour in zip(MODES, ("tab:green", "tab:orange", "tab:gray"), strict=True):
        curves = []
        for arms in results.values():
            if mode in arms:
                success = arms[mode]["success"]
                curves.append([(0, success.get("after", success["at_swap"])), *arms[mode]["evals"]])
                axes.plot(*zip(*curves[-1], strict=True), color=colour, alpha=0.3, linewidth=0.8)
        if curves:
            stages = [stage for stage, _ in curves[0]]
            means = [sum(curve[k][1] for curve in curves) / len(curves) for k in range(len(stages))]
            axes.plot(stages, means, color=colour, marker="o", label=NAMES[mode])
    axes.set(xlabel="stages after the swap", ylabel="held-out success", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    canvas.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/swap"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=20, help="stages after the swap")
    parser.add_argument("--agent", default="speaker", choices=("left", "right", "speaker"))
    parser.add_argument("--layers", type=int, default=2, help="of the new model; the old one has 1")
    parser.add_argument("--width", type=int, default=128, help="of the new model; the old one has 64")
    parser.add_argument("--figure", type=Path, help="draw the recovery curves here")
    options = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    for seed in range(options.seeds):
        team, model = options.out / f"team-{seed}", options.out / f"newcomer-{seed}"
        trained_team(team, seed)
        newcomer(model, seed, options.layers, options.width)
        results[seed] = {}
        for mode in MODES:
            results[seed][mode] = swap_and_train(
                team, model, options.out / f"{mode}-{seed}", agent=options.agent, mode=mode, stages=options.stages
            )
            (options.out / "swap.json").write_text(json.dumps(results, indent=1) + "\n")
            print(f"seed {seed}, {mode}: done", flush=True)
    print(table(results))
    if options.figure:
        figure(results, options.figure)


if __name__ == "__main__":
    main()
