"""The tracker backends. Each imports its package only when it is opened, and may raise anything."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from teamtr.trackers.conversations import Table, in_markdown_table


class Unusable(Exception):
    """The tracker cannot work at all (not installed, not logged in), so it is not retried."""


@dataclass(frozen=True)
class Filing:
    """How a tracker files the run; ``conversations`` is how many conversations of each stage are sent to it."""

    project: str = "teamtr"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    conversations: int = 0


AS_EVER = Filing()


@dataclass(frozen=True)
class Tracked:
    """The run as a tracker sees it. ``id`` is the tracker's id of the run, None at first; ``folder`` is the folder of
    trackers in the run folder."""

    name: str
    folder: Path
    settings: Mapping[str, str]
    id: str | None = None
    filing: Filing = AS_EVER


class Sink(Protocol):
    """One tracker. Called from one thread only."""

    def open(self, run: Tracked) -> str:
        """Start a run, or resume ``run.id``; returns the id to resume later."""

    def send(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Send the numbers of one step; ``seconds`` since 1970."""

    def show(self, step: int, conversations: Table) -> None:
        """Send a table of conversations; only called if ``Filing.conversations`` is not 0."""

    def close(self) -> None:
        """Deliver what is still buffered, and close."""


class Tensorboard:
    """Event files in the run folder: ``tensorboard --logdir RUN/trackers/tensorboard``. A resumed run adds a file."""

    def open(self, run: Tracked) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.writer = SummaryWriter(str(folder))
        if run.id is None:
            table = "".join(f"    {key}: {value}\n" for key, value in run.settings.items())
            self.writer.add_text("settings", table)
        return "tensorboard"

    def send(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=seconds)

    def show(self, step: int, conversations: Table) -> None:
        self.writer.add_text("conversations", in_markdown_table(conversations), step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of a wandb project; with WANDB_MODE=offline it is stored in the run folder."""

    def open(self, run: Tracked) -> str:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise Unusable("nobody is logged in: run `wandb login`, or set WANDB_MODE=offline")
        self.run = wandb.init(
            project=run.filing.project,
            entity=run.filing.entity,
            group=run.filing.group,
            tags=list(run.filing.tags),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            # The training screen uses the console; git state and code stay private.
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        return str(self.run.id)

    def send(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def show(self, step: int, conversations: Table) -> None:
        import wandb

        table = wandb.Table(columns=list(conversations.columns), data=[list(row) for row in conversations.rows])
        self.run.log({"conversations": table}, step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """A run of an mlflow experiment, at MLFLOW_TRACKING_URI if set, else in the run folder."""

    def open(self, run: Tracked) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        own = f"sqlite:///{run.folder.resolve()}/mlflow.db"
        elsewhere = bool(os.environ.get("MLFLOW_TRACKING_URI"))
        self.client = MlflowClient(None if elsewhere else own)
        if run.id is not None:
            self.client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return self.id
        filing = run.filing
        experiment = self.client.get_experiment_by_name(filing.project)
        # Otherwise tables would be written to the working directory.
        place = None if elsewhere else (run.folder.resolve() / "mlflow").as_uri()
        number = (
            experiment.experiment_id
            if experiment
            else self.client.create_experiment(filing.project, artifact_location=place)
        )
        tags = {**({} if filing.group is None else {"group": filing.group}), **dict.fromkeys(filing.tags, "true")}
        self.id = str(self.client.create_run(number, run_name=run.name, tags=tags).info.run_id)
        params = [Param(re.sub(r"[^A-Za-z0-9_. /-]", "_", key), value[:500]) for key, value in run.settings.items()]
        for start in range(0, len(params), 100):  # mlflow's limit per call
            self.client.log_batch(self.id, params=params[start : start + 100])
        return self.id

    def send(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        stamp = int(1000 * seconds)
        self.client.log_batch(self.id, metrics=[Metric(name, value, stamp, step) for name, value in values.items()])

    def show(self, step: int, conversations: Table) -> None:
        by_column = {name: [row[k] for row in conversations.rows] for k, name in enumerate(conversations.columns)}
        self.client.log_table(self.id, by_column, f"conversations/{step:06}.json")

    def close(self) -> None:
        self.client.set_terminated(self.id)


class Trackio:
    """A run of a trackio project, in trackio's own folder (TRACKIO_DIR)."""

    def open(self, run: Tracked) -> str:
        import trackio

        name = run.id or run.name
        self.run = trackio.init(
            project=run.filing.project,
            group=run.filing.group,
            name=name,
            resume="never" if run.id is None else "allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self.run.name)

    def send(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def show(self, step: int, conversations: Table) -> None:
        import trackio

        table = trackio.Table(columns=list(conversations.columns), data=[list(row) for row in conversations.rows])
        self.run.log({"conversations": table}, step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: Mapping[str, Callable[[], Any]] = {
    "tensorboard": Tensorboard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
"""By the name used in a team file, which is also the name of the package and of the extra."""


def missing(name: str) -> str | None:
    """How to install the package of this tracker; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed: pip install 'teamtr[{name}]'"
