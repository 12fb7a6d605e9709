"""Paths in a team file: relative to its folder, absolute once it is read, relative to the run folder in stored
copies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

BUILT_IN_MODELS = ("tiny", "tabular")
SOMEWHERE = "/"
"""Stands for every absolute path where team files are compared regardless of where data, code and models are. The root
folder is none of these."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Anchor:
    """Resolves the paths of a team file relative to ``folder``."""

    folder: Path

    def path(self, path: str) -> str:
        return os.path.abspath(self.folder / Path(path).expanduser())

    def file(self, name: str) -> str:
        """Make the path of an existing file absolute; return any other text unchanged."""
        return self.path(name) if (self.folder / name).is_file() else name

    def model(self, name: str | None) -> str | None:
        """Make the path of a model folder absolute; return a built-in model or a hub id unchanged."""
        if name is None or name in BUILT_IN_MODELS:
            return name
        return self.path(name) if _looks_like_a_path(name) or (self.folder / name).is_dir() else name

    def source(self, name: str | None) -> str | None:
        """Make the path of a data file or folder absolute; return a dataset of the hub unchanged."""
        if name is None:
            return None
        is_there = Path(name).suffix.lower() in DATA_SUFFIXES or (self.folder / name).exists()
        return self.path(name) if _looks_like_a_path(name) or is_there else name


class SeenFrom(Anchor):
    """The inverse of ``Anchor``: makes absolute paths relative to the folder, so that both can be moved together. A
    path that has only the root in common with the folder stays absolute: it names a place on this machine."""

    def path(self, path: str) -> str:
        place, here = os.path.abspath(path), os.path.abspath(self.folder)
        if os.path.commonpath([place, here]) == os.path.sep:
            return place
        seen = os.path.relpath(place, here)
        return seen if seen.startswith(os.pardir) else os.path.join(os.curdir, seen)  # "./": not a hub id


class Nowhere(Anchor):
    """Replaces every absolute path with ``SOMEWHERE``, so that the result does not depend on where files are."""

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
