"""Hosts of agents' weights: a vLLM server of a shared base with adapters, or a server for one agent.

Each version of an agent's weights is served under its own name, ``{agent}-{version}``, from a folder that is used once.
A server that was not given these weights lacks the name, so other weights can never silently write a message.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from teamtr.engines.vllm.client import Client, Drawing, Served
from teamtr.engines.vllm.server import Launch, Server
from teamtr.errors import TeamTRError, UserError

Write = Callable[[Path], None]
"""Writes an agent's weights into a folder in Hugging Face format; training state may lie beside them."""

BASE = "base"
"""Name of the base on a server that is started here."""


def name_of(agent: str, version: str) -> str:
    return f"{agent}-{version}"


class Host(ABC):
    """One server and the weights that it was given. The server starts on first use.

    ``place``: where its folder is created; None: the system's directory for temporary files.
    """

    def __init__(self, place: Path | None) -> None:
        self.place = place
        self.context: int | None = None
        """Maximum number of tokens of a prompt and its message."""
        self._client: Client | None = None
        self._server: Server | None = None
        self._folder: Path | None = None
        self._numbers = count()

    @property
    @abstractmethod
    def told(self) -> str:
        """A short description of the host."""

    @abstractmethod
    def serve(self, agent: str, version: str, write: Write) -> str:
        """Serve these weights; returns the model name to request them by."""

    @property
    def runs_here(self) -> bool:
        """Whether a server started by this host is running, with all its memory taken."""
        return self._server is not None

    @property
    def client(self) -> Client:
        assert self._client is not None, "serve comes first"
        return self._client

    @property
    def folder(self) -> Path:
        """A folder of this host alone, for the files that its server reads."""
        if self._folder is None:
            if self.place is not None:
                self.place.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="teamtr-vllm-", dir=self.place))
        return self._folder

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._client = self._server = self._folder = None

    def _written(self, name: str, write: Write) -> Path:
        """A new folder with the weights alone: vLLM would also load any other safetensors file beside them."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        write(folder)
        for file in folder.glob("*.safetensors"):
            if not file.name.startswith(("model", "adapter_model")):
                file.unlink()
        return folder

    def _meet(self, client: Client, model: Served) -> None:
        """Adopt a server: read its context length, and check that it reports log-probabilities of the distribution that
        it samples from."""
        drawing = Drawing(model.name, salt="first", end_ids=frozenset(), top_k=1)
        first = client.message(np.array([1], dtype=np.int32), 1, 0, drawing)
        if abs(float(first.logprobs[0])) > 1e-3:  # top_k=1 leaves one token, with probability 1
            raise UserError(
                f"{client} tells log-probabilities before temperature, top_p and top_k: start it with --logprobs-mode "
                "processed_logprobs"
            )
        self._client, self.context = client, model.context

    def _start(self, launch: Launch, model: str, name: str, arguments: Sequence[str] = ()) -> None:
        self._server = Server(launch, self.folder, model, ["--served-model-name", name, *arguments])
        (served,) = self._server.client.models()
        self._meet(self._server.client, served)


class SharedBase(Host):
    """A base with the adapters of several agents; agents that are the base itself are served as the base.

    Args:
        source: the model's folder or hub id.
        launch: how to start a server; None: use one of those running at ``urls``.
        rank: the adapter rank that the server reserves memory for, one of vLLM's allowed values.
        adapters: number of agents with an adapter.
        unchanged: version of every agent that is the base itself.
        make: writes the base into a folder, if it is not stored in one.
    """

    def __init__(
        self,
        source: str,
        *,
        revision: str | None = None,
        launch: Launch | None = None,
        urls: Sequence[str] = (),
        patience_s: float = 600.0,
        place: Path | None = None,
        rank: int = 0,
        adapters: int = 0,
        unchanged: dict[str, str] | None = None,
        make: Write | None = None,
    ) -> None:
        super().__init__(place)
        self.source = source
        self.revision = revision
        self.launch = launch
        self.urls = tuple(urls)
        self.patience_s = patience_s
        self.rank = rank
        self.adapters = adapters
        self.unchanged = unchanged or {}
        self.make = make
        self.base = BASE
        self.loaded: dict[str, tuple[str, Path]] = {}
        """By agent: the name of its adapter on the server, and the adapter's folder."""

    @property
    def told(self) -> str:
        if self.launch is not None:
            return "vllm"
        return f"vllm at {' or '.join(self.urls) if self._client is None else self._client.address}"

    def serve(self, agent: str, version: str, write: Write) -> str:
        if self._client is None:
            self._begin()
        if agent in self.unchanged:
            if self.unchanged[agent] != version:
                raise UserError(
                    f"agent {agent!r} is frozen, and its weights are not those of {self.source}, which vLLM serves: "
                    "use another sampling.engine"
                )
            return self.base
        name = name_of(agent, version)
        before = self.loaded.get(agent)
        if before is not None and before[0] == name:
            return name
        folder = self._written(name, write)
        try:
            if self.launch is None:
                self.client.unload_adapter(name)  # left over from a run that was killed
            self.client.load_adapter(name, str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.loaded[agent] = name, folder
        if before is not None:
            self.client.unload_adapter(before[0])
            shutil.rmtree(before[1], ignore_errors=True)
        return name

    def close(self) -> None:
        """Also unloads our adapters from a server that was not started here."""
        if self.launch is None and self._client is not None:
            for name, _ in self.loaded.values():
                with contextlib.suppress(TeamTRError):
                    self._client.unload_adapter(name)
        self.loaded.clear()
        super().close()

    def _begin(self) -> None:
        if self.launch is None:
            self._join()
            return
        source, arguments = self.source, []
        if self.revision is not None:
            arguments += ["--revision", self.revision]
        if self.make is not None:
            self.make(self.folder / BASE)
            source = str(self.folder / BASE)
        if self.adapters:
            arguments += ["--enable-lora", f"--max-lora-rank={self.rank}", f"--max-loras={self.adapters}"]
            arguments += [f"--max-cpu-loras={self.adapters + 1}"]  # a new version loads before the old one unloads
        self._start(self.launch, source, BASE, arguments)

    def _join(self) -> None:
        """Connect to a server that lists this model."""
        found = {}
        for url in self.urls:
            client = Client(url, patience_s=self.patience_s)
            for served in client.models():
                if self.source in (served.name, served.root):
                    self.base = served.name
                    self._meet(client, served)
                    return
                found[url] = served.root or served.name
        raise UserError(
            f"sampling.vllm.urls: no server has {self.source}; "
            + "; ".join(f"{url} has {model}" for url, model in found.items())
        )


class OwnServer(Host):
    """Serves all weights of one agent. Every version gets a new server, one at a time: reloading weights in a running
    server is not safe (vLLM 0.32 on a CPU silently keeps some of the old ones)."""

    def __init__(self, launch: Launch, place: Path | None = None) -> None:
        super().__init__(place)
        self.launch = launch
        self.name: str | None = None

    @property
    def told(self) -> str:
        return "vllm"

    def serve(self, agent: str, version: str, write: Write) -> str:
        name = name_of(agent, version)
        if self.name != name:
            self.close()
            self._start(self.launch, str(self._written(name, write)), name)
            self.name = name
        return name

    def close(self) -> None:
        self.name = None
        super().close()
