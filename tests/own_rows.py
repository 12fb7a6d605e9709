"""Small made-up rows for every benchmark, and the real files where available."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("TEAMTR_DATA", Path(__file__).parents[2] / "shared" / "data"))

FILES = {
    "math": "math500/math500.jsonl",
    "aime24": "aime24/aime24.jsonl",
    "aime25": "aime25/aime25.jsonl",
    "math500": "math500/math500.jsonl",
    "gsm8k": "gsm8k/test.jsonl",
    "deepscaler": "deepscaler/dsr_sub_1209.jsonl",
    "dapo": "dapo/dapo_math_17k.parquet",
    "zebralogic": "zebralogic/zebralogic_grid_1000.jsonl",
    "planbench": "planbench/blocksworld_3.jsonl",
    "arbench:gn": "arbench/gn_test.json",
    "arbench:sp": "arbench/sp_test.jsonl",
    "arbench:dc": "arbench/dc_test.jsonl",
}
"""AutoLogi is missing, since its test file is not available."""

_SUMS = [{"id": f"p{n}", "problem": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(8)]


def _zebra(n: int) -> dict[str, Any]:
    people = ["Ada", "Ben", "Cem"][: 2 + n % 2]
    drinks = ["tea", "milk", "water"][: len(people)]
    rows = [[str(k + 1), name, drink] for k, (name, drink) in enumerate(zip(people, drinks, strict=True))]
    return {
        "id": f"z{n}",
        "size": f"{len(people)}*2",
        "puzzle": f"Puzzle {n}: {len(people)} houses; {', '.join(people)} live in them in this order, and drink "
        f"{', '.join(drinks)} in this order.",
        "solution": {"header": ["House", "Name", "Drink"], "rows": rows},
    }


def _blocks(n: int) -> dict[str, Any]:
    start, goal = [("a b", "b c"), ("c b", "b a")][n % 2], [("c a",), ("a b",)][n % 2]
    top, bottom = start[0].split()[0], start[1].split()[1]
    facts = " ".join(f"(on {pair})" for pair in start)
    goals = " ".join(f"(on {pair})" for pair in goal)
    return {
        "instance_id": n,
        "problem_pddl": f"(define (problem p{n}) (:domain blocksworld-4ops) (:objects a b c) "
        f"(:init (handempty) (clear {top}) (ontable {bottom}) {facts}) (:goal (and {goals})))",
    }


def _logic(n: int) -> dict[str, Any]:
    return {
        "idx": n,
        "prompt": f"Party {n}: who comes, of Ada, Ben and Cem? Two of them, and Ada is one. A list called inputs.",
        "lang": "en",
        "code": {
            "Inputs_Check_code": "def inputs_check(inputs):\n"
            "    return isinstance(inputs, list) and len(inputs) == 2 and set(inputs) <= {'Ada', 'Ben', 'Cem'}\n",
            "Constraint_List_code": "def ada(inputs):\n    return 'Ada' in inputs\nconstraint_list = [ada]\n",
            "Traverse_code": "from itertools import combinations\n"
            "def count_valid_arrangements():\n"
            "    return sum(verify_function(list(c), inputs_check, constraint_list)"
            " for c in combinations(['Ben', 'Cem', 'Ada'], 2))\n",
        },
    }


def _person(name: str, **more: str) -> dict[str, str]:
    return {"name": name, "introduction": f"{name} is here.", **more}


def _case(n: int) -> dict[str, Any]:
    names = ("Ada Bell", "Ben Cole", "Eve Dunn")
    victim = _person("Abe", cause_of_death="poison", murder_weapon="tea")
    known = {"time": f"night {n}", "location": "attic", "victim": victim, "suspect": [_person(x) for x in names]}
    hidden = [_person(x, story=f"{x} slept.", task="Deny it.") for x in names]
    return {"index": n, "label": n % 3, "initial_information": known, "suspects": hidden}


OWN: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("math", "aime24", "aime25", "math500", "gsm8k", "deepscaler", "dapo"), _SUMS),
    "zebralogic": [_zebra(n) for n in range(8)],
    "planbench": [_blocks(n) for n in range(8)],
    "autologi": [_logic(n) for n in range(8)],
    "arbench:gn": [{"id": f"n{n}", "answer": number} for n, number in enumerate(("0123", "9876", "5061"))],
    "arbench:sp": [
        {"index": n, "surface": f"The lamp went out {n} times.", "bottom": f"He had {n} matches and a damp sock."}
        for n in range(3)
    ],
    "arbench:dc": [_case(n) for n in range(3)],
}


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def source(name: str, folder: Path) -> Path:
    """The real file of a benchmark if available, else a file with our own rows."""
    real = DATA / FILES.get(name, "nowhere")
    return real if real.is_file() else write_rows(folder, OWN[name])
