"""The agents that a trainer is given, and what they are after training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from teamtr.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from teamtr.config import LoraConfig

Sees = Literal["everything", "blind"] | dict[str, Any]


@dataclass(frozen=True)
class Agent:
    """One agent of a team.

    Args:
        name: how the team file, the log and the other agents call it.
        model: a transformers model, a folder, a hub id, or ``"tiny"`` for the built-in model.
        tokenizer: the model's tokenizer; needed with a model object, and only then.
        system_prompt: what it is told at the outset.
        lora: train an adapter of this shape; None trains the whole model.
        sees: what it sees of the conversation: ``"everything"``, ``"blind"`` (none of the current round), or as in the
            team file.
        max_tokens: most tokens of one message.
        frozen: it speaks and is never updated.
    """

    name: str
    model: str | Path | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    system_prompt: str = ""
    lora: LoraConfig | None = None
    sees: Sees = "everything"
    max_tokens: int = 256
    frozen: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, str | Path):
            if self.tokenizer is not None:
                raise UserError(f"agent {self.name!r}: a folder or hub id brings its own tokenizer: leave it out")
        elif self.tokenizer is None:
            raise UserError(f"agent {self.name!r}: a model object needs its tokenizer: Agent(name, model, tokenizer)")

    @property
    def is_object(self) -> bool:
        return not isinstance(self.model, str | Path)


Export = Callable[[str, Path, bool], Path]


@dataclass(frozen=True)
class TrainedAgent:
    """An agent of a run: its newest weights, to be saved or published."""

    name: str
    _export: Export = field(repr=False)

    def save_pretrained(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the newest checkpoint as transformers or PEFT reads it, with a model card.

        Args:
            folder: where to; must not exist yet.
            merge: merge an adapter into its base and save a whole model.
        """
        return self._export(self.name, Path(folder), merge)

    def push_to_hub(self, repo_id: str, *, merge: bool = False, private: bool = True, token: str | None = None) -> str:
        """Save it and upload the folder to the Hugging Face hub; returns the address of the commit."""
        from huggingface_hub import HfApi

        hub = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / self.name, merge=merge)
            hub.create_repo(repo_id, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"TeamTR: {self.name}"))
