"""Tasks, that is, problems and their graders: generated games, your own data, and benchmarks by name."""

from teamtr.tasks.base import Benchmark, Task, WrongAnswer
from teamtr.tasks.config import TaskConfig, TaskContext
from teamtr.tasks.data.task import DataTask
from teamtr.tasks.games.code_exchange import CodeExchange
from teamtr.tasks.games.lookup import Lookup
from teamtr.tasks.games.roles import Roles
from teamtr.tasks.games.sums import Sums
from teamtr.tasks.own import own_task
from teamtr.tasks.registry import benchmark, task

__all__ = [
    "Benchmark",
    "CodeExchange",
    "DataTask",
    "Lookup",
    "Roles",
    "Sums",
    "Task",
    "TaskConfig",
    "TaskContext",
    "WrongAnswer",
    "benchmark",
    "own_task",
    "task",
]
