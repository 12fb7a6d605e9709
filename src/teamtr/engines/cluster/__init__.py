"""Engines over several worker processes: each computes shards of its agents' batches, and all hold the same weights."""
