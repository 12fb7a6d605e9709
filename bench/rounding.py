"""The effect of rounding a frozen base on the model: KL per token between the float32 base and the rounded one.

    python bench/rounding.py tiny FOLDER [--text FILE] [--tokens 1024] [--markdown] [--json]

``tiny`` is the built-in model without warm-up, FOLDER a transformers model. Reports KL(float32, rounded) over the
tokens of a text (default: docs/concepts.md), computed in float32 with the code that trains (``learner.base``), the
share of tokens whose most likely next token stays the same, and the loss on the text. *one scale* is int8 with one
scale per weight matrix instead of one per row, which the library does not offer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from common import report
from teamtr.engines.torch.fused_lora import FusedLora, fuse_lora
from teamtr.engines.torch.loading import TinyShape, quieten, share_base, tiny_model
from teamtr.engines.torch.pretrained import load_pretrained
from teamtr.engines.torch.row_scaled import LARGEST
from teamtr.engines.torch.short_base import ROUNDED, keep_short

TEXT = Path(__file__).parent.parent / "docs" / "concepts.md"
WINDOW = 256
"""Tokens per row."""


def one_scale(model: Any, fused: FusedLora) -> None:
    keep_short(model, SimpleNamespace(linears=[], unfused=[]), torch.float16, rounded=True)
    for layer in fused.linears:
        scale = layer.weight.abs().max() / LARGEST
        layer.weight.copy_((layer.weight / scale).round() * scale)


def rounding(base: str) -> Callable[[Any, FusedLora], None]:
    return lambda model, fused: keep_short(model, fused, ROUNDED[base], rounded=True)


WAYS: dict[str, Callable[[Any, FusedLora], None]] = {
    "`fp16`": rounding("fp16"),
    "`int8`": rounding("int8"),
    "int8, one scale": one_scale,
}


def loaded(source: str) -> tuple[Any, Any]:
    return tiny_model(TinyShape(), seed=0) if source == "tiny" else load_pretrained(source)


def logits_of(model: Any, rows_BT: Tensor) -> Tensor:
    return torch.cat([model(input_ids=row[None]).logits[0, :-1] for row in rows_BT])


@torch.no_grad()
def rows(source: str, text: str, tokens: int) -> Iterator[dict[str, Any]]:
    """One row of results for each way to store the base."""
    quieten()
    model, tokenizer = loaded(source)
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False)[:tokens])
    rows_BT = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    exact_NV, target_N = logits_of(model.eval(), rows_BT), rows_BT[:, 1:].flatten()
    yield _row(source, "`fp32`", exact_NV, exact_NV, target_N)
    for name, round_ in WAYS.items():
        model, _ = loaded(source)
        lora = SimpleNamespace(rank=1, alpha=1.0, targets="all-linear", start=None)
        fused = fuse_lora(share_base(model.eval(), {"agent": lora}, seed=0))  # changes nothing: B is zero
        fused.adapter = "agent"
        round_(model, fused)
        yield _row(source, name, exact_NV, logits_of(model, rows_BT), target_N)


def _row(source: str, base: str, exact_NV: Tensor, found_NV: Tensor, target_N: Tensor) -> dict[str, Any]:
    old_NV, new_NV = log_softmax(exact_NV.double(), -1), log_softmax(found_NV.double(), -1)
    kl_N = (old_NV.exp() * (old_NV - new_NV)).sum(-1)
    return {
        "model": Path(source).name,
        "base": base,
        "tokens": len(kl_N),
        "kl per token": float(kl_N.mean()),
        "largest": float(kl_N.max()),
        "same first choice": float((exact_NV.argmax(-1) == found_NV.argmax(-1)).double().mean()),
        "loss": float(cross_entropy(found_NV.double(), target_N)),
    }


def as_markdown(row: dict[str, Any]) -> str:
    told = [row["model"], row["base"], f"{row['kl per token']:.1e}", f"{row['largest']:.1e}"]
    told += [f"{row['same first choice']:.1%}".replace("%", " %"), f"{row['loss']:.4f}"]
    return f"| {' | '.join(told)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="tiny, or folders of models")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/sizing.md, to stdout")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [row for source in options.models for row in rows(source, options.text.read_text(), options.tokens)]
    if options.markdown:
        print("\n".join(map(as_markdown, found)))
        return
    header = tuple(found[0])
    title = "what rounding a frozen base costs the model"
    report(title, header, [[row[name] for name in header] for row in found], {"rows": found}, options.json)


if __name__ == "__main__":
    main()
