"""Setups for the tests of planning: a team of built-in models, and three agents on the shape of a known model."""

from __future__ import annotations

from dataclasses import replace

from teamtr.planning.cards import CARDS
from teamtr.planning.setup import Cluster, Learning, Member, PlannedTurn, Setup
from teamtr.planning.shape import ModelShape
from teamtr.ports import Demand, Lengths
from teamtr.presets import Plan

TEAM = """
name: plan
task: {{name: code, half_length: 1}}
team:
  model: tiny
  train: {train}
  max_tokens: 4
  agents: [{{name: left}}, {{name: right}}, {{name: speaker}}]
tiny: {{layers: 1, width: 32, heads: 4, warmup_steps: 0}}
plan: {{problems: 2, group_size: 2}}
learner: {{micro_batch: 8}}
sampling: {{engine: {engine}}}
"""

QWEN3_1_7B = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = ModelShape.of(QWEN3_1_7B)
LARGE = replace(SHAPE, layers=64, width=5120, inner=25600, heads=64, tied=False)
"""The shape of Qwen3-32B."""


def setup(shape: ModelShape = SHAPE, *, rank: int | None = 16, micro_batch: int = 16, **cluster: object) -> Setup:
    """Three agents, 64 problems x 8 episodes, prompts and messages of 256 tokens."""
    names = ("a", "b", "c")
    plan = Plan.preset("teamtr", radius=0.05, problems=64, group_size=8)
    return Setup(
        members=tuple(Member(name, shape, "base", rank) for name in names),
        turns=tuple(PlannedTurn(name, 256 + 256 * k, 256, 256) for k, name in enumerate(names)),
        demand=Demand(
            lengths={name: Lengths(256 + 256 * k, 256) for k, name in enumerate(names)},
            episodes=512,
            problems=64,
            messages=dict.fromkeys(names, 512),
            checked=dict.fromkeys(names, 0),
            minibatches=4,
            objective=plan.objective,
        ),
        plan=plan,
        cluster=Cluster(CARDS["H200"], **cluster),
        learning=Learning(epochs=1, micro_batch=micro_batch),
    )


def workers(count: int, shards: int | None = None, **more: object) -> dict[str, object]:
    return {"cards": count, "workers": count, "shards": shards or count, **more}
