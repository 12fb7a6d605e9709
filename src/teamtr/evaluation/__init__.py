"""Evaluation of teams: metrics with intervals, sampled evaluation, and exact success for tasks with a closed form."""
