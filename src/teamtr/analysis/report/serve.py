"""The live page: a small read-only server on this machine, for whoever holds the link.

- Every path begins with a random token; anything else is answered 403 and told nothing.
- A request must name the address that was bound in its Host header: a foreign site cannot reach it by rebinding its
  own name to 127.0.0.1.
- Runs and batches are looked up in what a listing of the folders found. No path is ever made from a request.
- It reads the log from where it stopped, takes no lock of the run's, writes nothing, and answers at low priority:
  training goes on undisturbed. A run that takes long to read keeps nobody waiting who looks at another.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from teamtr.analysis.diagnostics.probes import token_kls
from teamtr.analysis.report.conversations import batch_payload, choose_groups
from teamtr.analysis.report.page import live_page, shown_plainly, to_json
from teamtr.analysis.report.reading import LogTail, Reading, list_batches, read_run
from teamtr.analysis.report.spelling import speller
from teamtr.analysis.report.summary import summarise
from teamtr.errors import UserError
from teamtr.store import StoreError, TornRead, read_episodes
from teamtr.text import on_terminal

LOOPBACK = ("127.0.0.1", "localhost")
MOST_EPISODES = 512
REST = 50.0
"""Times what a summary took until the next: at most two per cent of one processor."""
AT_ONCE = 0.02
"""Seconds of a summary that needs no rest: the page asks every two seconds."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}

_NO_ROOM_SAID = to_json({"error": "there is not enough memory to answer now"}).encode()
_NO_ROOM = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_NO_ROOM_SAID),
    _NO_ROOM_SAID,
)


@dataclass(frozen=True)
class _Kept:
    """A summary, what it is a summary of, and until when it will do."""

    stamp: str
    report: dict[str, Any]
    sections: list[dict[str, Any]]
    rests_until: float


class _Watched:
    """One run that is looked at: its log as far as it was read, and the last summary. One look at a time."""

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
        """The run as it is now. The longer a summary took, the longer the next one waits: a big run costs no more of
        the machine than a small one."""
        started = time.thread_time()
        tail = self._tail
        tail.poll()
        stamp = f"{tail.generation}-{tail.offset}-{_changed(self.path / 'episodes')}-{int(bool(tail.torn_bytes))}"
        if kept is not None and kept.stamp == stamp:
            return kept
        report = summarise(read_run(self.path, tail))
        sections = shown_plainly(report)
        took = time.thread_time() - started
        return _Kept(stamp, report, sections, time.monotonic() + (REST * took if took > AT_ONCE else 0.0))


class Library:
    """The runs that can be looked at. ``folders`` are runs, or folders of runs, which are listed anew each time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()  # of the dictionary alone

    def runs(self) -> dict[str, Path]:
        """Every run by its key, newest log first."""
        found = {}
        for folder in self._folders:
            for path in [folder] if _is_run(folder) else _runs_in(folder):
                found[hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]] = path
        return dict(sorted(found.items(), key=lambda item: _modified(item[1]), reverse=True))

    def names(self) -> list[dict[str, str]]:
        return [{"key": key, "name": path.absolute().name} for key, path in self.runs().items()]

    def summary(self, key: str, stamp: str) -> dict[str, Any] | None:
        """The run's data, or only the news that nothing changed since ``stamp``; None when there is no such run."""
        watched = self._find(key)
        if watched is None:
            return None
        kept = watched.summary()
        if kept.stamp == stamp:
            return {"unchanged": True, "stamp": stamp}
        return {"stamp": kept.stamp, "report": kept.report, "sections": kept.sections}

    def batch(self, key: str, name: str) -> dict[str, Any] | None:
        """One stored batch; None when this run's listing has no such name."""
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


