"""Kinds of single values that sections share. Strict, so that "12" is no number, true no 1 and 2.0 no whole number,
wherever the models are built."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, Field, Strict

from teamtr.settings.refusals import show


@dataclass(frozen=True)
class InWords:
    """In an annotation: what a value may be, as help says it, where the type itself does not."""

    text: str


NonEmpty = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Ge(0)]
Positive = Annotated[int, Strict(), Ge(1)]
Above0 = Annotated[float, Strict(), Gt(0)]
From0 = Annotated[float, Strict(), Ge(0)]
UpTo1 = Annotated[float, Strict(), Ge(0), Le(1)]
Share = Annotated[float, Strict(), Gt(0), Lt(1)]  # strictly between none and all
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]


def of_form(form: str, must: str) -> AfterValidator:
    """Text that the regular expression matches; ``must`` says so in words."""

    def check(value: str) -> str:
        if not re.fullmatch(form, value):
            raise ValueError(f"{must}, got {show(value)}")
        return value

    return AfterValidator(check)
