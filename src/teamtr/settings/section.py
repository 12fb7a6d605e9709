"""The base class of all sections of a team file, and helpers to declare their keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from teamtr.settings.refusals import Refusal

_Default = TypeVar("_Default")


def key(default: _Default, description: str) -> _Default:
    """An optional key; help shows the description."""
    return Field(default, description=description)


def unset(description: str, **rules: Any) -> Any:
    """A key without its own default: None, or, for an agent that is part of a team, the team's value."""
    return Field(None, description=description, **rules)


class Section(BaseModel):
    """A mapping in the team file. ``unset_means`` says in words what a key without a value stands for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    unset_means: ClassVar[str] = "none"

    @model_validator(mode="after")
    def _as_a_whole(self, info: ValidationInfo) -> Self:
        """Fill in dependent values, then check relations between fields.

        Raises pydantic's error, so that the models refuse the same values from a file and from Python. If pydantic's
        context is a list, refusals are appended to it instead, so that one refusal does not hide the next.
        """
        self._settle()
        refusals = tuple(self._refusals())
        if isinstance(info.context, list):
            info.context.extend(refusals)
        elif refusals:
            text = "; ".join(refusal.message for refusal in refusals)
            raise PydanticCustomError("between_fields", "{text}", {"text": text})
        return self

    def _settle(self) -> None:
        """Fill in values that depend on other fields."""

    def _refusals(self) -> Iterable[Refusal]:
        """Yield what is wrong between fields that are valid by themselves."""
        return ()
