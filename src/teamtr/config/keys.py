"""The list of all keys of a team file, derived from the models; used by help, docs and "did you mean"."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from teamtr.config.schema import TeamFile
from teamtr.settings.section import Section
from teamtr.settings.values import InWords
from teamtr.tasks.config import TaskConfig
from teamtr.tasks.registry import is_name_of, task_names, task_sections


@dataclass(frozen=True)
class SchemaKey:
    """One key of a team file. ``tasks`` names the tasks that have it; empty means all. The keys of an agent are under
    team.agents.NAME, those of a group under cluster.groups.NUMBER."""

    key: str
    type: str
    default: str
    description: str
    required: bool
    tasks: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        """The condition on the task under which the key exists, in words."""
        return f"task.name is {' | '.join(self.tasks)}" if self.tasks else ""

    def exists_for(self, task_name: Any) -> bool:
        return not self.tasks or (isinstance(task_name, str) and any(is_name_of(task_name, t) for t in self.tasks))


def schema_keys() -> tuple[SchemaKey, ...]:
    """Every key of a team file, in the order of the file."""
    return tuple(_walk(TeamFile, ""))


def section_of(name: str) -> type[Section] | None:
    """The section of this top-level key; None for a plain value, and for ``task``, which has several sections."""
    sections = _sections_of(TeamFile.model_fields[name].annotation)
    return sections[0] if len(sections) == 1 and sections[0] is not TaskConfig else None


def item_of(section: type[Section]) -> str:
    """The placeholder in a key for one item of a list of such sections."""
    return "NAME" if "name" in section.model_fields else "NUMBER"


def _walk(model: type[Section], prefix: str, tasks: tuple[str, ...] = (), inherited: str = "") -> Iterator[SchemaKey]:
    """Yield the keys of a section; ``inherited`` says in words where the defaults of the whole section come from."""
    for name, info in model.model_fields.items():
        sections = _sections_of(info.annotation)
        key, description = f"{prefix}{name}", info.description or ""
        if sections == (TaskConfig,):  # its name chooses which other keys there are
            yield SchemaKey(f"{key}.name", " | ".join(task_names()), "", description, required=True)
            for own, names in task_sections().items():
                yield from (other for other in _walk(own, f"{key}.", names) if other.key != f"{key}.name")
        elif sections:
            each = f"{item_of(sections[0])}." if typing.get_origin(info.annotation) is tuple else ""
            left_to = model.unset_means if info.default is None and model.unset_means != Section.unset_means else ""
            yield from _walk(sections[0], f"{key}.{each}", tasks, left_to)
        else:
            type_name, required = _type_name(info.annotation, info.metadata), info.is_required()
            value = None if required else info.get_default(call_default_factory=True)
            of_its_own = "" if required else model.unset_means if value is None else json.dumps(value, default=str)
            yield SchemaKey(key, type_name, inherited or of_its_own, description, required, tasks)


def _sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in typing.get_args(annotation) for section in _sections_of(part))


_PLAIN_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}
_BOUNDS: dict[type, tuple[str, str]] = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type annotation in words for users of team files."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if said := [each.text for each in metadata if isinstance(each, InWords)]:
        return said[0]
    if origin is Annotated:
        return _type_name(parts[0], parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part, metadata) for part in parts if part is not type(None))
    if origin in (tuple, list, set, frozenset):
        many = f"{len(parts)}: " if origin is tuple and parts[-1] is not Ellipsis else ""
        return f"list of {many}{_type_name(parts[0])}"
    if origin is dict:
        return f"mapping of text to {_type_name(parts[1])}"
    known = [(_BOUNDS[type(bound)], bound) for bound in metadata if type(bound) in _BOUNDS]
    bounds = ", ".join(f"{sign} {getattr(bound, name):g}" for (sign, name), bound in known)
    return f"{_PLAIN_TYPES.get(annotation, str(annotation))} {bounds}".rstrip()
