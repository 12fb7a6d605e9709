"""The registry of methods by the names that ``teamtr eval --method`` uses.

    @method("shout")             # on a frozen dataclass derived from Method, in a module of this package
    class Shout(Conversation): ...

All modules of this package are imported automatically: a new method is one new module, without other changes.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

from teamtr.baselines.method import Method
from teamtr.errors import UserError

_PACKAGE = "teamtr.baselines"
_registered: dict[str, type[Method]] = {}
_T = TypeVar("_T", bound=type[Method])


def method(name: str) -> Callable[[_T], _T]:
    """Register a class under this name."""

    def register(cls: _T) -> _T:
        other = _registered.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"two methods are called {name!r}: {other.__module__} and {cls.__module__}; rename one")
        cls.name = name
        _registered[name] = cls
        return cls

    return register


def methods() -> dict[str, type[Method]]:
    """All methods by name, sorted."""
    for found in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        importlib.import_module(f"{_PACKAGE}.{found.name}")
    return dict(sorted(_registered.items()))


def method_names() -> tuple[str, ...]:
    return tuple(methods())


def settings_of(cls: type[Method]) -> dict[str, Field[Any]]:
    """The settings of a method that users can set."""
    return {each.name: each for each in fields(cls) if "help" in each.metadata}


def make_methods(names: Sequence[str], settings: Mapping[str, Any]) -> tuple[Method, ...]:
    """The methods of these names, each with those of the settings that it has. Raises UserError for an unknown or
    duplicate name, and for a setting that none of them has."""
    known = methods()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(f"there is no method {name!r}; the nearest is {near!r}, of {', '.join(known)}")
        if names.count(name) > 1:
            raise UserError(f"the method {name} is asked for twice: a method is compared with others, once")
    for key in settings:
        having = [name for name, cls in known.items() if key in settings_of(cls)]
        if not having:
            raise UserError(f"no method has a setting {key!r}")
        if not set(having) & set(names):
            raise UserError(f"--{key} is a setting of {', '.join(having)}: name one in --method, or leave it out")
    return tuple(
        known[name](**{key: value for key, value in settings.items() if key in settings_of(known[name])})
        for name in names
    )
