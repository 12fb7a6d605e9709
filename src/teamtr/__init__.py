"""TeamTR: fine-tune teams of language models, one agent at a time, inside a KL trust region."""

__version__ = "0.2.0.dev0"
