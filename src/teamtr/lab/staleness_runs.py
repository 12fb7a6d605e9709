"""The training runs of the map of staleness: each in a single-threaded process, and stored so that a map can resume.

Seconds are CPU time for sampling, updating and saving, so other load on the machine does not stretch them. Building the
team and evaluating it are excluded. The relative cost of sampling and training is given, not measured, so that plans
that depend on it make the same decisions on every machine.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.config import TeamFile
from teamtr.errors import UserError
from teamtr.lab.staleness_cells import Cell, Point, Run
from teamtr.presets import PRESETS
from teamtr.session.demo import demo_file
from teamtr.session.processes import beside
from teamtr.session.train import train
from teamtr.store import Log
from teamtr.version import __version__

SAMPLING_COST = 1.0
"""Cost of a sampled token relative to a trained one, as measured for a tiny model on one CPU thread."""

EVALUATED = 512
"""Held-out episodes after every stage, if success has no closed form."""


@dataclass(frozen=True)
class Job:
    """A run to make."""

    cell: Cell
    plan: str
    seed: int

    @property
    def team_file(self) -> TeamFile:
        cell = self.cell
        changes = ["device=cpu", f"plan.problems={cell.problems}", "store.episodes=false"]
        if cell.is_exact:
            changes.append("eval.every=0")
        else:
            problems = 16 if cell.length == 1 else 128  # roles and codes of two symbols have no more held-out problems
            changes += ["eval.every=1", f"eval.problems={problems}", f"eval.samples={EVALUATED // problems}"]
        if PRESETS[self.plan].resample.sampling_cost == "measured":
            changes.append(f"plan.sampling_cost={SAMPLING_COST}")
        return demo_file(
            "roles" if cell.game == "roles" else "code",
            agents=cell.agents,
            preset=self.plan,
            seed=self.seed,
            radius=cell.radius,
            stages=cell.stages,
            sees=cell.sees,
            rounds=cell.rounds,
            length=cell.length,
            changes=changes,
        )

    @property
    def settings(self) -> str:
        """A hash of everything that determines the run. Defaults are left out, so that it stays the same when the team
        file gets a new key whose default changes nothing."""
        given = self.team_file.model_dump(mode="json", exclude_defaults=True)
        return hashlib.sha256(f"{__version__}\n{json.dumps(given, sort_keys=True)}".encode()).hexdigest()[:16]


def make_runs(
    jobs: Sequence[Job], workers: int, out: Path | None, tell: Callable[[Run, int], None] = lambda run, left: None
) -> list[Run]:
    """The runs of these jobs. Runs that ``out`` holds are reused, and every other one is added to it as soon as it is
    finished; ``tell`` is called with it and with the number of runs left."""
    there = {} if out is None else kept_runs(out)
    wanted = {job.settings: job for job in jobs}
    missing = [job for settings, job in wanted.items() if settings not in there]
    missing.sort(key=lambda job: -job.cell.updates)  # longest first, so that no long one is left alone at the end
    kept = None if out is None else Log(out / "runs.jsonl")
    for made, (_, run) in enumerate(beside(train_run, missing, workers), start=1):
        if kept is not None:
            kept.append(run.as_record())
        there[run.settings] = run
        tell(run, len(missing) - made)
    return [there[settings] for settings in wanted]


def kept_runs(folder: Path) -> dict[str, Run]:
    """The finished runs in a folder, by their settings. Reads every .jsonl file, so that maps from several machines can
    be combined."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, record in enumerate(Log(path, writable=False).read(), start=1):
            try:
                run = Run.of_record(record)
            except (TypeError, LookupError) as error:
                raise UserError(
                    f"{path}, line {number} is no run of this map ({error}): give --out another folder"
                ) from None
            found[run.settings] = run
    return found


def train_run(job: Job) -> Run:
    """Train in a temporary folder and return the record of the run."""
    with tempfile.TemporaryDirectory(prefix="teamtr-lab-") as folder:
        return _told(job, train(job.team_file, Path(folder) / "run"))


def _told(job: Job, records: Iterable[dict[str, Any]]) -> Run:
    points: list[Point] = []
    updates = tokens = 0
    seconds, clock = 0.0, time.process_time()
    actions: list[str] = []
    shares: list[float] = []
    kept: list[float] = []
    biases: list[float] = []
    for record in records:
        now = time.process_time()
        match record["kind"]:
            case "update":
                updates, tokens, seconds = record["update"], record["sampled_tokens_total"], seconds + now - clock
                if record["exact_success"] is not None:
                    before, after = record["exact_success"]
                    points += [] if points else [Point(0, 0, 0.0, before)]
                    points.append(Point(updates, tokens, round(seconds, 3), after))
                choice = record["rollouts"]
                actions.append(choice["action"])
                shares += [] if choice["share"] is None else [choice["share"]]
                if choice["partly"] is not None:
                    kept.append(choice["partly"]["kept"])
                    biases += [] if choice["partly"]["bias"] is None else [choice["partly"]["bias"]["estimate"]]
            case "eval":
                points.append(Point(updates, tokens, round(seconds, 3), record["avg_at_k"]))
        clock = time.process_time()
    return Run(
        cell=job.cell.name,
        plan=job.plan,
        seed=job.seed,
        settings=job.settings,
        points=tuple(points),
        samplings=actions.count("sample"),
        redraws=actions.count("redraw"),
        share=_mean(shares),
        kept=_mean(kept),
        bias=_mean(biases),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
