"""PlanBench: Blocksworld in words, and the checker of plans."""

from teamtr.tasks.benchmarks.planbench.task import PlanBench

__all__ = ["PlanBench"]
