"""The loss of a critic: squared error, clipped around the values before the update, as in PPO's reference code."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(new_N: Tensor, old_N: Tensor, target_N: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(sum over tokens of max((V - G)^2, (V_clipped - G)^2) / 2, tokens whose value left the range).

    V_clipped is within ``clip`` of the value before the update: a value that has moved that far towards its target gets
    no gradient. ``clip`` may be inf.
    """
    plain_N = (new_N - target_N).square()
    held_N = old_N + (new_N - old_N).clamp(-clip, clip)
    outside = ((new_N - old_N).abs() > clip).sum()
    return 0.5 * torch.maximum(plain_N, (held_N - target_N).square()).sum(), outside
