"""Growth of a stage's cost: seconds by phase and peak memory by agents, episodes, message length and model size.

    python bench/growth.py --axis agents,episodes,length,model --shape 1.7b --limit-s 60 --out FILE.jsonl
    python bench/growth.py --draw FILE.jsonl --figure docs/figures/growth.svg --page docs/growth.md

One size is varied at a time around a middle point. Each point runs in its own process, so that peak memory is measured
per point and a point that does not fit affects no other. A line is written after each point. The same command resumes
where it stopped, and with a larger limit retries points that were cut off. Once a point is cut off, larger points of
its axis are skipped. With ``--out`` and ``--page`` or ``--figure`` it measures and then draws.

The stage is that of bench/stage.py: agents speak in turn, and all turns are sampled again before every update. Since
every rollout takes the same time, a round samples once and counts its seconds for every update. Of more than four
agents, four are updated, spread evenly over the speaking order because contexts grow from one speaker to the next, and
their seconds are scaled up. No message ends before its last token.

With ``--pieces``, messages are random tokens, and the sampling of a turn is timed in the given number of pieces of up
to 256 tokens, each in the middle of an equal part of a message: the time of a step there, times the tokens, plus the
first token with its whole context. Contexts and training data have their full lengths.

On a CPU the benchmark uses one thread and plain sampling, as training does. Seconds are then processor time, so that
other work on the machine matters little: for sampling as the system reports it, for the phases of an update wall-clock
time multiplied by the share of a core that the update had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stage
from common import (
    NEVER,
    SHAPES,
    adapted_team,
    make_model,
    peak_gb,
    versions,
    whole_number,
    whole_numbers,
)
from growth_page import AXES, PHASES, Measured, Point, draw, on_axis, read, setup_of
from memory import peak_mib
from pieces import Timed, in_pieces
from teamtr.errors import UserError, first_line
from teamtr.planning.cards import CARDS, card_named
from teamtr.ports import GB

UPDATED = 4
"""Number of agents that are updated in a larger team."""
WARM_TOKENS = 8
"""Tokens of a message during warm-up: kernels are chosen and graphs captured by rows, not by lengths."""


@dataclass(frozen=True)
class Grid:
    """The middle point, and the values of each axis."""

    middle: Point
    values: dict[str, tuple[Any, ...]]

    def points(self, axis: str) -> list[Point]:
        """The points of an axis by size, including the middle point."""
        own = [replace(self.middle, **{AXES[axis]: value}) for value in self.values[axis]]
        return on_axis(dict.fromkeys([*own, self.middle]), self.middle, axis)


ON_A_CPU = Grid(
    Point("tiny", agents=2, episodes=32, tokens=16, group=8, prompt=16, micro_batch=32),
    {
        "agents": (1, 2, 4, 8, 16),
        "episodes": (16, 32, 64, 128, 256, 512),
        "length": (16, 32, 64, 128, 256, 512, 1024),
        "model": ("tiny", "1m", "6m", "25m"),
    },
)
ON_A_CARD = Grid(  # 16 episodes still fit with messages of 16k tokens
    Point("1.7b", agents=2, episodes=16, tokens=256, group=8, prompt=256, micro_batch=16),
    {
        "agents": (1, 2, 4, 8, 16),
        "episodes": (16, 64, 256, 1024, 2048),
        "length": (128, 256, 1024, 4096, 16384),
        "model": ("small", "0.6b", "1.7b", "4b", "8b"),
    },
)


# -- one point, in its own process --------------------------------------------------------------------------------


def updated(agents: int) -> list[int]:
    """Indices of the agents that are updated: all, or the middle of each of four equal parts, placed symmetrically."""
    if agents <= UPDATED:
        return list(range(agents))
    lower = [int((2 * k + 1) * agents / (2 * UPDATED) - 0.5) for k in range(UPDATED // 2)]
    return [*lower, *(agents - 1 - k for k in reversed(lower))]


def measure(point: Point, repeats: int, pieces: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields a record when warm (on a GPU with the memory plan after the rehearsal), then one for every update with the
    time of sampling its batch, or one with the reason if the point does not fit."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    a = argparse.Namespace(
        shape=point.shape, problems=point.problems, group=point.group, prompt=point.prompt, tokens=point.tokens,
        epochs=1, precision="fp16" if gpu else "fp32", micro_batch=point.micro_batch,
    )  # fmt: skip
    short = argparse.Namespace(**{**vars(a), "tokens": min(a.tokens, WARM_TOKENS)})
    try:
        if not gpu:
            _load_libraries(short)
        before = peak_mib()
        engine = adapted_team(
            make_model(point.shape, eos_token_id=NEVER, max_position_embeddings=max(8192, point.longest)), point.agents,
            a.precision, micro_batch=point.micro_batch, sampler="bf16" if gpu else None,
        )  # fmt: skip
        settled: dict[str, float] = {}
        if gpu:  # as a run does: fixes the micro-batch and whether activations are recomputed
            demand = setup_of(point, "H200").demand
            engine.rehearse(demand)
            settled = {"planned_gb": engine.memory_plan(demand).total / GB}
        else:
            longest_context = point.longest - point.tokens
            engine.learner("a0").policy.reserve(point.episodes, longest_context, point.tokens)  # for all agents
        stage.warm(engine, stage.play(engine, short, 0, Counter(), point.agents), short)
        yield {"warm": True, **settled}
        names = list(engine.learners)
        for seed in range(1, repeats + 1):
            played = in_pieces(engine, a, seed, pieces) if pieces else Timed.of(partial(_play, engine, a, seed))
            for agent in (names[k] for k in updated(point.agents)):
                learned = Timed.of(partial(stage.update, engine, a, agent, played.found, seed))
                share = 1.0 if gpu else learned.core
                phases = {phase: share * learned.found.seconds[phase] for phase in PHASES if phase != "sample"}
                yield {
                    "phases": {"sample": played.wall if gpu else played.busy, **phases},
                    "peak_gb": peak_gb() if gpu else (peak_mib() - before) / 1024,
                    "core": None if gpu else (played.busy + learned.busy) / (played.wall + learned.wall),
                }
    except (torch.OutOfMemoryError, MemoryError):
        yield {"cut": "does not fit"}
    except UserError as error:
        yield {"cut": f"refused: {first_line(error)}"}


def _load_libraries(a: argparse.Namespace) -> None:
    """Loads the libraries that an update imports, so that their memory is not counted as the team's."""
    smallest = argparse.Namespace(**{**vars(a), "shape": "tiny", "problems": 1})
    engine = adapted_team(make_model("tiny", eos_token_id=NEVER), 1, a.precision, micro_batch=a.micro_batch)
    said = stage.play(engine, smallest, 0, Counter(), 1)
    stage.update(engine, smallest, "a0", said, 0)


