"""The shape of a model, from its config.json alone: parameter counts, operations per token, KV cache size.

Dense decoders with gated MLPs (Llama and similar). Tests compare every count with models built by transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
"""Values of ``model_type`` whose weights are counted exactly."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


_STORED = {"bfloat16": "bf16", "float16": "fp16"}


class UnknownShape(UserError):
    """A shape that cannot be planned: an unsupported model, a value missing in its config, or LoRA targets without a
    match."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine memory and time.

    ``inner`` is the MLP's width. ``tied``: the output layer is the embedding. ``biased``: query, key and value have
    biases (the output of attention only with ``biased_output``). ``head_norms``: queries and keys are normalized per
    head. ``stored``: the precision that the config names for the weights file.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    biased: bool = False
    biased_output: bool = False
    head_norms: bool = False
    stored: str = "fp32"

    @staticmethod
    def of(config: Mapping[str, Any], name: str = "the model") -> ModelShape:
        """The shape in the content of a config.json; ``name`` is for errors."""
        config = config.get("text_config") or config
        kind = config.get("model_type")
        experts = [key for key in EXPERTS if config.get(key)]
        if kind not in FAMILIES or experts:
            why = f"{experts[0]}: a mixture of experts" if experts else f"model_type {kind!r}"
            raise UnknownShape(
                f"{name}: config.json says {why}; planned without loading are dense models of the families "
                f"{', '.join(FAMILIES)}. Run `teamtr plan` without --card, which loads and measures the model"
            )

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                told = "is missing" if value is None else f"is {value!r}, which is no number of things"
                raise UnknownShape(f"{name}: {key} {told} in config.json; take the file that came with the weights")
            return value

        width, heads = number("hidden_size"), number("num_attention_heads")
        biased = kind == "qwen2" or bool(config.get("attention_bias"))
        return ModelShape(
            layers=number("num_hidden_layers"),
            width=width,
            inner=number("intermediate_size"),
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", max(1, width // heads)),
            vocabulary=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", kind in ("smollm3", "granite"))),
            biased=biased,
            biased_output=biased and kind != "qwen2",
            head_norms=kind == "qwen3",
            stored=_STORED.get(str(config.get("dtype") or config.get("torch_dtype")), "fp32"),
        )

    # -- weights ----------------------------------------------------------------------------------------------

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: (outputs, inputs) by name."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, self.width),
            "self_attn.k_proj": (key, self.width),
            "self_attn.v_proj": (key, self.width),
            "self_attn.o_proj": (self.width, query),
            "mlp.gate_proj": (self.inner, self.width),
            "mlp.up_proj": (self.inner, self.width),
            "mlp.down_proj": (self.width, self.inner),
        }

    @property
    def body(self) -> int:
        """Weights of the linear layers of all blocks."""
        return self.layers * sum(a * b for a, b in self.products.values())

    @property
    def outputs(self) -> int:
        """Rows of these weights: outputs of all linear layers of all blocks."""
        return self.layers * sum(a for a, _ in self.products.values())

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.width

    @property
    def matrices(self) -> int:
        """Weights of all matrices: linear layers, embedding and output layer; a tied output layer counts once."""
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def blocks(self) -> int:
        """All parameters of the blocks: linear layers, biases and norms."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        small = 2 * self.width + (2 * self.head_dim if self.head_norms else 0)
        small += (query + 2 * key if self.biased else 0) + (self.width if self.biased_output else 0)
        return self.body + self.layers * small

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied output layer counts once."""
        return self.blocks + self.width + self.head * (1 if self.tied else 2)

    def adapter(self, rank: int, targets: str | Sequence[str] = "all-linear") -> int:
        """Parameters of a LoRA adapter of this rank on these layers, named as in PEFT."""
        found = sum(
            rank * (outputs + inputs)
            for block in range(self.layers)
            for name, (outputs, inputs) in self.products.items()
            if is_target(f"model.layers.{block}.{name}", targets)
        )
        if not found:
            raise UnknownShape(f"lora.targets {targets!r} names none of {', '.join(self.products)}")
        return found

    # -- costs of a token -------------------------------------------------------------------------------------

    def forward_flops(self, tokens: float) -> float:
        """Operations of the blocks' matrix products: a multiplication and an addition per weight and token."""
        return 2.0 * self.body * tokens

    def head_flops(self, positions: float) -> float:
        return 2.0 * self.head * positions

    def attention_flops(self, queries: float, keys: float) -> float:
        """Operations of scores and weighted sums in all layers, for this many queries that attend to this many keys
        each."""
        return 4.0 * self.layers * self.heads * self.head_dim * queries * keys

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values of one token, in all layers."""
        return 2 * self.key_width * itemsize

    @property
    def query_width(self) -> int:
        """Elements of the queries of one token, summed over layers."""
        return self.layers * self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.layers * self.kv_heads * self.head_dim


def is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Whether PEFT would adapt this module: all linear layers, a pattern for the full name, or suffixes of names."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)
