"""Callbacks: they receive every record of a run's log as it is written, and can stop the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Record = Mapping[str, Any]


class Stoppable(Protocol):
    """The part of a trainer (a ``TeamTrainer``) that a callback may use."""

    def stop(self) -> None: ...


class Callback:
    """Override the methods you need. ``trainer.stop()`` ends the run after the update in progress, and saves it."""

    def on_record(self, record: Record, trainer: Stoppable) -> None:
        """Called with every record of the log, and with the run's outcome; calls ``on_KIND`` by default."""
        handler = getattr(self, f"on_{record['kind']}", None)
        if handler is not None:
            handler(record, trainer)

    def on_start(self, record: Record, trainer: Stoppable) -> None:
        """Called when the run begins."""

    def on_resume(self, record: Record, trainer: Stoppable) -> None:
        """Called when the run is resumed."""

    def on_update(self, record: Record, trainer: Stoppable) -> None:
        """Called after each update of an agent."""

    def on_eval(self, record: Record, trainer: Stoppable) -> None:
        """Called after each evaluation of the team."""

    def on_stage(self, record: Record, trainer: Stoppable) -> None:
        """Called at the end of each stage, when every agent was updated once."""

    def on_stopped(self, record: Record, trainer: Stoppable) -> None:
        """Called when the run was stopped; it is saved."""

    def on_finished(self, record: Record, trainer: Stoppable) -> None:
        """Called when all stages are done."""


AnyCallback = Callback | Callable[[Record], object]
"""A ``Callback``, or a function that takes a record and stops the run by returning True."""


def tell(callback: AnyCallback, record: Record, trainer: Stoppable) -> None:
    if isinstance(callback, Callback):
        callback.on_record(record, trainer)
    elif callback(record) is True:
        trainer.stop()
