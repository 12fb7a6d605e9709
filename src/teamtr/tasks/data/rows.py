"""Reads rows, each with its location, from jsonl, a JSON list, csv, parquet, a folder of them, or a hub dataset."""

from __future__ import annotations

import csv
import datetime
import decimal
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from teamtr.bounded_json import DEEPEST, NotJson, read_json
from teamtr.errors import UserError
from teamtr.settings.paths import DATA_SUFFIXES
from teamtr.text import shown

LONGEST_LINE = 64 << 20
"""Maximum bytes of a row."""


class DataError(UserError):
    """A data file that cannot be used as it is; the message says where and what to do."""


class NoSuchData(DataError, FileNotFoundError):
    """The data file does not exist."""

    def __init__(self, file: Path) -> None:
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        near = get_close_matches(file.name, beside, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(f"{file}: there is no such data file{guess}")


class NeedsPackage(DataError, ImportError):
    """Reading the data needs a package that is not installed."""


@dataclass(frozen=True)
class Row:
    """One row and its location: ``where`` begins every error about it."""

    where: str
    cells: Mapping[str, Any]


# owner/name, owner/name:split or owner/name:configuration:split
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.-]+))?")
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff")
_OTHER_KINDS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url")


def read_rows(source: str | Path, *, half_characters: bool = False) -> Iterator[Row]:
    """The rows of a local file, of all data files in a folder, or of a hub dataset: ``owner/name``,
    ``owner/name:split``, ``owner/name:configuration:split``. Local files take precedence.

    ``half_characters``: accept text with a lone surrogate, which no model can be given.
    """
    file = Path(source)
    if file.is_dir():
        return _folder_rows(file, half_characters)
    if not file.is_file():
        hub_id = _HUB_ID.fullmatch(str(source))
        if hub_id is not None and file.suffix.lower() not in DATA_SUFFIXES:
            return _hub_rows(str(source), hub_id)
        raise NoSuchData(file)
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(file, half_characters)
        case ".json":
            return _json_rows(file, half_characters)
        case ".csv" | ".tsv":
            return _csv_rows(file)
        case ".parquet":
            return _parquet_rows(file)
    raise DataError(
        f"{file}: data must be .jsonl (one JSON object a line), .json (a list of objects), .csv, .tsv or .parquet"
    )


def data_files(folder: Path) -> list[Path]:
    """The data files in a folder, sorted by name; subfolders are not searched."""
    found = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    files = [file for file in found if file.suffix.lower() in DATA_SUFFIXES]
    if not files:
        there = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
        raise DataError(f"{folder}: a folder without data files ({', '.join(DATA_SUFFIXES)}); it holds {there}")
    return files


def splits_in(folder: Path) -> dict[str, Path] | None:
    """The files of a folder that are called ``train...`` and ``test...``; None if there are none. Raises DataError if
    it is not clear which file is for what."""
    files = data_files(folder)
    named = {split: [file for file in files if file.name.lower().startswith(split)] for split in ("train", "test")}
    if not any(named.values()):
        return None
    if any(len(found) != 1 for found in named.values()) or len(files) > 2:
        raise DataError(
            f"{folder}: it is not clear which of its files are for what ({', '.join(file.name for file in files)}): "
            "give task.train and task.test"
        )
    return {split: found[0] for split, found in named.items()}


def _folder_rows(folder: Path, half_characters: bool) -> Iterator[Row]:
    if splits_in(folder) is not None:
        raise DataError(f"{folder}: it holds files to train on and to test on: name one of them")
    for file in data_files(folder):
        yield from read_rows(file, half_characters=half_characters)


def _csv_rows(file: Path) -> Iterator[Row]:
    """Rows of text cells, whose columns the first line names."""
    tabs = file.suffix.lower() == ".tsv"
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter="\t" if tabs else ",", strict=True)
            header = next(reader, [])
            _check_header(file, header)
            for cells in reader:
                where = f"{file}, line {reader.line_num}"
                if not cells:
                    continue  # an empty line
                if len(cells) != len(header):
                    raise DataError(
                        f"{where}: {len(cells)} cells, and the first line names {len(header)} columns: put cells with "
                        "commas or line breaks in quotes"
                    )
                yield Row(where, dict(zip(header, cells, strict=True)))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not csv ({error}): save it as .jsonl, or mend it") from None


def _check_header(file: Path, header: list[str]) -> None:
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
        raise DataError(f"{file}, line 1: separated by {other!r}: save it with commas (with tabs: as .tsv)")
    twice = [name for name in header if header.count(name) > 1]
    if twice or not all(name.strip() for name in header):
        what = f"two columns are called {twice[0]!r}" if twice else "a column has no name"
        raise DataError(f"{file}, line 1: {what}: the first line must name every column")


