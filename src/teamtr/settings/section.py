"""What all sections of a team file have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from teamtr.settings.refusals import Refusal

_Default = TypeVar("_Default")


def key(default: _Default, description: str) -> _Default:
    """A key that may be left out; help shows the description."""
    return Field(default, description=description)


def unset(description: str, **rules: Any) -> Any:
    """A key without a default of its own: None, or, on an agent that is part of a team, what the team says."""
    return Field(None, description=description, **rules)


class Section(BaseModel):
    """A mapping of the team file. ``unset_means`` says in words what a key without a value stands for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    unset_means: ClassVar[str] = "none"

    @model_validator(mode="after")
    def _as_a_whole(self, info: ValidationInfo) -> Self:
        """Raise in pydantic's way, so that the models refuse alike from a file and from Python; or collect, in a list
        given as pydantic's context, so that one refusal does not hide the next."""
        self._settle()
        refusals = tuple(self._refusals())
        if isinstance(info.context, list):
            info.context.extend(refusals)
        elif refusals:
            text = "; ".join(refusal.message for refusal in refusals)
            raise PydanticCustomError("between_fields", "{text}", {"text": text})
        return self

    def _settle(self) -> None:
        """Fill in what depends on other fields."""

    def _refusals(self) -> Iterable[Refusal]:
        """What is wrong between fields that are each sound."""
        return ()
