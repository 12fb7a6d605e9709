"""What a run takes on a given cluster, before it runs: memory by part, seconds by phase, and what bounds them."""
