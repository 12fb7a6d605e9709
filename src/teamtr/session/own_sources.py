"""Hashes of user code: a Python file with the files next to it that it imports, or a function or object from a Python
program."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def file_digest(file: Path) -> str:
    """Hash of a file's bytes; a message if it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def program_digest(file: Path) -> str:
    """Hash of a Python file and of every file in its folder that it imports, directly or indirectly."""
    digest = hashlib.sha256()
    for path in sorted(_imported(file.resolve())):
        digest.update(f"{path.relative_to(file.resolve().parent)} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def object_digest(thing: Any) -> str:
    """Hash of the code of a function, class or object, or of each in a tuple, of the plain values that it uses, and of
    the functions and classes of its own module that it calls. Code in other modules is not included."""
    digest, seen = hashlib.sha256(), dict[int, Any]()
    for each, home in _with_homes(thing):
        for part in _parts(each, home, seen):
            digest.update(part.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
    return digest.hexdigest()


def _imported(file: Path) -> set[Path]:
    folder, found, waiting = file.parent, set[Path](), [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in _imports(path):
            parts = name.split(".")
            for upto in range(1, len(parts) + 1):
                module = folder.joinpath(*parts[:upto])
                candidates = (module.with_suffix(".py"), module / "__init__.py")
                waiting += [candidate for candidate in candidates if candidate.is_file()]
    return found


def _imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, and the names imported from them, which may be modules too."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # its own bytes are hashed anyway
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)


def _with_homes(thing: Any) -> Iterator[tuple[Any, str]]:
    """The thing with its module; of a tuple, what it holds, each with its own. Of this library's classes in a tuple
    only the names count."""
    if type(thing) is not tuple:
        yield thing, _home(thing)
        return
    for item in thing:
        for each, home in _with_homes(item):
            yield each, _home(()) if home.partition(".")[0] == "teamtr" else home


def _home(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        return _home(thing.func)
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module)


def _parts(thing: Any, home: str, seen: dict[int, Any]) -> Iterator[str]:
    """Texts that describe what an object does: sources, bytecode where there is no source, and values."""
    if isinstance(thing, _PLAIN):
        yield f"{type(thing).__name__} {thing!r}"
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # keeps it, so that no other object gets its id
    if isinstance(thing, dict):
        for key in sorted(thing, key=repr):
            yield f"key {key!r:.1000}" if isinstance(key, _PLAIN) else f"key {type(key).__qualname__}"
            yield from _parts(thing[key], home, seen)
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from _parts(item, home, seen)
    elif isinstance(thing, set | frozenset):
        yield from sorted(repr(item) for item in thing if isinstance(item, _PLAIN))
    elif isinstance(thing, functools.partial):
        yield from _parts([thing.func, thing.args, thing.keywords], home, seen)
    elif isinstance(thing, types.MethodType):
        yield from _parts(thing.__func__, home, seen)
        yield from _parts(thing.__self__, home, seen)
    elif isinstance(thing, types.FunctionType):
        yield from _function(thing, home, seen)
    elif isinstance(thing, type):
        yield from _class(thing, home, seen)
    elif isinstance(thing, types.ModuleType | types.BuiltinFunctionType):
        yield str(getattr(thing, "__name__", ""))
    else:
        yield from _class(type(thing), home, seen)
        if _home(thing) == home:
            yield from _parts(getattr(thing, "__dict__", {}), home, seen)


def _function(function: types.FunctionType, home: str, seen: dict[int, Any]) -> Iterator[str]:
    yield _source(function) or "".join(_code(function.__code__))
    yield from _parts(function.__defaults__ or (), home, seen)
    yield from _parts(function.__kwdefaults__ or {}, home, seen)
    names = [name for code in _codes(function.__code__) for name in code.co_names]
    module = vars(sys.modules[function.__module__]) if function.__module__ in sys.modules else {}
    used = [module[name] for name in names if name in module]
    for cell in function.__closure__ or ():
        try:
            used.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for value in used:
        foreign = isinstance(value, types.FunctionType | type) and value.__module__ != home
        if not foreign and not isinstance(value, types.ModuleType):
            yield from _parts(value, home, seen)


def _class(made: type, home: str, seen: dict[int, Any]) -> Iterator[str]:
    for each in made.__mro__:
        if each.__module__ != home:
            yield f"{each.__module__}.{each.__qualname__}"
            continue
        for name, value in sorted(vars(each).items()):
            held = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            if isinstance(held, types.FunctionType) or (isinstance(held, _PLAIN) and not name.startswith("__")):
                yield name
                yield from _parts(held, home, seen)


def _source(function: types.FunctionType) -> str | None:
    """The function's source without common indentation; None if it is not available."""
    try:
        return inspect.cleandoc(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield each.co_code.hex()
        yield repr([constant for constant in each.co_consts if isinstance(constant, (*_PLAIN, tuple))])
        yield repr((each.co_names, each.co_varnames))
