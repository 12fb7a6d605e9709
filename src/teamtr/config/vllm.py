"""The section ``sampling.vllm``: servers that already run, or the environment to start them from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Above0, NonEmpty, Positive, of_form

Url = Annotated[str, of_form(r"http://[^/\s]+/?", "must be the address of a server, such as http://host:8000")]


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that a vLLM server can be started with."""

OF_STARTED = ("context_tokens", "cards", "arguments", "start_s")
"""The keys about servers that the run starts."""


def room_for(rank: int) -> int:
    """The smallest of these ranks that fits an adapter of this rank."""
    return next(room for room in RANKS if room >= rank)


class VllmConfig(Section):
    """The servers that sample with `sampling.engine: vllm`; see docs/cluster.md."""

    python: NonEmpty | None = unset(
        "The Python of an environment that has vLLM (relative to the team file; `make vllm-env` makes one): servers "
        "are started from it, and end with the run."
    )
    urls: tuple[Url, ...] = key((), "Servers that run already, such as http://host:8000: one for each base model.")
    folder: NonEmpty | None = unset(
        "Where new weights are put for the servers, on a file system that they share; default: a temporary folder."
    )
    context_tokens: Positive | None = unset(
        "Most tokens of a prompt and its message, for servers started here; default: all positions of the model."
    )
    cards: NonEmpty | None = unset(
        "CUDA_VISIBLE_DEVICES of servers started here, and all of these cards; default: the cards of this process, and "
        "four tenths of their memory."
    )
    arguments: tuple[NonEmpty, ...] = key((), "More arguments of vllm serve, such as --tensor-parallel-size=2.")
    start_s: Above0 = key(900.0, "How many seconds a server may take to start.")
    patience_s: Above0 = key(600.0, "How many seconds one message may take before the server counts as lost.")

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the keys that differ from their defaults."""
        return tuple(name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default)

    def anchored(self, anchor: Anchor) -> Self:
        paths = {"python": self.python, "folder": self.folder}
        return self.model_copy(update={name: anchor.path(path) for name, path in paths.items() if path is not None})

    def _refusals(self) -> Iterator[Refusal]:
        here = ("sampling", "vllm")
        if self.python is not None and self.urls:
            message = "sampling.vllm.python starts servers, and sampling.vllm.urls names some that run: give one"
            yield Refusal((*here, "urls"), message, ((*here, "python"), (*here, "urls")))
        for name in self.given if self.urls else ():
            if name in OF_STARTED:
                message = (
                    f"sampling.vllm.{name} is for servers started here, and those of sampling.vllm.urls run already: "
                    "leave it out"
                )
                yield Refusal((*here, name), message, ((*here, "urls"),), at_key=True, idle=True)
