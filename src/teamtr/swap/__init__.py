"""Replaces one agent of a team: protocol checks, Stage-0 alignment, and a new run that continues the old one."""

from teamtr.swap.request import Request
from teamtr.swap.strings import compared_strings, run_strings
from teamtr.swap.swap import swap

__all__ = ["Request", "compared_strings", "run_strings", "swap"]
