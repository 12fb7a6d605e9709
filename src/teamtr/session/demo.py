"""The demo: trains a tiny team on a game that it can only win together, and collects what changed."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teamtr.config import TeamFile, loads, recipe_text
from teamtr.reports import was_kept
from teamtr.session import train as runs
from teamtr.store import RunFolder, read_episodes
from teamtr.types import Episode

Watch = Callable[[Iterator[runs.Record]], Iterator[runs.Record]]


@dataclass
class DemoResult:
    """One trained team: its success before and after, and figures of its training.

    If the task has a closed form (roles), ``initial``, ``final`` and ``regressing`` are exact, computed from the
    agents' probabilities; otherwise success is measured on held-out episodes.
    """

    preset: str
    seed: int
    radius: float
    initial: float = 0.0
    final: float = 0.0
    curve: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    updates: int = 0
    accepted: int = 0
    out_of_region: int = 0
    regressing: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    folder: str = ""

    def learn(self, record: runs.Record) -> None:
        match record["kind"]:
            case "eval":
                self.curve.append(record["avg_at_k"])
                if not self.exact:
                    self.initial, self.final = self.curve[0], self.curve[-1]
            case "update":
                accepted = was_kept(record["outcome"])
                self.updates += 1
                self.accepted += accepted
                self.out_of_region += accepted and not record["kl_upper"] <= record["radius"]
                if record.get("exact_success") is not None:
                    before, after = record["exact_success"]
                    self.exact.extend([after] if self.exact else [before, after])
                    self.initial, self.final = self.exact[0], self.exact[-1]
                    self.regressing = (self.regressing or 0) + (after < before)
            case "finished":
                self.tokens = record["tokens"]


def demo_file(
    task: str,
    *,
    agents: int,
    preset: str | None = None,
    seed: int,
    radius: float | None = None,
    stages: int | None = None,
    sees: str = "blind",
    rounds: int = 1,
    length: int = 1,
    changes: Sequence[str] = (),
) -> TeamFile:
    """The recipe of a game with these settings.

    Args:
        task: "roles", or "code" for code exchange.
        agents: number of agents in roles; code exchange has three.
        preset: takes precedence over ``changes``; None keeps theirs, or the recipe's own.
        sees: what agents in roles see of each other.
        rounds: how often each agent speaks.
        length: symbols in each half of a code; in roles a message is one symbol.
        changes: any other settings, as dotted keys.
    """
    overrides = [f"seed={seed}", f"team.router.rounds={rounds}"]
    if radius is not None:
        overrides.append(f"plan.radius_nats_per_message={radius}")
    if stages is not None:
        overrides.append(f"plan.stages={stages}")
    if task == "code":
        recipe, symbols = "code-exchange", {"left": length, "right": length, "speaker": 2 * length}
        room = [f"team.agents.{name}.max_tokens={said + 1}" for name, said in symbols.items()]  # plus the end token
        overrides += [f"task.half_length={length}", *room]
    else:
        recipe, names = "roles", ", ".join(f"{{name: a{k + 1}, sees: {sees}}}" for k in range(agents))
        overrides.insert(0, f"team.agents=[{names}]")
    overrides += changes
    if preset is not None:
        overrides.append(f"plan.preset={preset}")
    return loads(recipe_text(recipe), recipe, overrides)


def train_demo(team_file: TeamFile, folder: Path, watch: Watch, stop: Callable[[], bool]) -> DemoResult:
    """Train in the folder (or resume there) and collect the result."""
    nothing = DemoResult(
        preset=team_file.plan.preset,
        seed=team_file.seed,
        radius=team_file.plan.plan().radii.nats,
        folder=str(folder),
    )
    result, started = copy.deepcopy(nothing), time.perf_counter()
    for record in watch(runs.train(team_file, folder, stop=stop)):
        if record["kind"] == "resume":
            result = copy.deepcopy(nothing)
            for past in _past(folder):
                result.learn(past)
        result.learn(record)
    result.seconds = round(time.perf_counter() - started, 1)
    return result


@dataclass(frozen=True)
class DemoRun:
    """A team to train, and its folder."""

    team_file: TeamFile
    folder: Path


def train_silently(run: DemoRun) -> DemoResult:
    """Train without output, for use in a separate process."""
    return train_demo(run.team_file, run.folder, lambda records: records, lambda: False)


def _past(folder: Path) -> list[runs.Record]:
    return RunFolder.read(folder).log.read()


@contextmanager
def demo_folder(out: Path | None) -> Iterator[Path]:
    """The given folder, or a temporary one that is deleted afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="teamtr-demo-") as temporary:
        yield Path(temporary)


def conversations(folder: Path, count: int = 3) -> list[tuple[str, Episode, Episode]]:
    """Problems that are both in the first and the last batch of a run: (expected answer, first episode, last
    episode)."""
    files = sorted(RunFolder.read(folder).episodes.glob("stage-*.jsonl.gz"))
    if not files:
        return []
    first, last = read_episodes(files[0]), read_episodes(files[-1])
    then = {episode.problem_id: episode for episode in reversed(first.episodes)}
    now = {episode.problem_id: episode for episode in reversed(last.episodes)}
    shared = [p for p in first.problems if p.id in now][:count]
    return [(str(problem.answer or ""), then[problem.id], now[problem.id]) for problem in shared]


def summary(results: list[DemoResult]) -> dict[str, Any]:
    """The line that ``--json`` prints: means over seeds, and sums of counts."""
    count = len(results)
    regressing = [r.regressing for r in results if r.regressing is not None]
    line: dict[str, Any] = {
        "initial": round(sum(r.initial for r in results) / count, 4),
        "final": round(sum(r.final for r in results) / count, 4),
        "updates": sum(r.updates for r in results),
        "accepted": sum(r.accepted for r in results),
        "out_of_region": sum(r.out_of_region for r in results),
        "tokens": sum(r.tokens for r in results),
        "seconds": round(sum(r.seconds for r in results), 1),
    }
    if regressing:
        line["regressing"] = sum(regressing)
    line["seeds"] = {
        r.seed: {"initial": round(r.initial, 4), "final": round(r.final, 4), "tokens": r.tokens} for r in results
    }
    return line
