"""Types of text with a required form, such as names, and their error messages."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from teamtr.chat.transcript import YOU
from teamtr.presets import PRESETS
from teamtr.settings.refusals import hint, show
from teamtr.settings.values import InSchema, of_form

ANSWER_WORDS = ("last", "majority")
"""Values of ``team.answer`` besides the names of agents."""


def _at_most(characters: int) -> AfterValidator:
    def check(value: str) -> str:
        if len(value) > characters:
            raise ValueError(f"must have at most {characters} characters (it names a folder), got {len(value)}")
        return value

    return AfterValidator(check)


def _no_reserved_word(value: str) -> str:
    if value in ANSWER_WORDS:
        raise ValueError(f"must not be {show(value)}: team.answer gives that word a meaning of its own")
    if value.lower() == YOU:
        raise ValueError(f"must not be {show(value)}: so every agent's own lines are labelled in what it is shown")
    return value


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"must name a preset, got {show(value)}{hint(value, PRESETS, 'one of')}")
    return value


RunName = Annotated[
    str,
    of_form(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be letters (a-z, A-Z), digits, dot, dash and underscore (it names a folder)",
    ),
    _at_most(200),
    InSchema({"maxLength": 200}),
]
AgentName = Annotated[
    str,
    of_form(
        r"[A-Za-z][A-Za-z0-9_-]*", "must be a letter (a-z, A-Z), then letters, digits (0-9), dashes or underscores"
    ),
    _at_most(64),
    AfterValidator(_no_reserved_word),
    InSchema({"maxLength": 64, "not": {"enum": [*ANSWER_WORDS, YOU]}}),
]
Device = Annotated[str, of_form(r"auto|cpu|cuda(:[0-9]+)?", "must be auto, cpu, cuda or cuda:N")]
Preset = Annotated[str, AfterValidator(_preset), InSchema({"enum": list(PRESETS)})]
