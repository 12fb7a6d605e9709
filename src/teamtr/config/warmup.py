"""The section ``warmup``: worked examples that agents are trained on before the first stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from teamtr.settings.paths import Anchor
from teamtr.settings.refusals import Refusal
from teamtr.settings.section import Section, key, unset
from teamtr.settings.values import Count, From0, NonEmpty, Positive


class WarmupConfig(Section):
    """Supervised training on worked examples before the first stage; see docs/tasks.md. It has no trust region."""

    tokens: Count = key(
        0,
        "Most tokens of examples, prompts and completions, to train on, shared out evenly among the agents that have "
        "examples; 0: no warm-up.",
    )
    path: NonEmpty | None = unset(
        "The examples: a data file (relative to the team file) or a hub id; default: the task's own, if it has any."
    )
    learning_rate: From0 | None = unset("Its learning rate, constant for half the steps; default: the learner's.")
    batch: Positive = key(16, "Examples in one step.")

    def anchored(self, anchor: Anchor) -> Self:
        return self.model_copy(update={"path": anchor.source(self.path)})

    def _refusals(self) -> Iterator[Refusal]:
        if self.path is not None and self.tokens == 0:
            message = "warmup.path needs a budget: set warmup.tokens to how many tokens of it to train on"
            yield Refusal(("warmup", "path"), message, (("warmup", "tokens"),))
