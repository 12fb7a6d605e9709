"""Norm and rotation of queries and keys, as a value that attention over KV blocks applies first.

A compiler generates six kernels for them in every layer, each reading and writing what fits in registers. The kernels
of ``paged.kernels`` include them; this is the same in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


@dataclass(frozen=True)
class Rotation:
    """The angles of packed tokens, and the weights of the norms over a head (None: no norm)."""

    cos_ND: Tensor
    sin_ND: Tensor
    query_weight_D: Tensor | None
    key_weight_D: Tensor | None
    epsilon: float

    def query(self, x_NHD: Tensor) -> Tensor:
        return self._rotated(x_NHD, self.query_weight_D)

    def key(self, x_NKD: Tensor) -> Tensor:
        return self._rotated(x_NKD, self.key_weight_D)

    def _rotated(self, x: Tensor, weight_D: Tensor | None) -> Tensor:
        """Computes in float32 and rounds once at the end."""
        wide = x.float()
        if weight_D is not None:
            wide = rms_norm(wide, (wide.shape[-1],), weight_D.float(), self.epsilon)
        first, second = wide.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (wide * self.cos_ND[:, None].float() + turned * self.sin_ND[:, None].float()).to(x.dtype)
