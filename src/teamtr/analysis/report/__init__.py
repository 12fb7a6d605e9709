"""Reports on training runs: the static report, the live page, and the comparison of runs.

They read only run folders (the log, the newest commit, stored episodes), without engine, weights or locks.
"""

from teamtr.analysis.report.compare import compare_runs
from teamtr.analysis.report.comparison import comparison_tables
from teamtr.analysis.report.markdown import comparison_text, report_text
from teamtr.analysis.report.page import compare_page, plain, report_page
from teamtr.analysis.report.reading import Reading, read_run
from teamtr.analysis.report.static import Report, build_report

__all__ = [
    "Reading",
    "Report",
    "build_report",
    "compare_page",
    "compare_runs",
    "comparison_tables",
    "comparison_text",
    "plain",
    "read_run",
    "report_page",
    "report_text",
]
