"""Child processes that train a small team and die on command. Imported by the fork server, so that each is cheap."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path
from typing import Any

import torch

from taught import remember_teaching
from teamtr.config import TeamFile, loads
from teamtr.engines.learner import PolicyLearner
from teamtr.session import driver
from teamtr.session import train as run
from teamtr.store import Checkpoints, Log, RunFolder

TEAM = """
name: small
task: {name: code, symbols: AB, half_length: 1, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
plan: {stages: 3, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 1, samples: 4}
"""


MARK = "TEAMTR_TEST_MARK"


def team_file(*overrides: str) -> TeamFile:
    return loads(TEAM, "small", overrides)


def train(
    folder: str,
    taught: str | None = None,
    overrides: tuple[str, ...] = (),
    die: tuple[str, int] | None = None,
    sabotage: str = "",
    mark: str = "",
) -> None:
    """Train to the end, or until the moment given: ("after_commit", n), ("after_log", n) or ("before_commit", n).
    The base is taught, or read from where taught ones are kept. ``mark``: in the environment of all that it starts."""
    torch.set_num_threads(1)
    os.environ[MARK] = mark
    os.environ.update(RAY_gcs_rpc_server_reconnect_timeout_s="5")  # Ray would wait a minute for a head that was killed
    if taught is not None:
        remember_teaching(Path(taught))
    moment, at = die or ("", 0)
    if moment:
        _arm(moment, at)
    if sabotage:
        SABOTAGE[sabotage]()
    for record in run.train(team_file(*overrides), folder):
        if moment == "after_log" and record["kind"] == "update" and record["update"] == at:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(moment: str, at: int) -> None:
    commit = Checkpoints.commit

    def commit_and_die(self: Checkpoints, number: int, *args: Any, **kwargs: Any) -> Any:
        if moment == "before_commit" and number == at:
            _die()
        result = commit(self, number, *args, **kwargs)
        if moment == "after_commit" and number == at:
            _die()
        return result

    Checkpoints.commit = commit_and_die  # type: ignore[method-assign]


def _drop_optimizer_state() -> None:
    load = PolicyLearner.load

    def load_without_moments(self: PolicyLearner, folder: Path) -> None:
        load(self, folder)
        self.optimizer.moments, self.optimizer.steps = {}, 0

    PolicyLearner.load = load_without_moments  # type: ignore[method-assign]


def _ignore_weights() -> None:
    """The position of the checkpoint with the weights of the beginning (and no check that would notice)."""
    load = PolicyLearner.load

    def load_all_but_weights(self: PolicyLearner, folder: Path) -> None:
        before = self.snapshot().parameters
        load(self, folder)
        with torch.no_grad():
            for name, parameter in self.policy.parameters().items():
                parameter.copy_(before[name])
        self._touched()

    PolicyLearner.load = load_all_but_weights  # type: ignore[method-assign]
    resume = driver.Driver._resume

    def resume_blindly(self: Any, commit: Any) -> None:
        versions = {name: self.session.engine.version(name) for name in self.session.team.names}
        object.__setattr__(commit, "progress", {**commit.progress, "versions": versions})
        resume(self, commit)

    driver.Driver._resume = resume_blindly  # type: ignore[method-assign]


def _add_backwards() -> None:
    """Gradients of the shards in another order."""
    from teamtr.engines.cluster.ranks import Ranks

    added = Ranks.added
    Ranks.added = lambda self, own, of, like: added(self, own, of[::-1], like)  # type: ignore[method-assign]


def _mix_up_parts() -> None:
    """Every worker draws its parts with each other's noise."""
    from teamtr.engines.cluster.seat import Seat

    draw = Seat._sample_parts

    def draw_with_another(self: Seat, agent: str, version: str, parts: Any, *options: Any) -> Any:
        noises = [noise_BT for _, noise_BT in parts]
        mixed = [(prompts, noise_BT[::-1].copy()) for (prompts, _), noise_BT in zip(parts, noises, strict=True)]
        return draw(self, agent, version, mixed, *options)

    Seat._sample_parts = draw_with_another  # type: ignore[method-assign]


SABOTAGE = {
    "optimizer": _drop_optimizer_state,
    "weights": _ignore_weights,
    "order": _add_backwards,
    "noise": _mix_up_parts,
}


def sabotaged_member(sabotage: str, *settings: Any) -> Any:
    """A worker of a cluster in which something is wrong."""
    from teamtr.session.cluster import _member

    SABOTAGE[sabotage]()
    return _member(*settings)


TIMES = {"seconds", "time"}


def result(folder: Path) -> dict[str, Any]:
    """Everything that must be the same to the bit: weights, optimizer, steering, log figures, episodes."""
    store = RunFolder.read(folder)
    commit = store.checkpoints.latest()
    assert commit is not None
    files = {}
    for agent in commit.agents:
        agent_folder = store.checkpoints.folder_of(commit, agent)
        files |= {f"{agent}/{f.name}": f.read_bytes() for f in sorted(agent_folder.iterdir())}
    records = [r for r in Log(folder / "log.jsonl").read() if r["kind"] in ("update", "eval", "stage")]
    return {
        "agents": dict(commit.agents),
        "files": files,
        "records": [{k: v for k, v in r.items() if k not in TIMES} for r in records],
        "episodes": {f.name: gzip.decompress(f.read_bytes()) for f in sorted(store.episodes.iterdir())},
        "tokens": commit.progress["account"]["tokens"],
    }
