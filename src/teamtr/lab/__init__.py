"""Experiments on the theory: exact checks on tabular teams, and trainings of tiny models on stale rollouts."""
