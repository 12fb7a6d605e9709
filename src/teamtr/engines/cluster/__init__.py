"""A team over several processes: each holds all of it, computes its shards of every batch, and ends up the same."""
