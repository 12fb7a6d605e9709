"""Conversations of an evaluation, for a person to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teamtr.session.evaluations import Sample

CHARACTERS, MESSAGES = 400, 12
"""That are shown of a message, and of a conversation."""


def told_samples(samples: Sequence[Sample], of: str = "") -> str:
    """One below the other: what was asked, who said what, and what the grader made of it."""
    return "\n".join(line for sample in samples for line in ["", *_lines(sample, of)])


def sample_record(sample: Sample) -> dict[str, Any]:
    """Whole, for ``--json``."""
    return {
        "problem": sample.problem.id,
        "messages": [{"author": message.author, "text": message.text} for message in sample.episode.messages],
        "answer": sample.episode.answer,
        "verdict": sample.episode.verdict.kind,
        "reward": sample.episode.verdict.reward,
    }


def _lines(sample: Sample, of: str) -> list[str]:
    problem, episode = sample.problem, sample.episode
    asked = " ".join([problem.prompt, *(f"[{name}] {text}" for name, text in _private(problem.private))])
    said = episode.messages
    lines = [
        f"{episode.verdict.kind}, reward {episode.verdict.reward:.3g}: {f'{of}, ' if of else ''}problem {problem.id}",
        f"  asked: {_short(asked)}",
        *(f"  {message.author}: {_short(message.text)}" for message in said[:MESSAGES]),
        *([f"  … {len(said) - MESSAGES} more messages"] if len(said) > MESSAGES else []),
    ]
    right = "" if problem.answer is None else f" (right: {_short(str(problem.answer))})"
    return [*lines, f"  answer: {_short(episode.verdict.extracted or episode.answer)}{right}"]


def _private(private: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(private.items())


def _short(text: str) -> str:
    """On one line, and no longer than a person reads."""
    line = " ".join(text.split())
    return line if len(line) <= CHARACTERS else f"{line[:CHARACTERS]}… ({len(line) - CHARACTERS:,} more characters)"
