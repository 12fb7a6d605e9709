"""What a commit holds besides weights and optimizer moments: where the run stands and how its agents are steered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr.rollout.cost import Account
from teamtr.store import Commit, LogMark, StoreError
from teamtr.types import AgentState


@dataclass(frozen=True)
class Position:
    """Where a run stands: ``done`` updates of ``stage`` are committed, ``number`` in all."""

    number: int = 0
    stage: int = 0
    done: int = 0
    batch: str | None = None
    log_weights: Sequence[float] | None = None
    carried: Sequence[float] | None = None
    """Trajectory log-weights from the stage's first batch to the present team, while probes ask for them."""
    returns: Sequence[Sequence[float]] | None = None
    """Returns of the latest batch of this stage, to measure the next update's gain against."""


@dataclass(frozen=True)
class RunState:
    """The whole of it. ``versions`` name the weights, ``references`` the policies that a reference KL is taken to."""

    position: Position
    account: Account
    states: Mapping[str, AgentState]
    versions: Mapping[str, str]
    precisions: Mapping[str, str]
    references: Mapping[str, str] = field(default_factory=dict)
    history: Mapping[str, Any] | None = None
    """The updates that later ones depend on; see ``history``. None in runs of version 0.1, which read their log."""
    inputs: Mapping[str, Any] | None = None
    """What the run learns from, by hash; None in runs of version 0.1."""
    log: LogMark | None = None
    """What the log held before the commit's own record."""

    def as_progress(self) -> dict[str, Any]:
        """As a commit stores it."""
        rest = {name: value for name, value in asdict(self).items() if name != "position"}
        return {**asdict(self.position), **rest}

    @classmethod
    def of(cls, commit: Commit, folder_of: Callable[[str], Path]) -> RunState:
        """What this commit holds. Raises StoreError where that is no state of a run."""
        try:
            return cls._of(commit, folder_of)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"commit {commit.number} holds no state of a run ({error!r:.200}): restore its folder from a copy, or "
                "remove it"
            ) from error

    @classmethod
    def _of(cls, commit: Commit, folder_of: Callable[[str], Path]) -> RunState:
        """Runs of version 0.1 stored each agent's state beside its weights."""
        progress = dict(commit.progress)
        states = progress.pop("states", None)
        if states is None:
            states = {name: json.loads((folder_of(name) / "state.json").read_text()) for name in commit.agents}
        return cls(
            account=Account(**progress.pop("account")),
            states={name: AgentState(**state) for name, state in states.items()},
            versions=progress.pop("versions"),
            precisions=progress.pop("precisions"),
            references=progress.pop("references", {}),
            history=progress.pop("history", None),
            inputs=progress.pop("inputs", None),
            log=None if (mark := progress.pop("log", None)) is None else LogMark(**mark),
            position=Position(**progress),
        )
