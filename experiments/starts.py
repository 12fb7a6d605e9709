"""Success of three SmolLM2 before any training, for several tasks and prompts: which tasks are worth training on.

    python experiments/starts.py --model FOLDER --out OUT [--only sum,chain] [--temperatures 1,0.7,0.5]

A task is worth training on if the untrained team is right in 10 to 60 % of its samples and clearly above chance: below,
most groups carry no signal; above, there is little to learn. Chance is the success of the best answer that ignores the
question: the most frequent one (for the largest of four, one of the four).

Questions are written to OUT/rows once and read from there. Those of reasoning-gym need it installed; a machine without
it can use a folder written on another.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, str]
ROWS = 400
HELD_OUT = 0.25
ROLES = {
    "solver": "Answer with the number only.",
    "checker": "Check the solver's answer. Answer with the right number only.",
    "finaliser": "Decide. Answer with the final number only.",
}
EXAMPLES = 4


def questions(rng: np.random.Generator) -> Iterator[tuple[str, list[Row]]]:
    """The tasks that are generated here."""

    def drawn(low: int, high: int, count: int) -> list[list[int]]:
        return [[int(x) for x in rng.integers(low, high, size=count)] for _ in range(4 * ROWS)]

    yield "sum-1", [_row(f"What is {a} + {b}?", a + b) for a, b in drawn(0, 10, 2)]
    yield "sum-2", [_row(f"What is {a} + {b}?", a + b) for a, b in drawn(10, 100, 2)]
    yield "chain-3", [_row(f"What is {a} + {b} + {c}?", a + b + c) for a, b, c in drawn(0, 10, 3)]
    yield "difference-1", [_row(f"What is {a + b} - {b}?", a) for a, b in drawn(0, 10, 2)]
    yield "product-1", [_row(f"What is {a} * {b}?", a * b) for a, b in drawn(0, 10, 2)]
    yield (
        "largest-4",
        [_row(f"Which is the largest of {a}, {b}, {c} and {d}?", max(a, b, c, d)) for a, b, c, d in drawn(0, 100, 4)],
    )


def gym_questions() -> Iterator[tuple[str, list[Row]]]:
    """Arithmetic tasks of reasoning-gym, if it is installed."""
    try:
        import reasoning_gym
    except ImportError:
        return
    families: dict[str, dict[str, Any]] = {
        "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    for family, parameters in families.items():
        entries = reasoning_gym.create_dataset(family, seed=0, size=4 * ROWS, **parameters)
        yield f"gym-{family}", [_row(entry["question"], entry["answer"]) for entry in entries]


def _row(question: str, answer: Any) -> Row:
    return {"question": question, "answer": str(answer)}


def write_rows(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for makers in (questions(np.random.default_rng(0)), gym_questions()):
        for name, rows in makers:
            different = list({row["question"]: row for row in rows}.values())[:ROWS]
            file = folder / f"{name}.jsonl"
            if not file.exists():
                file.write_text("".join(json.dumps(row) + "\n" for row in different))


def system_prompt(prompts: str, name: str, rows: list[Row]) -> str:
    """An agent's system prompt: ``bare`` is the instruction, ``examples`` adds answered questions, and ``talk`` adds
    them as this agent sees them, after the messages of the agents before it."""
    told, before = ROLES[name], list(ROLES)[: list(ROLES).index(name)]
    if prompts == "bare":
        return told
    if prompts == "examples" or not before:
        return "\n".join([told, *(f"{row['question']} {row['answer']}" for row in rows[:EXAMPLES])])
    shown = []
    for k, row in enumerate(rows[:EXAMPLES]):
        # In every second example the first speaker is wrong.
        said = [row["answer"] if k % 2 == 0 or i > 0 else rows[k + 1]["answer"] for i in range(len(before))]
        talk = [f"{author}: {text}" for author, text in zip(before, said, strict=True)]
        shown.append("\n".join([row["question"], *talk, row["answer"]]))
    return "\n\n".join([told, *shown])


def team_file(model: str, rows: Path, *, prompts: str, alone: bool) -> dict[str, Any]:
    """The team of the recipe ``smollm2-sums`` on this task."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    agents = [
        {"name": name, "system_prompt": system_prompt(prompts, name, lines)}
        for name in list(ROLES)[: 1 if alone else None]
    ]
    return {
        "name": rows.stem,
        "task": {"name": "data", "path": str(rows.resolve()), "grader": "number", "held_out": HELD_OUT},
        "team": {"model": model, "train": "lora", "max_tokens": 12, "agents": agents, "answer": "last"},
    }


def chance(name: str, answers: list[str]) -> float:
    if name.startswith("largest"):
        return 0.25
    return max(Counter(answers).values()) / len(answers)


def measure(model: str, rows: Path, *, prompts: str, alone: bool, a: argparse.Namespace) -> list[dict[str, Any]]:
    from teamtr.config import loads
    from teamtr.evaluation.evaluate import evaluate
    from teamtr.session.build import build

    text = json.dumps(team_file(model, rows, prompts=prompts, alone=alone))
    session = build(loads(text, overrides=a.set))
    # Examples in the prompts are not used as questions.
    problems = list(session.task.problems("test"))
    asked = [p for p in problems if p.prompt not in text.split('"system_prompt"', 1)[1]][: a.problems]
    found = []
    for temperature in (*a.temperatures, 0.0):
        samples = a.samples if temperature else 1
        report = evaluate(session.context, session.current_team(), asked, samples, seed=0, temperature=temperature)
        found.append(
            {
                "task": rows.stem, "prompts": prompts, "who": "one" if alone else "team",
                "temperature": temperature, "success": report.avg_at_k, "interval": list(report.avg_interval),
                "chance": chance(rows.stem, [str(p.answer) for p in problems]),
                "verdicts": dict(report.verdicts),
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="tasks whose name begins with one of these, comma-separated")
    parser.add_argument("--temperatures", type=lambda t: [float(x) for x in t.split(",")], default=[1.0, 0.7, 0.5])
    parser.add_argument("--prompts", default="bare,examples,talk")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="a setting of the team file, such as device=cpu")
    a = parser.parse_args()
    write_rows(a.out / "rows")
    for rows in sorted((a.out / "rows").glob("*.jsonl")):
        if not rows.stem.startswith(tuple(a.only.split(","))):
            continue
        for prompts in a.prompts.split(","):
            for alone in (False,) if prompts == "talk" else (False, True):
                for found in measure(a.model, rows, prompts=prompts, alone=alone, a=a):
                    with (a.out / "starts.jsonl").open("a") as out:
                        out.write(json.dumps(found) + "\n")
                    low, high = (round(100 * x) for x in found["interval"])
                    print(
                        f"{found['task']:<22} {found['prompts']:<9} {found['who']:<5} T {found['temperature']:<4} "
                        f"{100 * found['success']:5.1f} % ({low} to {high}), chance {100 * found['chance']:.0f} %",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
