"""An evaluation by inspect_ai against a server, to be run in the environment of ``make inspect-env``.

    python inspect_task.py MODEL QUESTIONS.json LOGS

QUESTIONS.json: {"seed": 7, "samples": [{"input": "...", "target": "..."}]}. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

model, questions, logs = sys.argv[1:]
asked = json.loads(Path(questions).read_text())
task = Task(
    dataset=MemoryDataset([Sample(input=s["input"], target=s["target"]) for s in asked["samples"]]),
    solver=generate(),
    scorer=exact(),
    config=GenerateConfig(seed=asked["seed"]),
)
[log] = eval(task, model=model, log_dir=logs, display="none", max_connections=8)
print(
    json.dumps(
        {
            "status": log.status,
            "error": log.error.message if log.error else None,
            "exact": log.results.scores[0].metrics["mean"].value if log.results else None,
            "answers": [sample.output.completion for sample in log.samples or []],
        }
    )
)
