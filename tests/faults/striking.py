"""Runs whose workers are struck, and what must come of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import killing
import pytest

from teamtr.engines.cluster.ray_members import RayMembers
from teamtr.engines.cluster.seat import Call
from teamtr.session.train import train

SMALL = ("team.model=tabular", "plan.stages=2", "eval.every=2", "cluster.shards=4")
"""Tables: workers that have nothing to load are there at once."""


def trained(folder: Path, *overrides: str, updates: int | None = None) -> list[dict[str, Any]]:
    """To the end, or until so many more updates are done."""
    records: list[dict[str, Any]] = []
    for record in train(
        killing.team_file(*overrides), folder, stop=lambda: updates == sum(r["kind"] == "update" for r in records)
    ):
        records.append(record)
    return records


def assert_same(folder: Path, alone: Mapping[str, Any]) -> None:
    found = killing.result(folder)
    for key, expected in alone.items():
        assert found[key] == expected, key


def killed(members: RayMembers, worker: int) -> None:
    os.kill(members.processes[worker][1], signal.SIGKILL)


class Strike:
    """Does something to a worker, of this group where there are several, when a call comes for the nth time, once."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        worker: int,
        nth: int = 0,
        blow: Callable[[RayMembers, int], None] = killed,
        group: int | None = None,
    ) -> None:
        self.left, self.struck = nth, False
        ask = RayMembers.ask

        def ask_and_strike(members: RayMembers, calls: Mapping[int, Call]) -> dict[int, Any]:
            if not self.struck and members.group.number == group and next(iter(calls.values())).name == name:
                self.left -= 1
                if self.left < 0:
                    self.struck = True
                    blow(members, worker)
            return ask(members, calls)

        monkeypatch.setattr(RayMembers, "ask", ask_and_strike)
