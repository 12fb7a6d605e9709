"""The process in which anything untrusted runs: a user's reward file, a pattern that may backtrack for ever.

It is started by ``pool.py`` as a plain script and imports nothing but the standard library until it is told to,
so that it is up in a few hundredths of a second and a replacement costs little.

The channel is stdin and stdout, moved at once to descriptors of their own: what a grader prints cannot reach it.
A frame is eight bytes of length, then JSON::

    <- {"sys_path": [...], "memory_bytes": ..., "show_output": ...}       once, at start
    <- {"load": name, "setup": {...}}      -> {"loaded": true} | {"error": "..."}
    <- {"call": [...items], "alarm": s}    -> {"streams": true}?  {"values": [...]}*  {"error": "..."}?

A *factory* (``load`` names it) turns a setup into a grader: a function of a list of items. A grader that returns a
list answers for all items at once; one that yields answers item by item, which tells the pool whom to blame.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

Item = dict[str, Any]
Grader = Callable[[list[Item]], Iterable[Any]]

HEADER_BYTES = 8


def encode_frame(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def regex(pattern: str) -> Grader:
    """The one group of the last match in each ``item["text"]``; None where nothing matches."""
    compiled = re.compile(pattern)

    def last_groups(items: list[Item]) -> Iterator[str | None]:
        for item in items:
            last = None
            for match in compiled.finditer(item["text"]):
                last = match
            yield None if last is None else last.group(1)

    return last_groups


def reward(path: str, function: str, columns: list[str]) -> Grader:
    """A user's ``f(prompts, completions, **columns) -> list[float]`` from a Python file.

    Items hold ``prompt``, ``completion`` and ``columns``. A function without ``**`` gets the columns that it names;
    one that asks for a column which is not there fails here, before anything is graded.
    """
    import inspect

    called = _function_in_file(path, function)
    parameters = inspect.signature(called).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    passed = [name for name in columns if takes_any or name in parameters]
    try:
        inspect.signature(called).bind(prompts=[], completions=[], **{name: [] for name in passed})
    except TypeError as error:
        raise TypeError(
            f"{function}{inspect.signature(called)} cannot be called with prompts, completions and the columns "
            f"{columns}: {error}"
        ) from None

    def rewards(items: list[Item]) -> list[float]:
        returned = called(
            prompts=[item["prompt"] for item in items],
            completions=[item["completion"] for item in items],
            **{name: [item["columns"].get(name) for item in items] for name in passed},
        )
        try:
            values = list(returned)
        except TypeError:
            raise TypeError(f"{function} must return a list of floats, it returned {returned!r:.80}") from None
        if len(values) != len(items):
            raise ValueError(f"{function} returned {len(values)} rewards for {len(items)} completions")
        return [float(value) for value in values]

    return rewards


FACTORIES: dict[str, Callable[..., Grader]] = {"regex": regex, "reward": reward}


def resolve(name: str) -> Callable[..., Grader]:
    """A factory by its name here, or as ``package.module:function``."""
    if name in FACTORIES:
        return FACTORIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise LookupError(f"no grader {name!r}: use one of {sorted(FACTORIES)} or 'package.module:function'")
    found: Callable[..., Grader] = getattr(importlib.import_module(module), attribute)
    return found


def _function_in_file(path: str, name: str) -> Callable[..., Any]:
    import importlib.util

    # As for any script, the modules beside the file can be imported.
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("teamtr_user_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"{path} has no function {name!r}; it has {names}")
    return found


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    graders: dict[str, Grader] = {}
    hello = _read_frame(requests)
    if hello is None:
        return
    sys.path[:] = hello["sys_path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hello["memory_bytes"] is not None and sys.platform == "linux":  # elsewhere the system does not enforce it
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = hello["memory_bytes"] if hard == resource.RLIM_INFINITY else min(hello["memory_bytes"], hard)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    if not hello["show_output"]:
        # Only now: a worker that cannot even start must be able to say why.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def reply(content: Any) -> None:
        replies.write(encode_frame(content))
        replies.flush()

    current: Grader | None = None
    while (request := _read_frame(requests)) is not None:
        try:
            if "load" in request:
                key = json.dumps([request["load"], request["setup"]], sort_keys=True)
                if key not in graders:
                    graders[key] = resolve(request["load"])(**request["setup"])
                current = graders[key]
                reply({"loaded": True})
            else:
                assert current is not None, "the pool loads before it calls"
                _call(current, request["call"], request["alarm"], reply)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a grader are its own affair too
            reply({"error": _describe(error)})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _call(grader: Grader, items: list[Item], alarm: float, reply: Callable[[Any], None]) -> None:
    # The pool kills a grader that is late. Should the pool's own process be gone by then, the kernel does it:
    # SIGALRM keeps its default action, so that not even code which holds the interpreter lock survives.
    signal.setitimer(signal.ITIMER_REAL, alarm)
    answered = grader(items)
    if not isinstance(answered, Iterator):
        values = list(answered)
        if len(values) != len(items):
            raise ValueError(f"the grader returned {len(values)} values for {len(items)} items")
        reply({"values": values})
        return
    reply({"streams": True})
    count = 0
    for value in islice(answered, len(items)):
        reply({"values": [value]})
        signal.setitimer(signal.ITIMER_REAL, alarm)
        count += 1
    if count < len(items):
        raise ValueError(f"the grader yielded {count} values for {len(items)} items")


def _describe(error: BaseException) -> str:
    """``ValueError: text (file.py:12)``: the line where the untrusted code raised it."""
    ours = (__file__, "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


def _read_frame(stream: BinaryIO) -> Any | None:
    """The next frame, or None when the other side has gone."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = int.from_bytes(header, "big")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def main() -> None:
    """Take the channel away from stdin and stdout, then serve until the other side closes it."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _serve(requests, replies)
    # Threads or exit handlers that a grader left behind must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
