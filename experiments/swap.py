"""Swap one agent of a trained team for a model that never saw the team: aligned, direct, or from scratch.

    python experiments/swap.py --out runs/swap --seeds 3 --stages 20 --figure docs/figures/swap.svg
    python experiments/swap.py --out runs/swap-smollm2 --model FOLDER --seeds 1 --stages 4 --modes aligned,direct

For every seed, a team of tiny models is trained on code exchange (a finished run is reused). One agent is replaced by a
larger tiny model, trained only on the form of the task's messages, in three ways, and each new run trains for the same
number of stages. With ``--model``, a Hugging Face folder: three adapters on it learn to add, and the last agent is
replaced by an adapter on a copy whose weights were all fine-tuned to answer in a sentence. Writes ``seed-K.json`` for
every seed and ``swap.json`` for all seeds found (table, curves, alignment), and prints the table. The same command
resumes where it stopped; seeds can run in parallel, each with ``--first-seed K --seeds 1``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from teamtr.chat import ChatCodec, render
from teamtr.config import load_team_file, loads, recipe_text
from teamtr.engines.torch.loading import teach_form
from teamtr.engines.torch.pretrained import load_pretrained
from teamtr.session import train as runs
from teamtr.session.build import build
from teamtr.store import RunFolder
from teamtr.swap import Request, swap
from teamtr.swap.request import Mode
from teamtr.tasks.games.sums import Sums

MODES: tuple[Mode, ...] = ("aligned", "direct", "reset")
NAMES = {"aligned": "aligned (Stage-0)", "direct": "direct", "reset": "from scratch"}
SUMS = (
    "plan.stages=15", "plan.problems=64", "eval.every=5", "eval.problems=256", "eval.samples=4",
    "sampling.temperature=1", "sampling.memory_gb=2",
    "team.agents.solver.system_prompt=Add the numbers. Answer with the sum only.",
    "team.agents.checker.system_prompt=Check the sum that the solver gives. Answer with the right sum only.",
    "team.agents.finaliser.system_prompt=Decide. Answer with the final sum only.",
)  # fmt: skip
"""Differences from the recipe, which has since got prompts with examples and a lower temperature."""
SPEAKERS = ("solver", "checker", "finaliser")
FINALISER = "Decide. Answer with the final sum only."
TRAINED = 0.85
"""Success that a team must reach before one of its agents is replaced."""


def tiny_team(folder: Path, seed: int) -> None:
    """Train a team that solves code exchange, or resume it."""
    team_file = loads(recipe_text("code-exchange"), "code-exchange", [f"seed={seed}"])
    for _ in runs.train(team_file, folder):
        pass
    success = [r["avg_at_k"] for r in RunFolder.read(folder).log.read() if r["kind"] == "eval"][-1]
    if success < TRAINED:
        raise SystemExit(f"{folder}: the team reached {success:.2f}, less than {TRAINED}; train it longer")


def tiny_newcomer(folder: Path, seed: int) -> None:
    """Save a larger model with other initial weights and the same warm-up on message form; it never saw the team."""
    if folder.exists():
        return
    overrides = [f"seed={1000 + seed}", "tiny.layers=2", "tiny.width=128"]
    session = build(loads(recipe_text("code-exchange"), "code-exchange", overrides))
    folder.mkdir(parents=True)
    session.engine.learner("speaker").policy.save_weights(folder)


def pretrained_team(folder: Path, seed: int, model: Path, settings: Sequence[str]) -> None:
    """Train three adapters on the model for a few stages of sums."""
    text = recipe_text("smollm2-sums").replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model.resolve()), 1)
    team_file = loads(text, "smollm2-sums", [f"seed={seed}", *SUMS, *settings])
    for _ in runs.train(team_file, folder):
        pass


def pretrained_newcomer(folder: Path, seed: int, model: Path, steps: int) -> None:
    """Save a copy of the model with all weights fine-tuned to answer in a sentence."""
    if folder.exists():
        return
    own, tokenizer = load_pretrained(str(model))
    own.to("cuda" if torch.cuda.is_available() else "cpu")
    codec = ChatCodec(tokenizer)
    examples = []
    for problem in Sums(digits=1, seed=1000 + seed).problems("train"):
        prompt = render(agent="finaliser", system_prompt=FINALISER, problem=problem, history=[], speakers=SPEAKERS)
        examples.append((codec.encode(prompt), codec.encode_message(f"The sum is {problem.answer}.")))
    teach_form(own, examples, steps=steps, learning_rate=2e-5, batch=16, seed=seed)
    own.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """What to swap: how to make the team and the new model, which agent is replaced, and settings of later training."""

    team: Callable[[Path, int], None]
    newcomer: Callable[[Path, int], None]
    agent: str
    train: Literal["full", "lora"]
    eval_settings: tuple[str, ...]
    request: dict[str, Any]


def swap_and_train(case: Case, team: Path, model: Path, folder: Path, *, mode: Mode, stages: int) -> dict[str, Any]:
    """One arm: swaps, trains the same number of stages, and reads the results from the log."""
    request = Request(case.agent, str(model), mode=mode, train=case.train, stages=stages, **case.request)
    *_, record = swap(team, request, folder)
    for _ in runs.train(load_team_file(folder / "team.yaml", case.eval_settings), folder):
        pass
    first = record["stage"]
    log = RunFolder.read(folder).log.read()
    later = [r for r in log if r["kind"] == "update" and r["stage"] >= first]
    evals = [(r["stage"] - first, r["avg_at_k"]) for r in log if r["kind"] == "eval" and r["stage"] > first]
    by_stage = {s: [r["success"] for r in later if r["stage"] == first + s] for s in range(stages)}
    return {
        **{key: record[key] for key in ("success", "intervals", "shock", "alignment")},
        "final": evals[-1][1],
        "evals": evals,
        "training_success": [sum(found) / len(found) for found in by_stage.values()],
        "updates": len(later),
        "accepted": sum(r["outcome"].startswith("accepted") for r in later),
        "out_of_region": sum(r["outcome"].startswith("accepted") and not r["kl_upper"] <= r["radius"] for r in later),
    }


def table(results: dict[int, dict[str, Any]]) -> str:
    """One row per arm: means over seeds, in percent."""

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
    """Draws held-out success by stages after the swap: the mean over seeds, and each seed as a thin line."""
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
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})


def case_of(options: argparse.Namespace) -> Case:
    if options.model is None:
        evaluation = {"eval_samples": 16}
        return Case(tiny_team, tiny_newcomer, "speaker", "full", ("eval.every=5", "eval.samples=16"), evaluation)
    size = {"probes": options.probes, "max_steps": options.max_steps, "eval_problems": options.eval_problems}
    after = (f"eval.every={max(1, options.stages // 2)}", f"eval.problems={options.eval_problems}")
    radius = f"plan.radius_nats_per_message={options.radius}"
    settings = (*after, radius, f"plan.stages={options.team_stages}", f"plan.problems={options.problems}")
    return Case(
        lambda folder, seed: pretrained_team(folder, seed, options.model, settings),
        lambda folder, seed: pretrained_newcomer(folder, seed, options.model, options.newcomer_steps),
        "finaliser",
        "lora",
        after,
        {**size, "check_every": options.check_every, "batch": 32, "eval_samples": 4},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/swap"))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--stages", type=int, default=20, help="stages after the swap")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--figure", type=Path, help="draw the recovery curves here")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder: its adapters are the team")
    sizes = parser.add_argument_group("with --model")
    sizes.add_argument("--team-stages", type=int, default=12)
    sizes.add_argument("--radius", type=float, default=0.5, help="nats per message, of training and alignment")
    sizes.add_argument("--problems", type=int, default=32, help="of a batch")
    sizes.add_argument("--newcomer-steps", type=int, default=60)
    sizes.add_argument("--probes", type=int, default=500)
    sizes.add_argument("--max-steps", type=int, default=400)
    sizes.add_argument("--check-every", type=int, default=10)
    sizes.add_argument("--eval-problems", type=int, default=64)
    options = parser.parse_args()
    case = case_of(options)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        team, model = options.out / f"team-{seed}", options.out / f"newcomer-{seed}"
        case.team(team, seed)
        case.newcomer(model, seed)
        arms = {}
        for mode in options.modes:
            folder = options.out / f"{mode}-{seed}"
            arms[mode] = swap_and_train(case, team, model, folder, mode=mode, stages=options.stages)
            (options.out / f"seed-{seed}.json").write_text(json.dumps(arms, indent=1) + "\n")
            print(f"seed {seed}, {mode}: done", flush=True)
    results = {int(file.stem[5:]): json.loads(file.read_text()) for file in sorted(options.out.glob("seed-*.json"))}
    (options.out / "swap.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if options.figure:
        figure(results, options.figure)


if __name__ == "__main__":
    main()
