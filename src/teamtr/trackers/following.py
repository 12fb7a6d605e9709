"""Connects trackers to a run: its records pass through unchanged, with messages about trackers in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from teamtr.records import TrackerRecord, encode_record
from teamtr.text import visible
from teamtr.trackers.feed import Feed, State
from teamtr.trackers.metrics import Point, point
from teamtr.trackers.sinks import AS_EVER, SINKS, Filing, Tracked

Record = dict[str, Any]
CLOSE_SECONDS = 15.0
"""How long a finished run waits for all its trackers together."""


def follow(
    records: Iterable[Record],
    names: Sequence[str],
    folder: Path,
    *,
    name: str,
    settings: Mapping[str, Any],
    filing: Filing = AS_EVER,
    history: Callable[[], Sequence[Record]],
) -> Iterator[Record]:
    """Yield the records of a run unchanged, and feed them to these trackers.

    Args:
        folder: the run folder; files of trackers go into its ``trackers``.
        filing: under which project, group and tags, and with how many conversations.
        history: the run's log, read when the first record has come. A resumed run first sends what a tracker does not
            have yet, so that nothing is lost that was dropped or in flight when the run ended. If it cannot be read,
            trackers get nothing from this command: a later one sends it.

    Yields:
        the records, and between them ``{"kind": "tracker", "text": ...}`` for each problem.
    """
    feeds: list[Feed] = []
    begun = False
    try:
        for record in records:
            refused: list[Record] = []
            if not begun and names:
                begun = True
                tracked = Tracked(name, folder / "trackers", dict(_flat(settings)), filing=filing)
                try:
                    past = [found for logged in history() if (found := point(logged)) is not None]
                    feeds = [_begin(each, tracked, past, new=record["kind"] == "start") for each in names]
                except Exception as error:  # no error of a tracker may end the run
                    refused = _none(names, error)
            elif (found := point(record)) is not None:
                for feed in feeds:
                    feed.put(found)
            yield record
            yield from refused
            yield from _news(feeds)
    finally:
        for feed in feeds:
            feed.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in feeds:
            feed.join(deadline)
    yield from _news(feeds)


def _begin(name: str, run: Tracked, past: Sequence[Point], *, new: bool) -> Feed:
    state = State() if new else State.read(run.folder / f"{name}.json")
    return Feed(name, SINKS[name](), run, state, [found for found in past if state.wants(found)])


def _none(names: Sequence[str], error: Exception) -> list[Record]:
    told = visible(" ".join(str(error).split()))[:300]
    why = f"the log could not be read back ({type(error).__name__}: {told}), so that it gets nothing of this command"
    return [_told(name, f"tracker {name}: {why}. Training continues") for name in names]


def _news(feeds: Sequence[Feed]) -> Iterator[Record]:
    for feed in feeds:
        while not feed.news.empty():
            yield _told(feed.name, feed.news.get())


def _told(tracker: str, text: str) -> Record:
    return encode_record(TrackerRecord(tracker=tracker, text=text))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted keys and text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _flat(item, f"{path}.{place}")
    elif value is not None:
        yield path, str(value)
