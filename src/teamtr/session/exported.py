"""Records of exported agents, and the commands to serve them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from teamtr.config.vllm import room_for


@dataclass(frozen=True)
class Exported:
    """One exported agent. ``base`` is the model of an adapter (or that it was merged into), ``revision`` its revision
    on the hub, and ``rank`` the adapter's. The form ``gguf`` is a whole model in half precision, for llama.cpp to
    convert. ``precision`` is that of the weights in the folder."""

    agent: str
    folder: Path
    form: Literal["model", "adapter", "merged", "gguf"]
    base: str | None = None
    revision: str | None = None
    rank: int = 0
    precision: str = "float32"


def vllm_lines(exported: Sequence[Exported], seen_from: Path | None = None) -> Iterator[str]:
    """Commands that serve these agents with vLLM, each under its own name: one server per base with all of its
    adapters, and one per whole model. Folders are written relative to ``seen_from``."""
    servers: dict[tuple[str, str | None], list[Exported]] = {}
    for each in exported:
        if each.form == "adapter":
            servers.setdefault((str(each.base), each.revision), []).append(each)
        else:
            yield _line("vllm", "serve", _seen(each.folder, seen_from), "--served-model-name", each.agent)
    for (base, revision), adapters in servers.items():
        yield _line(
            *("vllm", "serve", _seen(Path(base), seen_from) if Path(base).is_absolute() else base),
            *(("--revision", revision) if revision is not None else ()),
            *("--enable-lora", "--max-lora-rank", str(room_for(max(each.rank for each in adapters)))),
            *("--max-loras", str(len(adapters)), "--lora-modules"),
            *(f"{each.agent}={_seen(each.folder, seen_from)}" for each in adapters),
        )


def _seen(folder: Path, seen_from: Path | None) -> str:
    if seen_from is None or not folder.absolute().is_relative_to(seen_from.absolute()):
        return str(folder)
    return f"./{folder.absolute().relative_to(seen_from.absolute())}"


def _line(*words: str) -> str:
    return " ".join(map(shlex.quote, words))
