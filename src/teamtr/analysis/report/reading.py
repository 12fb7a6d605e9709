"""Reads an untrusted run folder: torn, missing or newer data is noted, and the rest is shown.

Nothing here takes the run's lock, verifies weights or writes, so viewing a run never slows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from teamtr.batches import RolloutBatch
from teamtr.config import ConfigError, TeamFile, loads_stored
from teamtr.config.source import LONGEST
from teamtr.presets import Plan
from teamtr.records import LOG_VERSION, Record, log_version, mapping, of_kind, unknown_kinds
from teamtr.store import NotARun, RunFolder, remedy_for
from teamtr.store.folder import open_own
from teamtr.store.log import decode, unsealed

_BATCH = re.compile(r"stage-([0-9]{4,9})-step-([0-9]{2,9})\.jsonl\.gz")
_COMMIT = re.compile(r"[0-9]{6,12}")
_LARGEST_COMMIT = 64 << 20  # bytes of its team.json

LAST_BYTES = 256
LONGEST_LINE = 64 << 20
"""Maximum bytes of a record in a log."""
HELD_BYTES = 24 << 20
"""Maximum bytes of updates and evaluations kept from a log. With everything derived for a page they take about seven
times as much memory."""


@dataclass(frozen=True)
class BatchFile:
    """One stored batch: the conversations that the update at this step of this stage was trained on."""

    name: str
    stage: int
    step: int
    path: Path


class _Entry(NamedTuple):
    """A record, the bytes of its line, and the index of its stage in the order of the log; None for a record that is
    always kept."""

    record: dict[str, Any]
    size: int
    stage: int | None


class LogTail:
    """The records of a growing log, read incrementally.

    A resumed run truncates its log by replacing the file; then everything is read again, as it is whenever the log is
    shorter than before or its content changed. A last line without a newline is still being written (or was torn):
    ``torn_bytes`` counts its bytes, and it is read again later.

    A large log is thinned: if the lines of updates and evaluations exceed ``HELD_BYTES``, only those of every second
    stage are kept, then of every fourth, and so on; ``every`` is that factor. The update before each kept stage, the
    last update of each training command, and the newest update and evaluation, are kept as well. Records of other
    kinds are all kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing = False
        self.generation = 0
        self._inode: int | None = None
        self._last: bytes
        self._begin_again(None)

    def poll(self) -> bool:
        """Read new lines; returns whether there were any."""
        try:
            with open_own(self.path) as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self.offset - len(self._last))
                if inode != self._inode or file.read(len(self._last)) != self._last:
                    self._begin_again(inode)
                    self.generation += 1
                    file.seek(0)
                began = self.offset
                while line := file.readline(LONGEST_LINE):
                    size, end = len(line), line
                    while not end.endswith(b"\n") and (more := file.readline(LONGEST_LINE)):
                        size, end = size + len(more), more
                    if not end.endswith(b"\n"):
                        self.torn_bytes = size
                        break
                    self._take(line)  # of a line that is too long only the beginning, which is no record
                    self.offset += size
                    self._last = end[-LAST_BYTES:]
                else:
                    self.torn_bytes = 0
        except OSError:
            self.missing = True
            return False
        self.missing = False
        return self.offset > began

    @property
    def records(self) -> list[dict[str, Any]]:
        """The kept records, oldest first."""
        return [entry.record for entry in _thinned(self._entries, self.every)]

    def _begin_again(self, inode: int | None) -> None:
        self.damaged: list[str] = []
        self.offset = self.torn_bytes = self.updates = 0
        self.every = 1
        self._inode = inode
        self._last = b""  # the end of what was read
        self._entries: list[_Entry] = []
        self._held_bytes = self._lines = 0
        self._room = HELD_BYTES
        self._stage: tuple[int, object] = (-1, self)  # its index, and its value in the log: none yet

    def _take(self, line: bytes) -> None:
        self._lines += 1
        try:
            body, intact = unsealed(line)
            record = decode(body)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            if intact is False:
                raise ValueError("it is not what was written")
        except ValueError as error:
            self.damaged.append(f"line {self._lines} of the log cannot be read and was left out ({error})")
            return
        kind = record.get("kind")
        if kind not in ("update", "eval"):
            self._entries.append(_Entry(record, len(line), None))
            return
        if kind == "update":
            self.updates += 1
            number, named = self._stage
            self._stage = number + (record.get("stage") != named), record.get("stage")
        self._entries.append(_Entry(record, len(line), max(self._stage[0], 0)))
        self._held_bytes += len(line)
        if self._held_bytes > self._room:
            self._make_room()

    def _make_room(self) -> None:
        self._hold(_thinned(self._entries, self.every))
        while (before := self._held_bytes) > HELD_BYTES // 2:
            self.every *= 2
            self._hold(_thinned(self._entries, self.every))
            if self._held_bytes == before:  # a single long stage: avoid thinning again at every line
                break
        self._room = max(HELD_BYTES, 2 * self._held_bytes)

    def _hold(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self._held_bytes = sum(entry.size for entry in entries if entry.stage is not None)


def _thinned(entries: list[_Entry], every: int) -> list[_Entry]:
    """The entries of every ``every``-th stage, with the update before each, the last update of each training command,
    and the newest update and evaluation."""
    if every == 1:
        return entries
    kept: list[_Entry] = []
    wanted = {"update", "eval"}  # kinds whose next entry, going backwards, is kept
    for entry in reversed(entries):
        kind = entry.record.get("kind")
        if entry.stage is not None and entry.stage % every == 0:
            wanted.add("update")
        elif entry.stage is not None and kind not in wanted:
            continue
        elif kind == "eval":
            wanted = {"update"}
        elif kind == "update":
            wanted.discard("update")
        elif kind in ("start", "resume"):
            wanted.add("update")
        kept.append(entry)
    return kept[::-1]


@dataclass(frozen=True)
class Sample:
    """Stored batches that were read: ``batches`` are complete, ``held`` is the part of each in a page, by name.
    ``rule`` describes the selection."""

    batches: Sequence[tuple[BatchFile, RolloutBatch]]
    held: Mapping[str, Mapping[str, Any]]
    rule: str


@dataclass(frozen=True)
class Reading:
    """The contents of a run folder. ``notes`` tell the user what is missing and what is therefore not shown."""

    folder: Path
    records: Sequence[Record]
    team_text: str
    team_file: TeamFile | None
    progress: Mapping[str, Any]
    agents: Mapping[str, str]
    """The stored version of each agent in the newest commit."""
    batches: Sequence[BatchFile]
    notes: Sequence[str] = field(default_factory=tuple)
    sample: Sample | None = None
    """Sample of the stored batches; None on the live page, which reads a batch when it is viewed."""
    is_in_use: bool = False
    """Whether a process appears to be training this run now."""

    @property
    def updates(self) -> list[Record]:
        return of_kind(self.records, "update")

    @property
    def evals(self) -> list[Record]:
        return of_kind(self.records, "eval")

    @property
    def plan(self) -> Plan | None:
        return None if self.team_file is None else self.team_file.sized_plan()

    @property
    def limits(self) -> Mapping[str, int]:
        """Maximum tokens of a message, by agent."""
        agents = () if self.team_file is None else self.team_file.team.agents
        return {agent.name: agent.max_tokens for agent in agents}

    @property
    def account(self) -> Mapping[str, Any]:
        return mapping(self.progress, "account")


def read_run(path: Path | str, tail: LogTail | None = None) -> Reading:
    """Read the run in this folder; raises StoreError if it is not a run. ``tail`` continues from its last position."""
    folder = Path(path)
    if not folder.is_dir():
        raise NotARun(f"there is no run folder {folder}: check the path")
    run = RunFolder(folder)
    if not (run.log.path.is_file() or run.team_file.is_file() or run.checkpoints.folder.is_dir()):
        lacking = "no log.jsonl, team.yaml or checkpoints in it"
        raise NotARun(f"{folder} is not a run folder ({lacking}): {remedy_for(folder)}")
    notes: list[str] = []
    tail = tail or LogTail(run.log.path)
    tail.poll()
    records = tail.records
    notes += _log_notes(tail, records)
    team_text, team_file = _read_team_file(run.team_file, notes)
    progress, agents = _read_commit(run, notes)
    batches = list_batches(run.episodes)
    if not batches:
        notes.append(
            "No episodes are stored (store.episodes is false, or they were removed or put behind a link): no "
            "conversations."
        )
    return Reading(
        folder, records, team_text, team_file, progress, agents, batches, tuple(notes), is_in_use=run.is_in_use
    )


def list_batches(folder: Path) -> tuple[BatchFile, ...]:
    """The stored batches in chronological order; none if the folder is a symbolic link, which may lead anywhere."""
    if folder.is_symlink():
        return ()
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return ()
    found = [(match, name) for name in names if (match := _BATCH.fullmatch(name))]
    batches = [BatchFile(name, int(match[1]), int(match[2]), folder / name) for match, name in found]
    return tuple(sorted(batches, key=lambda batch: (batch.stage, batch.step)))


def _log_notes(tail: LogTail, records: Sequence[Record]) -> list[str]:
    notes = [f"{what[0].upper()}{what[1:]}." for what in tail.damaged[:5]]
    if len(tail.damaged) > 5:
        notes.append(f"{len(tail.damaged) - 5} more lines of the log cannot be read.")
    if tail.every > 1:
        notes.append(
            f"The log is large: of its {tail.updates:,} updates those of one stage in {tail.every} are shown, with the "
            "evaluations after them, and figures about updates and evaluations are of these."
        )
    if tail.missing:
        notes.append(
            "There is no log.jsonl, or none that is a plain file: nothing about updates and evaluations can be shown."
        )
    if tail.torn_bytes:
        notes.append(
            f"The last line of the log is torn ({tail.torn_bytes} bytes): it is being written, or its writer was "
            "killed. It is not shown; a resumed run writes it again."
        )
    if (version := log_version(records)) > LOG_VERSION:
        notes.append(
            f"The log is of version {version}, and this version of TeamTR reads versions 1 to {LOG_VERSION}: what is "
            "new in it is not shown, and what is shown may mean something else."
        )
    if unknown := unknown_kinds(records):
        notes.append(f"Records of kinds that this version does not know are left out: {', '.join(unknown[:8])}.")
    return notes


@lru_cache(maxsize=64)
def _parsed(text: str, path: Path) -> TeamFile:
    """Parses a team file, cached: a live page reads it every few seconds, and parsing is the slowest part."""
    return loads_stored(text, path.name, path.parent)


def _read_team_file(path: Path, notes: list[str]) -> tuple[str, TeamFile | None]:
    try:
        with open_own(path) as file:
            text = file.read(4 * LONGEST).decode(errors="replace")
    except OSError:
        notes.append(
            "There is no team.yaml, or none that is a plain file: settings are unknown, and advantages are not shown."
        )
        return "", None
    try:
        return text, _parsed(text, path)
    except ConfigError as error:
        first = str(error).splitlines()[0]
        notes.append(f"The team file is not understood ({first}): it is shown as text, advantages are not shown.")
        return text, None


def _read_commit(run: RunFolder, notes: list[str]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Progress and agents of the newest readable commit. Its weights are not verified, because that is slow."""
    folder = run.checkpoints.folder / "commits"
    try:
        numbers = sorted(entry.name for entry in os.scandir(folder) if _COMMIT.fullmatch(entry.name))
    except OSError:
        numbers = []
    for number in reversed(numbers):
        try:
            body = decode(_own_bytes(run, folder / number / "team.json"))
        except (OSError, ValueError):
            notes.append(f"Checkpoint {int(number)} cannot be read.")
            continue
        if isinstance(body, dict):
            agents = mapping(body, "agents")
            own = {name: v for name, v in agents.items() if run.holds(_tokenizer_file(run, name, str(v)))}
            if len(own) < len(agents):
                notes.append("Agents whose stored files lead out of the run folder are not read: no texts of tokens.")
            return mapping(body, "progress"), own
    notes.append("No checkpoint can be read: tokens and seconds of sampling by agent are unknown.")
    return {}, {}


def _own_bytes(run: RunFolder, path: Path) -> bytes:
    if not run.holds(path):
        raise OSError(f"{path} leads out of the run folder")
    with open_own(path) as file:
        return file.read(min(os.fstat(file.fileno()).st_size, _LARGEST_COMMIT))  # read() allocates that much


def _tokenizer_file(run: RunFolder, agent: str, version: str) -> Path:
    return run.checkpoints.folder / "agents" / agent.replace("\0", "") / version.replace("\0", "") / "tokenizer.json"
