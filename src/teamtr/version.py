"""The version of the library, and nothing else: everything may import it."""

__version__ = "0.2.0.dev0"
