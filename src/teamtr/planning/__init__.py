"""Predicts what a run needs on a given cluster: memory by part, seconds by phase, and what bounds them."""
