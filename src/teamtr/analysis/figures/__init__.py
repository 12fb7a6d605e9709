"""Our versions of the paper's figures, from run folders alone, computed as plain values before they are drawn.

A figure is a function of runs that returns a ``Drawing``, or raises ``Lacking`` with the setting to change.
"""

from teamtr.analysis.figures.catalogue import FIGURES, Figure
from teamtr.analysis.figures.drawing import Drawing, Lacking, Panel, Series
from teamtr.analysis.figures.gallery import Gallery, hang
from teamtr.analysis.figures.paint import FORMS
from teamtr.analysis.figures.runs import Run, read_runs

__all__ = ["FIGURES", "FORMS", "Drawing", "Figure", "Gallery", "Lacking", "Panel", "Run", "Series", "hang", "read_runs"]
