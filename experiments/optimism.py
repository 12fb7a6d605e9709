"""Optimism of the surrogate: its value on the batch that a step was trained on, and on new problems.

    python experiments/optimism.py [--stages 40] [--problems 16]

Three tiny models learn the demo's game from 16 problems x 8 episodes per update. Every kept step is also judged on the
other problems of the training split, played by the team before the step. On its own batch every kept step gains; on
other problems some lose. With ``learner.cross_fit``, each half of the problems judges the step trained on the other.
"""

from __future__ import annotations

import argparse

import numpy as np

from teamtr.config import loads
from teamtr.randomness import generator, seed_of
from teamtr.rollout import play
from teamtr.session.build import build
from teamtr.theory.gain import surrogate_gain
from teamtr.training.algorithm import run_stage, schedule
from teamtr.training.batch import TrainingBatch
from teamtr.training.update import Update, update_agent

TEAM = """\
name: optimism
task: {name: code, symbols: ABCDEFGH, held_out: 0.25, skill: 0.6}
tiny: {layers: 1, warmup_steps: 300}
team: {model: tiny, max_tokens: 3, agents: [{name: left}, {name: right}, {name: speaker}]}
plan: {problems: 16, group_size: 8, radius_nats_per_message: 0.01}
"""


def train(stages: int, problems: int, *, cross_fit: bool) -> list[tuple[float, float]]:
    """(surrogate reported by the update, surrogate on new problems) of every kept update."""
    session = build(loads(TEAM, "optimism", [f"learner.cross_fit={str(cross_fit).lower()}"]))
    plan, context, team = session.plan, session.context, session.current_team()
    train_split, found = session.task.problems("train"), []
    states = dict.fromkeys(team.names, plan.first_state())

    def batch(team, chosen, *names):
        return play(context, team, [train_split[i] for i in chosen], plan.group_size, seed=seed_of(0, *names))

    for stage in range(stages):
        order = generator(0, "problems", stage).permutation(len(train_split))
        own_problems, new_problems = order[:problems], order[problems:]

        def update(agent: str, data: TrainingBatch, stage: int = stage, new_problems=new_problems) -> Update:
            learner = session.engine.learner(agent)
            before, other = learner.snapshot(), batch(session.current_team(), new_problems, "new", stage, agent)
            done = update_agent(
                learner,
                data,
                plan,
                session.optimization,
                states[agent],
                seed=seed_of(0, "update", stage, agent),
            )
            states[agent] = done.state
            if done.report.accepted:
                after = learner.snapshot()
                learner.restore(before)
                learner.begin(other.of(agent))
                learner.restore(after)
                advantages = plan.advantage.estimate(other.returns_PG(1.0))
                own = advantages.values_PG.reshape(-1)[other.of(agent).episode_M]
                found.append((done.report.surrogate, surrogate_gain(learner.measure().log_ratio_M, own)))
                learner.end()
            return done

        def collect(team, step: int, stage: int = stage, own_problems=own_problems):
            return batch(team, own_problems, "own", stage, step)

        slots = schedule(plan.order, team.trainable, generator(0, "order", stage))
        for step in run_stage(team, plan, collect, update, slots):
            team = step.team
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=40)
    parser.add_argument("--problems", type=int, default=16)
    asked = parser.parse_args()
    print("| judged by | kept updates | surrogate reported | on new problems | of them below zero |")
    print("|---|---|---|---|---|")
    for cross_fit, name in ((False, "its own batch"), (True, "the other half (cross_fit)")):
        own, new = np.array(train(asked.stages, asked.problems, cross_fit=cross_fit)).T
        line = f"| {name} | {len(own)} of {3 * asked.stages} | {own.mean():.4f} | {new.mean():.4f} ± "
        print(f"{line}{new.std(ddof=1) / len(new) ** 0.5:.4f} | {100 * (new < 0).mean():.0f} % |", flush=True)


if __name__ == "__main__":
    main()
