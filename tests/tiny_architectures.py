"""Tiny models of many architectures with random weights, and log-probabilities from a model's own forward pass."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from teamtr.engines.paged.sampler import Server
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.torch.policy import TransformerPolicy

CPU = torch.device("cpu")
COMMON = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = 4
SHAPE = {
    **COMMON, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
STATE_SPACE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
LATENT = {  # values have another width than queries
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": SHAPE,
    "Gemma3": SHAPE,
    "Gemma2": {**SHAPE, "final_logit_softcapping": None},  # caps its attention
    "DeepseekV3": {**COMMON, **LATENT},
    "Falcon": {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},  # two attentions only
    "Bloom": {**COMMON, "hidden_size": 64, "n_layer": 3, "n_head": 4},  # its own attention, no positions
    "GPTJ": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, **COMMON},
    "DiffLlama": SHAPE,  # calls attention twice per layer
    "FalconH1": {**SHAPE, **STATE_SPACE},  # a state space beside attention, in every layer
    "Qwen3Next": {**SHAPE, **LINEAR},  # linear attention in most layers
    "Qwen3_5": {**SHAPE, **LINEAR},
}
OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**COMMON, **LATENT},
    "Mamba": {**COMMON, "hidden_size": 64, "num_hidden_layers": 3},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PACKED = {"Llama", "Gemma3"}


def make_model(kind: str, **changes: Any) -> Any:
    names = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
    config_class = getattr(transformers, names.get(kind, f"{kind}Config"), None)
    if config_class is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    config = config_class(**{**CONFIGS, **OTHERS}.get(kind, SHAPE), **changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.float().eval()


def make_model_with_eyes() -> Any:
    """A model that also takes images, with a separate config for text."""
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=dict(SHAPE), vision_config={**eyes, "image_size": 28, "patch_size": 14}
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def make_gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=4)).eval()


@torch.no_grad()
def scored(policy: TransformerPolicy, prompts: Any, drawn: Any) -> Any:
    """The learner's log-probability of every sampled token."""
    messages = [sample.token_ids for sample in drawn]
    ids = np.concatenate(messages)
    logp = policy.head()(policy.features(prompts, messages)).log_softmax(-1).numpy()
    return logp[np.arange(len(ids)), ids]


def make_policy(model: Any, **options: Any) -> TransformerPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = TransformerPolicy(model, SimpleNamespace(eos_token_id=2), **options)
    policy.end_ids = frozenset()
    return policy


def served(model: Any) -> Server:
    copy = SamplingCopy(model, torch.float32, CPU)
    copy.fill(model, None, version="v", base="")
    return Server(copy, pool_bytes=1 << 24, graphs=False)


def some_prompts() -> list[np.ndarray]:
    """Prompts of several lengths; two are equal, and two have a common beginning."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 100, size=length).astype(np.int32) for length in (5, 9, 5, 12)]
    prompts[2] = prompts[0].copy()
    prompts[3][:4] = prompts[1][:4]
    return prompts


@torch.no_grad()
def alone(model: Any, prompt: np.ndarray, message: np.ndarray) -> np.ndarray:
    """Log-probabilities from the model's own forward pass on one row."""
    ids = torch.tensor([[*prompt.tolist(), *message.tolist()]])
    logp = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(1, torch.tensor(message, dtype=torch.int64)[:, None])[:, 0].numpy()
