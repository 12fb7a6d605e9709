"""Experiments on the theory: checks and curves on exactly solved tabular teams, and trainings of tiny models that measure
what stale rollouts cost."""
