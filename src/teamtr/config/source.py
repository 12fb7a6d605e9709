"""Reads YAML 1.2 as plain data with the place of every key and value; writes plain data as YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scanner import Scanner
from ruamel.yaml.tag import Tag

from teamtr.config.errors import Mistake, Place
from teamtr.errors import first_line
from teamtr.settings.refusals import KeyPath, dotted, show
from teamtr.text import MOST_DIGITS, has_half_character

LONGEST = 500_000
"""Maximum characters of a team file."""
DEEPEST = 50
"""Maximum nesting depth of lists and mappings."""
ROOM_FOR_ALIASES = 1_000
"""Values allowed in addition to one per character of the file; values that aliases repeat are counted each time."""

_TAG_PREFIX = "tag:yaml.org,2002:"

# The core schema of YAML 1.2.2, section 10.3.2: a plain scalar has the first type whose pattern it matches. ruamel's
# own 1.2 rules still treat dates, `=`, `1_000` and `<<` as more than text.
_CORE_SCHEMA: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"null|Null|NULL|~|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10)),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(inf|nan)", r"\1", text.lower())),
    ),
    "str": (r"(?s:.*)", str),
}
_TAGS = {name: Tag(suffix=_TAG_PREFIX + name) for name in _CORE_SCHEMA}


class _CoreResolver(VersionedResolver):  # type: ignore[misc, unused-ignore]
    """Resolves plain scalars by the core schema, regardless of a %YAML directive."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is not ScalarNode:
            return super().resolve(kind, value, implicit)
        kinds = (name for name, (form, _) in _CORE_SCHEMA.items() if re.fullmatch(form, value))
        return _TAGS[next(kinds) if implicit[0] else "str"]


_TOO_DEEP = f"lists and mappings stand more than {DEEPEST} deep inside each other"


class _BoundedScanner(Scanner):  # type: ignore[misc, unused-ignore]
    """Refuses brackets nested deeper than ``DEEPEST``: at each bracket, the scanner goes through all open ones."""

    def fetch_flow_collection_start(self, *arguments: Any, **options: Any) -> None:
        if len(self.flow_context) > DEEPEST:
            raise MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.reader.get_mark())
        super().fetch_flow_collection_start(*arguments, **options)


