"""Types of single values that sections share. They are strict wherever the models are built: "12" is not a number, true
is not 1, and 2.0 is not a whole number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from teamtr.settings.refusals import show


@dataclass(frozen=True)
class InWords:
    """Annotation: describes the allowed values in help where the type does not."""

    text: str


@dataclass(frozen=True, eq=False)
class InSchema:
    """Annotation: additions to the type's JSON schema."""

    says: dict[str, Any]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.says}


NonEmpty = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Ge(0)]
Positive = Annotated[int, Strict(), Ge(1)]
Above0 = Annotated[float, Strict(), Gt(0)]
From0 = Annotated[float, Strict(), Ge(0)]
UpTo1 = Annotated[float, Strict(), Ge(0), Le(1)]
Share = Annotated[float, Strict(), Gt(0), Lt(1)]  # strictly between none and all
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]


@dataclass(frozen=True)
class Form:
    """Annotation: text must match the regular expression; ``must`` says so in words."""

    form: str
    must: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.form})$"}

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.form, value):
            raise ValueError(f"{self.must}, got {show(value)}")
        return value


def of_form(form: str, must: str) -> Form:
    """Annotation for text that matches the regular expression; ``must`` says so in words."""
    return Form(form, must)
