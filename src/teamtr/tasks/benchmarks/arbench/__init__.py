"""AR-Bench: three interactive games, and a player at an endpoint for their other roles."""

from teamtr.tasks.benchmarks.arbench.detective import DetectiveCases
from teamtr.tasks.benchmarks.arbench.numbers import GuessingNumbers
from teamtr.tasks.benchmarks.arbench.puzzles import SituationPuzzles

__all__ = ["DetectiveCases", "GuessingNumbers", "SituationPuzzles"]
