"""The server of the live page: local, read-only, and accessible with a secret link.

- Every path begins with a random token; any other request is answered with 403 and no information.
- The Host header of a request must name the bound address (``teamtr.web``).
- Runs and batches are looked up in listings of the folders. No path is ever built from a request.
- It reads logs incrementally, takes no run's lock, writes nothing, and runs at low priority, so that training is not
  disturbed. Reading a large run does not delay requests for other runs.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from teamtr.analysis.diagnostics.probes import token_kls
from teamtr.analysis.report.conversations import batch_payload, choose_groups
from teamtr.analysis.report.page import live_page, shown_plainly, to_json
from teamtr.analysis.report.reading import LogTail, Reading, list_batches, read_run
from teamtr.analysis.report.spelling import speller
from teamtr.analysis.report.summary import summarise
from teamtr.store import RunFolder, StoreError, TornRead, is_run, read_episodes, runs_in
from teamtr.web import WebServer, header, send_bytes

MOST_EPISODES = 512
REST = 50.0
"""The wait until the next summary, as a multiple of the time of the last: at most two percent of one processor."""
AT_ONCE = 0.02
"""Summaries that take fewer seconds than this need no wait: the page polls every two seconds."""
THREADS = 8
"""Number of runs that are read concurrently."""
_NO_ROOM = to_json({"error": "there is not enough memory to answer now"}).encode()


@dataclass(frozen=True)
class _Kept:
    """A cached summary, the stamp of the state that it summarizes, and the time until which it is reused."""

    stamp: str
    report: dict[str, Any]
    sections: list[dict[str, Any]]
    rests_until: float


class _Watched:
    """One viewed run: its log as far as it was read, and the last summary. Locked against concurrent reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = LogTail(path / "log.jsonl")
        self._kept: _Kept | None = None
        self._lock = threading.Lock()

    def summary(self) -> _Kept:
        with self._lock:
            kept = self._kept
            if kept is None or time.monotonic() >= kept.rests_until:
                kept = self._kept = self._read(kept)
            return kept

    def reading(self) -> Reading:
        with self._lock:
            return read_run(self.path, self._tail)

    def _read(self, kept: _Kept | None) -> _Kept:
        """The summary of the run's current state. The longer a summary took, the longer the next one waits, so that a
        large run does not use more of the machine than a small one."""
        started = time.thread_time()
        tail = self._tail
        tail.poll()
        found = (_changed(self.path / "episodes"), int(bool(tail.torn_bytes)), int(RunFolder(self.path).is_in_use))
        stamp = "-".join(map(str, (tail.generation, tail.offset, *found)))
        if kept is not None and kept.stamp == stamp:
            return kept
        report = summarise(read_run(self.path, tail))
        sections = shown_plainly(report)
        took = time.thread_time() - started
        return _Kept(stamp, report, sections, time.monotonic() + (REST * took if took > AT_ONCE else 0.0))


class Library:
    """The runs that can be viewed. ``folders`` are runs, or folders of runs, which are listed again each time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()  # guards only the dictionary

    def runs(self) -> dict[str, Path]:
        """Every run by its key, newest log first."""
        found = {}
        for folder in self._folders:
            for path in [folder] if is_run(folder) else runs_in(folder):
                found[hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]] = path
        return dict(sorted(found.items(), key=lambda item: _modified(item[1]), reverse=True))

    def names(self) -> list[dict[str, str]]:
        return [{"key": key, "name": path.absolute().name} for key, path in self.runs().items()]

    def summary(self, key: str, stamp: str) -> dict[str, Any] | None:
        """The run's data, or only that nothing changed since ``stamp``; None if there is no such run."""
        watched = self._find(key)
        if watched is None:
            return None
        kept = watched.summary()
        if kept.stamp == stamp:
            return {"unchanged": True, "stamp": stamp}
        return {"stamp": kept.stamp, "report": kept.report, "sections": kept.sections}

    def batch(self, key: str, name: str) -> dict[str, Any] | None:
        """One stored batch; None if this run's listing has no such name."""
        watched = self._find(key)
        if watched is None:
            return None
        file = next((batch for batch in list_batches(watched.path / "episodes") if batch.name == name), None)
        if file is None:
            return None
        reading, batch = watched.reading(), read_episodes(file.path)
        kls = token_kls(reading.updates).get((file.stage, file.step), {})
        groups = choose_groups(batch, MOST_EPISODES, probed=[episode for episode, _ in kls])
        return batch_payload(file, batch, groups, reading.plan, reading.limits, speller(reading), kls)

    def _find(self, key: str) -> _Watched | None:
        path = self.runs().get(key)
        if path is None:
            return None
        with self._lock:
            return self._watched.setdefault(key, _Watched(path))


