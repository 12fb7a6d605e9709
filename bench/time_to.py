"""What a user waits for: seconds from the command to the first update, and until the team is better by some points.

    python bench/time_to.py team.yaml [KEY=VALUE ...] --plans teamtr,auto --points 10 --trl --out OUT
    python bench/time_to.py roles.yaml --plans reweighted --window 1 --limit 60 --out OUT        # on a CPU

Every plan is a ``teamtr train`` in a process of its own, one after the other, ended as soon as it is better by
``--points`` or after ``--limit`` seconds. With ``--trl``, TRL's GRPO then trains one model alone: the base of the first
agent, on the same problems with the same grader, adapter, learning rate and number of episodes, and with as many tokens
for its answer as all agents of the team have together.

Success is that of the batches that are trained on, before the update that they serve: their problems are new, so that
it is what the team is worth at that time, and nobody waits for an evaluation. Batches that are used again are counted
once. A method is better by so many points when the mean of ``--window`` batches in a row is above that of its first
``--window`` batches by as much; the time is that of the last of them. The clock starts with the command: reading
Python and weights, compiling and measuring noise floors count. ``--cold`` begins with empty caches of compiled kernels
and trains the first plan's first update once more, warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import report, so_far

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Batch:
    """A batch when it had been trained on: seconds since the command, sampled tokens so far, and its success."""

    seconds: float
    tokens: int
    success: float


@dataclass(frozen=True)
class Wait:
    """How long it took. None: not within the limit."""

    first_update: float | None
    before: float | None
    seconds: float | None
    tokens: int | None
    batches: int
    best: float | None
    """The highest mean of a window of batches."""

    @classmethod
    def of(cls, batches: Sequence[Batch], first_update: float | None, points: float, window: int) -> Wait:
        if len(batches) < window:
            return cls(first_update, None, None, None, len(batches), None)
        means = np.convolve([batch.success for batch in batches], np.full(window, 1 / window), "valid")
        better = np.flatnonzero(means >= means[0] + points / 100 - 1e-9)
        reached = batches[int(better[0]) + window - 1] if len(better) else None
        return cls(
            first_update,
            float(means[0]),
            reached and reached.seconds,
            reached and reached.tokens,
            len(batches),
            float(means.max()),
        )


def batches_in(log: Path, began: float) -> tuple[list[Batch], float | None]:
    """What a run of ours has logged so far, and when its first update was over."""
    found: list[Batch] = []
    first: float | None = None
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # it is being written
        if record["kind"] != "update":
            continue
        first = record["time"] - began if first is None else first
        if (record.get("rollouts") or {}).get("action", "sample") != "reuse":
            found.append(Batch(record["time"] - began, record["sampled_tokens_total"], record["success"]))
    return found, first


def trl_batches_in(log: Path, began: float) -> tuple[list[Batch], float | None]:
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    found = [Batch(row["time"] - began, row["tokens"], row["success"]) for row in rows if row["kind"] == "step"]
    return found, found[0].seconds if found else None


def wait_for(command: Sequence[str], log: Path, read: Any, a: argparse.Namespace, environment: dict[str, str]) -> Wait:
    """Run the command until it is better, over, or out of time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with open(log.parent.with_suffix(".txt"), "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                over = process.poll() is not None
                found = Wait.of(*read(log, began), a.points, a.window)
                if over or found.seconds is not None or time.time() - began > a.limit:
                    break
                time.sleep(LOOK_EVERY_S)
        finally:
            process.kill()
            process.wait()
    if over and process.returncode and found.first_update is None:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}; see {log.parent.with_suffix('.txt')}")
    return found


def first_update(command: Sequence[str], log: Path, a: argparse.Namespace, environment: dict[str, str]) -> float | None:
    """Seconds until the first update of a run that ends there."""
    short = argparse.Namespace(**{**vars(a), "points": -100.0, "window": 1})
    return wait_for(command, log, batches_in, short, environment).first_update


