"""Triton kernel of a decode step's matrix products, up to 128 rows or 256 times a weight, on Hopper cards.

Such a product has too few rows to be worth several waves of programs. It is cut so that all programs run at once, and
each has several tiles of the weight under way. It is launched early (``early_launch``), and gate and up are multiplied
where they are computed. ``products.py`` says when it is used.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from teamtr.engines.torch.early_launch import await_previous, early
from teamtr.engines.torch.fused_layers import FEW_ROWS, TILE_ROWS, with_room

MANY_ROWS = 256
"""The only number of rows above ``FEW_ROWS``. Of 192, the captured size in between, torch's products are faster."""
LARGEST = 128 * 6144
"""Rows times inputs, in whole tiles, above which torch is faster."""
FULL = 0.9
"""Share of the cores that must have a program."""


class Tiles(NamedTuple):
    """The part of a product that one program computes; the inputs that it reads at a time, and how many such tiles are
    under way; and how many such programs a core runs at once."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    per_core: int = 1


WIDTHS: tuple[Tiles, ...] = (
    Tiles(64, 16, 256, 4),
    Tiles(64, 32, 256, 4),
    Tiles(64, 64, 128, 6),
    Tiles(64, 128, 128, 4),
)
"""From the narrowest on; each fills the shared memory of a core."""
GATED = {64: Tiles(64, 64, 64, 4, 3), 128: Tiles(128, 64, 64, 4, 2), 256: Tiles(64, 128, 64, 3, 3)}
"""By the number of rows in whole tiles, for gate and up together."""


def plain_tiles(rows: int, outputs: int, inputs: int, cores: int) -> Tiles | None:
    """How to cut a product into one program for nearly every core; None if torch computes it."""
    room = whole_tiles(rows)
    if room is None or room * inputs > LARGEST:
        return None
    fitting = (tiles for tiles in WIDTHS if outputs % tiles.outputs == inputs % tiles.inputs == 0)
    return next((tiles for tiles in fitting if FULL * cores <= _programs(room, outputs, tiles) <= cores), None)


def gated_tiles(rows: int, outputs: int, inputs: int, cores: int) -> Tiles | None:
    """The same for gate and up side by side, ``outputs`` of both together, with all programs running at once."""
    room = whole_tiles(rows)
    if room is None or outputs % (tiles := GATED[room]).outputs or inputs % tiles.inputs:
        return None
    return tiles if _programs(room, outputs, tiles) <= tiles.per_core * cores else None


def whole_tiles(rows: int) -> int | None:
    """Rows in whole tiles; None if torch computes the products of so many."""
    if 0 < rows <= FEW_ROWS:
        return triton.cdiv(rows, TILE_ROWS) * TILE_ROWS
    return rows if rows == MANY_ROWS else None


def has_room(x_NI: Tensor) -> bool:
    """Whether the memory of these rows holds whole tiles of them. Tiles that reach beyond a tensor are slow, so what
    lies behind the last row is read, too; what is computed from it is not stored."""
    room, storage = whole_tiles(len(x_NI)), x_NI.untyped_storage()
    if room is None or not x_NI.is_contiguous():
        return False
    return (x_NI.storage_offset() + room * x_NI.shape[1]) * x_NI.element_size() <= storage.nbytes()


def _programs(rows: int, outputs: int, tiles: Tiles) -> int:
    return triton.cdiv(rows, tiles.rows) * (outputs // tiles.outputs)


@triton.jit
def _product_kernel(
    x_tiles, weight_tiles, bias, out, rows, outputs, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows and OUTPUTS outputs of x @ weight.T. Programs of the same outputs follow each other, so
    that they read the weight together. With GATED, the weight is [2, outputs, inputs], half of the outputs are of the
    gate, the other half what it multiplies, and silu(gate) * up is stored."""
    await_previous(EARLY)
    row_tiles = tl.cdiv(rows, ROWS)
    first_row, tile = tl.program_id(0) % row_tiles * ROWS, tl.program_id(0) // row_tiles
    n = first_row + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        x = x_tiles.load([first_row, start])
        if GATED:
            part = tl.reshape(weight_tiles.load([0, tile * (OUTPUTS // 2), start]), [OUTPUTS, INPUTS])
        else:
            part = weight_tiles.load([tile * OUTPUTS, start])
        total = tl.dot(x, tl.trans(part), total)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, OUTPUTS // 2]), (0, 2, 1)))
        o = tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        if BIAS:
            gate += tl.load(bias + o).to(tl.float32)[None, :]
            up += tl.load(bias + outputs + o).to(tl.float32)[None, :]
        found = gate / (1.0 + tl.exp(-gate)) * up
    else:
        o = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        found = total
        if BIAS:
            found += tl.load(bias + o).to(tl.float32)[None, :]
    at = n.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=(n < rows)[:, None])


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tiles) -> Tensor:
    """x @ weight.T + bias."""
    outputs, inputs = weight_OI.shape
    weight_tiles = TensorDescriptor.from_tensor(weight_OI, [tiles.outputs, tiles.inputs])
    return _launch(x_NI, weight_tiles, bias_O, outputs, inputs, tiles, gated=False)


def gated_product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tiles) -> Tensor:
    """silu(gate) * up, for a weight with gate's outputs above up's."""
    outputs, inputs = weight_OI.shape[0] // 2, weight_OI.shape[1]
    halves = weight_OI.view(2, outputs, inputs)
    weight_tiles = TensorDescriptor.from_tensor(halves, [2, tiles.outputs // 2, tiles.inputs])
    return _launch(x_NI, weight_tiles, bias_O, outputs, inputs, tiles, gated=True)


def _launch(
    x_NI: Tensor, weight_tiles: TensorDescriptor, bias_O: Tensor | None, outputs: int, inputs: int, tiles: Tiles, *,
    gated: bool,
) -> Tensor:  # fmt: skip
    rows, room = len(x_NI), whole_tiles(len(x_NI))
    assert room is not None
    assert has_room(x_NI)
    x_RI = x_NI.as_strided((room, inputs), (inputs, 1))
    out_NO = with_room(rows, outputs, x_NI)
    width = tiles.outputs // 2 if gated else tiles.outputs
    _product_kernel[(triton.cdiv(rows, tiles.rows) * (outputs // width),)](
        TensorDescriptor.from_tensor(x_RI, [tiles.rows, tiles.inputs]), weight_tiles,
        out_NO if bias_O is None else bias_O, out_NO, rows, outputs, inputs,
        ROWS=tiles.rows, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs, GATED=gated, BIAS=bias_O is not None,
        num_warps=4, num_stages=tiles.stages, **early(x_NI),
    )  # fmt: skip
    return out_NO