class LiveServer(ThreadingHTTPServer):
    """Serves a library until it is shut down. ``link`` is what a person opens."""

    daemon_threads = True

    def __init__(self, library: Library, *, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> None:
        _require_address(host)
        if host not in LOOPBACK and not allow_remote:
            raise UserError(
                f"--host {host} would let other machines in: conversations are shown to whoever holds the link, over "
                "plain HTTP. Add --allow-remote if that is what you want"
            )
        self.library = library
        self.token = secrets.token_urlsafe(24)
        self.page = live_page().encode()
        self.checks_host = host in LOOPBACK
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(_why_not(host, port, error)) from error
        self.link = f"http://{host}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; where none can be had, say so and let go: the page asks again."""
        try:
            super().process_request(request, client_address)
        except (RuntimeError, MemoryError):
            with suppress(OSError):
                request.settimeout(1.0)
                request.recv(1 << 16)  # else closing would take the answer back
                request.sendall(_NO_ROOM)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer when nobody else needs the processor: on a busy machine training comes first."""
        with suppress(OSError, AttributeError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is no error; any other is told as Python tells it, but for what a request may hold."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            sys.stderr.write(on_terminal(traceback.format_exc()))

    def admits(self, host_header: str | None) -> bool:
        """Whether the Host header names the loopback address that was bound."""
        return not self.checks_host or host_header in {f"{name}:{self.server_port}" for name in LOOPBACK}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30
    server_version = "teamtr"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
            parts, query = asked.path.split("/"), parse_qs(asked.query)
        except ValueError:  # such as http://[::1/
            parts, query = [], {}
        known = (
            len(parts) >= 3
            and parts[0] == ""
            and secrets.compare_digest(parts[1].encode(errors="replace"), self.server.token.encode())
        )
        if not known or not self.server.admits(self.headers.get("Host")):
            self._answer(403, b"forbidden\n", "text/plain")
            return
        try:
            self._route(parts[2:], query.get("stamp", [""])[0])
        except (StoreError, TornRead) as error:
            self._json({"error": str(error)}, 503)
        except MemoryError:
            self._json({"error": "there is not enough memory to show this run now"}, 503)

    def _route(self, parts: list[str], stamp: str) -> None:
        library = self.server.library
        match parts:
            case [""]:
                self._answer(200, self.server.page, "text/html; charset=utf-8")
            case ["api", "runs"]:
                self._json({"runs": library.names()})
            case ["api", "run", key]:
                self._found(library.summary(key, stamp))
            case ["api", "batch", key, name]:
                self._found(library.batch(key, name))
            case _:
                self._json({"error": "there is nothing here"}, 404)

    def _found(self, value: dict[str, Any] | None) -> None:
        if value is None:
            self._json({"error": "there is no such run or batch"}, 404)
        else:
            self._json(value)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, to_json(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if len(body) > 4096 and "gzip" in (self.headers.get("Accept-Encoding") or ""):
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self) -> None:
        self._answer(403, b"forbidden\n", "text/plain")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def do_HEAD(self) -> None:
        self.send_response(403)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a request line holds the token."""


def _require_address(host: str) -> None:
    """Refuse what no machine can listen on, before anything is said of who could reach it."""
    is_number = bool(host) and not host.strip("0123456789.")  # nobody need be asked what it means
    try:
        socket.getaddrinfo(host, None, family=socket.AF_INET, flags=socket.AI_NUMERICHOST if is_number else 0)
    except (OSError, UnicodeError):
        raise UserError(f"--host {host!r} is no IPv4 address and no name of one: leave it out for 127.0.0.1") from None


def _why_not(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is in use: choose another, or --port 0, which takes a free one"
        case errno.EACCES:
            return f"port {port} is not for you to open: choose one from 1024 on, or --port 0, which takes a free one"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine: leave it out for 127.0.0.1"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}"


def _is_run(folder: Path) -> bool:
    return (folder / "team.yaml").is_file() or (folder / "log.jsonl").is_file()


def _runs_in(folder: Path) -> list[Path]:
    """The runs that lie directly in the folder. Links are not followed: they may lead anywhere."""
    if not folder.is_dir():
        return []
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    return [path for path in below if _is_run(path)]


def _changed(folder: Path) -> int:
    """A number that differs whenever files came or went: cheaper than a listing."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _modified(run: Path) -> float:
    try:
        return (run / "log.jsonl").stat().st_mtime
    except OSError:
        return 0.0
