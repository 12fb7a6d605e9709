"""Time that a user waits: from the command to the first update, and until a team is better by some points.

    python bench/time_to.py team.yaml [KEY=VALUE ...] --plans teamtr,auto --points 10 --trl --out OUT
    python bench/time_to.py roles.yaml --plans reweighted,auto --samples 8 --limit 60 --out OUT        # on a CPU

Success is measured on fixed held-out problems: the first ``--problems`` of the task's test split, with ``--samples``
answers each, the same for every method, before training and after every ``--every`` stages. A method is better by
``--points`` at the first evaluation whose mean exceeds the one before training by as much. Its gain has an interval
(paired bootstrap over problems). Seconds and tokens of evaluations are not counted, but reported separately.

Every method is run twice, each time in a process of its own. The first run evaluates nothing and ends at its first
update. It yields the seconds since the command, with imports, loading, compiling and noise floors, and their parts. The
second run evaluates and ends when it is better, or after ``--limit`` seconds of training. Its clock starts at the first
update with the first run's seconds, because its initial evaluation compiles what the first batch would otherwise
compile. An evaluation after update n counts at the time of that update. With ``--cold``, another run comes first, with
empty caches (compiled kernels, warmed-up tiny models; the system's file cache is kept).

With ``--trl``, TRL's GRPO trains one model alone: the base of the first agent, on the same problems with the same
grader, adapter, learning rate, episodes per update and number of updates, and with as many tokens for its answer as all
agents of the team have together. A batch of its ``generate`` takes as long as its longest answer: with fewer
``--trl-tokens`` it is faster, and may learn less. It is evaluated after every update, because an update takes at least
as long as a stage of a team, and with our sampler, which takes seconds where its own takes minutes. One run yields both
results here: the model before training is evaluated after the first update, without its adapter. If TRL fails, the
plans are reported, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import device, report, so_far, wait, whole_number
from teamtr.evaluation.metrics import paired_difference
from teamtr.randomness import generator, seed_of, uniforms
from teamtr.reports import MeanInterval
from teamtr.store.cache import keep_kernels
from teamtr.store.log import Log
from teamtr.types import Ids

TRL = "TRL's GRPO, one model"
CACHES = ("TEAMTR_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
OURS = ("eval.every", "eval.problems", "eval.samples", "eval.patience")
"""Settings that the benchmark sets itself."""
LOOK_EVERY_S = 0.2
PAGES_GB = 16
"""Memory for keys and values when TRL's model is evaluated on a card."""
Record = Mapping[str, Any]


# -- results of a method, from the records of its logs --------------------------------------------------------------


@dataclass(frozen=True)
class FirstUpdate:
    """Seconds from the command to the first update, and their parts, which add up to them."""

    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, records: Sequence[Record], began: float) -> FirstUpdate | None:
        """From the records of a run without evaluations; None before its first update."""
        first = {record["kind"]: record for record in reversed(records)}
        if "update" not in first:
            return None
        started, updated, known = first["start"]["time"], first["update"]["time"], first["start"]["seconds"]
        other = started - began - sum(known.values())  # imports, settings, first checkpoint
        return cls(updated - began, {"other": other, **known, "batch and update": updated - started})


@dataclass(frozen=True)
class Look:
    """Held-out success after this many updates, and seconds and tokens of training until then, without evaluations."""

    updates: int
    seconds: float
    tokens: int
    success_P: tuple[float, ...]

    @property
    def success(self) -> float:
        return float(np.mean(self.success_P))


