"""A task of your own: a class in a Python file, ``python:FILE.py:CLASS``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

from teamtr.errors import TeamTRError, UserError
from teamtr.settings.paths import Anchor
from teamtr.settings.section import key
from teamtr.settings.values import of_form
from teamtr.tasks.base import Benchmark, Data, Task
from teamtr.tasks.config import TaskConfig, TaskContext
from teamtr.tasks.registry import task

PREFIX = "python:"
OwnTaskName = Annotated[
    str, of_form(r"python:.+\.py:[^\W\d]\w*", "must be python:FILE.py:CLASS (FILE relative to the team file)")
]


@task("python:FILE:CLASS")
class OwnTask(Benchmark):
    """Stands for all of them: what it makes is an object of the person's own class."""

    class Config(TaskConfig):
        """A task of your own: a class in a Python file, see docs/tasks.md."""

        name: OwnTaskName
        options: dict[str, Any] = key({}, "What the class is called with.")

        def arguments(self, context: TaskContext) -> dict[str, Any]:
            return self.options

        def anchored(self, anchor: Anchor) -> Self:
            file, _, attribute = self.name.removeprefix(PREFIX).rpartition(":")
            return self.model_copy(update={"name": f"{PREFIX}{anchor.path(file)}:{attribute}"})

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        return own_task(config.name, **config.arguments(context))

    @classmethod
    def from_data(cls, name: str, data: Data, **options: Any) -> Benchmark:
        if data is not None:
            raise UserError(f"{name} has problems of its own and reads no data: leave path, train and test out")
        own = own_task(name, **options)
        if not isinstance(own, Benchmark):
            raise UserError(f"{name} is no teamtr.tasks.Benchmark: it can be trained on, but not grade stored replies")
        return own


def own_task(name: str, **options: Any) -> Task:
    """The task that a class in a Python file makes: ``python:FILE.py:CLASS``. The file is run, as any import is."""
    file, _, attribute = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{name}: there is no file {path}: name a task python:FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location(f"teamtr_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _own_code(name, path):
        spec.loader.exec_module(module)
    make = getattr(module, attribute, None)
    if make is None:
        raise UserError(f"{name}: {path} has no {attribute!r}")
    if not callable(make):
        raise UserError(f"{name}: {attribute!r} is {type(make).__name__}, neither a class nor a function")
    _check_options(name, make, options)
    with _own_code(name, path):
        made = make(**options)
    return made if isinstance(made, Task) else _completed(name, made)


def _completed(name: str, made: Any) -> Task:
    """An object of a class that is not derived from Task, with Task's default for everything that it does not have."""
    missing = [part for part in ("problems", "grade") if not hasattr(made, part)]
    if missing:
        raise UserError(f"{name}: what it makes has no {missing[0]!r}; derive the class from teamtr.tasks.Task")
    own = type(made)
    try:
        made.__class__ = ABCMeta(own.__name__, (own, Task), {"__module__": own.__module__, "__doc__": own.__doc__})
    except TypeError as error:  # a class with slots, or a metaclass of its own
        raise UserError(f"{name}: derive {own.__name__} from teamtr.tasks.Task ({error})") from None
    assert isinstance(made, Task)
    return made


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse what the call itself would: an option that it has not, or none where it must have one."""
    parameters = inspect.signature(make).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else sorted(options.keys() - named.keys())
    if unknown:
        raise UserError(f"{name} has no option {unknown[0]!r}; it has {', '.join(named) or 'none'}")
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"{name} needs the option {missing[0]!r}: give it in task.options; it has {', '.join(named)}")


@contextmanager
def _own_code(name: str, path: Path) -> Iterator[None]:
    """What a person's own code raises is told as theirs, with the line of their file that it came through."""
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