class _BoundedComposer(Composer):  # type: ignore[misc, unused-ignore]
    """Refuses nesting deeper than ``DEEPEST``: the code that follows recurses as deep as the file."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.levels += 1
        if self.levels > DEEPEST:
            raise MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node


class _TextRepresenter(SafeRepresenter):  # type: ignore[misc, unused-ignore]
    """Writes multi-line text as a block, and text with unprintable characters in double quotes with escapes. (By
    default the emitter writes U+0085 in single quotes, where it is read back as a space.)"""

    def represent_str(self, text: str) -> Any:
        lines = text.split("\n")
        style = None if text.isprintable() else "|" if all(map(str.isprintable, lines)) else '"'
        return self.represent_scalar(f"{_TAG_PREFIX}str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True  # repeated values are written out each time


_TextRepresenter.add_representer(str, _TextRepresenter.represent_str)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    yaml.Scanner = _BoundedScanner
    yaml.Composer = _BoundedComposer
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows a later anchor of the same name
    yaml.default_flow_style = False
    yaml.width = 2**31
    yaml.sort_base_mapping_type_on_output = False
    yaml.Representer = _TextRepresenter
    return yaml


def write(data: Any) -> str:
    """Write plain data as YAML that ``read`` parses back to it."""
    stream = StringIO()
    _yaml().dump(data, stream)
    return stream.getvalue()


@dataclass
class Document:
    """Plain data with the origin of every path: the places of its key and value, or the override that set it."""

    data: Any = None
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    room: int = 0
    """How many more values may be read."""

    def mistake(self, message: str, path: KeyPath, *, at_key: bool = False) -> Mistake:
        """A mistake at this path, or at the nearest enclosing path with a place."""
        for end in range(len(path), -1, -1):
            part = path[:end]
            if part in self.overridden:
                return Mistake(message, override=self.overridden[part])
            # A mistake in a part of this path (such as a missing key) is reported at the key that contains it.
            first, second = (self.keys, self.values) if at_key or end < len(path) else (self.values, self.keys)
            place = first.get(part) or second.get(part)
            if place is not None:
                return Mistake(message, place)
        return Mistake(message, Place(1, 1))

    def overwrite(self, path: KeyPath, override: str) -> None:
        """Record that this path and everything below it come from an override, not from the file."""
        for noted in (self.keys, self.values, self.overridden):
            for old in [other for other in noted if other[: len(path)] == path]:
                del noted[old]
        self.overridden[path] = override


class _TooManyValues(Exception):
    """Aliases expand to more values than a file of this length may hold."""


def read(text: str) -> Document:
    """Read YAML text as plain data with places. A syntax error is returned as the only mistake, since nothing after it
    is reliable; so is a text beyond the limits."""
    if len(text) > LONGEST:
        return Document(mistakes=[Mistake(f"longer than {LONGEST} characters", Place(1, 1))])
    try:
        root = _yaml().compose(text)
    except YAMLError as error:
        return Document(mistakes=[_syntax_mistake(error, text)])
    except Exception as error:  # bugs of the library, such as an escape whose number is not a character
        return Document(mistakes=[Mistake(f"not valid YAML: {first_line(error)}", Place(1, 1))])
    document = Document(room=ROOM_FOR_ALIASES + len(text))
    if root is not None:
        try:
            document.data = _plain(root, (), document, ())
        except _TooManyValues:
            most = ROOM_FOR_ALIASES + len(text)
            problem = f"aliases make more than {most} values of this file: write out what is meant"
            return Document(mistakes=[Mistake(problem, Place(1, 1))])
    return document


def _syntax_mistake(error: YAMLError, text: str) -> Mistake:
    problem, place = str(error), Place(1, 1)
    if isinstance(error, ReaderError):
        problem = f"the character {chr(error.character)!r} is not allowed"
        place = Place.after(text[: error.position])
    elif isinstance(error, MarkedYAMLError):
        mark, since = error.problem_mark or error.context_mark, error.context_mark
        place = Place(mark.line + 1, mark.column + 1)
        problem = str(error.problem)
        if problem.startswith("but"):  # the problem is worded as the second half of a sentence
            problem = f"{error.context}, {problem}"
        elif error.context and error.context.startswith("while"):
            problem += f" {error.context}"
            if since is not None and since.line != mark.line:
                problem += f" that began at line {since.line + 1}"
    return Mistake(f"not valid YAML: {problem}", place)


def _place(node: Any) -> Place:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end is not None and end.line == start.line else 1
    return Place(start.line + 1, start.column + 1, max(width, 1))


def _plain(node: Any, path: KeyPath, document: Document, around: tuple[int, ...]) -> Any:
    """Convert a node to plain data, and record places and mistakes."""
    place = document.values[path] = _place(node)
    document.room -= 1
    if document.room < 0:
        raise _TooManyValues

    def wrong(message: str) -> None:
        document.mistakes.append(Mistake(message, place))

    if id(node) in around:
        return wrong("an alias must not stand inside what it names")
    inside = (*around, id(node))
    kind = str(node.tag).removeprefix(_TAG_PREFIX)
    match node:
        case MappingNode() if kind == "map":
            return _mapping(node, path, document, inside)
        case SequenceNode() if kind == "seq":
            return [_plain(item, (*path, i), document, inside) for i, item in enumerate(node.value)]
        case ScalarNode() if kind in _CORE_SCHEMA:
            form, value_of = _CORE_SCHEMA[kind]
            if not re.fullmatch(form, node.value):  # such as !!int x
                return wrong(f"{show(node.value)} is not of the YAML type {kind}")
            if kind == "int" and len(node.value) > MOST_DIGITS:
                return wrong(f"a whole number of more than {MOST_DIGITS} digits")
            if has_half_character(node.value):
                return wrong("half of a surrogate pair stands alone in this text: write the character itself")
            return value_of(node.value)
    return wrong(f"the tag {show(str(node.tag))} has no meaning in a team file")


def _mapping(node: MappingNode, path: KeyPath, document: Document, around: tuple[int, ...]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place, key = _place(key_node), key_node.value
        if not isinstance(key_node, ScalarNode) or str(key_node.tag) != f"{_TAG_PREFIX}str":
            quote = f'; write "{key}"' if isinstance(key_node, ScalarNode) else ""
            document.mistakes.append(Mistake(f"a key must be text{quote}", place))
        elif has_half_character(key):
            document.mistakes.append(Mistake("half of a surrogate pair stands alone in this key", place))
        elif key in mapping:
            first = document.keys[(*path, key)].line
            message = f'duplicate key "{key}" in {dotted(path)} (first at line {first})'
            document.mistakes.append(Mistake(message, place))
        else:
            document.keys[(*path, key)] = place
            mapping[key] = _plain(value_node, (*path, key), document, around)
            if value_node.start_mark.index == value_node.end_mark.index:  # an empty value has no place of its own
                document.values[(*path, key)] = place
    return mapping