@dataclass(frozen=True)
class Course:
    """The evaluations of a run within the limit, and the seconds of training until its last update."""

    looks: tuple[Look, ...]
    seconds: float

    @classmethod
    def of(cls, records: Sequence[Record], first_s: float, limit: float) -> Course:
        """From the records of a run whose first update counts as ``first_s`` seconds after the command.

        Evaluation records have no time of day and do not need one. Each evaluates the team as the last update left it,
        and its seconds lie between that update and the next.
        """
        looks: list[Look] = []
        first_time: float | None = None
        seconds, tokens, evaluating = 0.0, 0, 0.0
        for record in records:
            if record["kind"] == "update":
                first_time = record["time"] if first_time is None else first_time
                seconds, tokens = first_s + record["time"] - first_time - evaluating, record["sampled_tokens_total"]
            elif record["kind"] == "eval":
                evaluating += 0.0 if first_time is None else record["seconds"]
                known = (seconds, tokens) if record["updates"] else (0.0, 0)  # even if evaluated after the first update
                looks.append(Look(record["updates"], *known, tuple(record["success_P"])))
        return cls(tuple(look for look in looks if look.seconds <= limit), seconds)

    def better(self, points: float) -> Look | None:
        """The first evaluation that exceeds the one before training by this many points."""
        return next((x for x in self.looks[1:] if x.success >= self.looks[0].success + points / 100 - 1e-9), None)


@dataclass(frozen=True)
class Wait:
    """The result of one method. None: not within the limit."""

    first: FirstUpdate | None
    cold: FirstUpdate | None
    before: float | None = None
    """Held-out success before training."""
    seconds: float | None = None
    tokens: int | None = None
    """Tokens sampled for training until it was better."""
    gain: MeanInterval | None = None
    """Gain at the evaluation that was better, or at the last one if none was."""
    best: float | None = None
    updates: int = 0
    """Updates until the last evaluation."""
    problems: int = 0
    evaluating_s: float = 0.0
    evaluating_tokens: int = 0
    looks: tuple[Look, ...] = ()

    @classmethod
    def of(
        cls, records: Sequence[Record], first: FirstUpdate, cold: FirstUpdate | None, points: float, limit: float
    ) -> Wait:
        course, evals = Course.of(records, first.seconds, limit), [r for r in records if r["kind"] == "eval"]
        if not course.looks:
            return cls(first, cold)
        before, better = course.looks[0], course.better(points)
        told, rng = better or course.looks[-1], generator(0, "time_to")
        return cls(
            first,
            cold,
            before=before.success,
            seconds=better and better.seconds,
            tokens=better and better.tokens,
            gain=None if told is before else paired_difference(told.success_P, before.success_P, rng=rng),
            best=max(look.success for look in course.looks),
            updates=course.looks[-1].updates,
            problems=len(before.success_P),
            evaluating_s=sum(record["seconds"] for record in evals),
            evaluating_tokens=sum(record["tokens"] for record in evals),
            looks=course.looks,
        )


def require_same_problems(logs: Mapping[str, Sequence[Record]]) -> None:
    """Raise unless every evaluation of every method has the same problems and number of answers."""
    evals = [(name, record) for name, records in logs.items() for record in records if record["kind"] == "eval"]
    asked = [(name, (record["samples"], *record["problem_ids"])) for name, record in evals]
    if other := [name for name, each in asked if each != asked[0][1]]:
        raise RuntimeError(
            f"{other[0]} was evaluated on other problems than {asked[0][0]} before training, or with another number of "
            "answers: see that the task's test split depends on nothing that a plan changes"
        )


# -- running methods ------------------------------------------------------------------------------------------------

Enough = Callable[[Sequence[Record], float], bool]
"""Whether a run may end, from its records and the time of its command."""


def in_short(record: Record, began: float) -> dict[str, Any]:
    """The fields of a record that are printed while its run goes on."""
    kept = {name: record[name] for name in ("update", "updates", "seconds", "avg_at_k") if name in record}
    return kept | ({"s after the command": round(record["time"] - began, 1)} if "time" in record else {})


def telling(name: str, enough: Enough) -> Enough:
    """The same condition, which also prints new records, so that a run that is cut off leaves these."""
    told = 0

    def asked(records: Sequence[Record], began: float) -> bool:
        nonlocal told
        for record in records[told:]:
            if record["kind"] in ("start", "update", "eval"):
                so_far(f"{name}, {record['kind']}", in_short(record, began))
        told = len(records)
        return enough(records, began)

    return asked


