"""The state of a run that a commit holds besides weights and optimizer moments: its position and its agents'
controllers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from teamtr.batches import Carried, RolloutBatch
from teamtr.rollout.cost import Account
from teamtr.store import Commit, LogMark, StoreError
from teamtr.types import AgentState


@dataclass(frozen=True)
class Position:
    """The position of a run: ``done`` updates of ``stage`` are committed, ``number`` in all."""

    number: int = 0
    stage: int = 0
    done: int = 0
    batch: str | None = None
    reused: Mapping[str, Any] | None = None
    """How far the team has moved since it wrote that batch (``Carried``), and whether the batch was redrawn."""
    past: Mapping[str, Any] | None = None
    """The file of the last stage's batch, and which of its problems this stage trains on once more."""
    carried: Sequence[float] | None = None
    """Trajectory log-weights from the stage's first batch to the current team, while probes need them."""
    returns: Sequence[Sequence[float]] | None = None
    """Returns of the latest batch of this stage, to measure the next update's gain against."""
    sampling_cost: float | None = None
    """Cost of one sampled token relative to one that is trained on, once measured."""

    def next_stage(self) -> Position:
        """The position at the start of the next stage. The last stage's batch is kept until that stage has sampled."""
        return Position(
            number=self.number,
            stage=self.stage + 1,
            batch=self.batch,
            reused=self.reused,
            past=self.past,
            sampling_cost=self.sampling_cost,
        )

    def holding(self, batch: RolloutBatch) -> Position:
        """The position with what is needed to resume with this batch."""
        carried = batch.carried
        if carried is None:
            return replace(self, reused={"redrawn": True} if batch.redrawn else None)
        arrays = {"log_ratio": carried.log_ratio_U, "kept": carried.kept_U, "next": carried.next_U}
        lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
        return replace(self, reused={"redrawn": batch.redrawn, "team_version": carried.team_version, **lists})

    def held(self, read: Callable[[str], RolloutBatch]) -> RolloutBatch | None:
        """The batch of the last update in its current state; ``read`` returns the batch stored under a name."""
        if self.batch is None:
            return None
        written, known = read(self.batch), self.reused
        if self.past is not None:
            again = read(self.past["batch"]).of_problems(self.past["problems"])
            written = RolloutBatch(
                (*written.problems, *again.problems),
                (*written.episodes, *again.episodes),
                written.group_size,
                past=len(again.problems),
            )
        if known is None:
            return written
        if "team_version" not in known:
            return replace(written, redrawn=bool(known["redrawn"]))
        kept_U, next_U = (
            None if known[name] is None else np.array(known[name], dtype=np.int64) for name in ("kept", "next")
        )
        log_ratio_U = np.array(known["log_ratio"], dtype=np.float64)
        carried = Carried(known["team_version"], log_ratio_U, kept_U, next_U)
        return replace(written, carried=carried, redrawn=bool(known["redrawn"]))


@dataclass(frozen=True)
class RunState:
    """The whole state. ``versions`` name the weights, ``references`` the policies of the reference KL."""

    position: Position
    account: Account
    states: Mapping[str, AgentState]
    versions: Mapping[str, str]
    precisions: Mapping[str, str]
    references: Mapping[str, str] = field(default_factory=dict)
    history: Mapping[str, Any] | None = None
    """The updates that later ones depend on; see ``history``. None in runs of version 0.1, which read their log."""
    inputs: Mapping[str, Any] | None = None
    """Hashes of what the run learns from; None in runs of version 0.1."""
    log: LogMark | None = None
    """How far the log went before the commit's own record."""

    def as_progress(self) -> dict[str, Any]:
        """The state as a commit stores it. Store it at once: values that are plain data already are not copied."""
        return {
            **vars(self.position),
            "account": asdict(self.account),
            "states": {name: asdict(state) for name, state in self.states.items()},
            "versions": self.versions,
            "precisions": self.precisions,
            "references": self.references,
            "history": self.history,
            "inputs": self.inputs,
            "log": None if self.log is None else asdict(self.log),
        }

    @classmethod
    def of(cls, commit: Commit, folder_of: Callable[[str], Path]) -> RunState:
        """The state in this commit. Raises StoreError if it is not the state of a run."""
        try:
            return cls._of(commit, folder_of)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"commit {commit.number} holds no state of a run ({error!r:.200}): restore its folder from a copy, or "
                "remove it"
            ) from error

    @classmethod
    def _of(cls, commit: Commit, folder_of: Callable[[str], Path]) -> RunState:
        """Also reads runs of version 0.1, which stored each agent's state next to its weights."""
        progress = dict(commit.progress)
        progress.pop("log_weights", None)  # not from plans that reweight, which are newer
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
