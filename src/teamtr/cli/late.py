"""Commands whose parameters are read on first use: ``teamtr --help`` lists all commands without reading any
signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand
from typer.main import get_command

Function = TypeVar("Function", bound=Callable[..., Any])


class LateApp(typer.Typer):
    """A ``Typer`` that creates commands in two steps: name and help at once, parameters on first use. Reading the
    signatures of all commands took a quarter of the time of ``teamtr --help``."""

    def command(self, name: str | None = None) -> Callable[[Function], Function]:  # type: ignore[override]
        def register(function: Function) -> Function:
            def listed() -> None:
                """Placeholder for the function until its signature is needed."""

            listed.__name__, listed.__doc__ = function.__name__, function.__doc__
            listed.function = function  # type: ignore[attr-defined]
            super(LateApp, self).command(name, cls=LateCommand)(listed)
            return function

        return register


class LateCommand(TyperCommand):
    def __init__(self, name: str | None, *, callback: Callable[..., Any], **settings: Any) -> None:
        super().__init__(name, callback=callback, **settings)
        self._function = callback.function  # type: ignore[attr-defined]
        del self.params, self.callback  # accesses then go to __getattr__

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        alone = typer.Typer(add_completion=False)
        alone.command()(self._function)
        whole = get_command(alone)
        self.params, self.callback = whole.params, whole.callback
        return self.__dict__[name]
