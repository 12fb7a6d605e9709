"""Memory plans for one card, by how many copies of a frozen base are held. Nothing is run.

    python bench/one_copy.py [--markdown] [--json]

Three agents with adapters on the shapes of Qwen3-8B and 32B (files in bfloat16), training and sampling in
fp16, turns after prompts of 256 tokens, one pass over every batch. For each way to hold the base, the table shows the
micro-batch and KV memory with which a stage is fastest among those that fit, or the smallest need if none fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from common import report
from sizing import MICRO_BATCHES, SHAPES
from teamtr.planning.cards import Card, card_named
from teamtr.planning.setup import Setup
from teamtr.planning.stage import Prediction, predict
from teamtr.ports import GB
from throughput import team

PAGES_GB = (1, 2, 4, 8, 16, 32)
BASES = {
    "`fp32`, merged": ("fp32", False),
    "`file`, by row": ("file", True),
    "`fp16`, by row": ("fp16", True),
    "`int8`, by row": ("int8", True),
}


@dataclass(frozen=True)
class Target:
    """A team and size of stage that should fit on a card, or on a part of one."""

    name: str
    model: str
    problems: int
    group: int
    tokens: int
    rank: int
    card: Card


TARGETS = (
    Target("60 GB of an H200", "8B", 32, 8, 256, 16, replace(card_named("H200"), memory=60 * 10**9)),
    Target("one H200", "32B", 32, 8, 256, 16, card_named("H200")),
    Target("H100, 80 GB", "32B", 32, 8, 256, 16, card_named("H100")),
    Target("RTX4090, 24 GB", "8B", 8, 8, 128, 8, card_named("RTX4090")),
    Target("RTX4090, 24 GB", "8B", 16, 8, 256, 16, card_named("RTX4090")),
)


def setup_of(target: Target, base: str, by_row: bool) -> Setup:
    shape = replace(SHAPES[target.model], stored="bf16")
    found = team(shape, 3, target.problems, target.group, 256, target.tokens, micro_batch=16, rank=target.rank)
    return replace(
        found,
        cluster=replace(found.cluster, card=target.card),
        learning=replace(found.learning, base=base),
        sampling=replace(found.sampling, precision="fp16", by_row=by_row),
    )


def best(setup: Setup) -> Prediction:
    """The fastest prediction that fits, or the smallest if none fits."""
    found = [
        predict(
            replace(
                setup,
                learning=replace(setup.learning, micro_batch=micro_batch),
                sampling=replace(setup.sampling, memory=gb * GB),
            )
        )
        for micro_batch, gb in product(MICRO_BATCHES, PAGES_GB)
    ]
    fitting = [one for one in found if one.memory.fits]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(found, key=lambda one: one.memory.plan.total)


def rows() -> Iterator[dict[str, Any]]:
    for target in TARGETS:
        for name, (base, by_row) in BASES.items():
            found = best(setup_of(target, base, by_row))
            sizes = dict.fromkeys(("base", "sampler", "pages", "update", "rest"), 0.0)
            for item in found.memory.plan.items:
                sizes[PARTS.get(item.what, "rest")] += item.bytes / GB
            memory = found.setup.sampling.memory or 0
            yield {
                "on": target.name,
                "model": target.model,
                "rank": target.rank,
                "stage": f"{target.problems} x {target.group} x {target.tokens}",
                "learner.base": name,
                "fits": "yes" if found.memory.fits else "no",
                "micro_batch": found.setup.learning.micro_batch,
                "memory_gb": memory // GB,
                **sizes,
                "total": found.memory.plan.total / GB,
                "stage s": found.seconds if found.memory.fits else None,
            }


PARTS = {
    "weights": "base",
    "base in half precision": "base",
    "sampling copy": "sampler",
    "adapters by row": "sampler",
    "a layer, cast to sample": "sampler",
    "keys and values": "pages",
    "gradients, moments, snapshots": "update",
    "old policy": "update",
    "worst step": "update",
}


def as_markdown(row: dict[str, Any]) -> str:
    told = [row["on"], row["model"], str(row["rank"]), row["stage"], row["learner.base"], row["fits"]]
    told += [str(row["micro_batch"]), str(row["memory_gb"])]
    told += [f"{row[name]:.1f}" for name in ("base", "sampler", "pages", "update", "total")]
    told.append("-" if row["stage s"] is None else f"{row['stage s']:,.0f}")
    return f"| {' | '.join(told)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/sizing.md, to stdout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows())
    if options.markdown:
        print("\n".join(map(as_markdown, found)))
        return
    header = tuple(found[0])
    title = "three agents on one frozen base, GB by plan"
    report(title, header, [[row[name] for name in header] for row in found], {"rows": found}, options.json)


if __name__ == "__main__":
    main()