def watch(
    command: Sequence[str],
    folder: Path,
    limit: float,
    environment: Mapping[str, str],
    enough: Enough,
) -> tuple[float, Sequence[Record]]:
    """Run a command that logs in ``folder`` until its log satisfies ``enough``, it exits, or it has logged nothing for
    ``limit`` seconds. Returns the time of the command, and the records."""
    log, output = Log(folder / "log.jsonl", writable=False), folder.with_suffix(".txt")
    began = heard = time.time()
    known = 0
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                over = process.poll() is not None  # checked first, so that everything that it wrote is read
                records = log.read()  # without an incomplete last line
                if len(records) > known:
                    known, heard = len(records), time.time()
                if over or enough(records, began) or time.time() - heard > limit:
                    break
                time.sleep(LOOK_EVERY_S)
        finally:
            process.kill()
            process.wait()
    if over and process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}; see {output}")
    return began, records


def measure(method: str, name: str, a: argparse.Namespace) -> tuple[Wait, Sequence[Record]]:
    """Measure one method: its first update, cold and warm, and the time until it is better."""
    environment = dict(os.environ)
    if a.cold:
        environment |= {each: str((a.out / f"{name}-caches" / each.lower()).absolute()) for each in CACHES}

    def run(folder: Path, every: int, enough: Enough) -> tuple[float, Any]:
        values = (every, a.problems, a.samples, "null")
        settings = [*a.settings, *(f"{key}={value}" for key, value in zip(OURS, values, strict=True))]
        ours = [sys.executable, "-m", "teamtr.cli", "train", a.team, *settings, f"plan.preset={method}"]
        trl = [sys.executable, __file__, a.team, *settings, "--as-trl", "--trl-micro-batch", str(a.trl_micro_batch)]
        trl += [] if a.trl_tokens is None else ["--trl-tokens", str(a.trl_tokens)]
        command = [*(trl if method == TRL else ours), "--out", str(folder)]
        return watch(command, folder, a.limit, environment, telling(folder.name, enough))

    def first(folder: Path) -> FirstUpdate | None:
        began, records = run(folder, 0, lambda found, at: FirstUpdate.of(found, at) is not None)
        return FirstUpdate.of(records, began)

    cold = first(a.out / f"{name}-cold") if a.cold else None
    warm = None if method == TRL else first(a.out / f"{name}-first")
    if method != TRL and (warm is None or warm.seconds > a.limit):
        return Wait(warm, cold), []

    def enough(records: Sequence[Record], began: float) -> bool:
        found = warm or FirstUpdate.of(records, began)
        course = Course.of(records, found.seconds if found else 0.0, a.limit)
        return course.better(a.points) is not None or course.seconds > a.limit

    began, records = run(a.out / name, a.every, enough)
    warm = warm or FirstUpdate.of(records, began)
    return (Wait(None, cold) if warm is None else Wait.of(records, warm, cold, a.points, a.limit)), records


# -- TRL, in a process of its own -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """One model that answers a task's problems by itself: its prompts and their grading, in training and evaluation."""

    task: Any
    system_prompt: str
    tokenizer: Any

    def asked(self, problem: Any) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": problem.prompt}]

    def graded(self, problems: Sequence[Any], answers: Sequence[str]) -> list[Any]:
        from teamtr.types import Transcript

        said = zip(problems, answers, strict=True)
        return list(self.task.grade([(problem, text, Transcript((), ())) for problem, text in said]))

    def evaluated(self, say: Callable[[list[Ids]], list[Ids]], problems: Sequence[Any], samples: int) -> dict[str, Any]:
        """A record of this many answers to each problem, as logged for an evaluation of a team. ``say`` maps prompts to
        answers, as token ids."""
        asked = [problem for problem in problems for _ in range(samples)]
        chats = [self.asked(problem) for problem in asked]
        texts = [self.tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True) for x in chats]
        prompts = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        said = say([np.array(prompt, dtype=np.int32) for prompt in prompts])
        verdicts = self.graded(asked, self.tokenizer.batch_decode(said, skip_special_tokens=True))
        success_P = np.reshape([verdict.right for verdict in verdicts], (len(problems), samples)).mean(axis=1)
        found = {"samples": samples, "problem_ids": [problem.id for problem in problems], "tokens": sum(map(len, said))}
        return {"kind": "eval", "avg_at_k": float(success_P.mean()), "success_P": success_P.tolist(), **found}


