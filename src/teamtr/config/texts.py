"""Texts with a form of their own, such as names, and errors that say what they must be."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from teamtr.config.errors import hint, show
from teamtr.presets import PRESETS

ANSWER_WORDS = ("last", "majority")
"""What team.answer may say besides the name of an agent."""


def _of_form(form: str, must: str) -> AfterValidator:
    """Text that the regular expression matches; ``must`` says so in words."""

    def check(value: str) -> str:
        if not re.fullmatch(form, value):
            raise ValueError(f"{must}, got {show(value)}")
        return value

    return AfterValidator(check)


def _at_most(characters: int) -> AfterValidator:
    def check(value: str) -> str:
        if len(value) > characters:
            raise ValueError(f"must have at most {characters} characters (it names a folder), got {len(value)}")
        return value

    return AfterValidator(check)


def _no_answer_word(value: str) -> str:
    if value in ANSWER_WORDS:
        raise ValueError(f"must not be {show(value)}: team.answer gives that word a meaning of its own")
    return value


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"must name a preset, got {show(value)}{hint(value, PRESETS, 'one of')}")
    return value


def _symbols(value: str) -> str:
    distinct = {symbol.upper() for symbol in value if len(symbol.upper()) == 1 and not symbol.isspace()}
    if len(value) < 2 or len(distinct) != len(value):  # answers are compared without regard to case
        raise ValueError(f"must be at least two characters that differ in more than case, no spaces, got {show(value)}")
    return value


def _one_group(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have exactly one group, round the answer, got {groups}; write (?:...) for others")
    return value


RunName = Annotated[
    str,
    _of_form(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be letters (a-z, A-Z), digits, dot, dash and underscore (it names a folder)",
    ),
    _at_most(200),
]
AgentName = Annotated[
    str,
    _of_form(
        r"[A-Za-z][A-Za-z0-9_-]*", "must be a letter (a-z, A-Z), then letters, digits (0-9), dashes or underscores"
    ),
    _at_most(64),
    AfterValidator(_no_answer_word),
]
Device = Annotated[str, _of_form(r"auto|cpu|cuda(:[0-9]+)?", "must be auto, cpu, cuda or cuda:N")]
GymName = Annotated[
    str, _of_form(r"gym:[a-z][a-z0-9_]*", "must be gym:NAME, with the name of a family of reasoning-gym")
]
OwnTaskName = Annotated[
    str, _of_form(r"python:.+\.py:[^\W\d]\w*", "must be python:FILE.py:CLASS (FILE relative to the team file)")
]
Preset = Annotated[str, AfterValidator(_preset)]
Symbols = Annotated[str, AfterValidator(_symbols)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_one_group)]
Grader = Annotated[
    str,
    _of_form(r"exact|number|regex|python:.+:[^\W\d]\w*", "must be exact, number, regex or python:FILE:FUNCTION"),
]
