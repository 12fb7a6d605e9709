"""Loads classes and functions from a user's own Python file: ``python:FILE.py:CLASS``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from teamtr.errors import TeamTRError, UserError

PREFIX = "python:"


class _AsItStands(SourceFileLoader):
    """Runs the source of the file, never cached bytecode, which is stale if an edit keeps the size and second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def make_own(name: str, options: Mapping[str, Any], *given: Any, what: str = "task") -> Any:
    """Call ``CLASS(*given, **options)``; the file is executed, like any import.

    Raises UserError if that fails; ``what`` is the section of the team file that names the class.
    """
    make, path = own_attribute(name, what)
    if not callable(make):
        attribute = name.rpartition(":")[2]
        raise UserError(f"{name}: {attribute!r} is {type(make).__name__}, neither a class nor a function")
    _check_options(name, make, options, len(given), what)
    with _own_code(name, path):
        return make(*given, **options)


def own_attribute(name: str, what: str) -> tuple[Any, Path]:
    """An attribute of a user's own file, which is executed, and the path of that file."""
    file, _, attribute = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{name}: there is no file {path}: name a {what} python:FILE.py:CLASS")
    loader = _AsItStands(f"teamtr_own_{path.stem}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _own_code(name, path):
        loader.exec_module(module)
    found = getattr(module, attribute, None)
    if found is None:
        raise UserError(f"{name}: {path} has no {attribute!r}")
    return found, path


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any], given: int, what: str) -> None:
    """Raise UserError for options that the call itself would reject: unknown ones, or missing required ones."""
    parameters = list(inspect.signature(make).parameters.values())[given:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else sorted(options.keys() - named.keys())
    if unknown:
        raise UserError(f"{name} has no option {unknown[0]!r}; it has {', '.join(named) or 'none'}")
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"{name} needs the option {missing[0]!r}: give it in {what}.options; it has {', '.join(named)}")


@contextmanager
def _own_code(name: str, path: Path) -> Iterator[None]:
    """Reports exceptions of a user's own code as UserError, with the line of their file."""
    try:
        yield
    except TeamTRError:
        raise
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else (lines or [None])[-1]
        place = f"{path}, line {line}" if line else str(path)
        said = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{name}: its own code raised {type(error).__name__}: {said} ({place})") from error