class LiveServer(WebServer):
    """Serves a library until it is shut down. ``link`` is the URL for the user to open."""

    def __init__(self, library: Library, *, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> None:
        shown = "conversations are shown to whoever holds the link"
        super().__init__(self._answer, host=host, port=port, allow_remote=allow_remote, shown=shown, drain_seconds=5)
        self.library = library
        self.token = secrets.token_urlsafe(24)
        self.page = live_page().encode()
        self.link = f"http://{host}:{self.server_port}/{self.token}/"
        self.threads = ThreadPoolExecutor(THREADS, initializer=_at_low_priority)

    def close(self) -> None:
        super().close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        parts = path.split("/")
        token = parts[1] if len(parts) >= 3 and parts[0] == "" else ""
        known = secrets.compare_digest(token.encode(errors="replace"), self.token.encode())
        if scope["method"] != "GET" or not known:
            await send_bytes(send, 403, b"forbidden\n", "text/plain")
            return
        stamp = parse_qs(query).get("stamp", [""])[0]
        compressed = b"gzip" in (header(scope, b"accept-encoding") or b"")
        try:
            looked = self.threads.submit(self._look, parts[2:], stamp, compressed)
        except (RuntimeError, MemoryError):  # no thread is available: report it, and the page retries
            await send_bytes(send, 503, _NO_ROOM, "application/json")
            return
        found = await asyncio.wrap_future(looked)
        more = {"Content-Encoding": "gzip"} if found.is_compressed else None
        await send_bytes(send, found.status, found.body, found.kind, more)

    def _look(self, parts: list[str], stamp: str, compressed: bool) -> _Found:
        """Handles a request in a worker thread, because reading a run takes time and must not block other requests."""
        try:
            found = self._route(parts, stamp)
        except (StoreError, TornRead) as error:
            found = _json({"error": str(error)}, 503)
        except MemoryError:
            found = _json({"error": "there is not enough memory to show this run now"}, 503)
        return found.compressed() if compressed else found

    def _route(self, parts: list[str], stamp: str) -> _Found:
        match parts:
            case [""]:
                return _Found(200, self.page, "text/html; charset=utf-8")
            case ["api", "runs"]:
                return _json({"runs": self.library.names()})
            case ["api", "run", key]:
                return _or_none(self.library.summary(key, stamp))
            case ["api", "batch", key, name]:
                return _or_none(self.library.batch(key, name))
            case _:
                return _json({"error": "there is nothing here"}, 404)


@dataclass(frozen=True)
class _Found:
    """A response before it is sent."""

    status: int
    body: bytes
    kind: str
    is_compressed: bool = False

    def compressed(self) -> _Found:
        """The response compressed, if it is long enough."""
        if len(self.body) <= 4096:
            return self
        return replace(self, body=gzip.compress(self.body, compresslevel=1), is_compressed=True)


def _json(value: Any, status: int = 200) -> _Found:
    return _Found(status, to_json(value).encode(), "application/json")


def _or_none(value: dict[str, Any] | None) -> _Found:
    return _json({"error": "there is no such run or batch"}, 404) if value is None else _json(value)


def _at_low_priority() -> None:
    """Lowers the thread's priority, so that training has precedence on a busy machine."""
    with suppress(OSError, AttributeError):  # on systems without priorities of threads
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(10, os.getpriority(os.PRIO_PROCESS, own)))


def _changed(folder: Path) -> int:
    """A number that changes whenever files are added or removed; cheaper than a listing."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _modified(run: Path) -> float:
    try:
        return (run / "log.jsonl").stat().st_mtime
    except OSError:
        return 0.0
