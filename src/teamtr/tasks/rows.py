"""Rows of a data file: jsonl, a JSON list, parquet, or a dataset of the hub, with the place of each row for errors."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr.errors import Misuse


class DataError(Misuse):
    """A data file that cannot be used as it is; says where and what to do."""


@dataclass(frozen=True)
class Row:
    """One row and where it stands: ``where`` begins every error about it."""

    where: str
    cells: Mapping[str, Any]


def read_rows(file: Path) -> Iterator[Row]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no such data file")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(file)
        case ".parquet":
            return _parquet_rows(file)
    raise DataError(f"{file}: data must be .jsonl (one JSON object a line) or .parquet")


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                cells = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
                ) from None
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}, column {error.colno}: not JSON ({error.msg}); found {shown(line)}: every line must be "
                    "one whole JSON object"
                ) from None
            if not isinstance(cells, dict):
                raise DataError(f"{where}: a row must be a JSON object, found {shown(cells)}")
            yield Row(where, cells)


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{file}: reading parquet needs pyarrow: pip install 'teamtr[parquet]'") from None
    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error})") from None
    for number, cells in enumerate(table.to_pylist(), start=1):
        where = f"{file}, row {number}"
        yield Row(where, {key: _plain(value, f"{where}, column {key!r}") for key, value in cells.items()})


def _plain(value: Any, where: str) -> Any:
    """The value as JSON can hold it: it travels to the graders and into the record of episodes."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(item, where) for item in value]
        case dict():
            return {str(key): _plain(item, where) for key, item in value.items()}
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise DataError(f"{where}: cannot use a value of type {type(value).__name__}: store it as text, or drop the column")


def shown(value: Any) -> str:
    """The value in at most 80 characters, for an error."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
