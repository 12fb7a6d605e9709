"""What sections of a team file are made of: the base class, kinds of values, paths and refusals."""
