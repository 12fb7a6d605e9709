"""Transformers models in one process, on a CPU or one GPU."""
