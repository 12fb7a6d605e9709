"""Lockstep turns, which wait for the slowest message, against ragged turns: the same episodes and noise in one run.

    python bench/ragged.py --shape 1.7b --json              # on a GPU: 256 episodes of three agents, fp16
    python bench/ragged.py --shape tiny --episodes 24       # on a CPU
    python bench/ragged.py --shape 1.7b --messages RUN      # lengths of the messages that a run has stored

Three agents, each an adapter on one base, speak in turn, and each reads the message before. Message lengths are drawn
from ``gsm8k_lengths.json`` (which describes its contents), or per episode from a stored run, with as many agents as it
has. Weights are random, and a message ends where its noise ends. There are two schedules:

- lockstep: no next message begins before the slowest of all episodes has ended its message;
- ragged: every episode continues as soon as its message ends.

Each is run with merged adapters, one agent at a time, and with adapters applied by row, so that rows of all agents form
one batch. "rows" is the average number of rows of a decode step, "prefilling" the seconds of all "prefills", and
"alike" the share of messages with the same tokens as in the first way: all in fp32, and in half precision those that
rounding did not change. Every way is timed ``--rounds`` times, alternating, and the best time counts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import SHAPES, adapted_team, device, make_model, peak_gb, random_prompts, report, seconds, so_far
from teamtr.answers import Ended, Wanted
from teamtr.engines.local import LocalEngine
from teamtr.engines.paged.pages import Pages
from teamtr.engines.paged.pool import DTYPES, SamplerPool
from teamtr.engines.paged.sampler import PAGE, Server
from teamtr.randomness import RowNoise, seed_of
from teamtr.store import read_episodes
from teamtr.types import Ids

LENGTHS = Path(__file__).with_name("gsm8k_lengths.json")
WAYS = (("lockstep", "merged"), ("ragged", "merged"), ("lockstep", "by_row"), ("ragged", "by_row"))


@dataclass(frozen=True)
class Talk:
    """Message lengths in tokens by episode and turn, and the order of speakers."""

    lengths_ET: np.ndarray
    speakers: tuple[str, ...]

    @property
    def agents(self) -> int:
        return len(set(self.speakers))


def drawn(episodes: int, most: int, rng: np.random.Generator) -> Talk:
    """Three messages per episode, with lengths drawn from the file."""
    counts = json.loads(LENGTHS.read_text())["lengths"]
    lengths = np.repeat([int(tokens) for tokens in counts], list(counts.values()))
    return Talk(np.minimum(rng.choice(lengths, size=(episodes, 3)), most), ("a0", "a1", "a2"))


def drawn_of(run: Path, episodes: int, most: int, rng: np.random.Generator) -> Talk:
    """Lengths of whole episodes of a run that have its most frequent order of speakers."""
    batches = [read_episodes(file) for file in sorted((run / "episodes").glob("*.jsonl.gz"))]
    orders = Counter(tuple(turn.agent for turn in e.turns) for batch in batches for e in batch.episodes)
    if not orders:
        raise SystemExit(f"{run} holds no episodes: give the folder of a run that keeps them")
    [(order, _)] = orders.most_common(1)
    found = np.array(
        [
            [len(turn.token_ids) for turn in e.turns]
            for batch in batches
            for e in batch.episodes
            if tuple(turn.agent for turn in e.turns) == order
        ]
    )
    names = {agent: f"a{k}" for k, agent in enumerate(dict.fromkeys(order))}
    chosen = found[rng.integers(len(found), size=episodes)]
    return Talk(np.minimum(chosen, most), tuple(names[agent] for agent in order))


@dataclass
class Episodes:
    """Episodes with fixed message lengths that feed a stream. ``together``: all wait for the slowest every turn."""

    problems: Sequence[Ids]
    talk: Talk
    together: bool
    said: dict[tuple[int, int], Ids] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)  # row -> episode
    _read: dict[int, Ids] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)
    _rows: int = 0

    def more(self, ended: Sequence[Ended]) -> list[Wanted]:
        if not self._rows:
            self._read = dict(enumerate(self.problems))
            return [self._next(e, 0) for e in self._read]
        done = []
        for one in ended:
            e = self._open.pop(one.row)
            turn = sum((e, t) in self.said for t in range(len(self.talk.speakers)))
            self.said[e, turn] = one.sample.token_ids
            self._read[e] = np.concatenate([self._read[e], one.sample.token_ids]).astype(np.int32)
            if turn + 1 < len(self.talk.speakers):
                done.append(e)
        self._held += done
        if self.together and self._open:
            return []
        going, self._held = sorted(self._held), []
        return [self._next(e, sum((e, t) in self.said for t in range(len(self.talk.speakers)))) for e in going]

    def _next(self, e: int, turn: int) -> Wanted:
        self._open[self._rows] = e
        self._rows += 1
        agent, lengths_ET = self.talk.speakers[turn], self.talk.lengths_ET
        noise_T = RowNoise(seed_of(0, "turn", turn, agent), int(lengths_ET.max()))[e]
        return Wanted(agent, self._read[e], noise_T[: lengths_ET[e, turn]])


@dataclass
class Counted:
    """Counts a server's decode steps and their rows, and its prefills with their seconds."""

    server: Server
    steps: int = 0
    rows: int = 0
    prefills: int = 0
    prefilling: float = 0.0

    def __post_init__(self) -> None:
        replay, prefill = self.server._replay, self.server._prefill

        def counting(rows: int, *others: Any) -> None:
            self.steps += 1
            self.rows += rows
            replay(rows, *others)

        def timing(*given: Any) -> Any:
            found: list[Any] = []
            self.prefills += 1
            self.prefilling += seconds(lambda: found.append(prefill(*given)))
            return found[0]

        self.server._replay = counting  # type: ignore[method-assign]
        self.server._prefill = timing  # type: ignore[method-assign]

    def forget(self, prompts: Sequence[int], tokens: int) -> None:
        """Reset the counts and the prefix cache; allocated memory and captured graphs stay."""
        self.steps = self.rows = self.prefills = 0
        self.prefilling = 0.0
        self.server.reserve(prompts, tokens)
        pool = self.server._require_pool()
        pool.books = Pages(pool.books.count, PAGE)


