"""The memory plan beside the memory used: by the rehearsal of the longest step, and at the peak of a training stage.

    python bench/plan.py --json                             # on a GPU
    python bench/plan.py --cases tiny-lora                  # on a CPU: the plan and the run, no peak

Every case is a team of three agents with random weights, trained for one stage in its own process, as by
``teamtr train``; figures are from its log. "used" is the larger of rehearsal and stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_model, report, so_far

CASES: dict[str, dict[str, Any]] = {
    "tiny-lora": {"shape": "tiny", "train": "lora", "tokens": 8, "problems": 2, "micro_batch": 8},
    "small-lora": {"shape": "small", "train": "lora", "tokens": 64, "problems": 32, "micro_batch": 64},
    "small-full": {"shape": "small", "train": "full", "tokens": 64, "problems": 32, "micro_batch": 64},
    "small-lora-told": {
        "shape": "small",
        "train": "lora",
        "tokens": 64,
        "problems": 32,
        "micro_batch": 64,
        "team": {"system_prompt": "Add the numbers. " * 24},
    },
    "1.7b-lora": {"shape": "1.7b", "train": "lora", "tokens": 128, "problems": 16, "micro_batch": 16},
    "1.7b-lora-long": {"shape": "1.7b", "train": "lora", "tokens": 512, "problems": 4, "micro_batch": 8},
}
ON_A_CARD = ("small-lora", "small-full", "small-lora-told", "1.7b-lora", "1.7b-lora-long")


def make_folder(folder: Path, shape: str) -> None:
    """Save a transformers model with random weights and the built-in tokenizer."""
    import torch

    from teamtr.engines.torch.tokenizer import character_tokenizer

    make_model(shape, torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def team_text(case: dict[str, Any], model: Path) -> str:
    return json.dumps(
        {
            "name": "plan",
            "task": {"name": "sums"},
            "team": {
                "model": str(model), "train": case["train"], "max_tokens": case["tokens"],
                "agents": [{"name": name} for name in ("first", "second", "third")], **case.get("team", {}),
            },
            "plan": {"stages": 1, "problems": case["problems"], "group_size": 8, "radius_nats_per_message": 0.5},
            "learner": {"micro_batch": case["micro_batch"], "learning_rate": 1e-5},
            "sampling": {"compiled": False},
            "eval": {"every": 0},
        }
    )  # fmt: skip


def one(name: str) -> dict[str, Any]:
    """Run one case in this process."""
    from teamtr.config import loads
    from teamtr.session import train as run
    from teamtr.session.build import build
    from teamtr.session.memory import plan_memory

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_folder(model, CASES[name]["shape"])
        team_file = loads(team_text(CASES[name], model))
        records = list(run.train(team_file, Path(folder) / "run"))
        plan = plan_memory(build(team_file)).as_record()
    start = next(r for r in records if r["kind"] == "start")["memory"]
    stage = next(r for r in records if r["kind"] == "stage")["memory"]
    found = {"case": name, "plan": plan, "planned_gb": plan["total_gb"], "rehearsed_gb": None, "stage_gb": None}
    if start is not None:
        found |= {"planned_gb": start["planned_gb"], "rehearsed_gb": start["peak_gb"], "stage_gb": stage["peak_gb"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda t: t.split(","), default=list(ON_A_CARD))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="the record on stdout")
    a = parser.parse_args()
    if a.one:
        print(json.dumps(one(a.one)))
        return
    found = []
    for name in a.cases:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        so_far(name, found[-1])
    rows = []
    for case in found:
        used = max((case["rehearsed_gb"] or 0.0, case["stage_gb"] or 0.0)) or None
        ratio = case["planned_gb"] / used if used else None
        rows.append((case["case"], case["planned_gb"], case["rehearsed_gb"], case["stage_gb"], ratio))
    header = ("case", "planned GB", "rehearsed GB", "stage GB", "planned / used")
    report("the memory plan and what was used", header, rows, {"cases": found}, a.json)


if __name__ == "__main__":
    main()
