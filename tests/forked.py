"""Processes forked from a server that has loaded torch and transformers, which would take each of them five seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

CONTEXT = multiprocessing.get_context("forkserver")
# One list for all tests, since the first process starts the server. The server finds only installed modules.
CONTEXT.set_forkserver_preload(
    [
        *("hypothesis", "peft", "pytest", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"),
        *("teamtr.engines.cluster.sharded_models", "teamtr.session.train"),
    ]
)
LONG = 600
"""Timeout in seconds, long enough for a busy machine."""


def in_ranks(target: Callable[..., None], world: int, *arguments: object) -> None:
    """Run ``target(rank, world, port, ...)`` in ``world`` new processes, which meet at the port."""
    from teamtr.engines.cluster.ranks import meeting_point

    store = meeting_point("127.0.0.1")
    started = [CONTEXT.Process(target=target, args=(rank, world, store.port, *arguments)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(LONG)
    ended = [process.exitcode for process in started]
    for process in started:
        process.kill()  # if it hangs
    assert ended == [0] * world
