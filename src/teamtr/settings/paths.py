"""Paths in a team file: relative to its folder, and absolute once it is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BUILT_IN_MODELS = ("tiny", "tabular")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Anchor:
    """What the paths of a team file are relative to."""

    folder: Path

    def path(self, path: str) -> str:
        return os.path.abspath(self.folder / Path(path).expanduser())

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


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~")) or Path(name).is_absolute()
