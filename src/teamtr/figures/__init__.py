"""Our version of the paper's figures, from run folders alone: what is plotted is a value first, then drawn and written.

A figure is a function of runs that returns a ``Drawing``, or raises ``Lacking`` with what to set in the team file.
"""

from teamtr.figures.catalogue import FIGURES, Figure
from teamtr.figures.drawing import Drawing, Lacking, Panel, Series
from teamtr.figures.gallery import Gallery, hang
from teamtr.figures.runs import Run, read_runs

__all__ = ["FIGURES", "Drawing", "Figure", "Gallery", "Lacking", "Panel", "Run", "Series", "hang", "read_runs"]
