"""What a commit holds besides weights and optimizer moments: where the run stands and how its agents are steered."""

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
    """Where a run stands: ``done`` updates of ``stage`` are committed, ``number`` in all."""

    number: int = 0
    stage: int = 0
    done: int = 0
    batch: str | None = None
    reused: Mapping[str, Any] | None = None
    """What has happened to the team since it wrote that batch: ``Carried``, and whether the batch was redrawn."""
    past: Mapping[str, Any] | None = None
    """The file of the last stage's batch, and which of its problems this stage learns from once more."""
    carried: Sequence[float] | None = None
    """Trajectory log-weights from the stage's first batch to the present team, while probes ask for them."""
    returns: Sequence[Sequence[float]] | None = None
    """Returns of the latest batch of this stage, to measure the next update's gain against."""
    sampling_cost: float | None = None
    """Of one sampled token beside one that is trained on, once it was measured."""

    def next_stage(self) -> Position:
        """At the beginning of it. What the last one learned from is known until this one has sampled."""
        return Position(
            number=self.number,
            stage=self.stage + 1,
            batch=self.batch,
            reused=self.reused,
            past=self.past,
            sampling_cost=self.sampling_cost,
        )

    def holding(self, batch: RolloutBatch) -> Position:
        """With what must be known of this batch to go on with it."""
        carried = batch.carried
        if carried is None:
            return replace(self, reused={"redrawn": True} if batch.redrawn else None)
        arrays = {"log_ratio": carried.log_ratio_U, "kept": carried.kept_U, "next": carried.next_U}
        lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
        return replace(self, reused={"redrawn": batch.redrawn, "team_version": carried.team_version, **lists})

    def held(self, read: Callable[[str], RolloutBatch]) -> RolloutBatch | None:
        """The batch of the last update, as it stands now; ``read`` gets what was written under a name."""
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
        """As a commit stores it, at once: what is plain data already is not copied."""
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
        progress.pop("log_weights", None)  # of no plan that reweights: those are newer
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
