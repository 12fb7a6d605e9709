"""The strings on which two tokenizers are compared: the team's own contexts, and difficult ones beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from teamtr.batches import RolloutBatch
from teamtr.chat import render
from teamtr.chat.tokenizers import adversarial
from teamtr.randomness import generator
from teamtr.store import RunFolder, read_episodes

T = TypeVar("T")

OWN = 1000
"""At most this many strings are the team's own."""
DIFFICULT = 1000
"""Beside them come this many that are made to be difficult, always all of them."""
FILES = 20
"""At most this many files of a run's episodes are read."""


def context_strings(batch: RolloutBatch) -> Iterator[str]:
    """What agents were shown and said in these conversations, as text: each string once."""
    problems = {problem.id: problem for problem in batch.problems}
    seen: set[str] = set()
    for episode in batch.episodes:
        history: list[tuple[str, str]] = []
        speakers = {message.author for message in episode.messages}
        for message in episode.messages:
            shown = render(
                agent=message.author,
                system_prompt="",
                problem=problems[episode.problem_id],
                history=history,
                speakers=speakers,
            )[-1]["content"]
            for string in (shown, message.text):
                if string and string not in seen:
                    seen.add(string)
                    yield string
            history.append((message.author, message.text))


def run_strings(folder: Path | str) -> list[str]:
    """Strings from the episodes that a run kept, each once; of many files, some spread evenly from first to last."""
    files = sorted(RunFolder.read(folder).episodes.glob("*.jsonl.gz"))
    return list(dict.fromkeys(s for file in spread(files, FILES) for s in context_strings(read_episodes(file))))


def compared_strings(own: Sequence[str], count: int = OWN, seed: int = 0) -> list[str]:
    """Up to ``count`` of the team's own, from all that there are, then the difficult ones."""
    return [*spread(own, count), *adversarial(generator(seed, "strings"), DIFFICULT)]


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spread over all of them, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[int(k)] for k in np.linspace(0, len(items) - 1, count).round()]
