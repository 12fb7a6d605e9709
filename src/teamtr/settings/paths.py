"""Paths in a team file: relative to its folder, absolute once it is read, relative to the run folder that keeps it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BUILT_IN_MODELS = ("tiny", "tabular")
SOMEWHERE = "/"
"""Stands for every path where only the rest of a team file matters: no data, code or model is the root folder."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Anchor:
    """What the paths of a team file are relative to."""

    folder: Path

    def path(self, path: str) -> str:
        return os.path.abspath(self.folder / Path(path).expanduser())

    def file(self, name: str) -> str:
        """A file that is there made absolute; any other text as it is."""
        return self.path(name) if (self.folder / name).is_file() else name

    def model(self, name: str | None) -> str | None:
        """A folder made absolute; a built-in model or a hub id as it is."""
        if name is None or name in BUILT_IN_MODELS:
            return name
        return self.path(name) if _looks_like_a_path(name) or (self.folder / name).is_dir() else name

    def source(self, name: str | None) -> str | None:
        """A data file or folder made absolute; a data set of the hub as it is."""
        if name is None:
            return None
        is_there = Path(name).suffix.lower() in DATA_SUFFIXES or (self.folder / name).exists()
        return self.path(name) if _looks_like_a_path(name) or is_there else name


class SeenFrom(Anchor):
    """The way back: absolute paths as seen from the folder, so that both can move together. A path that has nothing
    but the root in common with the folder stays absolute: it names a place of the machine."""

    def path(self, path: str) -> str:
        place, here = os.path.abspath(path), os.path.abspath(self.folder)
        if os.path.commonpath([place, here]) == os.path.sep:
            return place
        seen = os.path.relpath(place, here)
        return seen if seen.startswith(os.pardir) else os.path.join(os.curdir, seen)  # a folder is no hub id


class Nowhere(Anchor):
    """Every absolute path becomes ``SOMEWHERE``: what is left is the same wherever data, code and models lie."""

    def path(self, path: str) -> str:
        return SOMEWHERE

    def file(self, name: str) -> str:
        return SOMEWHERE if Path(name).is_absolute() else name

    def model(self, name: str | None) -> str | None:
        return SOMEWHERE if name is not None and Path(name).is_absolute() else name

    def source(self, name: str | None) -> str | None:
        return self.model(name)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~")) or Path(name).is_absolute()
