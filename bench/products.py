"""Matrix products of a decode step: our kernel beside torch's, in microseconds per product.

    python bench/products.py                        # a Hopper card, the shapes of Qwen3 from 0.6B to 8B
    python bench/products.py --shapes 1.7b --rows 64,256 --json
    python bench/products.py --shapes tiny --rows 8 # elsewhere: torch alone

Each figure is the median of replays of a captured graph that computes the product with many different weights, more
than the card's cache holds; first torch's, then ours. Gate and up are measured with what multiplies them. A dash: the
sampler leaves this product to torch. On a CPU, calls are timed instead of replays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from common import SHAPES, device, report, seconds, so_far, wait, whole_numbers
from teamtr.engines.paged import products
from teamtr.engines.torch.known_layers import computed_by_kernels

ENOUGH_BYTES = 1 << 30
"""Bytes of weights in a graph."""
REPLAYS = 15


def layers(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The products of a decoder layer: outputs and inputs."""
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    return {
        "query, key, value": ((heads + 2 * kv_heads) * dim, width), "attention's output": (width, heads * dim),
        "gate and up": (2 * inner, width), "down": (width, inner),
    }  # fmt: skip


def captured_us(work: Callable[[], Any], times: int) -> float:
    """Median microseconds of one of ``times`` products."""
    work()
    wait()
    if device().type != "cuda":
        return sorted(seconds(work) for _ in range(REPLAYS))[REPLAYS // 2] * 1e6 / times
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    took = []
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        wait()
        took.append(begin.elapsed_time(end))
    return sorted(took[2:])[REPLAYS // 2] * 1000 / times


def by_torch(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    found = linear(x, weight)
    if not gated:
        return found
    gate, up = found.chunk(2, -1)
    if not computed_by_kernels(x):
        return silu(gate) * up
    from teamtr.engines.torch.fused_layers import gated as multiplied

    return multiplied(gate, up)


def by_kernel(x: Tensor, weight: Tensor, gated: bool) -> Tensor | None:
    if gated:
        return products.gated_product(x, weight, None)
    return products.product(x, weight, None) if products.tiles_of(x, weight) is not None else None


def rows_of(count: int, width: int) -> Tensor:
    """Random rows, with the memory behind them that the sampler's have."""
    if device().type != "cuda":
        return torch.randn(count, width)
    from teamtr.engines.torch.fused_layers import with_room

    return with_room(count, width, torch.empty(0, dtype=torch.float16, device="cuda")).normal_()


def measured(rows: int, outputs: int, inputs: int, gated: bool) -> dict[str, float]:
    x = rows_of(rows, inputs)
    count = max(8, ENOUGH_BYTES // (2 * outputs * inputs)) if x.is_cuda else 2
    weights = [(torch.randn(outputs, inputs, device=x.device) * inputs**-0.5).to(x.dtype) for _ in range(count)]
    found = {"torch": captured_us(lambda: [by_torch(x, weight, gated) for weight in weights], count)}
    if (ours := by_kernel(x, weights[0], gated)) is not None:
        exact = by_torch(x.float(), weights[0].float(), gated)
        found["error"] = float((ours.float() - exact).norm() / exact.norm())
        found["ours"] = captured_us(lambda: [by_kernel(x, weight, gated) for weight in weights], count)
        found["ratio"] = found["ours"] / found["torch"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6b,1.7b,4b,8b", help="by comma (default: %(default)s)")
    parser.add_argument("--rows", type=whole_numbers, default=(8, 16, 32, 64, 96, 128, 256))
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if unknown := set(a.shapes.split(",")) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    rows = []
    for shape in a.shapes.split(","):
        for name, (outputs, inputs) in layers(SHAPES[shape]).items():
            for count in a.rows:
                key = f"{shape}, {name}, {count} rows"
                results[key] = found = measured(count, outputs, inputs, name == "gate and up")
                so_far(key, found)
                rows.append((shape, name, count, *(found.get(kind) for kind in ("torch", "ours", "ratio", "error"))))
    header = ("shape", "product", "rows", "torch", "ours", "ratio", "error")
    report(
        f"microseconds per product on {device()}",
        header,
        rows,
        {"benchmark": "products", **vars(a), "results": results},
        a.json,
    )


if __name__ == "__main__":
    main()
