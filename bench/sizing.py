"""The fastest settings that fit on 1, 8, 64 and 512 cards, by the throughput model. Nothing is run.

    python bench/sizing.py [--card H200] [--cards 1,8,64,512] [--growing] [--markdown] [--json]

Three agents on the shapes of Qwen3-1.7B, 8B and 32B, 64 problems x 8 episodes x 3 turns of 256 tokens after prompts of
256, one pass over every batch, radius 0.05. ``--growing``: 8 problems per card, if that is more. The search covers all
powers of two up to the number of cards as the number of workers (one per card, as many shards as workers), with and
without ``cluster.shard_base``, micro-batches from 16 down, and KV memory for one batch or the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from common import report
from teamtr.planning.advice import pages_of_a_batch
from teamtr.planning.cards import Card, card_named
from teamtr.planning.setup import Cluster, Setup
from teamtr.planning.shape import ModelShape
from teamtr.planning.stage import Prediction, predict
from throughput import QWEN_1_7B, QWEN_8B, team

SHAPES: dict[str, ModelShape] = {
    "1.7B": QWEN_1_7B,
    "8B": replace(QWEN_8B, tied=False),
    "32B": replace(QWEN_8B, layers=64, width=5120, inner=25600, heads=64, tied=False),
}
MICRO_BATCHES = (16, 8, 4, 2, 1)
PHASES = ("sample", "score", "train", "gate", "exchange", "gather")


@dataclass(frozen=True)
class Choice:
    """The fastest setting that fits; ``best`` is None if none fits."""

    model: str
    train: str
    cards: int
    problems: int
    best: Prediction | None

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "model": self.model, "train": self.train, "cards": self.cards, "problems": self.problems,
        }  # fmt: skip
        if self.best is None:
            return {**row, "workers": "does not fit"}
        cluster, phases = self.best.setup.cluster, self.best.phases
        return {
            **row,
            "workers": cluster.workers,
            "shard_base": "yes" if cluster.shard_base else "",
            "micro-batch": self.best.micro_batch,
            "GB": self.best.memory.plan.total / 2**30,
            **{f"{name} s": phases[name].seconds for name in PHASES},
            "stage s": self.best.seconds,
            "bound by": self.best.spent.bound,
        }


def choices(card: Card, counts: list[int], growing: bool) -> Iterator[Choice]:
    for model, shape in SHAPES.items():
        for train, rank in (("lora", 16), ("full", None)):
            for cards in counts:
                problems = max(64, 8 * cards) if growing else 64
                setup = team(shape, 3, problems, 8, 256, 256, micro_batch=16, rank=rank)
                yield Choice(model, train, cards, problems, fastest(setup, card, cards))


def fastest(setup: Setup, card: Card, cards: int) -> Prediction | None:
    found = [predict(one) for one in _settings(setup, card, cards)]
    return min((one for one in found if one.memory.fits), key=lambda one: one.seconds, default=None)


def _settings(setup: Setup, card: Card, cards: int) -> Iterator[Setup]:
    workers = 1
    while workers <= cards:
        for shard_base in (False, True) if workers > 1 else (False,):
            cluster = Cluster(card, cards, workers, workers, shard_base)
            placed = replace(setup, cluster=cluster)
            for micro_batch, pages in product(MICRO_BATCHES, (None, pages_of_a_batch(placed))):
                learning = replace(setup.learning, micro_batch=micro_batch)
                yield replace(placed, learning=learning, sampling=replace(setup.sampling, memory=pages))
        workers *= 2


def as_markdown(row: dict[str, Any]) -> str:
    """A row with the sizes, the phases in groups, and what limits the stage."""
    told = [str(row[name]) for name in ("model", "train", "cards", "problems")]
    if "stage s" not in row:
        return f"| {' | '.join(told)} | does not fit | | | | | | |"
    workers = f"{row['workers']}{', `cluster.shard_base`' if row['shard_base'] else ''}"
    update = sum(row[f"{name} s"] for name in ("score", "train", "gate"))
    between = row["exchange s"] + row["gather s"]
    seconds = [f"{x:,.0f}" if x >= 10 else f"{x:.1f}" for x in (row["sample s"], update, between, row["stage s"])]
    return f"| {' | '.join([*told, workers, str(row['micro-batch']), *seconds, row['bound by']])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="H200")
    parser.add_argument("--cards", default="1,8,64,512")
    parser.add_argument("--growing", action="store_true", help="8 problems for each card")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/sizing.md, to stdout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = list(map(int, options.cards.split(",")))
    rows = [choice.as_row() for choice in choices(card_named(options.card), counts, options.growing)]
    sizes = ("model", "train", "cards", "problems", "workers", "shard_base", "micro-batch", "GB")
    header = (*sizes, *(f"{name} s" for name in PHASES), "stage s", "bound by")
    if options.markdown:
        print("\n".join(as_markdown(row) for row in rows))
        return
    title = f"a stage of three agents on {options.card}, by the throughput model"
    report(title, header, [[row.get(name) for name in header] for row in rows], {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
