"""Training a team from Python: ``TeamTrainer`` and what it is given. ``teamtr`` itself re-exports all of it."""
