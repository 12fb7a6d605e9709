"""The version of the library. It imports nothing, so that every module may import it."""

__version__ = "0.2.0.dev0"
