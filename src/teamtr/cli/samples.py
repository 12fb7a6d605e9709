"""Conversations of an evaluation as text and as JSON records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teamtr.session.evaluations import Sample

CHARACTERS, MESSAGES = 400, 12
"""Maximum characters shown of a message, and messages shown of a conversation."""


def told_samples(samples: Sequence[Sample], of: str = "") -> str:
    """Conversations one after another: the question, the messages with their authors, and the verdict."""
    return "\n".join(line for sample in samples for line in ["", *_lines(sample, of)])


def sample_record(sample: Sample) -> dict[str, Any]:
    """The whole conversation, for ``--json``."""
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
    """The text on one line, truncated to a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= CHARACTERS else f"{line[:CHARACTERS]}… ({len(line) - CHARACTERS:,} more characters)"
