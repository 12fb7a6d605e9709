"""Inference-time methods for a team's models, untrained or trained, with their token costs counted."""

from teamtr.baselines.cast import Cast
from teamtr.baselines.method import Method, play_method, setting
from teamtr.baselines.registry import make_methods, method, method_names

__all__ = ["Cast", "Method", "make_methods", "method", "method_names", "play_method", "setting"]
