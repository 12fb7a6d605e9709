"""A vLLM server as a subprocess with its own Python environment, from start to exit."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from teamtr.engines.vllm import watch
from teamtr.engines.vllm.client import UNIX, Client
from teamtr.errors import TeamTRError, UserError

log = logging.getLogger(__name__)

PROGRAM = ("-m", "vllm.entrypoints.openai.api_server")
"""Equivalent to ``vllm serve``, which in CPU builds looks for a package that has another name there."""
LAST_LINES = 20
TELL_EVERY_S = 15.0
LOOK_EVERY_S = 0.2
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that the server does not inherit: they would make its Python import our packages."""
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # adapters are loaded and unloaded while it runs
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Launch:
    """How servers are started.

    Attributes:
        python: interpreter of the environment that has vLLM.
        arguments: of ``vllm serve``, besides those of one model.
        environment: variables that differ from this process's.
        start_s: startup timeout.
        patience_s: timeout of one message.
    """

    python: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    start_s: float = 900.0
    patience_s: float = 600.0

    def require(self) -> None:
        if not os.access(self.python, os.X_OK):
            raise UserError(
                f"sampling.vllm.python: there is no Python at {self.python}; `make vllm-env` makes an environment with "
                "vLLM, or give another one's"
            )


class Server:
    """Serves one model at a socket in ``folder``, which only this user can read and which is deleted with the server.
    The server ends on ``close``, and when this process ends."""

    def __init__(self, launch: Launch, folder: Path, model: str, arguments: Sequence[str]) -> None:
        launch.require()
        self.launch = launch
        self.folder = folder
        self.model = model
        socket = folder / "socket"
        with open(folder / "output", "wb") as output:
            self.process = self._started([*launch.arguments, *arguments, "--uds", str(socket)], output)
        self.client = Client(f"{UNIX}{socket}", patience_s=launch.patience_s, ended=self.ended)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _started(self, arguments: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [self.launch.python, *PROGRAM, "--model", self.model, *arguments]
        own = {name: value for name, value in os.environ.items() if name not in NOT_THEIRS}
        return subprocess.Popen(
            [self.launch.python, "-I", watch.__file__, str(self.folder), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**own, **ENVIRONMENT, **(self.launch.environment or {})},
            start_new_session=True,  # the user's Ctrl-C does not reach it; it ends with this process
        )

    def _wait(self) -> None:
        """Wait until the server answers. Logs the wait and the server's last output line at intervals."""
        began = told = time.monotonic()
        while not self.client.healthy(patience_s=5.0):
            now = time.monotonic()
            if (why := self.ended()) is not None:
                raise TeamTRError(f"vLLM did not start with {self.model}: {why}")
            if now - began > self.launch.start_s:
                raise TeamTRError(
                    f"vLLM has not started with {self.model} in {self.launch.start_s:.0f} s (sampling.vllm.start_s); "
                    f"its last lines:\n{self.last_lines()}"
                )
            if now - told > TELL_EVERY_S:
                told = now
                log.info("waiting for vLLM since %.0f s: %s", now - began, self.last_lines(1))
            time.sleep(LOOK_EVERY_S)
        log.info("vLLM serves %s after %.0f s", self.model, time.monotonic() - began)

    def ended(self) -> str | None:
        """Why the process has ended, with its last output lines; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a closed connection may be seen before the exit
            code = self.process.wait(timeout=0.2)
            return f"it has ended with exit code {code}; its last lines:\n{self.last_lines()}"
        return None

    def last_lines(self, count: int = LAST_LINES) -> str:
        try:
            with open(self.folder / "output", "rb") as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - 64_000))
                text = output.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-count:])

    def close(self) -> None:
        """Stop the server and wait until it has exited; a no-op once it has."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(watch.GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
