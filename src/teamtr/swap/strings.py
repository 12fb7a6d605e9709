"""Strings for comparing two tokenizers: the team's own contexts and adversarial strings."""

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
"""Maximum number of the team's own strings."""
DIFFICULT = 1000
"""Number of adversarial strings, all of which are always used."""
FILES = 20
"""Maximum number of episode files of a run that are read."""


def context_strings(batch: RolloutBatch) -> Iterator[str]:
    """The texts of prompts and messages in these conversations, without duplicates."""
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
    """Distinct strings from a run's stored episodes; if there are many files, from an evenly spaced selection."""
    files = sorted(RunFolder.read(folder).episodes.glob("*.jsonl.gz"))
    return list(dict.fromkeys(s for file in spread(files, FILES) for s in context_strings(read_episodes(file))))


def compared_strings(own: Sequence[str], count: int = OWN, seed: int = 0) -> list[str]:
    """Up to ``count`` of the team's own strings, evenly selected, followed by the adversarial ones."""
    return [*spread(own, count), *adversarial(generator(seed, "strings"), DIFFICULT)]


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` items, evenly spaced over all of them, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[int(k)] for k in np.linspace(0, len(items) - 1, count).round()]