@dataclass(frozen=True)
class Sizes:
    """The budget of one model's run that is to match a team's: updates, episodes per update, and tokens."""

    updates: int
    episodes: int
    tokens: int
    """Maximum tokens of an answer: by default those of all agents of the team together, in all rounds."""

    @classmethod
    def of(cls, team_file: Any, tokens: int | None) -> Sizes:
        plan, team = team_file.sized_plan(), team_file.team
        trained = sum(not each.frozen for each in team.agents)
        if tokens is None:
            if team.rounds is None:
                raise SystemExit("how many rounds there are, only the team's router knows: give --trl-tokens")
            tokens = sum(each.max_tokens for each in team.agents) * team.rounds
        return cls(plan.stages * trained, plan.problems * plan.group_size, tokens)


def train_with_trl(a: argparse.Namespace) -> None:
    """GRPO of one model, with log records in the format of a team's run."""
    began = time.perf_counter()
    keep_kernels()  # those of our sampler, which evaluates the model
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from teamtr.config import load_team_file
    from teamtr.engines.paged.pool import SamplerPool
    from teamtr.engines.sampling import TokenSampler
    from teamtr.session.task import build_task
    from trl_step import dataset_of

    imported = time.perf_counter()
    team_file = load_team_file(Path(a.team), a.settings)
    plan, agent, evaluation = team_file.sized_plan(), team_file.team.agents[0], team_file.eval
    alone = Alone(build_task(team_file), agent.system_prompt, AutoTokenizer.from_pretrained(agent.model))
    problems, held_out = alone.task.problems("train"), alone.task.problems("test")[: evaluation.problems]
    sizes = Sizes.of(team_file, a.trl_tokens)
    steps, rows, longest = sizes.updates, sizes.episodes, sizes.tokens
    numbers = np.random.default_rng(team_file.seed).integers(len(problems), size=plan.problems * steps).tolist()
    log, sampled = Log(a.out / "log.jsonl"), Counter[str]()

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        sampled["tokens"] += sum(map(len, completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        return [verdict.reward for verdict in alone.graded([problems[k] for k in number], texts)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            parts = {"import": imported - began, "load": time.perf_counter() - imported}
            log.append({"kind": "start", "seconds": parts, "time": time.time()})

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            wait()
            done = {"update": state.global_step, "sampled_tokens_total": sampled["tokens"], "time": time.time()}
            log.append({"kind": "update", **done})
            if state.global_step == 1:
                self.evaluate(0)
            self.evaluate(state.global_step)

        def evaluate(self, updates: int) -> None:
            """Leaves the model and the state of random number generators unchanged."""
            started = time.perf_counter()
            with torch.random.fork_rng():  # a sampling copy is initialized with random weights
                found = alone.evaluated(partial(self.say, updates), held_out, evaluation.samples)
            log.append({**found, "updates": updates, "seconds": time.perf_counter() - started})

        def say(self, updates: int, prompts: list[Ids]) -> list[Ids]:
            model = trainer.model.get_base_model()
            server = pool.server_of(model)
            server.copy.fill(model, "default" if updates else None, version=str(updates), base="")
            noise = uniforms(seed_of(team_file.seed, "eval", "test", updates), len(prompts), longest)
            ends, drawing = frozenset(trainer.generation_config.eos_token_id), TokenSampler(temperature)
            samples = server.sample(str(updates), prompts, noise, drawing=drawing, end_ids=ends)
            return [sample.token_ids for sample in samples]

    gpu = torch.cuda.is_available()
    pool = SamplerPool("bf16" if gpu else "fp32", device(), (PAGES_GB << 30) if gpu else None)
    temperature = team_file.sampling.temperature if evaluation.temperature is None else evaluation.temperature
    micro_batch = min(a.trl_micro_batch, rows)
    if rows % micro_batch:
        raise SystemExit(f"--trl-micro-batch {micro_batch} does not divide the {rows} episodes of an update")
    settings = GRPOConfig(
        output_dir=str(a.out / "trl"), max_steps=steps, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch, num_generations=plan.group_size,
        max_completion_length=longest, temperature=team_file.sampling.temperature, top_p=1.0, top_k=0, beta=0.0,
        learning_rate=team_file.learner.learning_rate, lr_scheduler_type="constant", gradient_checkpointing=False,
        bf16=gpu, use_cpu=not gpu, seed=team_file.seed, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    lora = agent.lora
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(agent.model, dtype=torch.bfloat16 if gpu else torch.float32),
        reward_funcs=reward, args=settings, processing_class=alone.tokenizer, callbacks=[Clock()],
        train_dataset=dataset_of({"prompt": [alone.asked(problems[k]) for k in numbers], "number": numbers}),
        peft_config=LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    trainer.train()


# -- the command ----------------------------------------------------------------------------------------------------


def as_row(name: str, found: Wait) -> tuple[Any, ...]:
    first, gain = found.first, found.gain
    points = gain and "{:+.1f} ({:.1f} to {:.1f})".format(*(100 * each for each in (gain.value, *gain.interval)))
    parts = first and ", ".join(f"{part} {seconds:.1f}" for part, seconds in first.parts.items())
    waited = (found.cold and found.cold.seconds, first and first.seconds, found.before, found.seconds, found.tokens)
    return (name, *waited, points, found.best, found.updates, found.evaluating_s, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("team", help="a team file")
    parser.add_argument("settings", nargs="*", help="settings that differ from it, KEY=VALUE")
    parser.add_argument("--plans", default="teamtr,naive_sequential,reweighted,auto,partial")
    parser.add_argument("--points", type=float, default=10.0, help="percentage points that it should gain")
    parser.add_argument("--problems", type=whole_number, default=200, help="held-out problems")
    parser.add_argument("--samples", type=whole_number, default=2, help="answers to each of them")
    parser.add_argument("--every", type=whole_number, default=1, help="stages of a team between evaluations")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of training of one method")
    parser.add_argument("--cold", action="store_true", help="the first update with empty caches, too")
    parser.add_argument("--trl", action="store_true", help="TRL's GRPO of one model, too")
    parser.add_argument("--trl-micro-batch", type=whole_number, default=8)
    parser.add_argument("--trl-tokens", type=whole_number, help="most tokens of its answer (default: the team's)")
    parser.add_argument("--out", required=True, type=Path, help="a folder for runs, which must not be there yet")
    parser.add_argument("--as-trl", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.as_trl:
        train_with_trl(a)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the watched run is ended too
    if a.out.exists():
        parser.error(f"--out {a.out} is there already: runs would go on in it instead of beginning")
    if wrong := [each for each in a.settings if each.partition("=")[0] in OURS]:
        parser.error(f"{wrong[0]}: this benchmark evaluates by its own options, --every, --problems and --samples")
    methods = [*((plan, plan) for plan in a.plans.split(",") if plan), *([(TRL, "trl")] if a.trl else [])]
    if not methods:
        parser.error("nothing to measure: name a plan with --plans, or add --trl")
    if a.trl and importlib.util.find_spec("trl") is None:
        parser.error("--trl: trl is not installed")
    a.out.mkdir(parents=True)
    found, logs, lost = {}, {}, ""
    for method, name in methods:
        try:
            found[method], logs[method] = measure(method, name, a)
        except RuntimeError as error:  # TRL's errors must not lose what was measured before
            if method != TRL or not found:
                raise
            lost = f"{method}: not measured: {error}"
            continue
        so_far(method, as_row(method, found[method])[1:])
        require_same_problems(logs)
    waited = ("", "cold s", "first update s", "before", f"+{a.points:g} points s", "tokens", "gain", "best", "updates")
    header = (*waited, "evaluating s, off the clock", "where the seconds to the first update went")
    record = {"results": {method: asdict(each) for method, each in found.items()}}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(a).items()}
    rows = [as_row(method, each) for method, each in found.items()]
    asked = max(each.problems for each in found.values())
    title = f"{a.team}: what one waits for; success on {asked} held-out problems, {a.samples} answers each"
    report(title, header, rows, {"benchmark": "time_to", **options, **record}, a.json)
    if lost:
        sys.exit(lost)


if __name__ == "__main__":
    main()