def train_with_trl(a: argparse.Namespace, log: Path) -> None:
    """In a process of its own: GRPO of one model, a line for each step."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from teamtr.config import load_team_file
    from teamtr.session.task import build_task
    from teamtr.types import Transcript

    team_file = load_team_file(Path(a.team), a.settings)
    task, plan, agent = build_task(team_file), team_file.sized_plan(), team_file.team.agents[0]
    problems = task.problems("train")
    rng = np.random.default_rng(team_file.seed)
    chosen = [problems[int(k)] for k in rng.integers(len(problems), size=plan.problems * plan.stages)]
    asked = [[{"role": "system", "content": agent.system_prompt}] if agent.system_prompt else [] for _ in chosen]
    for messages, problem in zip(asked, chosen, strict=True):
        messages.append({"role": "user", "content": problem.prompt})
    tokens = sum(each.max_tokens for each in team_file.team.agents) * team_file.team.rounds
    rows, state = plan.problems * plan.group_size, {"tokens": 0}

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        verdicts = task.grade([(chosen[k], text, Transcript((), ())) for k, text in zip(number, texts, strict=True)])
        state["tokens"] += sum(map(len, completion_ids))
        state["success"] = float(np.mean([verdict.right for verdict in verdicts]))
        return [verdict.reward for verdict in verdicts]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with log.open("a") as file:
                file.write(json.dumps({"kind": "step", "time": time.time(), **state}) + "\n")

    import torch

    gpu = torch.cuda.is_available()
    micro_batch = min(a.trl_micro_batch, rows)
    settings = GRPOConfig(
        output_dir=str(log.parent / "trl"), max_steps=plan.stages, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch, num_generations=plan.group_size,
        max_completion_length=tokens, temperature=team_file.sampling.temperature, top_p=1.0, top_k=0, beta=0.0,
        learning_rate=team_file.learner.learning_rate, lr_scheduler_type="constant", bf16=gpu, use_cpu=not gpu,
        seed=team_file.seed, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    lora = agent.lora
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(agent.model, dtype=torch.bfloat16 if gpu else torch.float32),
        reward_funcs=reward, args=settings, processing_class=AutoTokenizer.from_pretrained(agent.model),
        train_dataset=Dataset.from_dict({"prompt": asked, "number": list(range(len(chosen)))}), callbacks=[Clock()],
        peft_config=LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    ).train()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("team", help="a team file")
    parser.add_argument("settings", nargs="*", help="settings that differ from it, KEY=VALUE")
    parser.add_argument("--plans", default="teamtr,naive_sequential,reweighted,auto,partial")
    parser.add_argument("--points", type=float, default=10.0, help="percentage points that it should gain")
    parser.add_argument("--window", type=int, default=3, help="batches whose mean counts")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of one method")
    parser.add_argument("--cold", action="store_true", help="begin with empty caches of compiled kernels")
    parser.add_argument("--trl", action="store_true", help="TRL's GRPO of one model, too")
    parser.add_argument("--trl-micro-batch", type=int, default=8)
    parser.add_argument("--out", required=True, type=Path, help="a folder for runs, which must not be there yet")
    parser.add_argument("--as-trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.as_trl:
        train_with_trl(a, a.as_trl)
        return
    if a.out.exists():
        parser.error(f"--out {a.out} is there already: runs would go on in it instead of beginning")
    a.out.mkdir(parents=True)
    environment = dict(os.environ)
    if a.cold:
        environment |= {name: str(a.out.absolute() / name.lower()) for name in CACHES}

    def ours(plan: str, name: str) -> tuple[list[str], Path]:
        command = [sys.executable, "-m", "teamtr.cli", "train", a.team, *a.settings, f"plan.preset={plan}"]
        return [*command, "--out", str(a.out / name)], a.out / name / "log.jsonl"

    plans, found = [plan for plan in a.plans.split(",") if plan], {}
    warm: float | None = None
    for k, plan in enumerate(plans):
        found[plan] = wait_for(*ours(plan, plan), batches_in, a, environment)
        so_far(plan, found[plan])
        if a.cold and k == 0:
            warm = first_update(*ours(plan, f"{plan}-warm"), a, environment)
            so_far(f"{plan}, first update with warm caches", warm)
    if a.trl:
        log = a.out / "trl" / "log.jsonl"
        command = [sys.executable, __file__, a.team, *a.settings, "--as-trl", str(log), "--out", str(a.out)]
        command += ["--trl-micro-batch", str(a.trl_micro_batch)]
        found["TRL's GRPO, one model"] = wait_for(command, log, trl_batches_in, a, environment)
        so_far("trl", found["TRL's GRPO, one model"])
    header = ("", "first update s", "before", f"+{a.points:g} points s", "tokens", "best", "batches")
    rows = [(n, w.first_update, w.before, w.seconds, w.tokens, w.best, w.batches) for n, w in found.items()]
    record = {"results": {name: vars(wait) for name, wait in found.items()}, "first update, warm": warm}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(a).items()}
    report(f"{a.team}: what one waits for", header, rows, {"benchmark": "time_to", **options, **record}, a.json)


if __name__ == "__main__":
    main()
