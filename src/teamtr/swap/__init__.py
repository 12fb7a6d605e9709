"""Replace one agent of a team without breaking it: protocol checks, Stage-0 alignment, a run that goes on."""

from teamtr.swap.request import Request
from teamtr.swap.strings import compared_strings, run_strings
from teamtr.swap.swap import swap

__all__ = ["Request", "compared_strings", "run_strings", "swap"]
