"""How many runs of a team fit on this machine at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teamtr.config import TeamFile
from teamtr.errors import TeamTRError
from teamtr.ports import GB
from teamtr.session.doctor import memory_bytes
from teamtr.session.forecast import Where, forecast
from teamtr.session.models import device_of
from teamtr.session.processes import usable_cores

PROCESS_BYTES = int(0.7 * GB)
"""Memory of a process that has imported torch and holds no model yet."""
SHARED_OUT = 0.95
"""Share of the free memory that is used."""
ANY_CARD = "H200"
"""The least memory of a run depends on its models and its batch only, so any card of the table gives it."""


@dataclass(frozen=True)
class Room:
    """How many runs fit, and why not more."""

    workers: int
    why: str


def room(team_file: TeamFile, runs: int) -> Room:
    """From the cores and memory that are free now, and the memory that a run needs by ``session.forecast``."""
    if team_file.cluster.engine != "local" or team_file.sampling.engine == "vllm":
        return Room(1, "a run has several processes of its own")
    on_card = device_of(team_file).type == "cuda"
    try:
        need = _needed(team_file, on_card)
    except TeamTRError as error:
        return Room(1, f"what a run needs is not known ({error})")
    if on_card:
        free, _ = torch.cuda.mem_get_info(device_of(team_file))
        return fitting(runs, need, free, None)
    return fitting(runs, PROCESS_BYTES + need, memory_bytes(), usable_cores())


def _needed(team_file: TeamFile, on_card: bool) -> int:
    if all(agent.model == "tabular" for agent in team_file.team.agents):
        return 0
    _, found = forecast(team_file, Where(ANY_CARD if on_card else "cpu"))
    return found.memory.least


def fitting(runs: int, need: int, free: int | None, cores: int | None) -> Room:
    """How many runs of ``need`` bytes each fit; ``free`` and ``cores`` are None if they set no limit."""
    workers, why = runs, f"all {runs} fit"
    if cores is not None and cores < workers:
        workers, why = cores, f"{cores} usable cores, one for each"
    if free is not None and need > 0 and (fit := int(SHARED_OUT * free) // need) < workers:
        workers, why = max(1, fit), f"a run needs {need / GB:.3g} GB, and {free / GB:.3g} GB are free"
    return Room(workers, why)
