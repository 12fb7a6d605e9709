"""A pool of killable workers for code that may not terminate."""
