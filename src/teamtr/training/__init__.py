"""Algorithm 1 and its parts: the stage, one agent's update, the KL gate, and the training batch."""
