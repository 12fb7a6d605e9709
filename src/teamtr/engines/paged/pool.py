"""Paged servers, one per architecture, created on first use."""

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
"""Smallest model that is compiled if our kernels do not fully cover its layers. A step of a smaller one does not fill
the card either way, and a run of one is too short to repay the compiler."""
SHARE_OF_FREE_MEMORY = 0.4


@dataclass
class SamplerPool:
    """How to sample, and the servers that do it. Agents of one architecture share a server and its pages.

    Args:
        precision: of the sampling copy.
        memory_bytes: memory limit of KV pages; None takes a share of what is free at first use.
        compiled: whether torch compiles decoding; None: if the model is large and our own kernels do not compute
            everything between its matrix products. These kernels need half precision.
        adapters: merged into the copy when their agent speaks, or applied by row, so that rows of several agents decode
            together.
        fallback: the precision to switch to after non-finite logits; None if there is none.
        keeps: servers can keep the features that tokens are drawn from, so that updates need not compute them again.
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
        """The weights of this model that its server reads in place; the others are copied."""
        return shared_weights(causal_lm, self.dtype, self.device) if self.applies_by_row(causal_lm) else {}

    def applies_by_row(self, causal_lm: Any) -> bool:
        return self.adapters == "by_row" and why_not(causal_lm) is None

    def key_of(self, causal_lm: Any) -> str:
        """Models with equal keys share a server: those of one architecture. A model whose weights are read in place has
        its own."""
        found = architecture(causal_lm)
        return f"{found} {id(causal_lm)}" if self.shared_of(causal_lm) else found

    def server_of(self, causal_lm: Any, let_go: Callable[[], None] = lambda: None) -> Server:
        """The server of this model. ``let_go`` is called before a new one is made, which may move weights of the model:
        views of them would keep their old memory allocated."""
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
        """Whether torch compiles decoding if our own kernels do not cover the model."""
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
        """Sample in the other precision from now on, with new servers; False if there is no other precision."""
        if self.fallback is None:
            return False
        self.precision, self.fallback = self.fallback, None
        self._servers.clear()
        return True

    def forget_pages(self) -> None:
        """Drop the cached prefixes of all servers."""
        for server in self._servers.values():
            server.forget_pages()

    def page_budget(self, causal_lm: Any) -> int:
        """Memory limit of the pages of this architecture: that of its server, or of one that would be made now."""
        if server := self._servers.get(self.key_of(causal_lm)):
            return server.pool_bytes
        if self.memory_bytes is not None:
            return self.memory_bytes
        if self.device.type != "cuda":
            return 1 << 30
        return int(SHARE_OF_FREE_MEMORY * card.free_bytes(self.device))


def has_kernels() -> bool:
    """Whether the GPU kernels are available: they need triton, which comes with torch's CUDA builds."""
    return find_spec("triton") is not None


def architecture(causal_lm: Any) -> str:
    """A key of what is computed: the class and its config, without the config's source, the attention implementation
    and what is added when a model is saved."""
    fields = causal_lm.config.to_dict()
    for name in (*NOT_COMPUTED_WITH, "_attn_implementation"):
        fields.pop(name, None)
    return f"{type(causal_lm).__qualname__} {json.dumps(fields, sort_keys=True, default=str)}"
