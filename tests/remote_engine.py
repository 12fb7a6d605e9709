"""An engine in another process: every call is one frame of JSON and raw arrays there, and one back. No pickle.

It proves that nothing leaks through ``ports.Engine``: what this module cannot send, no engine elsewhere could get.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np

from teamtr import ports, types
from teamtr.config import dump, loads
from teamtr.errors import UserError
from teamtr.session.models import Models, codecs_of, local_engine
from teamtr.theory.objective import Objective

RECORDS = {
    cls.__name__: cls
    for cls in (
        *(
            types.ValueStats,
            types.AgentBatch,
            types.AgentInfo,
            types.Divergence,
            types.Sample,
            types.StepStats,
            types.TokenShift,
            types.Verified,
        ),
        *(ports.Demand, ports.Lengths, ports.MemoryItem, ports.MemoryPlan, ports.Rehearsal, Objective),
    )
}
"""All that may cross besides arrays, numbers and names."""


class Handle:
    """A snapshot that lives on the other side."""

    def __init__(self, number: int) -> None:
        self.number = number


# -- frames ------------------------------------------------------------------------------------------------------


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), arrays)
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": [str(value.dtype), list(value.shape)]}
    if isinstance(value, Handle):
        return {"handle": value.number}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, arrays) for item in value]}
    if isinstance(value, Mapping):
        return {"map": [[key, encode(item, arrays)] for key, item in value.items()]}
    if is_dataclass(value) and type(value).__name__ in RECORDS:
        own = {field.name: encode(getattr(value, field.name), arrays) for field in fields(value) if field.init}
        return {"record": type(value).__name__, "fields": own}
    raise TypeError(f"{type(value).__name__} may not cross")


def decode(tree: Any, arrays: Iterator[np.ndarray]) -> Any:
    match tree:
        case {"array": _}:
            return next(arrays)
        case {"handle": number}:
            return Handle(number)
        case {"path": text}:
            return Path(text)
        case {"set": items}:
            return frozenset(items)
        case {"list": items}:
            return [decode(item, arrays) for item in items]
        case {"tuple": items}:
            return tuple(decode(item, arrays) for item in items)
        case {"map": pairs}:
            return {key: decode(item, arrays) for key, item in pairs}
        case {"record": name, "fields": own}:
            return RECORDS[name](**{key: decode(item, arrays) for key, item in own.items()})
    return tree


def send(stream: IO[bytes], value: Any) -> None:
    arrays: list[np.ndarray] = []
    tree = encode(value, arrays)
    head = json.dumps({"tree": tree, "arrays": [[str(a.dtype), a.shape] for a in arrays]}).encode()
    stream.write(len(head).to_bytes(8, "big") + head)
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    length = stream.read(8)
    if len(length) < 8:
        raise EOFError("the other side is gone")
    head = json.loads(stream.read(int.from_bytes(length, "big")))
    arrays = []
    for dtype, shape in head["arrays"]:
        kind = np.dtype(dtype)
        body = stream.read(kind.itemsize * int(np.prod(shape)))
        arrays.append(np.frombuffer(body, kind).reshape(shape).copy())
    return decode(head["tree"], iter(arrays))


# -- this side ---------------------------------------------------------------------------------------------------


class RemoteEngine:
    """The Engine port; everything it is asked goes to the other process."""

    def __init__(self, team_file: str, taught: bool) -> None:
        program = [sys.executable, __file__]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self._dropped: list[int] = []
        self._end = weakref.finalize(self, _stop, self._process)
        self.agents = tuple(self.call("start", team_file, taught))

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            dropped, self._dropped = self._dropped, []
            send(self._process.stdin, {"call": name, "args": arguments, "options": options, "dropped": dropped})
            answer = receive(self._process.stdout)
        if "error" in answer:
            kind = {"UserError": UserError, "RuntimeError": RuntimeError}.get(answer["error"], AssertionError)
            raise kind(answer["message"])
        result = answer["result"]
        if isinstance(result, Handle):
            weakref.finalize(result, self._dropped_later, result.number)
        return result

    def _dropped_later(self, number: int) -> None:
        self._dropped.append(number)

    def close(self) -> None:
        self._end()

    def learner(self, agent: str) -> RemoteLearner:
        return RemoteLearner(self, agent)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait(60)


class RemoteLearner:
    """The Learner port of one agent."""

    def __init__(self, engine: RemoteEngine, agent: str) -> None:
        self.engine = engine
        self.agent = agent

    @property
    def tokens(self) -> dict[str, int]:
        return self.engine.call("tokens", self.agent)


ENGINE = ("version", "publish", "sample", "info", "set_precision", "memory_plan", "rehearse", "peak_bytes")
LEARNER = (
    *(
        "version",
        "fingerprint",
        "begin",
        "token_logprobs",
        "step",
        "values",
        "fit_values",
        "measure",
        "verify",
        "token_kls",
        "token_shift",
        "end",
    ),
    *("snapshot", "restore", "move", "perturb", "save", "load"),
)


def _forward(cls: type, names: tuple[str, ...], prefix: str) -> None:
    for name in names:

        def method(self: Any, *arguments: Any, _name: str = name, **options: Any) -> Any:
            if prefix:
                return self.engine.call(prefix + _name, self.agent, *arguments, **options)
            return self.call(_name, *arguments, **options)

        setattr(cls, name, method)


_forward(RemoteEngine, ENGINE, "")
_forward(RemoteLearner, LEARNER, "learner.")


def remote_engine(team_file, task, plan, player, *, taught: bool = True) -> Models:
    """As ``session.models.local_engine``, with all models in another process."""
    assert player is None
    return Models(RemoteEngine(dump(team_file), taught), codecs_of(team_file))


# -- the other side ----------------------------------------------------------------------------------------------


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    import torch

    from teamtr.session.task import build_task

    torch.set_num_threads(1)
    engine: Any = None
    snapshots: dict[int, Any] = {}
    numbers = count(1)

    def held(value: Any) -> Any:
        return snapshots[value.number] if isinstance(value, Handle) else value

    while True:
        try:
            asked = receive(stdin)
        except EOFError:
            return
        for number in asked["dropped"]:
            snapshots.pop(number, None)
        arguments, options, name = [held(a) for a in asked["args"]], asked["options"], asked["call"]
        try:
            if name == "start":
                settings = loads(arguments[0], name="remote")
                task, plan = build_task(settings), settings.plan.plan()
                engine = local_engine(settings, task, plan, None, taught=arguments[1]).engine
                result: Any = list(engine.agents)
            elif name == "tokens":
                result = dict(engine.learner(arguments[0]).tokens)
            elif name.startswith("learner."):
                learner, method = engine.learner(arguments[0]), name.removeprefix("learner.")
                result = getattr(learner, method)(*arguments[1:], **options)
                if method == "snapshot":
                    number = next(numbers)
                    snapshots[number] = result
                    result = Handle(number)
            else:
                result = getattr(engine, name)(*arguments, **options)
            send(stdout, {"result": result})
        except Exception as error:
            send(stdout, {"error": type(error).__name__, "message": str(error)})


if __name__ == "__main__":
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints must not get between frames
    serve(sys.stdin.buffer, out)
