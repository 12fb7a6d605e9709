"""Cards that a run can be planned for, with the rates of the manufacturers' data sheets, without sparsity."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from teamtr.errors import UserError


@dataclass(frozen=True)
class Card:
    """One device.

    ``memory`` in bytes (None: main memory, which is not counted), ``bandwidth`` in bytes per second, ``flops`` of
    matrix products per second by precision, ``link`` in bytes per second and direction to other cards of the same
    machine.
    """

    name: str
    memory: int | None
    bandwidth: float
    flops: Mapping[str, float]
    link: float

    @property
    def is_cpu(self) -> bool:
        return self.memory is None


def _card(name: str, gb: int, tb_per_s: float, tflops: tuple[float, float, float], link_gb_per_s: float) -> Card:
    """``tflops`` are those in half precision, TF32 and float32. A data sheet's GB is 10^9 bytes; cards report slightly
    more."""
    half, tf32, fp32 = (1e12 * x for x in tflops)
    flops = {"fp16": half, "bf16": half, "tf32": tf32, "fp32": fp32}
    return Card(name, gb * 10**9, 1e12 * tb_per_s, flops, 1e9 * link_gb_per_s)


CPU = Card("cpu", None, 35e9, dict.fromkeys(("fp16", "bf16", "tf32", "fp32"), 36e9), 1e9)
"""One core in float32, measured by copying and by a 512 x 512 product on the machine of docs/cluster.md. On a CPU,
ratios are more reliable than seconds."""

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("H200", 141, 4.8, (989.0, 494.0, 67.0), 450.0),
        _card("H100", 80, 3.35, (989.0, 494.0, 67.0), 450.0),
        _card("A100-80", 80, 2.039, (312.0, 156.0, 19.5), 300.0),
        _card("L40S", 48, 0.864, (362.0, 183.0, 91.6), 32.0),
        _card("RTX4090", 24, 1.008, (165.0, 82.6, 82.6), 32.0),
        CPU,
    )
}
"""H200, H100 and A100 are the SXM boards, connected by NVLink; L40S and RTX4090 have PCIe 4 with 16 lanes. The
half-precision rate of the RTX4090 is the one with float32 accumulation."""


def card_named(name: str) -> Card:
    by_name = {known.lower(): card for known, card in CARDS.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=1)
    hint = f" (did you mean {by_name[near[0]].name}?)" if near else ""
    raise UserError(f"there is no card {name!r} in the table{hint}; there are {', '.join(CARDS)}")


OTHER_BOARDS = {"pcie", "nvl", "mig", "laptop", "d"}
"""Words in a device name that mark a slower board than the card of the table, or a part of one."""


def card_like(device: str) -> Card | None:
    """The card of the table with this device name ("NVIDIA A100-SXM4-80GB" is an A100-80); None if there is none."""
    words = set(re.sub(r"\brtx (?=\d)", "rtx", re.sub(r"[^a-z0-9]+", " ", device.lower())).split())
    if words & OTHER_BOARDS:
        return None
    for card in CARDS.values():
        name, *gb = card.name.lower().split("-")
        if {name, *(f"{size}gb" for size in gb)} <= words:
            return card
    return None
