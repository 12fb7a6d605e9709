"""A router of your own: the solver's answer decides whether the helper speaks. Seconds on a CPU.

python examples/own_router.py [FOLDER]
"""

import sys
from dataclasses import dataclass

from teamtr import Agent, Plan, TeamTrainer


@dataclass(frozen=True)  # a frozen value: resuming with another router is refused
class HelpIfNeeded:
    """The solver speaks; if it does not begin with a digit, the helper speaks and the solver tries again."""

    rounds: int = 1  # ``rounds``, ``horizon`` and ``turns_of`` are upper bounds; certificates depend on them
    horizon: int = 3

    def turns_of(self, agent):
        return {"solver": 2, "helper": 1}[agent]

    def next(self, turns):
        """(round, speaker) of the next turn, or None at the end: a function of the turns only."""
        if len(turns) == 1 and turns[0].text[:1].isdigit():
            return None
        return (0, ("solver", "helper", "solver")[len(turns)]) if len(turns) < 3 else None


trainer = TeamTrainer(
    agents=[Agent("solver", "tiny", max_tokens=3), Agent("helper", "tiny", max_tokens=3)],
    reward_funcs=lambda completions, **columns: [float(text[:1].isdigit()) for text in completions],
    train_dataset=[{"prompt": f"Problem {k}"} for k in range(20)],
    args=Plan.preset("teamtr", radius=0.5, stages=5, problems=8, group_size=8),
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/own-router",
    router=HelpIfNeeded(),
    config={"tiny.layers": 1, "tiny.width": 32, "learner.learning_rate": 1e-2, "eval.every": 0},
)
print("rewards:", [round(record["reward"], 2) for record in trainer.train() if record["kind"] == "update"])
