"""Launches kernels early: a kernel is placed on the card while the one before still runs, and waits until it has ended.

Hopper cards can do this (programmatic dependent launch). Otherwise a card is idle for a moment after every kernel, of
which a decode step has hundreds. A kernel that is launched early begins with ``await_previous``, before it reads or
writes anything, so that it sees what it would have seen anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a triton without NVIDIA's part
    gdc_launch_dependents = gdc_wait = None

HOPPER = 9
"""Major compute capability."""


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait for the previous kernel's end, and let the next one be placed. Each kernel waits for the one before it, so
    all earlier ones have ended as well."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel on the device of ``x``; it must have ``EARLY`` among its arguments."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(x.device) else {"EARLY": False}


@cache
def launches_early(device: torch.device) -> bool:
    """Whether this is a Hopper card, such as an H100 or H200. Later cards can launch kernels early, too, but this was
    never run on one."""
    if device.type != "cuda" or torch.version.hip is not None or gdc_wait is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == HOPPER