def _play(engine: Any, a: argparse.Namespace, seed: int) -> stage.Said:
    said = stage.play(engine, a, seed, Counter(), len(engine.learners))
    short = [len(m) for _, messages, _ in said.values() for m in messages if len(m) != a.tokens]
    if short:
        raise RuntimeError(f"{len(short)} messages ended before {a.tokens} tokens: the point is not what it says it is")
    return said


# -- the parent ---------------------------------------------------------------------------------------------------


@dataclass
class Limits:
    """Most seconds until a point is warm, and from then on."""

    start_s: float
    limit_s: float


@dataclass
class Heard:
    """Records received from a point's process so far."""

    updates: list[dict[str, Any]] = field(default_factory=list)
    cut: str | None = None
    over: str | None = None
    planned_gb: float | None = None


@dataclass(eq=False)
class Child:
    """A process that does its imports and then waits for the signal to start."""

    command: Sequence[str]

    def __post_init__(self) -> None:
        self.complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the child)
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.complaints, text=True
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as word:
            word.write("go\n")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.complaints.close()


def command_of(point: Point, repeats: int, pieces: int | None = None) -> list[str]:
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(point)), "--repeats", str(repeats)]
    return [*command, "--pieces", str(pieces)] if pieces else command


def listen(command: Sequence[str], limits: Limits, started: Child | None = None) -> Heard:
    """Run a point's process, and kill it if it takes too long. ``started``: a process that is already waiting."""
    heard = Heard()
    with started or Child(command) as child:
        process = child.process

        def end(why: str) -> None:
            heard.over = why
            process.kill()

        def timer(seconds: float, why: str) -> threading.Timer:
            made = threading.Timer(seconds, end, (why,))
            made.start()
            return made

        child.go()
        running = timer(limits.start_s, f"not warm after {limits.start_s:g} s")
        assert process.stdout is not None
        try:
            for line in process.stdout:
                told = json.loads(line)
                if "warm" in told:
                    running.cancel()
                    heard.planned_gb = told.get("planned_gb")
                    running = timer(limits.limit_s, f"over {limits.limit_s:g} s")
                elif "cut" in told:
                    heard.cut = told["cut"]
                else:
                    heard.updates.append(told)
            code = process.wait()
        finally:
            running.cancel()
            process.kill()
        if code == -9 and heard.over is None:
            heard.cut = "killed by the system: most likely out of memory"
        elif code != 0 and heard.over is None:
            child.complaints.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{child.complaints.read()[-3000:]}")
    return heard


