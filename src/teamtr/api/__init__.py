"""Training a team from Python: ``TeamTrainer`` and its arguments. ``teamtr`` re-exports all of it."""
