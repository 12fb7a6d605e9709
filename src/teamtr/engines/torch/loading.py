"""Builds the models that a team names: the built-in tiny one, a folder, or a hub id."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teamtr.engines.torch.policy import belongs_to
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import UserError, first_line
from teamtr.randomness import seed_of
from teamtr.types import Ids

HUB_SECONDS = 10.0
"""How long the hub may take to say whether it knows a model."""

VOCABULARIES = ("tokenizer.json", "tekken.json", "*vocab*", "*.model", "*.tiktoken")
"""The files that a tokenizer's tokens are in, one of which must be there."""

log = logging.getLogger(__name__)


class ModelError(UserError):
    """A model could not be built; says which and what to do."""


@dataclass(frozen=True)
class TinyShape:
    """The built-in model: Qwen3 architecture, small enough to train in a minute on a CPU."""

    layers: int = 2
    width: int = 64
    heads: int = 4


def quieten() -> None:
    """Loading and saving say what matters through us; progress bars for each small file do not."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def tiny_model(shape: TinyShape, seed: int) -> tuple[Any, Any]:
    """(model, tokenizer), initialised from the seed alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 2),
        head_dim=shape.width // shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attention_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model, tokenizer


def load_pretrained(source: str) -> tuple[Any, Any]:
    """(model, tokenizer) from a folder or a hub id, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    looks_like_path = source.startswith((".", "/", "~")) or Path(source).expanduser().exists()
    where = str(Path(source).expanduser()) if looks_like_path else source
    if looks_like_path and not Path(where).is_dir():
        raise ModelError(f"model {source!r}: there is no such folder")
    if looks_like_path:
        _check_folder(source, Path(where))
    options = {} if looks_like_path else hub_options(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each format has a reader of its own, and each reader its own errors
        hint = (
            "a folder saved by transformers" if looks_like_path else "a folder, a hub id that can be reached, or tiny"
        )
        told = first_line(error)
        if not isinstance(error, OSError | ValueError):
            told = f"{type(error).__name__}: {told}"
        raise ModelError(f"model {source!r} could not be loaded ({told}); give {hint}") from error
    return model, tokenizer


def _check_folder(source: str, folder: Path) -> None:
    """What the loaders would say in other words, or not at all: without a vocabulary they make an empty tokenizer."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ModelError(f"model {source!r}: the folder has no config.json; give a folder saved by transformers")
    if not any(found for form in VOCABULARIES for found in folder.glob(form)):
        raise ModelError(
            f"model {source!r}: the folder has no tokenizer (no tokenizer.json and no other vocabulary); save the "
            "model's tokenizer into it as well"
        )
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            json.loads((folder / name).read_bytes())
        except OSError:
            continue  # not every folder has all of them; what is needed, the loader says
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"model {source!r} could not be loaded ({name} is damaged: {error}); copy or save the folder anew"
            ) from error


def hub_options(source: str) -> dict[str, bool]:
    """How loaders are to ask for this hub id: the hub, or the cache alone when the hub does not answer.

    Raises ModelError when neither has it. The loaders would find out too, but they ask for file after file, each of
    them again and again: a misspelt name takes them a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=HUB_SECONDS)
    except EntryNotFoundError:
        return {}  # the hub knows the id; what it lacks, the loader says
    except HFValidationError as error:
        raise ModelError(f"model {source!r} is neither a folder nor a hub id (OWNER/NAME) nor tiny") from error
    except RepositoryNotFoundError:
        why = "the hub does not know it, or not for you"
    except Exception as error:  # of whichever HTTP client the hub's library uses: all mean that no answer came
        why = f"the hub could not be reached ({first_line(error)})"
    else:
        return {}
    if any(isinstance(try_to_load_from_cache(source, name), str) for name in ("config.json", "tokenizer_config.json")):
        return {"local_files_only": True}
    raise ModelError(f"model {source!r}: there is no such folder, and {why}; give a folder, a hub id or tiny")


def teach_form(
    model: Any,
    examples: Sequence[tuple[Ids, Ids]],
    *,
    steps: int,
    learning_rate: float,
    batch: int,
    seed: int,
) -> None:
    """Supervised steps on (prompt, message) pairs, so that an untrained model writes well-formed messages.

    What it learns is what the examples hold: the form alone, or a share of right content (a task's ``skill``). It says
    in one line that it does so and for how long: the time of its second step, as the first one pays for starting.
    """
    if not examples or steps == 0:
        return
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    device = next(model.parameters()).device
    model.train()
    for step in range(steps):
        started = time.perf_counter()
        chosen = [examples[i] for i in rng.integers(0, len(examples), size=batch)]
        longest = max(len(p) + len(m) for p, m in chosen)
        ids_BL = torch.zeros(batch, longest, dtype=torch.long)
        labels_BL = torch.full((batch, longest), -100)
        mask_BL = torch.zeros(batch, longest, dtype=torch.long)
        for b, (prompt, message) in enumerate(chosen):
            row = torch.as_tensor(np.concatenate([prompt, message]), dtype=torch.long)
            ids_BL[b, : len(row)] = row
            mask_BL[b, : len(row)] = 1
            labels_BL[b, len(prompt) : len(row)] = row[len(prompt) :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, 2 * (1 - step / steps))
        logits_BLV = model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL[:, 1:].flatten().to(device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == min(1, steps - 1):
            seconds = (steps - step) * (time.perf_counter() - started)
            log.info("teaching the tiny base the form of messages (%d steps, about %.0f s)", steps, max(seconds, 1.0))
    model.eval()
    for parameter in model.parameters():
        parameter.grad = None


def share_base(model: Any, adapters: Mapping[str, Any], *, seed: int) -> Any:
    """One frozen base with a LoRA adapter per agent: a PEFT model. ``adapters`` maps agents to (rank, alpha,
    targets); an adapter starts as no change at all."""
    from peft import LoraConfig, get_peft_model

    shared: Any = None
    for name, lora in adapters.items():
        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, name) % 2**31)
            try:
                if shared is None:
                    shared = get_peft_model(model, config, adapter_name=name)
                else:
                    shared.add_adapter(name, config)
            except ValueError as error:
                told = first_line(error).rstrip(".")
                raise ModelError(
                    f"no adapter on {type(model).__name__} with lora.targets {targets!r}: {told}. Name the layers that "
                    "carry it in lora.targets, or use train: full"
                ) from error
    stray = [
        k for k, _ in shared.named_parameters() if "lora_" in k and not any(belongs_to(k, name) for name in adapters)
    ]
    if stray or any(".lm_head." in k for k, _ in shared.named_parameters() if "lora_" in k):
        raise ModelError(
            f"lora.targets reaches {stray[:1] or ['the output layer']}: only linear layers below the head can carry "
            "an adapter; use all-linear or name attention and MLP layers"
        )
    return shared
