"""What watches a training run: every record of its log as it is made, with a way to stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Record = Mapping[str, Any]


class Stoppable(Protocol):
    """What a callback may do with its trainer, a ``TeamTrainer``."""

    def stop(self) -> None: ...


class Callback:
    """Override what you want to see. ``trainer.stop()`` ends the run after the update in progress, and saves it."""

    def on_record(self, record: Record, trainer: Stoppable) -> None:
        """Every record of the log, and how the run ended; by default hands it on by its kind."""
        handler = getattr(self, f"on_{record['kind']}", None)
        if handler is not None:
            handler(record, trainer)

    def on_start(self, record: Record, trainer: Stoppable) -> None:
        """The run begins."""

    def on_resume(self, record: Record, trainer: Stoppable) -> None:
        """The run goes on."""

    def on_update(self, record: Record, trainer: Stoppable) -> None:
        """One agent was updated."""

    def on_eval(self, record: Record, trainer: Stoppable) -> None:
        """The team was evaluated."""

    def on_stage(self, record: Record, trainer: Stoppable) -> None:
        """Every agent was updated once."""

    def on_stopped(self, record: Record, trainer: Stoppable) -> None:
        """The run was stopped and is saved."""

    def on_finished(self, record: Record, trainer: Stoppable) -> None:
        """All stages are done."""


AnyCallback = Callback | Callable[[Record], object]
"""A ``Callback``, or a function of a record; a function that returns True stops the run."""


def tell(callback: AnyCallback, record: Record, trainer: Stoppable) -> None:
    if isinstance(callback, Callback):
        callback.on_record(record, trainer)
    elif callback(record) is True:
        trainer.stop()
