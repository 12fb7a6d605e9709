"""Who computes: tabular (exact) and torch (one process, CPU or GPU)."""
