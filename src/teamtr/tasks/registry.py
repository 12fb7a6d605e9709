"""Registry of tasks by name, for team files and ``teamtr grade``.

    @task("sums")                # on a class derived from Task; nothing else needs registering
    class Sums(Task): ...

The modules in ``tasks/games`` and ``tasks/benchmarks`` are found by listing those folders. Another package declares
its tasks as entry points of the group ``teamtr.tasks``, which are loaded on demand:

    [project.entry-points."teamtr.tasks"]
    maze = "my_package.maze"     # the module that holds @task("maze")

Capitals after a colon stand for any text: ``gym:NAME`` is the task for ``gym:chain_sum``.

    benchmark("math500", "math500.jsonl")                          # a file, or a hub id such as owner/name:test
    benchmark("gsm8k", {"train": "train.jsonl", "test": "test.jsonl"})
    benchmark("gym:chain_sum", sizes={"train": 64, "test": 16})    # generated, needs no data
    benchmark("planbench")                                         # a grader alone, for rows that come later

Options are those of the benchmark's class; the error for an unknown option lists them.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pydantic import create_model

from teamtr.errors import UserError
from teamtr.tasks.base import Benchmark, Data, Task
from teamtr.tasks.config import BenchmarkConfig, TaskConfig, TaskContext

GROUP = "teamtr.tasks"
"""The entry point group of other packages."""

_BUILT_IN = ("teamtr.tasks.games", "teamtr.tasks.data.task", "teamtr.tasks.benchmarks", "teamtr.tasks.own")
_registered: dict[str, type[Task]] = {}
_T = TypeVar("_T", bound=type[Task])


def task(name: str) -> Callable[[_T], _T]:
    """Register a class under its name in team files."""
    if not isinstance(name, str):
        raise TypeError('a task is registered with its name: @task("name")')

    def register(cls: _T) -> _T:
        if not issubclass(cls, Task):
            raise TypeError(f"@task({name!r}): derive {cls.__qualname__} from teamtr.tasks.Task")
        if not issubclass(cls.Config, TaskConfig):
            raise TypeError(f"@task({name!r}): derive {cls.__qualname__}.Config from teamtr.tasks.TaskConfig")
        other = _registered.get(name)
        if other is not None and _where(other) != _where(cls):  # equal if its module is loaded again
            raise UserError(f"two tasks are called {name!r}: {_where(other)} and {_where(cls)}; rename one of them")
        cls.name = name
        if cls.Config in (TaskConfig, BenchmarkConfig):  # its own section class, for the reference
            cls.Config = create_model("Config", __base__=cls.Config, __doc__=cls.__doc__, __module__=cls.__module__)
        cls.Config.__doc__ = cls.Config.__doc__ or cls.__doc__
        _registered[name] = cls
        return cls

    return register


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -- finding --------------------------------------------------------------------------------------------------


def task_class(name: str) -> type[Task] | None:
    """The class of this name, or None. Raises UserError if the package that provides it is broken."""
    for _ in _loading_built_in():
        if name in _registered and _registered[name].__module__.startswith(_BUILT_IN):
            break  # skip the rest: importing benchmarks imports their graders
    for point in _points():
        if is_name_of(name, point.name):
            _load(point)
    exact = _registered.get(name)
    return exact or next((cls for known, cls in _registered.items() if is_name_of(name, known)), None)


def is_name_of(name: str, registered: str) -> bool:
    """Whether ``task.name`` in a team file refers to the task registered under ``registered``."""
    prefix, colon, rest = registered.partition(":")
    return name.startswith(prefix + colon) if rest.isupper() else name == registered


def section_class(name: str) -> type[TaskConfig] | None:
    """The section class of the task with this name."""
    cls = task_class(name)
    return None if cls is None else cls.Config


def build_task(config: TaskConfig, context: TaskContext) -> Task:
    """The task that a section of the team file describes."""
    cls = task_class(config.name)
    if cls is None:
        raise UserError(f"there is no task {config.name!r}; there are {', '.join(task_names())}")
    return cls.from_config(config, context)


def task_names() -> tuple[str, ...]:
    """All task names, including those of other packages, which are not loaded."""
    _load_built_in()
    return tuple(dict.fromkeys((*_all(), *(point.name for point in _points()))))


def task_sections() -> dict[type[TaskConfig], tuple[str, ...]]:
    """Every section class, and the tasks that use it. Tasks that cannot be loaded are left out (``broken_tasks``)."""
    broken_tasks()
    found: dict[type[TaskConfig], tuple[str, ...]] = {}
    for name, cls in _all().items():
        found[cls.Config] = (*found.get(cls.Config, ()), name)
    return found


def broken_tasks() -> tuple[str, ...]:
    """One sentence for each task of another package that cannot be loaded."""
    _load_built_in()
    notes = []
    for point in _points():
        try:
            _load(point)
        except UserError as error:
            notes.append(str(error))
    return tuple(notes)


def _all() -> dict[str, type[Task]]:
    """The loaded tasks, in an order that does not depend on the order of imports."""

    def turn(item: tuple[str, type[Task]]) -> tuple[int, str]:
        module = item[1].__module__
        own = next((k for k, name in enumerate(_BUILT_IN) if module.startswith(name)), len(_BUILT_IN))
        return own, module

    return dict(sorted(_registered.items(), key=turn))


def _load_built_in() -> None:
    for _ in _loading_built_in():
        pass


def _loading_built_in() -> Iterator[None]:
    """A generator that imports one more built-in module per step."""
    for name in _BUILT_IN:
        module = importlib.import_module(name)
        yield
        for found in pkgutil.iter_modules(module.__path__ if hasattr(module, "__path__") else ()):
            importlib.import_module(f"{name}.{found.name}")
            yield


@cache
def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _load(point: EntryPoint) -> None:
    """Import an entry point. It must register a task of its name that no other package has registered."""
    package = point.dist.name if point.dist is not None else point.module
    whose = f"task {point.name!r} of the package {package}"
    try:
        point.load()
    except Exception as error:
        problem = f"cannot be loaded: {type(error).__name__}: {error}"
        raise UserError(f"{whose} ({point.value}) {problem}; update that package, or uninstall it") from error
    cls = _registered.get(point.name)
    if cls is None:
        raise UserError(f'{whose} ({point.value}) is not registered: put @task("{point.name}") on its class there')
    if cls.__module__.partition(".")[0] != point.module.partition(".")[0]:
        raise UserError(f"two tasks are called {point.name!r}: {_where(cls)} and {whose} ({point.value}); rename one")


# -- benchmarks -----------------------------------------------------------------------------------------------


def benchmark_names() -> tuple[str, ...]:
    """The tasks whose stored replies can be graded."""
    broken_tasks()
    return tuple(name for name, cls in _all().items() if issubclass(cls, Benchmark))


def benchmark(name: str, data: Data = None, **options: Any) -> Benchmark:
    """The benchmark of this name on this data. Raises UserError, with the nearest name, if there is none.

    ``python:FILE.py:CLASS`` is a user-defined one, which provides its own data.
    """
    cls = task_class(name)
    if cls is None or not issubclass(cls, Benchmark):
        names = benchmark_names()
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise UserError(f"there is no benchmark {name!r}; the nearest is {near!r}, of {', '.join(names)}")
    return cls.from_data(name, data, **options)
