"""The index of transformers' model files in the user's cache.

Importing transformers searches its 1,600 model files for the classes that each of them defines, and importing its
models does so again: a seventh of the time of ``teamtr check``. The files are the same until another version is
installed. The key of a kept index is a hash of their sizes and modification times.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from teamtr.store.cache import cached, keep

MODULE, FUNCTION = "transformers.utils.import_utils", "define_import_structure"
MODELS = "models"
KIND, FORMAT = "model-index", 1

Index = dict[frozenset[str], dict[str, set[str]]]
"""Required backends -> module -> classes, as ``define_import_structure`` returns it."""
Define = Callable[..., Index]

log = logging.getLogger(__name__)


def keep_model_index() -> None:
    """From now on, importing transformers reads the index of its model files from the cache, or keeps it there. Without
    effect if transformers is already imported."""
    if MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the one module whose function is wrapped."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname == MODULE else None
        if found is None or found.origin is None or not isinstance(found.loader, SourceFileLoader):
            return None  # for the other finders
        return spec_from_file_location(fullname, found.origin, loader=_Loader(fullname, found.origin))


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        define = getattr(module, FUNCTION, None)
        if callable(define):
            setattr(module, FUNCTION, read_once(define, Path(self.path)))


def read_once(define: Define, code: Path) -> Define:
    """``define``, but the index of all models comes from the cache. ``code``: the file that defines it."""
    models = code.parents[1] / MODELS

    @functools.cache
    def index() -> Index | None:
        """None if there are no such files, or the index does not have the form that is known."""
        try:
            key = _key([code, *_sources(models)], models)
            kept = _read(cached(KIND, key))
            if kept is None:
                kept = define(str(models))
                keep(KIND, key, _written(kept))
        except (OSError, TypeError, ValueError, AttributeError) as error:
            log.debug("the index of %s is not kept: %s", models, error)
            return None
        return kept

    @functools.wraps(define)
    def found(module_path: str | Path, prefix: str | None = None, *more: Any, **named: Any) -> Index:
        folder = Path(module_path)
        asked = (folder.parent if folder.suffix == ".py" else folder) == models and not more and not named
        whole = index() if asked else None
        if whole is None:
            return define(module_path, prefix, *more, **named)
        start = f"{prefix}." if prefix else ""  # a copy: callers add to what they get
        return {needs: {f"{start}{name}": set(own) for name, own in parts.items()} for needs, parts in whole.items()}

    return found


def _sources(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _sources(Path(entry.path))
            elif entry.name.endswith(".py"):
                yield entry


def _key(files: Sequence[Path | os.DirEntry[str]], folder: Path) -> str:
    digest = hashlib.sha256(f"{FORMAT}\0{folder}\n".encode())
    for file in files:
        state = file.stat()
        digest.update(f"{os.fspath(file)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _written(index: Index) -> bytes:
    rows = [[sorted(needs), {name: sorted(own) for name, own in modules.items()}] for needs, modules in index.items()]
    return json.dumps(rows).encode()


def _read(data: bytes | None) -> Index | None:
    if data is None:
        return None
    try:
        rows = json.loads(data)
        return {frozenset(needs): {name: set(own) for name, own in parts.items()} for needs, parts in rows}
    except (TypeError, ValueError, AttributeError) as error:
        log.warning("a kept index of model files cannot be read (%s): made anew", error)
        return None