def whole_rounds(point: Point, updates: Sequence[dict[str, Any]]) -> tuple[dict[str, float], ...]:
    """Seconds of each complete round (a stage) by phase: the measured updates, scaled up to all agents."""
    size = len(updated(point.agents))
    rounds = [updates[first : first + size] for first in range(0, len(updates) - size + 1, size)]
    times = point.agents / size
    return tuple({phase: times * sum(one["phases"][phase] for one in own) for phase in PHASES} for own in rounds)


def run_point(
    point: Point,
    middle: Point,
    card: str,
    limits: Limits,
    repeats: int,
    started: Child | None = None,
    pieces: int | None = None,
) -> Measured:
    heard = listen(command_of(point, repeats, pieces), limits, started)
    rounds = whole_rounds(point, heard.updates)
    cores = [one["core"] for one in heard.updates if one["core"] is not None]
    return Measured(
        point=point,
        middle=middle,
        card=card,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "one CPU core",
        limit_s=limits.limit_s,
        rounds=rounds,
        peak_gb=max((one["peak_gb"] for one in heard.updates), default=None),
        cut=None if rounds else heard.cut or heard.over or "ended without a round",
        core=sum(cores) / len(cores) if cores else None,
        pieces=pieces,
        planned_gb=heard.planned_gb,
        versions={name: version for name, version in versions().items() if name in ("torch", "transformers", "peft")},
    )


def measure_all(
    grid: Grid,
    axes: Sequence[str],
    file: Path,
    card: str,
    limits: Limits,
    repeats: int,
    pieces: int | None = None,
    again: bool = False,
) -> None:
    """Measure point by point. Points that the file already holds are measured again only with ``again``."""
    known = read(file)
    if any(one.middle != grid.middle or one.card != card for one in known.values()):
        raise SystemExit(f"{file} holds another grid, or one of another card: give another --out")

    new: set[Point] = set()

    def wanted(point: Point) -> bool:
        have = known.get(point)
        if again and point not in new:
            return True
        return have is None or (have.cut is not None and have.limit_s < limits.limit_s)

    for axis in axes:
        points = grid.points(axis)
        with ExitStack() as waiting:
            ahead: dict[Point, Child] = {}
            for k, point in enumerate(points):
                if wanted(point):
                    own, following = ahead.pop(point, None), next(filter(wanted, points[k + 1 :]), None)
                    if following is not None and torch.cuda.is_available():  # such a machine has enough cores
                        ahead[following] = waiting.enter_context(Child(command_of(following, repeats, pieces)))
                    known[point] = run_point(point, grid.middle, card, limits, repeats, own, pieces)
                    new.add(point)
                    with file.open("a") as out:
                        out.write(known[point].as_line())
                    print(f"{axis} {point.at(axis):,.3g}: {_told(known[point])}", file=sys.stderr, flush=True)
                if known[point].cut is not None:
                    break


