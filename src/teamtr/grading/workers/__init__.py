"""A pool of killable workers for whatever is not trusted to end."""
