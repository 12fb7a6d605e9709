"""Graders: pure ones for strings, and a pool of killable workers for anything untrusted."""

from teamtr.grading.answers import Number, exact_match, last_number, normalise, number_match
from teamtr.grading.nursery import GraderError
from teamtr.grading.pool import Result, WorkerPool

__all__ = [
    "GraderError",
    "Number",
    "Result",
    "WorkerPool",
    "exact_match",
    "last_number",
    "normalise",
    "number_match",
]
