"""What watches a training run: every record of its log as it is made, with a way to stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teamtr.api.trainer import TeamTrainer

Record = Mapping[str, Any]


class Callback:
    """Override what you want to see. ``trainer.stop()`` ends the run after the update in progress, and saves it."""

    def on_record(self, record: Record, trainer: TeamTrainer) -> None:
        """Every record; by default hands it on by its kind."""
        handler = getattr(self, f"on_{record['kind']}", None)
        if handler is not None:
            handler(record, trainer)

    def on_start(self, record: Record, trainer: TeamTrainer) -> None:
        """The run begins."""

    def on_resume(self, record: Record, trainer: TeamTrainer) -> None:
        """The run goes on."""

    def on_update(self, record: Record, trainer: TeamTrainer) -> None:
        """One agent was updated."""

    def on_eval(self, record: Record, trainer: TeamTrainer) -> None:
        """The team was evaluated."""

    def on_stage(self, record: Record, trainer: TeamTrainer) -> None:
        """Every agent was updated once."""

    def on_finished(self, record: Record, trainer: TeamTrainer) -> None:
        """All stages are done."""


AnyCallback = Callback | Callable[[Record], object]
"""A ``Callback``, or a function of a record; a function that returns True stops the run."""


def tell(callback: AnyCallback, record: Record, trainer: TeamTrainer) -> None:
    if isinstance(callback, Callback):
        callback.on_record(record, trainer)
    elif callback(record) is True:
        trainer.stop()
