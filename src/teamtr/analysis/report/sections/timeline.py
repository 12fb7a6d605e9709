"""The Timeline section: an overview of every update of the run; its script shows details of the selected one."""

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
