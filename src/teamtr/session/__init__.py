"""A run from a team file to its end: build, check, train, resume, evaluate, export."""
