"""The memory of a card: how it is handed out, which share of it this process may have, and what of that is free."""

from __future__ import annotations

import os

import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SHARED_OUT = 0.95
"""Of the whole card; the rest is for the contexts of the processes, which no allocator counts."""


def use(device: torch.device) -> None:
    """Before anything is on the card: messages of all lengths leave holes that nothing fits into, unless memory is
    handed out from ranges that grow. What the environment asks for stands."""
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = "expandable_segments:True"
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one


def take_share(processes: int) -> None:
    """One of so many processes beside each other takes its part of each card and no more: it learns by itself what
    fits, instead of by what its neighbours hold at the moment. Without a card nothing is shared."""
    if processes > 1:
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SHARED_OUT / processes, index)


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate, from what it has reserved or from the card."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    idle = torch.cuda.memory_reserved(device) - used
    return min(free + idle, own_bytes(device) - used)


def own_bytes(device: torch.device) -> int:
    """What this process may have in all."""
    index = torch.cuda.current_device() if device.index is None else device.index  # it takes no other name for a card
    share = torch.cuda.get_per_process_memory_fraction(index)
    return int(share * torch.cuda.get_device_properties(device).total_memory)
