"""Benchmarks by name, graded as their own evaluators do."""