def _told(one: Measured) -> str:
    if one.cut is not None:
        return f"cut off: {one.cut}"
    mean = sum(one.seconds("stage")) / len(one.rounds)
    return f"{mean:.3g} s a stage, {len(one.rounds)} rounds, {one.peak_gb:.3g} GB"


def this_card() -> str:
    """The name of this machine's card in the table of cards."""
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name()
    squeezed = name.replace(" ", "").replace("-", "").lower()
    found = [card for card in CARDS if card.split("-")[0].lower() in squeezed]
    if len(found) != 1:
        raise UserError(f"no card of the table is a {name}: give --card; there are {', '.join(CARDS)}")
    return found[0]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", default=",".join(AXES), help="which to vary (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="of the middle point")
    for name, what in (("agents", "agents"), ("episodes", "episodes"), ("length", "tokens of a message")):
        parser.add_argument(f"--{name}", type=whole_numbers, help=f"{what}: the axis, instead of the usual one")
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), help="shapes: the axis of models")
    parser.add_argument("--start-s", type=float, default=300.0, help="until a point is warm (default: %(default)s s)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of a point that is warm (default: %(default)s s)")
    parser.add_argument("--repeats", type=whole_number, default=3, help="rounds of a point, if the limit allows")
    parser.add_argument("--pieces", type=whole_number, help="in which a turn's sampling is timed (default: all of it)")
    parser.add_argument("--again", action="store_true", help="measure points that the file has once more")
    parser.add_argument("--card", help="whose predictions to compare with (default: the one that is here)")
    parser.add_argument("--out", type=Path, help="JSON lines: measured points are added")
    parser.add_argument("--draw", type=Path, metavar="FILE.jsonl", help="measure nothing, draw this file")
    parser.add_argument("--figure", type=Path, help="SVG; needs matplotlib")
    parser.add_argument("--page", type=Path, help="the page whose part of this device is written")
    parser.add_argument("--measure", type=lambda text: Point(**json.loads(text)), help=argparse.SUPPRESS)
    a = parser.parse_args(arguments)
    a.axes = a.axis.split(",")
    if unknown := set(a.axes) - set(AXES):
        parser.error(f"--axis: {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    if unknown := set(a.models or ()) - set(SHAPES):
        parser.error(f"--models: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    group = grid_of(a).middle.group
    if uneven := [n for n in a.episodes or () if n % group]:
        parser.error(f"--episodes: {uneven[0]} are no whole groups of {group}")
    points = [point for axis in a.axes for point in grid_of(a).points(axis)]
    if a.pieces and a.pieces > (shortest := min(point.tokens for point in points)):
        parser.error(f"--pieces: a message of {shortest} tokens has no {a.pieces} pieces")
    if a.measure is None and (a.out is None) == (a.draw is None):
        parser.error("give --out FILE.jsonl to measure, or --draw FILE.jsonl")
    return a


def grid_of(a: argparse.Namespace) -> Grid:
    usual = ON_A_CARD if torch.cuda.is_available() else ON_A_CPU
    middle = usual.middle if a.shape is None else replace(usual.middle, shape=a.shape)
    told = {"agents": a.agents, "episodes": a.episodes, "length": a.length, "model": a.models}
    return Grid(middle, {axis: told[axis] or usual.values[axis] for axis in AXES})


def main(arguments: Sequence[str] | None = None) -> None:
    a = parsed(arguments)
    if a.measure is not None:
        sys.stdin.readline()  # wait for the signal to start
        for line in measure(a.measure, a.repeats, a.pieces):
            print(json.dumps(line), flush=True)
        return
    if a.out is not None:
        try:
            card = card_named(a.card).name if a.card else this_card()
        except UserError as error:
            raise SystemExit(f"bench/growth.py: {error}") from error
        limits = Limits(a.start_s, a.limit_s)
        measure_all(grid_of(a), a.axes, a.out, card, limits, a.repeats, a.pieces, a.again)
    draw(a.draw or a.out, a.figure, a.page)


if __name__ == "__main__":
    main()
