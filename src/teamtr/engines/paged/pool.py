"""One server per architecture, made when it is first needed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from teamtr.engines import card
from teamtr.engines.hashing import NOT_COMPUTED_WITH
from teamtr.engines.paged.one_copy import NotShared, shared_weights
from teamtr.engines.paged.row_adapters import adapted_linears, why_not
from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COMPILE_FROM_PARAMETERS = 400_000_000
"""Of a model whose layers we do not know in all their parts. Below this a step is short of work either way, and a run
too short to repay the compiler."""
SHARE_OF_FREE_MEMORY = 0.4


@dataclass
class SamplerPool:
    """How to sample, and the servers that do it. Agents of one architecture share a server and its pages.

    Args:
        precision: of the sampling copy.
        memory_bytes: most memory for pages of keys and values; None takes a share of what is free at first use.
        compiled: whether torch compiles decoding; None: a large model, unless kernels of our own compute all that lies
            between its products. They are for half precision.
        adapters: merged into the copy when their agent speaks, or applied by row, so that rows of several agents decode
            together.
        fallback: the precision to go on in once logits were not finite; None where there is no other.
        keeps: servers can keep what tokens are drawn from, for updates that do not compute it again.
    """

    precision: str
    device: torch.device
    memory_bytes: int | None = None
    compiled: bool | None = None
    fallback: str | None = None
    adapters: Literal["merged", "by_row"] = "merged"
    keeps: bool = False
    _servers: dict[str, Server] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def shared_of(self, causal_lm: Any) -> dict[str, Tensor]:
        """The weights of this model that its server reads where they are; the others are copied."""
        return shared_weights(causal_lm, self.dtype, self.device) if self.applies_by_row(causal_lm) else {}

    def applies_by_row(self, causal_lm: Any) -> bool:
        return self.adapters == "by_row" and why_not(causal_lm) is None

    def key_of(self, causal_lm: Any) -> str:
        """Models of equal keys have one server: those of one architecture. A model whose weights a server reads where
        they are has one of its own."""
        found = architecture(causal_lm)
        return f"{found} {id(causal_lm)}" if self.shared_of(causal_lm) else found

    def server_of(self, causal_lm: Any, let_go: Callable[[], None] = lambda: None) -> Server:
        """``let_go`` is called before one is made, which may lay weights of the model elsewhere: views of them would
        keep where they lay."""
        key = self.key_of(causal_lm)
        if key not in self._servers:
            let_go()
            copy = self._copy_of(causal_lm)
            if self.adapters == "by_row":
                self._apply_by_row(copy, causal_lm)
            self._servers[key] = Server(
                copy,
                pool_bytes=self.page_budget(causal_lm),
                graphs=self.device.type == "cuda",
                compiled=self._may_compile(causal_lm) and not copy.joined,
                keeps=self.keeps,
            )
        return self._servers[key]

    def _may_compile(self, causal_lm: Any) -> bool:
        """Whether torch compiles decoding where kernels of our own do not do as much."""
        if self.device.type != "cuda":
            return False
        if self.compiled is not None:
            return self.compiled
        parameters = sum(p.numel() for name, p in causal_lm.named_parameters() if ".lora_" not in name)
        return parameters >= COMPILE_FROM_PARAMETERS

    def _copy_of(self, causal_lm: Any) -> SamplingCopy:
        made = partial(
            SamplingCopy, causal_lm, self.dtype, self.device,
            joins_layers=not self.compiled and (self.device.type != "cuda" or self.dtype != torch.float32),
            in_part=not self._may_compile(causal_lm),
        )  # fmt: skip
        try:
            return made(self.shared_of(causal_lm))
        except NotShared as reason:
            warnings.warn(
                f"{type(causal_lm).__name__} is sampled from a copy of its weights, which memory plans do not count: "
                f"{reason}",
                stacklevel=2,
            )
            return made()

    def _apply_by_row(self, copy: SamplingCopy, causal_lm: Any) -> None:
        if (reason := why_not(causal_lm)) is None:
            copy.apply_by_row(causal_lm)
        elif adapted_linears(causal_lm):
            warnings.warn(
                f"adapters of {type(causal_lm).__name__} are merged, one agent at a time, and not applied by row: "
                f"{reason}",
                stacklevel=2,
            )

    def fall_back(self) -> bool:
        """From now on sample in the other precision; False where there is none. All servers are made anew."""
        if self.fallback is None:
            return False
        self.precision, self.fallback = self.fallback, None
        self._servers.clear()
        return True

    def forget_pages(self) -> None:
        """What servers computed before is not found any more."""
        for server in self._servers.values():
            server.forget_pages()

    def page_budget(self, causal_lm: Any) -> int:
        """Most memory for pages of this architecture: what its server has, or would have if it were made now."""
        if server := self._servers.get(self.key_of(causal_lm)):
            return server.pool_bytes
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.device.type != "cuda":
            return 1 << 30
        return int(SHARE_OF_FREE_MEMORY * card.free_bytes(self.device))


def has_kernels() -> bool:
    """Whether the GPU kernels can be had: they need triton, which comes with torch's CUDA builds."""
    return find_spec("triton") is not None


def architecture(causal_lm: Any) -> str:
    """What shapes the computation: the class and its config, but not where it came from, how attention runs, or what
    is written into it when a model is saved."""
    fields = causal_lm.config.to_dict()
    for name in (*NOT_COMPUTED_WITH, "_attn_implementation"):
        fields.pop(name, None)
    return f"{type(causal_lm).__qualname__} {json.dumps(fields, sort_keys=True, default=str)}"
