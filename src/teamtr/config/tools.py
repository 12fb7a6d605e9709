"""The section ``tools``: what agents can call, and how far."""

from __future__ import annotations

from teamtr.settings.section import Section, key
from teamtr.settings.values import Positive


class ToolsConfig(Section):
    """What agents can call."""

    steps: Positive = key(
        4, "Most messages of an agent in a row: after each that calls a tool it reads the result and speaks again."
    )
