"""The built-in tiny model and its supervised training, and a base that agents share with a LoRA adapter each."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from teamtr.engines.torch.model_files import ModelError
from teamtr.engines.torch.policy_files import belongs_to
from teamtr.engines.torch.products import are_small, without_onednn
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import first_line
from teamtr.progress import Work, working
from teamtr.randomness import seed_of
from teamtr.types import Ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TinyShape:
    """The size of the built-in model: Qwen3 architecture, small enough to train in a minute on a CPU."""

    layers: int = 2
    width: int = 64
    heads: int = 4


def quieten() -> None:
    """Turns off transformers' progress bars, which appear for each small file; TeamTR reports what matters itself."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def tiny_model(shape: TinyShape, seed: int) -> tuple[Any, Any]:
    """(model, tokenizer), initialized from the seed alone."""
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


def teach_form(
    model: Any,
    examples: Sequence[tuple[Ids, Ids]],
    *,
    steps: int,
    learning_rate: float,
    batch: int,
    seed: int,
) -> None:
    """Supervised training on (prompt, message) pairs, so that an untrained model writes well-formed messages.

    What it learns depends on the examples: the form alone, or also a share of right content (a task's ``skill``). One
    log line announces it and estimates its duration from the second step, because the first one includes start-up.
    """
    if not examples or steps == 0:
        return
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.train()
    with without_onednn(are_small(model)), working("teaching the tiny base", steps, "steps") as work:
        _teach(model, optimizer, examples, work, rng, learning_rate, batch)
    model.eval()
    for parameter in model.parameters():
        parameter.grad = None


def _teach(
    model: Any,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[tuple[Ids, Ids]],
    work: Work,
    rng: np.random.Generator,
    learning_rate: float,
    batch: int,
) -> None:
    """Runs all steps of ``work``."""
    device, steps = next(model.parameters()).device, work.total or 0
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
        work.advance()
        if step == min(1, steps - 1):
            seconds = (steps - step) * (time.perf_counter() - started)
            log.info("teaching the tiny base the form of messages (%d steps, about %.0f s)", steps, max(seconds, 1.0))


def share_base(model: Any, adapters: Mapping[str, Any], *, seed: int) -> Any:
    """One frozen base with a LoRA adapter per agent, as a PEFT model. ``adapters`` maps agents to (rank, alpha,
    targets); a new adapter changes nothing."""
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
