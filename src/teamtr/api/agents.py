"""The agents passed to a trainer, and the trained agents of its run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from teamtr.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from teamtr.config import LoraConfig

Sees = Literal["everything", "blind"] | dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """One agent of a team.

    Args:
        name: the agent's name in the team file, in the log and for the other agents.
        model: a transformers model, a folder, a hub id, or ``"tiny"`` for the built-in model.
        tokenizer: the model's tokenizer; required with a model object, and not allowed otherwise.
        system_prompt: the agent's system prompt.
        lora: train an adapter of this shape, ``teamtr.LoraConfig`` or PEFT's; None trains the whole model.
        sees: what the agent sees of the conversation: ``"everything"``, ``"blind"`` (nothing of the current round), or
            a mapping as in the team file.
        max_tokens: maximum number of tokens in one message.
        frozen: the agent speaks but is never updated.
        revision: for a hub id: the branch, tag or commit to load.
        tools: the tools that the agent may call: ``"all"``, ``"none"`` or a list of names (docs/tools.md).
    """

    name: str
    model: str | Path | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    system_prompt: str = ""
    lora: LoraConfig | PeftLoraConfig | None = None
    sees: Sees = "everything"
    max_tokens: int = 256
    frozen: bool = False
    revision: str | None = None
    tools: Literal["all", "none"] | Sequence[str] = "all"

    def __post_init__(self) -> None:
        if isinstance(self.model, str | Path):
            if self.tokenizer is not None:
                raise UserError(f"agent {self.name!r}: a folder or hub id brings its own tokenizer: leave it out")
        elif self.revision is not None:
            raise UserError(f"agent {self.name!r}: a model object has no revision: leave it out")
        elif self.tokenizer is None:
            raise UserError(f"agent {self.name!r}: a model object needs its tokenizer: Agent(name, model, tokenizer)")
        elif getattr(self.model, "peft_config", None):
            raise UserError(
                f"agent {self.name!r}: its model carries adapters already: give model.merge_and_unload(), and lora= "
                "for a new one"
            )

    @property
    def is_object(self) -> bool:
        return not isinstance(self.model, str | Path)


def lora_settings(agent: Agent) -> dict[str, Any] | None:
    """The adapter's settings as a team file writes them. PEFT settings that TeamTR does not have are refused."""
    from teamtr.config import LoraConfig

    lora = agent.lora
    if lora is None:
        return None
    if isinstance(lora, LoraConfig):
        return lora.model_dump(mode="json")
    from peft import LoraConfig as PeftLoraConfig

    if not isinstance(lora, PeftLoraConfig):
        raise UserError(f"agent {agent.name!r}: lora must be a LoraConfig of teamtr or PEFT, got {lora!r:.80}")
    targets = lora.target_modules
    if targets is None:
        raise UserError(f"agent {agent.name!r}: say which layers the adapter is for: target_modules='all-linear'")
    known = {"r": lora.r, "lora_alpha": lora.lora_alpha, "target_modules": targets, "task_type": lora.task_type}
    plain = PeftLoraConfig(**known).to_dict()
    if other := sorted(name for name, value in lora.to_dict().items() if value != plain.get(name)):
        raise UserError(
            f"agent {agent.name!r}: TeamTR's adapters have no {', '.join(other)}: r, lora_alpha and target_modules only"
        )
    return {
        "rank": lora.r,
        "alpha": float(lora.lora_alpha),
        "targets": targets if isinstance(targets, str) else sorted(targets),
    }


Export = Callable[[str, Path, bool], Path]


@dataclass(frozen=True)
class TrainedAgent:
    """An agent of a run: its newest weights, to be saved or published."""

    name: str
    _export: Export = field(repr=False)

    def save_pretrained(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the newest checkpoint in the format of transformers or PEFT, with a model card.

        Args:
            folder: a new or empty folder to write to.
            merge: merge an adapter into its base and save the whole model.
        """
        return self._export(self.name, Path(folder), merge)

    def push_to_hub(self, repo_id: str, *, merge: bool = False, private: bool = True, token: str | None = None) -> str:
        """Save the agent and upload the folder to the Hugging Face hub; returns the address of the commit.

        An adapter is uploaded without its base, so the base must be on the hub; otherwise set ``merge``.
        """
        from teamtr.session.hub import push

        with tempfile.TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / self.name, merge=merge)
            return push(self.name, folder, repo_id, private=private, token=token)
