"""Algorithm 1 and what it is made of: the stage, one agent's update, the KL gate, the batch it learns from."""
