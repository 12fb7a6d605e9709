"""A team over several processes: those that hold an agent compute shards of its batches each, and end up the same."""
