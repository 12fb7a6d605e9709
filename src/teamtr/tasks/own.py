"""User-defined tasks: a class in a Python file, ``python:FILE.py:CLASS``."""

from __future__ import annotations

from abc import ABCMeta
from typing import Annotated, Any, Self

from teamtr.errors import UserError
from teamtr.own_code import PREFIX, make_own
from teamtr.settings.paths import Anchor
from teamtr.settings.section import key
from teamtr.settings.values import of_form
from teamtr.tasks.base import Benchmark, Data, Task
from teamtr.tasks.config import TaskConfig, TaskContext
from teamtr.tasks.registry import task

OwnTaskName = Annotated[
    str, of_form(r"python:.+\.py:[^\W\d]\w*", "must be python:FILE.py:CLASS (FILE relative to the team file)")
]


@task("python:FILE:CLASS")
class OwnTask(Benchmark):
    """Registered in place of all user-defined tasks; it creates objects of the user's own class."""

    class Config(TaskConfig):
        """Your own task: a class in a Python file, see docs/tasks.md."""

        name: OwnTaskName
        options: dict[str, Any] = key({}, "Arguments of the class.")

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
    """The task made by a class in a Python file, ``python:FILE.py:CLASS``. The file is executed, as by an import."""
    made = make_own(name, options)
    return made if isinstance(made, Task) else _completed(name, made)


def _completed(name: str, made: Any) -> Task:
    """An object whose class is not derived from Task, with Task's defaults for everything that it lacks."""
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


@task("object")
class ObjectTask(Task):
    """Stands for a task that a Python program passed to ``TeamTrainer``; a team file cannot create one."""

    class Config(TaskConfig):
        """A task passed to TeamTrainer as an object; see ``python``."""

    @classmethod
    def from_config(cls, config: TaskConfig, context: TaskContext) -> Task:
        raise UserError(
            "the task of this team is an object of a Python program: resume the run with teamtr.TeamTrainer"
        )
