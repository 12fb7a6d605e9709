"""An advantage estimator of your own: each episode against the mean of the others (RLOO). Seconds on a CPU.

python examples/own_advantage.py [FOLDER]
"""

import math
import sys
from dataclasses import dataclass, replace

from teamtr import Agent, GroupAdvantage, Plan, TeamTrainer


@dataclass(frozen=True)  # a frozen value: resuming with another estimator is refused
class LeaveOneOut(GroupAdvantage):
    """R - mean of the other G - 1 returns, which is G / (G - 1) times R - mean of all. Axes: P problems, G episodes."""

    normalize: bool = False  # do not divide by the deviation of the group
    clip: float = math.inf

    def estimate(self, returns_PG, weights_PG=None):
        found = super().estimate(returns_PG, weights_PG)  # R - mean; handles groups without signal and broken rewards
        scale = returns_PG.shape[1] / (returns_PG.shape[1] - 1)
        return replace(found, values_PG=scale * found.values_PG, raw_PG=scale * found.raw_PG)

    def largest(self, group_size, reward_range):
        return reward_range  # a bound on every advantage, estimated or true: certificates depend on it


trainer = TeamTrainer(
    agents=[Agent("writer", "tiny", max_tokens=4)],
    reward_funcs=lambda completions, **columns: [1.0 - len(text) / 4 for text in completions],  # be short
    train_dataset=[{"prompt": f"Problem {k}"} for k in range(20)],
    args=replace(Plan.preset("teamtr", radius=0.3, stages=6, problems=8, group_size=8), advantage=LeaveOneOut()),
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/own-advantage",
    config={"tiny.layers": 1, "tiny.width": 32, "learner.learning_rate": 1e-2, "eval.every": 0},
)
print("rewards:", [round(record["reward"], 2) for record in trainer.train() if record["kind"] == "update"])
