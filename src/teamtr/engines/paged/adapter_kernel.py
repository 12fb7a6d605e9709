"""Triton kernel that adds to each row of a matrix product the output of that row's adapter.

``row_adapters.py`` has the same in plain torch; tests compare the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from teamtr.engines.torch.early_launch import await_previous, early

ROWS, OUTPUTS = 32, 128
"""The tile that one program computes."""
COLUMNS = 64
"""Columns added at a time: the ranks of all agents and fused layers side by side."""


@triton.jit
def _own_adapter_kernel(
    product, up, index, out, rows, row, OUT: tl.constexpr, ALL: tl.constexpr, RANK: tl.constexpr,
    ADAPTERS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of product[:, :OUT] + own(product[:, OUT:]) @ up', where own() keeps the columns of the row's adapter."""
    await_previous(EARLY)
    n = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_n, in_o = n < rows, o < OUT
    adapter = tl.load(index + n, mask=in_n, other=-1)
    tile = in_n[:, None] & in_o[None, :]
    found = tl.load(product + n[:, None] * row + o[None, :], mask=tile, other=0.0)
    total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for start in tl.static_range(0, ALL, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        own = adapter[:, None] == (c % (ADAPTERS * RANK) // RANK)[None, :]
        of_rows = in_n[:, None] & (c < ALL)[None, :]
        # Loaded without the mask by column, which would split the load into single numbers, and masked afterwards.
        narrow = tl.load(product + n[:, None] * row + OUT + c[None, :], mask=of_rows, other=0.0)
        narrow = tl.where(own, narrow, 0.0)
        part = tl.load(up + o[:, None] * ALL + c[None, :], mask=in_o[:, None] & (c < ALL)[None, :], other=0.0)
        total = tl.dot(narrow, tl.trans(part), total)
    tl.store(out + n[:, None] * OUT + o[None, :], (found.to(tl.float32) + total).to(out.dtype.element_ty), mask=tile)


def with_own_adapter(product: Tensor, up_OC: Tensor, index_N: Tensor, rank: int, adapters: int) -> Tensor:
    """Rows [.., O + C] of a product with the base and all A, to [.., O]; ``index_N``: the adapter of each row."""
    flat = product.flatten(0, -2)
    outputs, columns = up_OC.shape
    out_NO = torch.empty(len(flat), outputs, dtype=product.dtype, device=product.device)
    _own_adapter_kernel[(triton.cdiv(outputs, OUTPUTS), triton.cdiv(len(flat), ROWS))](
        flat, up_OC, index_N, out_NO, len(flat), flat.stride(0), OUT=outputs, ALL=columns, RANK=rank,
        ADAPTERS=adapters, ROWS=ROWS, OUTPUTS=OUTPUTS, COLUMNS=COLUMNS, num_warps=4, num_stages=2,
        **early(flat),
    )  # fmt: skip
    return out_NO.view(*product.shape[:-1], outputs)
