"""Which transformers architectures work as agents: tries tiny random models with a LoRA adapter on a CPU.

    python bench/architectures.py                       # all causal language models that can be made tiny; 5 minutes
    python bench/architectures.py --only llama,gpt2

"sampler - learner" is the largest difference, in nats, of log-probabilities of sampled tokens. "fp16" is the largest
error of the learner's features in half precision, relative to the largest feature (large where rounding routes a token
to another expert; `teamtr check` measures the effect for a radius). A model that our settings do not make small, or
that does not run with them on its own, counts as not tried.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common import report, so_far
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.torch.fused_lora import fuse_lora
from teamtr.engines.torch.loading import share_base
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.errors import UserError
from teamtr.randomness import uniforms

TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    **TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "d_model": 64,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
WHOLE = {**SHAPE, **EXPERTS, **LATENT, **LINEAR}
MOST_WEIGHTS = 20_000_000
ALIKE_NATS = 1e-4


def settings() -> list[dict[str, Any]]:
    """Candidate settings, from all to few, since many configs do not accept all."""
    without_heads = {k: v for k, v in WHOLE.items() if k not in ("num_key_value_heads", "head_dim")}
    return [WHOLE, without_heads, {**SHAPE, **EXPERTS}, SHAPE, without_heads | EXPERTS, {"text_config": dict(WHOLE)}]


def make_tiny(kind: str, name: str) -> Any | None:
    """A tiny model of this kind, or None if no settings give a small model that runs."""
    for given in settings():
        try:
            known = transformers.CONFIG_MAPPING[kind]()
            heads = {k for k in ("num_key_value_heads", "head_dim") if not hasattr(known, k)}
            config = transformers.CONFIG_MAPPING[kind](**{k: v for k, v in given.items() if k not in heads})
            with torch.device("meta"):
                weights = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
            if weights > MOST_WEIGHTS:
                continue
            torch.manual_seed(0)
            model = getattr(transformers, name)(config).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
                model(input_ids=torch.arange(3, 8)[None])
        except Exception:  # any of two hundred configs and models may fail in its own way
            continue
        return model
    return None


def tried(model: Any) -> dict[str, Any]:
    """Sample, score, and compute in half precision with an adapter on all linear layers."""
    prompts = [np.array(row, dtype=np.int32) for row in ([5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [4])]
    tokenizer = SimpleNamespace(eos_token_id=2)
    shared = share_base(model, {"agent": SimpleNamespace(rank=4, alpha=8.0, targets="all-linear")}, seed=0)
    fused = fuse_lora(shared)
    room = SamplerPool("fp32", torch.device("cpu"), memory_bytes=1 << 24)
    policy = TransformerPolicy(shared, tokenizer, adapter="agent", fused=fused, serving=room)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policy.end_ids = frozenset()
    drawn = policy.sample(prompts, uniforms(1, len(prompts), 4))
    messages = [sample.token_ids for sample in drawn]
    ids, said = np.concatenate(messages), np.concatenate([sample.logprobs for sample in drawn])
    with torch.no_grad():
        exact = policy.features(prompts, messages)
        scored = policy.head()(exact).log_softmax(-1).numpy()[np.arange(len(ids)), ids]
    half = TransformerPolicy(shared, tokenizer, adapter="agent", precision="fp16", fused=fused)
    features = half.features(prompts, messages).float()
    features.sum().backward()
    return {
        "learner": "packed" if policy.packs else "padded",
        "sampler": "pages" if policy.serving is not None else "plain",
        "sampler - learner": float(np.abs(scored - said).max()),
        "fp16": float((features.detach() - exact).abs().max() / exact.abs().max()),
    }


def judged(kind: str, name: str) -> dict[str, Any]:
    model = make_tiny(kind, name)
    if model is None:
        return {"outcome": "not tried"}
    try:
        found = tried(model)
    except UserError as reason:
        return {"outcome": "refused", "why": str(reason)}
    except Exception as error:
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    return {"outcome": "works" if found["sampler - learner"] < ALIKE_NATS else "wrong", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="these model types")
    parser.add_argument("--json", action="store_true", help="the record on stdout")
    a = parser.parse_args()
    if unknown := set(a.only or ()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        parser.error(f"--only: transformers has no causal language model of type {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results: dict[str, dict[str, Any]] = {}
    for kind, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if a.only is None or kind in a.only:
            results[kind] = judged(kind, names if isinstance(names, str) else names[0])
            so_far(kind, results[kind])
    counts = Counter(found["outcome"] for found in results.values())
    title = "; ".join(f"{outcome} {count}" for outcome, count in counts.most_common())
    keys = ("outcome", "learner", "sampler", "sampler - learner", "fp16", "why")
    rows = [
        (kind, *(found.get(key) for key in keys)) for kind, found in results.items() if found["outcome"] != "not tried"
    ]
    report(title, ("", *keys), rows, {"benchmark": "architectures", "counts": counts, "results": results}, a.json)


if __name__ == "__main__":
    main()
