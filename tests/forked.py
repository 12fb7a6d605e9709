"""Processes that are forked from one that has loaded torch and transformers: each would take five seconds to do so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

CONTEXT = multiprocessing.get_context("forkserver")
# One list for all tests: the first process that anybody starts starts the server. It finds installed modules only.
CONTEXT.set_forkserver_preload(
    [
        *("hypothesis", "peft", "pytest", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"),
        *("teamtr.engines.cluster.sharded_models", "teamtr.session.train"),
    ]
)
LONG = 600
"""Seconds that nothing takes, also not on a busy machine, unless it hangs."""


def in_ranks(target: Callable[..., None], world: int, *arguments: object) -> None:
    """``target(rank, world, port, ...)`` in so many new processes, which find each other at the port."""
    from teamtr.engines.cluster.ranks import meeting_point

    store = meeting_point("127.0.0.1")
    started = [CONTEXT.Process(target=target, args=(rank, world, store.port, *arguments)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(LONG)
    ended = [process.exitcode for process in started]
    for process in started:
        process.kill()  # whoever hangs
    assert ended == [0] * world
