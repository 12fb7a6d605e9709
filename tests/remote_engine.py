"""A member of a cluster engine behind a pipe: every call and every answer is one frame of JSON and raw arrays.

It checks that ``ports.Engine`` passes only data that can be sent to another process or machine.
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
from pathlib import Path
from typing import IO, Any

import numpy as np

from teamtr import answers, batches, ports
from teamtr.config import dump, loads
from teamtr.engines.cluster.engine import ClusterEngine
from teamtr.engines.cluster.seat import Answer, Call, Handle, Seat
from teamtr.errors import UserError
from teamtr.session.models import Models, codecs_of, local_engine
from teamtr.theory.objective import Objective

RECORDS = {
    cls.__name__: cls
    for cls in (
        *(answers.AgentInfo, answers.Decoding, answers.Divergence, answers.Sample, answers.StepStats),
        *(answers.TokenShift, answers.ValueStats, batches.AgentBatch, batches.Verified),
        *(ports.Demand, ports.Lengths, ports.MemoryItem, ports.MemoryPlan, ports.Rehearsal, Objective),
    )
}
"""The records that may be sent, besides arrays, numbers and names."""


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


class FrameMembers:
    """One member, in another process."""

    count = 1

    def __init__(self, team_file: str, taught: bool) -> None:
        program = [sys.executable, __file__]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _stop, self._process)
        self._exchange({"team_file": team_file, "taught": taught})

    def ask(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        return {
            member: self._exchange({f.name: getattr(call, f.name) for f in fields(Call)})
            for member, call in calls.items()
        }

    def _exchange(self, asked: dict[str, Any]) -> Any:
        with self._lock:
            send(self._process.stdin, asked)
            answer = receive(self._process.stdout)
        if "error" in answer:
            kind = {"UserError": UserError, "RuntimeError": RuntimeError}.get(answer["error"], AssertionError)
            raise kind(answer["message"])
        return answer["result"]

    def close(self) -> None:
        self._end()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait(60)


def remote_engine(team_file, task, plan, player, *, taught: bool = True) -> Models:
    """Like ``session.models.local_engine``, but with all models in another process."""
    assert player is None
    return Models(ClusterEngine(FrameMembers(dump(team_file), taught), shards=1), codecs_of(team_file))


# -- the other side ----------------------------------------------------------------------------------------------


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    import torch

    from teamtr.session.task import build_task

    torch.set_num_threads(1)
    seat: Seat | None = None
    while True:
        try:
            asked = receive(stdin)
        except EOFError:
            return
        try:
            if seat is None:
                settings = loads(asked["team_file"], name="remote")
                engine = local_engine(
                    settings, build_task(settings), settings.plan.plan(), None, taught=asked["taught"]
                ).engine
                seat, answer = Seat(engine), Answer()
            else:
                answer = seat.answer(Call(**asked))
            if answer.error is not None:
                raise answer.error
            send(stdout, {"result": answer.result})
        except Exception as error:
            send(stdout, {"error": type(error).__name__, "message": str(error)})


if __name__ == "__main__":
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # printed text must not get between frames
    serve(sys.stdin.buffer, out)
