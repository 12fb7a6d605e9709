"""Memory of a GPU: allocator settings, this process's share, and how many bytes are free."""

from __future__ import annotations

import os

import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SHARED_OUT = 0.95
"""Share of a GPU's memory that is divided among processes. The rest is for their CUDA contexts, which no allocator
counts."""


def use(device: torch.device) -> None:
    """Configures the CUDA allocator and selects the device, before anything is allocated. Messages of many lengths
    fragment memory unless segments are expandable. Settings in the environment take precedence."""
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = "expandable_segments:True"
    if device.index is not None:
        torch.cuda.set_device(device)  # our own kernels launch on the current device


def take_share(processes: int) -> None:
    """Limits this process to its share of every GPU when several processes run side by side. What fits then does not
    depend on what the others hold at the moment. No-op for one process or without a GPU."""
    if processes > 1:
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(SHARED_OUT / processes, index)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate, from what it has reserved or from the GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    idle = torch.cuda.memory_reserved(device) - used
    return min(free + idle, own_bytes(device) - used)


def own_bytes(device: torch.device) -> int:
    """Bytes that this process may allocate in total."""
    index = torch.cuda.current_device() if device.index is None else device.index  # the next call takes only an index
    share = torch.cuda.get_per_process_memory_fraction(index)
    return int(share * torch.cuda.get_device_properties(device).total_memory)