def image_refusal(column: str, value: Any) -> str | None:
    """Why a value cannot be used, if it is an image (or audio, or video) or names one; None for anything else."""
    kind = "an image"
    match value:
        case {"type": str(said)} if said in _OTHER_KINDS:
            kind = f"of type {said!r}"
        case {"bytes": bytes() | bytearray() | str(), **rest} if set(rest) <= {"path"}:
            pass
        case str() if value.startswith("data:image/"):
            pass
        case str() if column.lower().rstrip("s") in ("image", "img", "picture") and value.lower().endswith(_IMAGES):
            pass
        case [first, *_]:
            return image_refusal(column, first)
        case _ if type(value).__module__.partition(".")[0] == "PIL":
            pass
        case _:
            return None
    return f"{kind}: teams of language models are given text alone; use data without it, or drop the column"


def _jsonl_rows(file: Path, half_characters: bool) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, raw in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            where = f"{file}, line {number}"
            if len(raw) > LONGEST_LINE:
                raise DataError(f"{where}: a row of more than {LONGEST_LINE} bytes: every line must be one JSON object")
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                cells = read_json(line, half_characters=half_characters)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
                ) from None
            except NotJson as error:
                if error.column is None:
                    raise DataError(f"{where}: {error.why}; found {shown(line)}: {_advice(error)}") from None
                raise DataError(
                    f"{where}, column {error.column}: not JSON ({error.why}); found {shown(line)}: every line must be "
                    "one whole JSON object"
                ) from None
            if not isinstance(cells, dict):
                raise DataError(f"{where}: a row must be a JSON object, found {shown(cells)}")
            yield Row(where, cells)


def read_json_file(file: Path, *, half_characters: bool = False) -> Any:
    """The content of a JSON file. Raises DataError with the position of an error."""
    try:
        return read_json(file.read_bytes().decode("utf-8-sig"), half_characters=half_characters)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except NotJson as error:
        if error.column is None:
            raise DataError(f"{file}: {error.why}: {_advice(error)}") from None
        raise DataError(f"{file}, line {error.line}, column {error.column}: not JSON ({error.why})") from None


def _advice(error: NotJson) -> str:
    """Advice for JSON that exceeds the bounds."""
    return "write the character itself" if "surrogate" in error.why else "store it as text"


def _json_rows(file: Path, half_characters: bool) -> Iterator[Row]:
    content = read_json_file(file, half_characters=half_characters)
    if not isinstance(content, list):
        raise DataError(f"{file}: a .json file must hold a list of objects, found {shown(content)}")
    for number, cells in enumerate(content, start=1):
        where = f"{file}, item {number}"
        if not isinstance(cells, dict):
            raise DataError(f"{where}: a row must be a JSON object, found {shown(cells)}")
        yield Row(where, cells)


def _hub_rows(source: str, hub_id: re.Match[str]) -> Iterator[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise NeedsPackage(
            f"{source}: there is no such file, and a data set of the hub needs datasets: pip install 'teamtr[hub]'"
        ) from None
    first, second = hub_id["first"], hub_id["second"]
    configuration, split = (first, second) if second else (None, first)
    try:
        loaded = datasets.load_dataset(hub_id["name"], configuration, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{source}: not a local file, and not to be had from the hub ({type(error).__name__}: "
            f"{shown(str(error))}): without a connection, download the data set elsewhere and give its file"
        ) from None
    if split is None:
        if len(loaded) != 1:
            raise DataError(f"{source} has the splits {sorted(loaded)}: name one, as in {source}:{sorted(loaded)[0]}")
        loaded = next(iter(loaded.values()))
    for number, cells in enumerate(loaded, start=1):
        where = f"{source}, row {number}"
        yield Row(where, {key: _plain(value, f"{where}, column {key!r}") for key, value in cells.items()})


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise NeedsPackage(f"{file}: reading parquet needs pyarrow: pip install 'teamtr[parquet]'") from None
    try:
        table = pyarrow.parquet.read_table(file)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{file}: not a parquet file that can be read ({shown(str(error))})") from None
    for number, cells in enumerate(rows, start=1):
        where = f"{file}, row {number}"
        yield Row(where, {key: _plain(value, f"{where}, column {key!r}") for key, value in cells.items()})


def _plain(value: Any, where: str, depth: int = 1) -> Any:
    """The value as plain JSON, because it is sent to graders and stored in the record of episodes."""
    if depth > DEEPEST:
        raise DataError(f"{where}: nested deeper than {DEEPEST}: store it as text")
    if refused := image_refusal("", value):
        raise DataError(f"{where}: {refused}")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(item, where, depth + 1) for item in value]
        case dict():
            return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise DataError(f"{where}: cannot use a value of type {type(value).__name__}: store it as text, or drop the column")
