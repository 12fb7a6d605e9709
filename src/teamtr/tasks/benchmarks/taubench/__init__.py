"""tau-bench: dialogues in which an agent serves a user with tools, graded by the resulting data."""

from teamtr.tasks.benchmarks.taubench.task import Airline, Retail

__all__ = ["Airline", "Retail"]
