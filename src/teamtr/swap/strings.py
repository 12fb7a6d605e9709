"""The strings on which two tokenizers are compared: the team's own contexts, and difficult ones beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from teamtr.config.paths import BUILT_IN_MODELS
from teamtr.engines.torch.loading import hub_options
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import Misuse
from teamtr.protocol import render
from teamtr.protocol.tokenizers import adversarial
from teamtr.randomness import generator
from teamtr.store import RunFolder, read_episodes
from teamtr.types import RolloutBatch

STRINGS = 1000
OWN_SHARE = 0.5
"""At most this share of the strings are the team's own; the rest are made to be difficult."""


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a folder, a hub id or the built-in model."""
    if source in BUILT_IN_MODELS:
        return character_tokenizer()
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    options = {} if path.exists() else hub_options(source)
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.exists() else source, **options)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise Misuse(
            f"no tokenizer could be loaded from {source!r} ({first_line}); give a folder, a hub id or tiny"
        ) from error


def context_strings(batch: RolloutBatch) -> Iterator[str]:
    """What agents were shown and said in these conversations, as text: each string once."""
    problems = {problem.id: problem for problem in batch.problems}
    seen: set[str] = set()
    for episode in batch.episodes:
        history: list[tuple[str, str]] = []
        for message in episode.messages:
            shown = render(
                agent=message.author, system_prompt="", problem=problems[episode.problem_id], history=history
            )[-1]["content"]
            for string in (shown, message.text):
                if string and string not in seen:
                    seen.add(string)
                    yield string
            history.append((message.author, message.text))


def run_strings(folder: Path | str, count: int) -> list[str]:
    """Up to ``count`` strings from the episodes that a run kept, the latest first."""
    found: list[str] = []
    for file in sorted(RunFolder.read(folder).episodes.glob("*.jsonl.gz"), reverse=True):
        for string in context_strings(read_episodes(file)):
            if string not in found:
                found.append(string)
            if len(found) == count:
                return found
    return found


def compared_strings(own: list[str], count: int = STRINGS, seed: int = 0) -> list[str]:
    """``count`` strings: the team's own up to their share, then difficult ones."""
    kept = own[: int(count * OWN_SHARE)]
    return [*kept, *adversarial(generator(seed, "strings"), count - len(kept))]
