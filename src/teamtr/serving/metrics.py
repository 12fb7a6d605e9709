"""Counters of the server, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teamtr.serving.schedule import Scheduler

if TYPE_CHECKING:
    from teamtr.serving.team import Choice


@dataclass
class Counts:
    """Counts since the start. The desk's lock protects them, except ``statuses``, which only the event loop changes."""

    answered: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, choice: Choice) -> None:
        self.answered += 1
        for message in choice.spoken:
            self.prompt_tokens[message.agent] += message.read
            self.sampled_tokens[message.agent] += message.written


def prometheus(counts: Counts, scheduler: Scheduler, pending: int) -> str:
    """The body of ``/metrics``."""
    work = scheduler.work
    parts = [
        _metric("choices_answered_total", "counter", "Choices answered.", [("", counts.answered)]),
        _metric("choices_cancelled_total", "counter", "Choices that nobody waited for.", [("", counts.cancelled)]),
        _metric("requests_refused_total", "counter", "Requests refused because of load.", [("", counts.refused)]),
        _metric("choices_pending", "gauge", "Choices being played or waiting.", [("", pending)]),
        _metric("rows_waiting", "gauge", "Messages that wait to be sampled.", [("", scheduler.waiting)]),
        _metric("batches_total", "counter", "Batches sampled.", [("", work.batches)]),
        _metric("rows_total", "counter", "Rows of these batches.", [("", work.rows)]),
        _metric("rows_put_back_total", "counter", "Rows that went on in another batch.", [("", work.put_back)]),
        _metric("prompt_tokens_total", "counter", "Tokens read, by agent.", _by("agent", counts.prompt_tokens.items())),
        _metric(
            "sampled_tokens_total", "counter", "Tokens written, by agent.", _by("agent", counts.sampled_tokens.items())
        ),
        _metric("http_responses_total", "counter", "Responses, by status.", _by("status", counts.statuses.items())),
    ]
    return "".join(parts)


def _by(label: str, found: Iterable[tuple[str | int, int]]) -> list[tuple[str, int]]:
    return [(f'{{{label}="{_escaped(str(name))}"}}', count) for name, count in sorted(found, key=str)]


def _metric(name: str, kind: str, about: str, values: Iterable[tuple[str, int]]) -> str:
    lines = [f"# HELP teamtr_{name} {about}", f"# TYPE teamtr_{name} {kind}"]
    lines += [f"teamtr_{name}{labels} {value}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