def played(engine: LocalEngine, make: Callable[[], Episodes]) -> tuple[float, Episodes]:
    episodes = make()
    return seconds(lambda: engine.stream(episodes.more)), episodes


def alike(one: Episodes, other: Episodes) -> float:
    return float(np.mean([np.array_equal(one.said[key], other.said[key]) for key in one.said]))


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--episodes", type=int, default=256 if gpu else 24)
    parser.add_argument("--group", type=int, default=8, help="episodes of one problem")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a problem")
    parser.add_argument("--most", type=int, default=256, help="most tokens of a message")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=DTYPES, default="fp16" if gpu else "fp32")
    parser.add_argument("--messages", type=Path, metavar="RUN", help="lengths of the messages that this run has stored")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()

    rng = np.random.default_rng(0)
    talk = drawn(a.episodes, a.most, rng) if a.messages is None else drawn_of(a.messages, a.episodes, a.most, rng)
    problems = random_prompts(rng, -(-a.episodes // a.group), a.prompt, SHAPES[a.shape]["vocab_size"])
    prompts = [problems[e // a.group] for e in range(a.episodes)]
    engine = adapted_team(make_model(a.shape), talk.agents, a.precision, micro_batch=1, sampler=a.precision)
    for k, name in enumerate(engine.agents):
        engine.learner(name).perturb(0.5, seed=k)  # a new adapter changes nothing
        engine.learner(name).policy.end_ids = frozenset()
    pools = {
        adapters: SamplerPool(a.precision, device(), (30 << 30) if gpu else (1 << 30), adapters=adapters)
        for adapters in ("merged", "by_row")
    }
    counted: dict[str, Counted] = {}
    best: dict[tuple[str, str], dict[str, Any]] = {}
    first: Episodes | None = None
    for turn in range(a.rounds + 1):  # the first captures graphs, and is not counted
        for way in WAYS:
            kind, adapters = way
            for name in engine.agents:
                engine.learner(name).policy.serving = pools[adapters]
            if adapters not in counted:
                counted[adapters] = Counted(
                    pools[adapters].server_of(engine.learner(engine.agents[0]).policy.causal_lm)
                )
            server = counted[adapters]
            server.forget([a.prompt + (len(talk.speakers) - 1) * a.most] * a.episodes, a.most)
            took, episodes = played(engine, lambda kind=kind: Episodes(prompts, talk, kind == "lockstep"))
            first = first or episodes
            tokens = sum(len(said) for said in episodes.said.values())
            found = {
                "seconds": took,
                "tokens per s": tokens / took,
                "steps": server.steps,
                "rows": server.rows / max(1, server.steps),
                "prefills": server.prefills,
                "prefilling": server.prefilling,
                "alike": alike(first, episodes),
            }
            so_far(f"round {turn}, {kind}, {adapters}", found)
            if turn and took < best.get(way, {"seconds": np.inf})["seconds"]:
                best[way] = found
    base = best[WAYS[0]]["seconds"]
    header = ["way", "adapters", *best[WAYS[0]], "times lockstep"]
    rows = [[*way, *found.values(), base / found["seconds"]] for way, found in best.items()]
    record = {
        "bench": "ragged",
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()},
        "lengths": {"mean": float(talk.lengths_ET.mean()), "longest": int(talk.lengths_ET.max())},
        "ways": {" ".join(way): {**found, "times lockstep": base / found["seconds"]} for way, found in best.items()},
        "peak_gb": peak_gb(),
    }
    told = f"{a.episodes} episodes of {len(talk.speakers)} messages, {talk.lengths_ET.mean():.0f} tokens on average"
    report(f"{told}, {a.shape}, {a.precision}", header, rows, record, a.json)


if __name__ == "__main__":
    main()
