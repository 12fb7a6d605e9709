"""Does any text make a reader raise what is not ours, or take too long? Inputs are made from a seed, by the thousand.

    python tests/fuzz/driver.py [--count 100000] [--seconds 600] [--seed 0] [--only autologi,log] [--out failures.json]

An input is a seed of the reader with a few edits, a fragment repeated, one nested in itself, or fragments in a row.
Cost is CPU time of this process over the length of the input; a case that seems slow is measured three times more. What
is printed is the table of docs/guarantees.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MS_PER_KB = 50.0
FLOOR_MS = MS_PER_KB
"""What any input may cost, as if it had a kilobyte: of a few characters nearly all is overhead."""
MOST_CHARACTERS = 1 << 14
HANGS_AFTER_S = 30


@dataclass(frozen=True)
class Reader:
    """Something that reads text which nobody vouches for.

    Attributes:
        read: is given what ``prepare`` makes of the text (a file, a frame); only ``read`` is timed.
        seeds: texts that it understands, or that once broke it; each is tried as it is.
        fragments: what its texts are made of, the nasty ones too.
        ours: the errors that it may raise; none where it always has an answer.
        killable: it runs in a worker that is killed when it is late, so that its cost is told but has no limit.
    """

    name: str
    what: str
    read: Callable[[Any], object]
    seeds: Sequence[str]
    fragments: Sequence[str]
    ours: tuple[type[BaseException], ...] = ()
    prepare: Callable[[str], Any] = lambda text: text
    killable: bool = False


@dataclass
class Outcome:
    """What came of a reader's inputs. ``worst`` is the largest cost, in ms per kB, of inputs from a kilobyte on."""

    reader: Reader
    inputs: int = 0
    longest: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)

    def row(self) -> str:
        limit = "in a worker" if self.reader.killable else f"{self.worst:.1f}"
        return f"| {self.reader.what} | {self.inputs:,} | {self.longest:,} | {limit} | {len(self.failures)} |"


class _Hang(BaseException):
    """A case that ran into the alarm."""


def inputs(reader: Reader, count: int, seed: int = 0) -> Iterator[str]:
    """The seeds as they are, then so many made of them: always the same for the same seed."""
    yield from reader.seeds
    rng = random.Random(f"{seed} {reader.name}")
    short = [text for text in reader.seeds if len(text) <= MOST_CHARACTERS]
    for _ in range(count - len(reader.seeds)):
        room = int(2 ** (3 + 11 * rng.random() ** 3))  # most are short, one in ten is longer than a thousand
        make = rng.choice((_edited, _edited, _repeated, _nested, _joined))
        yield make(rng, short, reader.fragments, room)[:MOST_CHARACTERS]


def _edited(rng: random.Random, seeds: Sequence[str], fragments: Sequence[str], room: int) -> str:
    text = rng.choice(seeds)
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((0, 1, 1, 3, 20)))
        other = rng.choice((rng.choice(fragments), chr(rng.choice((9, 10, 34, 39, 92, 0x660, 0xD800, 0x2028)))))
        inserted = rng.choice((other, "", other * rng.randint(1, 8), text[start:end] * 2, rng.choice(seeds)[:200]))
        text = text[:start] + inserted + text[end:]
    return text


def _repeated(rng: random.Random, seeds: Sequence[str], fragments: Sequence[str], room: int) -> str:
    unit = "".join(rng.choices(fragments, k=rng.randint(1, 3)))
    head, tail = (rng.choice(("", rng.choice(fragments), rng.choice(seeds)[:80])) for _ in range(2))
    return head + unit * (room // max(1, len(unit))) + tail


def _nested(rng: random.Random, seeds: Sequence[str], fragments: Sequence[str], room: int) -> str:
    before, after, middle = rng.choice(fragments), rng.choice(fragments), rng.choice(fragments)
    depth = room // max(1, len(before) + len(after))
    return before * depth + middle + after * (depth if rng.random() < 0.7 else 0)


def _joined(rng: random.Random, seeds: Sequence[str], fragments: Sequence[str], room: int) -> str:
    return "".join(rng.choices(fragments, k=rng.randint(1, max(1, room // 4))))


def try_reader(
    reader: Reader, count: int, seed: int = 0, *, timed: bool = True, seconds: float = float("inf")
) -> Outcome:
    """Give a reader its inputs, as many as ``seconds`` of CPU time allow. ``timed``: look at the cost of each, too."""
    outcome = Outcome(reader)
    began = time.process_time()
    for text in inputs(reader, count, seed):
        if time.process_time() - began > seconds:
            break
        outcome.inputs += 1
        outcome.longest = max(outcome.longest, len(text))
        try:
            spent = _spent_ms(reader, text)
            kilobytes = len(text.encode("utf-8", "surrogatepass")) / 1000
            limit = max(FLOOR_MS, MS_PER_KB * kilobytes)
            if timed and not reader.killable and spent > limit:
                spent = min(spent, *(_spent_ms(reader, text) for _ in range(3)))
                if spent > limit:
                    outcome.failures.append({"why": f"{spent:.0f} ms for {kilobytes:.2f} kB", "text": text})
            if kilobytes >= 1:
                outcome.worst = max(outcome.worst, spent / kilobytes)
        except _Hang:
            if not reader.killable:
                outcome.failures.append({"why": f"no end within {HANGS_AFTER_S} s", "text": text})
        except Exception as error:
            outcome.failures.append({"why": f"{type(error).__name__}: {error}"[:300], "text": text})
    outcome.seconds = time.process_time() - began
    return outcome


def _spent_ms(reader: Reader, text: str) -> float:
    """CPU time of one reading. Raises what is not ours, and _Hang when it takes too long for words."""

    def stop(*_: object) -> None:
        raise _Hang

    given = reader.prepare(text)
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 if reader.killable else HANGS_AFTER_S)
    started = time.process_time()
    try:
        reader.read(given)
    except reader.ours:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return 1000 * (time.process_time() - started)


def main() -> int:
    from fuzz.readers import readers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="inputs of each reader")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="CPU time of each reader at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of readers, with commas between them")
    parser.add_argument("--out", type=Path, help="a JSON file for the inputs that failed")
    asked = parser.parse_args()
    failed: dict[str, list[dict[str, str]]] = {}
    print("| reader of | inputs | longest, characters | most ms per kB | failures |\n|---|---|---|---|---|", flush=True)
    gc.disable()
    for reader in readers():
        if asked.only and reader.name not in asked.only.split(","):
            continue
        outcome = try_reader(reader, asked.count, asked.seed, seconds=asked.seconds)
        gc.collect()
        print(outcome.row(), flush=True)
        print(f"{reader.name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        for failure in outcome.failures[:5]:
            print(f"  {failure['why']}: {failure['text'][:100]!r}", file=sys.stderr, flush=True)
        if outcome.failures:
            failed[reader.name] = outcome.failures[:100]
    if asked.out is not None:
        asked.out.write_text(json.dumps(failed, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.exit(main())
