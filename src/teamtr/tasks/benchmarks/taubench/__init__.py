"""tau-bench: dialogues of an agent that serves a user with tools, graded by the data that they leave behind."""

from teamtr.tasks.benchmarks.taubench.task import Airline, Retail

__all__ = ["Airline", "Retail"]
