"""Graders: pure functions of strings, and a pool of killable workers for anything untrusted."""

from teamtr.grading.answers import Number, exact_match, last_number, normalize, number_match
from teamtr.grading.workers.container import Container
from teamtr.grading.workers.forkserver import GraderError
from teamtr.grading.workers.pool import Result, WorkerPool

__all__ = [
    "Container",
    "GraderError",
    "Number",
    "Result",
    "WorkerPool",
    "exact_match",
    "last_number",
    "normalize",
    "number_match",
]
