"""What training did, for a person: the static report, the live page, the comparison of runs.

Reads run folders (the log, the newest commit, stored episodes) and nothing else: no engine, no weights, no lock.
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
