"""The append-only log, one JSON object per line, and the JSON dialect of the whole store.

JSON has no nan, no infinity, no integer beyond 64 bits and no lone surrogate, and a diverging run has all of them.
Writing null or a string would lose them silently, so each becomes an object with one key that starts with a
dollar sign, and reading converts it back:

    math.nan -> {"$float": "nan"}        math.inf -> {"$float": "inf"}
    2**100   -> {"$int": "0x1000..."}    "\\udc80" -> {"$str": "<hex of its UTF-8 bytes>"}

A key of the caller that starts with a dollar sign is written with one more dollar sign. Numpy scalars and arrays are
written as numbers and lists. A tuple is read back as a list, and every nan as the same nan.

Every line of the log ends with its own checksum, ``"$crc"``, which detects a digit changed on disk. Lines written by
versions before 0.2 have none.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from teamtr.bounded_json import DEEPEST, is_deeper
from teamtr.records import AnyRecord, RecordError, decode_record, encode_record, require_known
from teamtr.store.atomic import StoreError, explained, make_folder, read_whole, sync_folder, write_atomic

MOST_BITS = 1000
"""Maximum size of an integer: three hundred digits, which every reader accepts and a float can represent."""
_LONGEST_HEX = len("-0x") + MOST_BITS // 4


def encode(value: Any, where: str, *, sort_keys: bool = False) -> bytes:
    """One line of JSON without its newline. ``where`` names the value in error messages."""
    try:
        return orjson.dumps(_to_json(value), option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except _Unfit as unfit:
        raise StoreError(f"{where}{unfit.path}{unfit.why}") from None
    except TypeError as error:
        raise StoreError(
            f"{where} cannot be written as JSON ({error}): store less deeply nested, plain values"
        ) from error


def decode(data: bytes) -> Any:
    """The inverse of ``encode``. Raises ValueError for bytes that it cannot have written."""
    value = orjson.loads(data)
    if data.count(b"[") + data.count(b"{") > DEEPEST and is_deeper(value):
        raise ValueError(f"nested deeper than {DEEPEST}")
    return _from_json(value) if b'"$' in data else value


_SEAL = re.compile(rb',"\$crc":"([0-9a-f]{8})"}\Z')


def sealed(line: bytes) -> bytes:
    """An encoded, non-empty record with its checksum at the end."""
    return line[:-1] + f',"$crc":"{zlib.crc32(line):08x}"}}'.encode()


def unsealed(line: bytes) -> tuple[bytes, bool | None]:
    """The record without its checksum, and whether the checksum matches; None if there is none."""
    line = line.rstrip(b"\n")
    if (seal := _SEAL.search(line)) is None:
        return line, None
    whole = line[: seal.start()] + b"}"
    return whole, zlib.crc32(whole) == int(seal[1], 16)


@dataclass(frozen=True)
class LogMark:
    """The extent of a log: the number of its complete records, their bytes, and a hash of them."""

    records: int
    bytes: int
    sha256: str


class _Line(NamedTuple):
    record: dict[str, Any]
    end_bytes: int  # where the line ends in the file, newline included
    intact: bool | None  # by its checksum, if it has one


class Log:
    """``log.jsonl``. A record counts once its line, newline included, is in the file.

    A process killed while appending leaves an incomplete last line: reading ignores it, the next append removes it.
    """

    def __init__(self, path: Path, *, writable: bool = True, guard: Callable[[], None] = lambda: None) -> None:
        """``guard`` is called before anything is written, and raises if nothing may be written."""
        self.path = Path(path)
        self._writable = writable
        self._guard = guard
        self._tail_is_whole = False
        self._hash = hashlib.sha256()
        self._hashed = LogMark(0, 0, "")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; on return it is on the disk."""
        self._require_writable()
        line = sealed(encode(record, f"record for {self.path}")) + b"\n"
        if not self._tail_is_whole:
            self.truncate_torn()
        self._tail_is_whole = False
        with explained(self.path):
            is_new = not self.path.exists()
            with open(self.path, "ab", buffering=0) as file:
                written_bytes = file.write(line)
                if written_bytes != len(line):
                    raise OSError(f"only {written_bytes} of {len(line)} bytes were taken")
                os.fsync(file.fileno())
            if is_new:
                sync_folder(self.path.parent)
        self._tail_is_whole = True
        self._hash.update(line)
        self._hashed = LogMark(self._hashed.records + 1, self._hashed.bytes + len(line), "")

    def read(self) -> list[dict[str, Any]]:
        """Every complete record, oldest first. Raises StoreError, with the line number, if a line before the last is
        damaged."""
        return [line.record for line in self._lines(self._bytes())]

    def truncate_torn(self) -> int:
        """Remove an incomplete last line; returns the number of bytes removed."""
        self._require_writable()
        make_folder(self.path.parent)
        data = self._bytes()
        whole_bytes = _end(self._lines(data))
        if whole_bytes < len(data):
            with explained(self.path), open(self.path, "r+b") as file:
                file.truncate(whole_bytes)
                os.fsync(file.fileno())
        self._is_whole(data[:whole_bytes])
        return len(data) - whole_bytes

    def mark(self) -> LogMark:
        """The mark of what this process has written or read of the file."""
        if not self._tail_is_whole:
            self.truncate_torn()
        return LogMark(self._hashed.records, self._hashed.bytes, self._hash.hexdigest())

    def lost(self, mark: LogMark) -> int | None:
        """How many records before this mark are missing; 0 if only their content differs, None if all are intact."""
        data = self._bytes()[: mark.bytes]
        if hashlib.sha256(data).hexdigest() == mark.sha256:
            return None
        return max(0, mark.records - data.count(b"\n"))

    def altered(self) -> list[int]:
        """The numbers, from 1, of lines that can be read but were changed: their checksum is wrong, or missing after
        lines that have one."""
        found, checked = [], False
        for number, line in enumerate(self._lines(self._bytes()), start=1):
            checked = checked or line.intact is not None
            if not line.intact and checked:
                found.append(number)
        return found

    def _is_whole(self, data: bytes) -> None:
        """Record ``data`` as the present content of the file."""
        self._tail_is_whole = True
        self._hash = hashlib.sha256(data)
        self._hashed = LogMark(data.count(b"\n"), len(data), "")

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        """Truncate the log, atomically, to its longest prefix of records that satisfy ``keep``.

        Returns how many records were removed. On resume this drops what was logged after the last committed update. The
        remaining lines are unchanged, byte for byte.
        """
        self._require_writable()
        data = self._bytes()
        lines = self._lines(data)
        kept = next((i for i, line in enumerate(lines) if not keep(line.record)), len(lines))
        end_bytes = _end(lines[:kept])
        if end_bytes < len(data):
            write_atomic(self.path, data[:end_bytes])
            self._is_whole(data[:end_bytes])
        return len(lines) - kept

    def _bytes(self) -> bytes:
        try:
            return read_whole(self.path)
        except FileNotFoundError:
            return b""

    def _lines(self, data: bytes) -> list[_Line]:
        found: list[_Line] = []
        start = 0
        while (newline := data.find(b"\n", start)) >= 0:
            end = newline + 1
            try:
                body, intact = unsealed(data[start:newline])
                record = decode(body)
                if not isinstance(record, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                if end == len(data):  # after a power cut the last line may have its length but not its content
                    break
                raise StoreError(
                    f"{self.path}, line {len(found) + 1} is damaged ({error}): restore the file from a copy, or "
                    "delete that line and the lines after it and run the same command again"
                ) from error
            found.append(_Line(record, end, intact))
            start = end
        return found

    def _require_writable(self) -> None:
        if not self._writable:
            raise StoreError(f"{self.path} was opened for reading; open the run folder with RunFolder.open to write")
        self._guard()


class RunLog(Log):
    """A log of typed records: the only writer and reader of the records that a run resumes from."""

    def write(self, record: AnyRecord) -> dict[str, Any]:
        """Add one record; on return it is on the disk. Returns what was written."""
        written = encode_record(record)
        self.append(written)
        return written

    def records(self) -> list[AnyRecord]:
        """Every complete record, oldest first. Raises StoreError if one does not have the form of its kind."""
        found: list[AnyRecord] = []
        for record in self.read():
            try:
                found.append(decode_record(record))
            except RecordError as error:
                raise StoreError(
                    f"{self.path}, line {len(found) + 1} is not a record to resume from ({error}): restore the file "
                    "from a copy, or start another run"
                ) from error
        return found

    def require_known(self) -> None:
        """Raise NewerLog if the log is of a newer version or has a record of an unknown kind, which is named."""
        require_known(self.read(), self.path)


def _end(lines: list[_Line]) -> int:
    return lines[-1].end_bytes if lines else 0


class _Unfit(Exception):
    """A value that JSON cannot represent. ``path`` locates it, and is built only while the exception propagates, since
    nearly every value is fine."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path = ""

    def below(self, step: str) -> _Unfit:
        self.path = step + self.path
        return self


_USUAL: Mapping[type, Callable[[Any], bool]] = {
    str: str.isascii,
    float: math.isfinite,
    int: range(-(2**63), 2**64).__contains__,
    bool: {True, False}.__contains__,
    type(None): {None}.__contains__,
    list: not_,  # an empty list
    dict: not_,
}
"""By type, which values are written unchanged; the predicates run in C."""


def _to_json(value: Any, depth: int = 1) -> Any:
    """Checks the common types first, inline, for speed: a batch of episodes has a hundred thousand values."""
    if depth >= DEEPEST:
        raise _Unfit(f" is nested deeper than {DEEPEST - 1}: store less deeply nested values")
    kind = type(value)
    usual = _USUAL.get(kind)
    if usual is not None and usual(value):
        return value
    if kind is np.ndarray:  # before the check for a mapping, which takes longer than the rest
        return _unusual_to_json(value, depth)
    if kind is dict or isinstance(value, Mapping):
        made = {}
        for key, item in value.items():
            name = key if type(key) is str and key.isascii() and key[:1] != "$" else _to_key(key)
            usual = _USUAL.get(type(item))
            if usual is not None and depth < DEEPEST - 1 and usual(item):  # no recursive call for most values
                made[name] = item
                continue
            try:
                made[name] = _to_json(item, depth + 1)
            except _Unfit as unfit:
                raise unfit.below(f".{key}") from None
        return made
    if kind is list or isinstance(value, list | tuple):
        items = []
        for item in value:
            usual = _USUAL.get(type(item))
            if usual is not None and depth < DEEPEST - 1 and usual(item):
                items.append(item)
                continue
            try:
                items.append(_to_json(item, depth + 1))
            except _Unfit as unfit:
                raise unfit.below(f"[{len(items)}]") from None
        return items
    return _unusual_to_json(value, depth)


def _unusual_to_json(value: Any, depth: int) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        if value.dtype.kind != "f":
            return value.tolist()
        items = value.astype(np.float64).tolist()
        plain = value.ndim == 1 and math.isfinite(sum(items))  # faster in C for the usual few tokens
        return items if plain or np.isfinite(value).all() else _to_json(items, depth)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, str):
        return {"$str": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogate(value) else str(value)
    if isinstance(value, int | np.integer):
        if int(value).bit_length() > MOST_BITS:
            raise _Unfit(f" is a number of more than {MOST_BITS} bits: store it as text")
        return int(value) if -(2**63) <= value < 2**64 else {"$int": hex(value)}
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    raise _Unfit(f" is a {type(value).__name__}, which JSON cannot hold: store numbers, text, lists, mappings or None")


def _to_key(key: Any) -> str:
    if not isinstance(key, str) or _has_surrogate(key):
        raise _Unfit(f" has the key {key!r}: keys must be text, so that they come back as they were")
    return f"${key}" if key.startswith("$") else str(key)


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": str(text)}:
            return float(text)
        case {"$int": str(text)}:
            if len(text) > _LONGEST_HEX:
                raise ValueError(f"a number of more than {MOST_BITS} bits")
            return int(text, 16)
        case {"$str": str(text)}:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
    if unknown := [key for key in value if key.startswith("$") and not key.startswith("$$")]:
        raise ValueError(f"unknown mark {unknown[0]}")
    return {key.removeprefix("$"): _from_json(item) for key, item in value.items()}
