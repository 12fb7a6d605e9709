"""Timeline: every update of the run at a glance; its script tells what became of the one that is chosen."""

from __future__ import annotations

from teamtr.analysis.report.section import Section, register

register(
    Section(
        key="timeline",
        title="Timeline",
        place=60,
        lead="Every stage from left to right, its updates from top to bottom in their order.",
        script="timeline.js",
    )
)
