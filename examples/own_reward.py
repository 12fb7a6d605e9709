"""A reward of your own: two agents learn to answer with digits. Seconds on a CPU.

python examples/own_reward.py [FOLDER]     # the same folder again resumes the run
"""

import sys

from teamtr import Agent, Plan, TeamTrainer

MODEL = "tiny"  # the built-in model; a folder, a hub id or a transformers model (with its tokenizer) works as well
ROWS = [{"prompt": f"Say a number below {limit}.", "limit": limit} for limit in range(100, 1000, 25)]


def is_number(prompts, completions, **columns):
    """The share of digits in each answer: partial credit gives a signal from the start."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def is_below(completions, limit, **columns):
    """Columns of the rows come as lists, here ``limit``. The rewards of several functions are added."""
    return [0.5 * (text.isdigit() and int(text) < top) for text, top in zip(completions, limit, strict=True)]


trainer = TeamTrainer(
    agents=[Agent("drafter", MODEL, max_tokens=4), Agent("editor", MODEL, max_tokens=4)],
    reward_funcs=[is_number, is_below],
    train_dataset=ROWS,  # without an eval_dataset a tenth of the prompts is held out
    args=Plan.preset("teamtr", radius=0.5, stages=6, problems=8, group_size=8),
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/own-reward",
    reward_range=1.5,  # largest minus smallest reward: certificates need it
    success_threshold=1.5,
    config={"tiny.layers": 1, "tiny.width": 32, "learner.learning_rate": 1e-2, "eval.every": 0},
)
print("right before:", trainer.evaluate(samples=16).avg_at_k)
records = trainer.train()
print("rewards:", [round(record["reward"], 2) for record in records if record["kind"] == "update"])
print("right after:", trainer.evaluate(samples=16).avg_at_k)
