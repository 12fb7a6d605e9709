"""The Conversations section: the agents' messages; its script finds episodes and shows them turn by turn."""

from __future__ import annotations

from typing import Any

from teamtr.analysis.report.reading import Reading, Sample
from teamtr.analysis.report.section import Answer, Data, Section, register
from teamtr.text import counted

MOST_QUOTED, LONGEST_QUOTE = 4, 40
"""Maximum messages, and characters of each, of the conversation quoted at the top of a report."""


def compute(run: Reading) -> Data:
    """``problems`` of a batch, ``sample`` and ``example`` are null if no batch was read, as on the live page."""
    held = {} if run.sample is None else run.sample.held
    return {
        "batches": [
            {"name": b.name, "stage": b.stage, "step": b.step, "problems": _problems(held.get(b.name))}
            for b in run.batches
        ],
        "sample": None if run.sample is None else _sampled(run.sample, len(run.batches)),
        "example": _example(held),
    }


def _problems(held: Data | None) -> list[str] | None:
    return None if held is None else [problem["id"] for problem in held["problems"]]


def _sampled(sample: Sample, stored: int) -> dict[str, Any]:
    return {
        "batches": len(sample.held),
        "stored_batches": stored,
        "episodes": sum(len(held["episodes"]) for held in sample.held.values()),
        "rule": sample.rule,
    }


def _example(conversations: Data) -> dict[str, Any] | None:
    """The messages and verdict of an episode of the last batch in the report."""
    for held in reversed(list(conversations.values())):
        for episode in held["episodes"]:
            said = [{"who": message["who"], "text": message["text"]} for message in episode["said"]]
            return {"verdict": episode["verdict"], "said": said}
    return None


def answer(data: Data) -> Answer:
    question, batches = "What do the agents say to each other?", data["batches"]
    if not batches:
        return Answer(question, "plain", "not stored", "No episodes are stored with this run.")
    verdicts = data["evals"][-1]["verdicts"] if data["evals"] else {}
    told = ", ".join(f"{count} {kind}" for kind, count in verdicts.items())
    text = _quoted(data["example"]) if data["example"] else ""
    text += f"{counted(len(batches), 'batch is', 'batches are')} stored, under Conversations."
    text += f" Verdicts of the last evaluation: {told}." if told else ""
    return Answer(question, "plain", counted(data["cost"]["episodes"], "episode"), text)


def _quoted(episode: Data) -> str:
    """The first messages of one conversation, each shortened to its first words."""
    said = episode["said"][:MOST_QUOTED]
    quotes = [f"{message['who']} “{_first_words(message['text'])}”" for message in said]
    more = len(episode["said"]) - len(said)
    after = f", and {more} more" if more else ""
    return f"One of the last: {', '.join(quotes)}{after}; verdict: {episode['verdict']}. "


def _first_words(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 1]}…"


register(
    Section(
        key="conversations",
        title="Conversations",
        place=70,
        compute=compute,
        answer=answer,
        script="conversations.js",
    )
)
