"""Trackers: tensorboard, wandb, mlflow and trackio follow a run's records, and nothing they do can hurt it.

Each has a thread of its own and a bounded queue. A tracker that is missing, fails, hangs or is slow is told of once,
counted, and in the end switched off; the log in the run folder holds everything whatever they do.
"""

from teamtr.trackers.following import follow
from teamtr.trackers.metrics import METRICS, Metric, Point, point
from teamtr.trackers.sinks import SINKS, Filing, missing

__all__ = ["METRICS", "SINKS", "Filing", "Metric", "Point", "follow", "missing", "point"]
