"""Experiment trackers (tensorboard, wandb, mlflow, trackio), which follow a run's records and cannot disturb the run.

Each has its own thread and a bounded queue. A tracker that is missing, fails, hangs or is slow is reported once,
counted, and in the end switched off. The log in the run folder is complete in any case.
"""

from teamtr.trackers.following import follow
from teamtr.trackers.metrics import METRICS, Metric, Point, point
from teamtr.trackers.sinks import SINKS, Filing, missing

__all__ = ["METRICS", "SINKS", "Filing", "Metric", "Point", "follow", "missing", "point"]
