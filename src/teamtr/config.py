"""The team file: its schema, its defaults, and errors that point at the line.

A team file is YAML 1.2 (core schema: ``no`` is text, ``1e-5`` a number, ``012`` twelve). It is read into frozen
pydantic models; an unknown key, a wrong type or a value out of range is refused, never guessed. All mistakes of a
file are told at once, each like a compiler's message::

    team.yaml:12:5: unknown key "radious" in plan; did you mean "radius_nats_per_message"?
       12 |     radious: 0.01
          |     ^^^^^^^

Values may be overridden by dotted keys, ``plan.stages=10`` or ``team.agents.left.model=tiny``.

How it works: YAML nodes -> plain data plus the place of every path (``_read``) -> overrides (``_override``) ->
pydantic (``_validate``), whose errors are carried back to places. The models are the only list of keys: help, docs
and "did you mean" all read it through ``schema_keys``.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic import ValidationError as PydanticValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag as YamlTag

from teamtr.presets import PRESETS, Order, Plan

KeyPath = tuple[str | int, ...]


# ---------------------------------------------------------------------------------------------------------------
# Mistakes


@dataclass(frozen=True)
class Place:
    """A stretch of one line of the file, counted from 1."""

    line: int
    column: int
    width: int = 1


@dataclass(frozen=True)
class Mistake:
    """One thing wrong, and where: a place in the file, or the override that brought it."""

    message: str
    place: Place | None = None
    override: str | None = None


class ConfigError(ValueError):
    """Everything wrong with a team file, in the order of its lines; overrides come last."""

    def __init__(self, name: str, text: str, mistakes: Iterable[Mistake]) -> None:
        self.name = name
        self.mistakes = tuple(sorted(mistakes, key=_by_place))
        lines = _LINE_BREAK.split(text)
        super().__init__("\n".join(_render(name, lines, mistake) for mistake in self.mistakes))


_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")


def _by_place(mistake: Mistake) -> tuple[bool, int, int]:
    place = mistake.place or Place(0, 0)
    return (mistake.override is not None, place.line, place.column)


def _render(name: str, lines: Sequence[str], mistake: Mistake) -> str:
    """One mistake as a compiler would print it."""
    if mistake.override is not None:
        return f"override {json.dumps(mistake.override, ensure_ascii=False)}: {mistake.message}"
    if mistake.place is None:
        return f"{name}: {mistake.message}"
    line, column, width = mistake.place.line, mistake.place.column, mistake.place.width
    head = f"{name}:{line}:{column}: {mistake.message}"
    source = lines[line - 1] if line <= len(lines) else ""
    # A tab stays a tab, so that the caret stands under its column however wide tabs are shown.
    pad = "".join("\t" if char == "\t" else " " for char in source[: column - 1].ljust(column - 1))
    return f"{head}\n{line:5d} | {source}\n      | {pad}{'^' * max(width, 1)}"


def _show(value: Any) -> str:
    """A value as a message quotes it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            short = value if len(value) <= 40 else value[:37] + "..."
            return json.dumps(short, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        case dict():
            return "a mapping"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return str(value)


def _nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a person who wrote ``word`` most likely meant, or None when none is near.

    Besides the whole name, its beginning, its parts and its initials count, a little less: ``radious`` is near
    ``radius_nats_per_message`` and ``lr`` near ``learning_rate``.
    """

    def score(candidate: str) -> float:
        def like(other: str) -> float:
            return SequenceMatcher(None, word.lower(), other.lower()).ratio()

        parts = candidate.split("_")
        scores = [like(candidate)]
        if len(word) >= 3:
            scores += [0.95 * like(candidate[: len(word)]), *(0.9 * like(part) for part in parts)]
        if len(parts) > 1 and word.lower() == "".join(part[:1] for part in parts):
            scores.append(0.9)
        return max(scores)

    best = max(candidates, key=score, default=None)
    return best if best is not None and score(best) >= 0.65 else None


def _hint(word: Any, candidates: Iterable[str], otherwise: str) -> str:
    """``; did you mean "x"?``, or ``; <otherwise>: all of them`` when none is near."""
    candidates = tuple(candidates)
    near = _nearest(word, candidates) if isinstance(word, str) else None
    return f'; did you mean "{near}"?' if near else f"; {otherwise}: {', '.join(candidates)}"


# ---------------------------------------------------------------------------------------------------------------
# YAML 1.2, with places

_TAG_PREFIX = "tag:yaml.org,2002:"

# The core schema of YAML 1.2.2, section 10.3.2. ruamel's own 1.2 rules still take dates, `=`, `1_000` and `<<` for
# more than text.
_CORE_SCHEMA: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("null", re.compile(r"null|Null|NULL|~|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")),
)


def _core_kind(text: str) -> str:
    """What a plain scalar is: null, bool, int, float or str."""
    return next((kind for kind, pattern in _CORE_SCHEMA if pattern.fullmatch(text)), "str")


def _core_value(kind: str, text: str) -> Any:
    """The value of a scalar of this kind; ValueError when the text does not have that form."""
    if kind == "str":
        return text
    pattern = dict(_CORE_SCHEMA)[kind]
    if not pattern.fullmatch(text):
        raise ValueError(f"{_show(text)} is not of the YAML type {kind}")
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case _:
            return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))


class _CoreResolver(VersionedResolver):  # type: ignore[misc, unused-ignore]
    """Plain scalars by the core schema, whatever a %YAML directive says."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode:
            return YamlTag(suffix=_TAG_PREFIX + (_core_kind(value) if implicit[0] else "str"))
        return super().resolve(kind, value, implicit)


class _TextRepresenter(SafeRepresenter):  # type: ignore[misc, unused-ignore]
    """Text of several lines as a block; whatever has characters that do not print, escaped in double quotes (left to
    itself, the emitter writes U+0085 into single quotes, where it reads back as a space)."""

    def represent_str(self, text: str) -> Any:
        lines = text.split("\n")
        style = None if text.isprintable() else "|" if all(map(str.isprintable, lines)) else '"'
        return self.represent_scalar(f"{_TAG_PREFIX}str", text, style=style)


_TextRepresenter.add_representer(str, _TextRepresenter.represent_str)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    yaml.composer.warn_double_anchors = False  # YAML 1.2 lets a later anchor of the same name win
    yaml.default_flow_style = False
    yaml.width = 2**31
    yaml.sort_base_mapping_type_on_output = False
    yaml.Representer = _TextRepresenter
    return yaml


@dataclass
class _Document:
    """Plain data and where each of its paths stands: its key, its value, or the override that set it."""

    data: Any = None
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def mistake(self, message: str, path: KeyPath, *, at_key: bool = False) -> Mistake:
        """A mistake at this path, or at the nearest thing around it that has a place."""
        for end in range(len(path), -1, -1):
            part = path[:end]
            if part in self.overridden:
                return Mistake(message, override=self.overridden[part])
            # What is wrong with a part of this path (a missing key, say) is told at the key that holds it.
            first, second = (self.keys, self.values) if at_key or end < len(path) else (self.values, self.keys)
            place = first.get(part) or second.get(part)
            if place is not None:
                return Mistake(message, place)
        return Mistake(message, Place(1, 1))


def _place(node: Any) -> Place:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end is not None and end.line == start.line else 1
    return Place(start.line + 1, start.column + 1, max(width, 1))


def _read(text: str) -> _Document:
    """YAML text as plain data with places. A syntax error is the only mistake then: nothing after it is sure."""
    document = _Document()
    try:
        root = _yaml().compose(text)
    except ReaderError as error:
        before = _LINE_BREAK.split(text[: error.position])
        place = Place(len(before), len(before[-1]) + 1)
        document.mistakes.append(
            Mistake(f"not valid YAML: the character {chr(error.character)!r} is not allowed", place)
        )
        return document
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f" {error.context}" if error.context and error.context.startswith("while") else ""
        since = error.context_mark
        if context and since is not None and since.line != mark.line:
            context += f" that began at line {since.line + 1}"
        if str(error.problem).startswith("but"):  # the problem is told as the second half of a sentence
            context, error.problem = "", f"{error.context}, {error.problem}"
        message = f"not valid YAML: {error.problem}{context}"
        document.mistakes.append(Mistake(message, Place(mark.line + 1, mark.column + 1)))
        return document
    except YAMLError as error:
        document.mistakes.append(Mistake(f"not valid YAML: {error}", Place(1, 1)))
        return document
    if root is not None:
        document.data = _plain(root, (), document, ())
    return document


def _plain(node: Any, path: KeyPath, document: _Document, around: tuple[int, ...]) -> Any:
    """The plain value of a node; notes places and mistakes on the way down."""
    document.values[path] = _place(node)

    def wrong(message: str) -> None:
        document.mistakes.append(Mistake(message, _place(node)))

    kind = str(node.tag).removeprefix(_TAG_PREFIX)
    if id(node) in around:
        return wrong("an alias must not stand inside what it names")
    inside = (*around, id(node))
    if isinstance(node, ScalarNode) and kind in {"str", "null", "bool", "int", "float"}:
        try:
            return _core_value(kind, node.value)
        except ValueError as error:
            return wrong(str(error))
    if isinstance(node, SequenceNode) and kind == "seq":
        return [_plain(item, (*path, i), document, inside) for i, item in enumerate(node.value)]
    if not (isinstance(node, MappingNode) and kind == "map"):
        return wrong(f"the tag {_show(str(node.tag))} has no meaning in a team file")

    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = _place(key_node)
        if not isinstance(key_node, ScalarNode) or str(key_node.tag) != f"{_TAG_PREFIX}str":
            quote = f'; write "{key_node.value}"' if isinstance(key_node, ScalarNode) else ""
            document.mistakes.append(Mistake(f"a key must be text{quote}", place))
            continue
        key = key_node.value
        if key in mapping:
            first = document.keys[(*path, key)].line
            message = f'duplicate key "{key}" in {_dotted(path, None)} (first at line {first})'
            document.mistakes.append(Mistake(message, place))
            continue
        document.keys[(*path, key)] = place
        mapping[key] = _plain(value_node, (*path, key), document, inside)
        if value_node.start_mark.index == value_node.end_mark.index:  # nothing stands there to point at
            document.values[(*path, key)] = place
    return mapping


# ---------------------------------------------------------------------------------------------------------------
# The schema


@dataclass(frozen=True)
class _Refusal:
    """Something wrong between fields: where in the team file, and what.

    It is not told when a field that it ``rests_on`` could not be read.
    """

    path: KeyPath
    message: str
    rests_on: tuple[KeyPath, ...] = ()
    at_key: bool = False


_FROM_TEAM: Any = None  # a default that the team fills in: never seen on an agent that is part of a team


def _refuse(info: ValidationInfo, *refusals: _Refusal) -> None:
    """Raise in pydantic's way, so that the models refuse alike from a file and from Python.

    A list given as pydantic's context collects the refusals instead, so that one does not hide the next.
    """
    if isinstance(info.context, list):
        info.context.extend(refusals)
    elif refusals:
        text = "; ".join(refusal.message for refusal in refusals)
        raise PydanticCustomError("between_fields", "{text}", {"text": text, "refusals": refusals})


def _name_of_run(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError(f"must be letters, digits, dot, dash and underscore (it names a folder), got {_show(value)}")
    return value


def _name_of_agent(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value):
        raise ValueError(f"must be a letter, then letters, digits, dashes or underscores, got {_show(value)}")
    if value in ("last", "majority"):
        raise ValueError(f"must not be {_show(value)}: team.answer gives that word a meaning of its own")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", value):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {_show(value)}")
    return value


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"must name a preset, got {_show(value)}{_hint(value, PRESETS, 'one of')}")
    return value


def _symbols(value: str) -> str:
    distinct = {symbol.upper() for symbol in value if len(symbol.upper()) == 1 and not symbol.isspace()}
    if len(value) < 2 or len(distinct) != len(value):  # answers are compared without regard to case
        raise ValueError(
            f"must be at least two characters that differ in more than case, no spaces, got {_show(value)}"
        )
    return value


def _regular_expression(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have exactly one group, round the answer, got {groups}; write (?:...) for others")
    return value


_GRADERS = ("exact", "number", "regex")


def _grader(value: str) -> str:
    if value not in _GRADERS and not re.fullmatch(r"python:.+:[^\W\d]\w*", value):
        raise ValueError(f"must be exact, number, regex or python:FILE:FUNCTION, got {_show(value)}")
    return value


# Strict, so that "12" is no number, true no 1 and 2.0 no whole number, wherever the models are built.
Text = str
NonEmpty = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Ge(0)]
Positive = Annotated[int, Strict(), Ge(1)]
Number = Annotated[float, Strict()]
Above0 = Annotated[float, Strict(), Gt(0)]
From0 = Annotated[float, Strict(), Ge(0)]
Share = Annotated[float, Strict(), Gt(0), Lt(1)]  # strictly between none and all
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]
Train = Literal["full", "lora"]


class _Section(BaseModel):
    """A mapping of the team file. ``unset`` says in words what a key without a value of its own means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    unset: ClassVar[str] = "none"


class CodeTask(_Section):
    """Code exchange: ``left`` and ``right`` each see half of a code, ``speaker`` must say it all."""

    name: Literal["code"] = Field(description="Code exchange: two agents see half a code each, the third says it.")
    symbols: Annotated[Text, AfterValidator(_symbols)] = Field("ABCD", description="The letters codes are made of.")
    half_length: Positive = Field(1, description="Letters in each half of a code.")
    held_out: Share = Field(0.25, description="Share of all codes kept for evaluation.")
    partial_credit: Flag = Field(True, description="Reward each right letter, not only the whole code.")
    skill: Annotated[float, Strict(), Ge(0), Le(1)] = Field(
        0.0, description="Share of right letters in the examples that warm up the tiny model; 0 starts at chance."
    )

    @model_validator(mode="after")
    def _between_fields(self, info: ValidationInfo) -> CodeTask:
        # The logarithm first: the power itself may be too large to compute.
        if self.half_length * math.log2(len(self.symbols)) > 16:
            message = f"{len(self.symbols)} symbols and task.half_length {self.half_length} make more than 65536 halves"
            both: tuple[KeyPath, ...] = (("task", "symbols"), ("task", "half_length"))
            _refuse(info, _Refusal(("task", "half_length"), f"{message}; use fewer or shorter", both))
        return self


class RolesTask(_Section):
    """Roles: in a blind round, exactly one of n agents, called a1 to an, must volunteer."""

    name: Literal["roles"] = Field(description="Roles: exactly one of the agents must volunteer.")
    tags: Annotated[int, Strict(), Ge(1), Le(26)] = Field(
        1, description="How many different problems there are, told apart by a tag."
    )


class DataTask(_Section):
    """Your own questions and answers."""

    name: Literal["data"] = Field(description="Your own data: questions and answers in a file.")
    path: NonEmpty = Field(description="A .jsonl or .parquet file, relative to the team file.")
    question: NonEmpty | None = Field(
        None, description="Column of the question; without it, prompt, question or problem."
    )
    answer: NonEmpty | None = Field(None, description="Column of the answer; without it, answer, solution or target.")
    held_out: Share = Field(0.1, description="Share of the rows kept for evaluation.")
    grader: Annotated[Text, AfterValidator(_grader)] = Field(
        "exact", description="exact, number, regex, or python:FILE:FUNCTION (FILE relative to the team file)."
    )
    pattern: Annotated[NonEmpty, AfterValidator(_regular_expression)] | None = Field(
        None, description="For grader regex: its one group is the answer; its last match in a message counts."
    )
    threshold: Number = Field(1.0, description="A reward of at least this counts as right.")
    private: dict[Text, NonEmpty] = Field(
        default_factory=dict, description="Agent name to the column that this agent alone sees."
    )
    seconds_per_item: Above0 = Field(5.0, description="Time limit for grading one answer.")

    @model_validator(mode="after")
    def _between_fields(self, info: ValidationInfo) -> DataTask:
        _refuse(info, *self._refusals())
        return self

    def _refusals(self) -> Iterator[_Refusal]:
        both: tuple[KeyPath, ...] = (("task", "grader"), ("task", "pattern"))
        if self.grader == "regex" and self.pattern is None:
            yield _Refusal(("task", "grader"), 'task.grader is "regex", which needs task.pattern', both)
        if self.grader != "regex" and self.pattern is not None:
            message = f'task.pattern is used by grader "regex" only, and task.grader is "{self.grader}"'
            yield _Refusal(("task", "pattern"), message, both)


TaskConfig = Annotated[CodeTask | RolesTask | DataTask, Field(discriminator="name")]


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list | tuple) else None


class LoraConfig(_Section):
    """A low-rank adapter on a frozen base."""

    rank: Positive = Field(16, description="Rank of the adapter.")
    alpha: Above0 = Field(32.0, description="Scale of the adapter; its output is multiplied by alpha / rank.")
    targets: Annotated[
        Annotated[NonEmpty, Tag("text")] | Annotated[tuple[NonEmpty, ...], Field(min_length=1), Tag("list")],
        Discriminator(
            _text_or_list,
            custom_error_type="text_or_list",
            custom_error_message="must be text or a list of text",
        ),
    ] = Field("all-linear", description="Which layers carry it: all-linear, a pattern, or a list of names.")


class AgentConfig(_Section):
    """One agent. What it leaves out of model, system_prompt, train, lora and max_tokens is as its team says."""

    unset: ClassVar[str] = "as the team says"

    name: Annotated[Text, AfterValidator(_name_of_agent)] = Field(description="How the others call it.")
    model: NonEmpty = Field(
        _FROM_TEAM, description="tiny, tabular, a folder (relative to the team file) or a hub id; else the team's."
    )
    system_prompt: Text = Field(_FROM_TEAM, description="What it is told before everything else; else the team's.")
    train: Train = Field(
        _FROM_TEAM, description="All weights or an adapter; else the team's; else full for tiny and tabular, or lora."
    )
    lora: LoraConfig = Field(_FROM_TEAM, description="The adapter, when it trains one; else the team's, key by key.")
    sees: Literal["everything", "blind"] = Field(
        "everything", description="blind: it does not see the messages of the current round."
    )
    max_tokens: Positive = Field(_FROM_TEAM, description="Most tokens in one message, end included; else the team's.")
    frozen: Flag = Field(False, description="Speaks, but is never updated.")


class RouterConfig(_Section):
    """Who speaks when."""

    rounds: Positive = Field(1, description="How often the speaking order is gone through.")
    order: Annotated[tuple[Text, ...], Field(min_length=1)] | None = Field(
        None, description="Names in speaking order; without it, the agents as listed."
    )


class TeamConfig(_Section):
    """The agents and how they talk."""

    model: NonEmpty | None = Field(None, description="The model of agents that name none.")
    system_prompt: Text = Field("", description="The system prompt of agents that have none.")
    train: Train | None = Field(None, description="What agents train that do not say: full or lora.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The adapter of agents that do not say.")
    max_tokens: Positive = Field(16, description="Most tokens in a message of agents that do not say.")
    agents: Annotated[tuple[AgentConfig, ...], Field(min_length=1)] = Field(description="The agents, a list.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Who speaks when.")
    answer: Text = Field("last", description="Whose message is the team's answer: last, majority or an agent.")
    history: Literal["transcript", "chat"] = Field(
        "transcript", description="The talk so far as lines of one user message, or as chat messages."
    )
    template_kwargs: dict[Text, Any] = Field(
        default_factory=dict, description="Passed to the chat template, such as enable_thinking: false."
    )

    @model_validator(mode="after")
    def _settle(self, info: ValidationInfo) -> TeamConfig:
        """Give every agent what it left to the team, then look at the team as a whole."""
        object.__setattr__(self, "agents", tuple(self._settled(agent) for agent in self.agents))
        _refuse(info, *self._refusals())
        return self

    def _settled(self, agent: AgentConfig) -> AgentConfig:
        model = agent.model or self.model
        train = agent.train or self.train or ("full" if model in ("tiny", "tabular") else "lora")
        own_lora = agent.lora.model_dump(exclude_unset=True) if agent.lora else {}
        return agent.model_copy(
            update={
                "model": model,
                "system_prompt": self.system_prompt if agent.system_prompt is None else agent.system_prompt,
                "train": train,
                "lora": self.lora.model_copy(update=own_lora),
                "max_tokens": agent.max_tokens or self.max_tokens,
            }
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    @property
    def speaking_order(self) -> tuple[str, ...]:
        return self.router.order or self.names

    def _refusals(self) -> Iterator[_Refusal]:
        for i, agent in enumerate(self.agents):
            here: KeyPath = ("team", "agents", i)
            if agent.name in self.names[:i]:
                yield _Refusal((*here, "name"), f'two agents are called "{agent.name}"; names must differ')
            if agent.model is None:
                message = f'agent "{agent.name}" has no model; give it one, or set team.model for all'
                yield _Refusal(here, message, (("team", "model"), (*here, "model")))
            if agent.model == "tabular" and agent.train == "lora":
                message = f'agent "{agent.name}" is tabular and cannot train lora; set train: full'
                yield _Refusal(here, message)
        for i, name in enumerate(self.router.order or ()):
            if name not in self.names:
                message = f"team.router.order names no agent {_show(name)}{_hint(name, self.names, 'the agents are')}"
                yield _Refusal(("team", "router", "order", i), message)
        if self.answer in ("last", "majority"):
            return
        if self.answer not in self.names:
            hint = _hint(self.answer, ("last", "majority", *self.names), "one of")
            message = f"team.answer must be last, majority or an agent, got {_show(self.answer)}{hint}"
            yield _Refusal(("team", "answer"), message)
        elif self.answer not in self.speaking_order:
            message = f'team.answer names "{self.answer}", who never speaks in team.router.order'
            yield _Refusal(("team", "answer"), message)


class TinyConfig(_Section):
    """The built-in model: a small transformer over characters."""

    layers: Positive = Field(2, description="Transformer blocks.")
    width: Positive = Field(64, description="Size of a hidden state; an even multiple of heads.")
    heads: Positive = Field(4, description="Attention heads.")
    warmup_steps: Count = Field(200, description="Supervised steps that teach the form of messages before training.")
    warmup_learning_rate: From0 = Field(3e-3, description="Learning rate of those steps.")

    @model_validator(mode="after")
    def _between_fields(self, info: ValidationInfo) -> TinyConfig:
        if self.width % (2 * self.heads):
            # Rotary positions turn the two halves of each head against each other.
            message = f"tiny.width must be an even multiple of tiny.heads ({self.heads}), got {self.width}"
            _refuse(info, _Refusal(("tiny", "width"), message, (("tiny", "width"), ("tiny", "heads"))))
        return self


class PlanConfig(_Section):
    """The algorithm: a preset and what differs from it. What is left out is as the preset says."""

    unset: ClassVar[str] = "as the preset says"

    preset: Annotated[Text, AfterValidator(_preset)] = Field(
        "teamtr", description="The algorithm to start from; see teamtr.presets."
    )
    stages: Positive = Field(40, description="Stages; in each, every agent is updated once.")
    problems: Positive = Field(32, description="Problems in a batch.")
    group_size: Annotated[int, Strict(), Ge(2)] = Field(16, description="Episodes of each problem.")
    radius_nats_per_message: Above0 | None = Field(None, description="KL allowed to one update, in nats per message.")
    radius_nats_per_token: Above0 | None = Field(
        None, description="The same in nats per token, instead of per message."
    )
    gamma: Annotated[float, Strict(), Gt(0), Le(1)] = Field(1.0, description="Discount per turn.")
    normalise: Flag | None = Field(None, description="Divide advantages by the deviation of their group.")
    a_clip: Annotated[float, Strict(), Gt(0)] | None = Field(
        None, description="Advantages are clipped to this size; .inf for no clipping.", allow_inf_nan=True
    )
    clip: Above0 | None = Field(None, description="How far from 1 the likelihood ratio counts, both ways.")
    clip_high: Above0 | None = Field(None, description="The same upwards only.")
    ratio: Literal["message", "token", "length_normalised"] | None = Field(
        None, description="What the likelihood ratio is taken over."
    )
    average_over: Literal["messages", "tokens"] | None = Field(None, description="What the objective averages over.")
    order: Literal["fixed", "reverse", "random", "together"] | None = Field(
        None, description="Who is updated when; fixed is as listed."
    )
    resample_every: Count | None = Field(
        None, description="Sample anew before every n-th update; 0 is only at the start of a stage."
    )
    importance_weighted: Flag | None = Field(None, description="Weigh reused episodes by their likelihood ratio.")
    gate: Flag | None = Field(None, description="Accept an update only when its upper KL bound is within the radius.")
    beta: From0 | None = Field(None, description="Weight of the KL penalty at the start.")
    adapt_beta: Flag | None = Field(None, description="Steer beta towards the radius.")
    adapt_radius: Flag | None = Field(None, description="Move each agent's radius towards the KL it really uses.")
    dynamic_sampling_rounds: Count | None = Field(
        None, description="How often to redraw problems whose groups carry no signal."
    )

    @model_validator(mode="after")
    def _settle(self, info: ValidationInfo) -> PlanConfig:
        given = (self.radius_nats_per_message is not None) + (self.radius_nats_per_token is not None)
        if given == 2:
            message = "plan.radius_nats_per_message and plan.radius_nats_per_token exclude each other; give one"
            _refuse(info, _Refusal(("plan", "radius_nats_per_token"), message, at_key=True))
        if given == 0:
            radii = PRESETS[self.preset].radii
            unit = "radius_nats_per_token" if radii.per_token else "radius_nats_per_message"
            object.__setattr__(self, unit, radii.nats)
        return self

    def plan(self) -> Plan:
        """The preset with what this section changes."""
        preset = PRESETS[self.preset]
        per_token = self.radius_nats_per_token is not None
        return replace(
            preset,
            group_size=self.group_size,
            gamma=self.gamma,
            radii=_changed(
                preset.radii,
                nats=self.radius_nats_per_token if per_token else self.radius_nats_per_message,
                per_token=per_token,
                adapt=self.adapt_radius,
            ),
            resample=_changed(preset.resample, every=self.resample_every, importance_weighted=self.importance_weighted),
            region=_changed(preset.region, gate=self.gate, beta=self.beta, adapt_beta=self.adapt_beta),
            objective=_changed(
                preset.objective,
                ratio=self.ratio,
                clip_low=self.clip,
                clip_high=self.clip if self.clip_high is None else self.clip_high,
                average_over=self.average_over,
            ),
            order=preset.order if self.order is None else Order(self.order),
            **_given(
                normalise=self.normalise,
                a_clip=self.a_clip,
                dynamic_sampling_rounds=self.dynamic_sampling_rounds,
            ),
        )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _changed(record: Any, **values: Any) -> Any:
    """The record with those of the values that are given."""
    return replace(record, **_given(**values))


class LearnerConfig(_Section):
    """How one agent is updated."""

    learning_rate: From0 = Field(1e-3, description="Adam's learning rate; 0 changes nothing.")
    epochs: Positive = Field(2, description="Passes over a batch in one update.")
    minibatches: Positive = Field(4, description="Optimizer steps in one pass.")
    micro_batch: Positive = Field(64, description="Messages computed at a time; changes memory, not results.")
    max_grad_norm: Above0 = Field(1.0, description="Gradients longer than this are shortened to it.")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        "auto", description="Arithmetic of training and scoring; auto is the cheapest that can see the radius."
    )
    confidence: Annotated[float, Strict(), Ge(0.5), Lt(1)] = Field(
        0.95, description="Confidence of the upper KL bound that the gate looks at."
    )
    max_backtracks: Count = Field(6, description="Tries along the line back to the old weights before restoring them.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="Adam's two decay rates.")


class SamplingConfig(_Section):
    """How messages are sampled in training."""

    temperature: Above0 = Field(1.0, description="Temperature of training; the policy is defined with it.")


class EvalConfig(_Section):
    """Evaluation during a run."""

    every: Count = Field(10, description="Stages between evaluations; 0 is never.")
    problems: Positive = Field(64, description="Held-out problems, at most.")
    samples: Positive = Field(4, description="Episodes of each problem.")
    temperature: From0 | None = Field(None, description="Without it, as trained; 0 is greedy.")


class StoreConfig(_Section):
    """What a run keeps."""

    keep_checkpoints: Positive = Field(2, description="How many of the latest checkpoints to keep.")
    episodes: Flag = Field(True, description="Keep the episodes for inspection.")


class TeamFile(_Section):
    """A whole team file."""

    name: Annotated[Text, AfterValidator(_name_of_run)] = Field(description="Names the run.")
    seed: Count = Field(0, description="All randomness comes from it.")
    device: Annotated[Text, AfterValidator(_device)] = Field("auto", description="auto, cpu, cuda or cuda:N.")
    task: TaskConfig = Field(description="The problems; name is code, roles or data.")
    team: TeamConfig = Field(description="The agents and how they talk.")
    tiny: TinyConfig = Field(default_factory=TinyConfig, description="The built-in tiny model.")
    plan: PlanConfig = Field(default_factory=PlanConfig, description="The algorithm.")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="How one agent is updated.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How messages are sampled.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation during a run.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="What a run keeps.")

    @model_validator(mode="after")
    def _between_sections(self, info: ValidationInfo) -> TeamFile:
        _refuse(info, *_task_refusals(self.task, self.team))
        return self

    def anchored(self, folder: Path) -> TeamFile:
        """The same with the paths of data, grader and model folders made absolute, taken as relative to ``folder``,
        so that a stored copy means the same wherever it lies."""

        def absolute(path: str) -> str:
            return os.path.abspath(folder / Path(path).expanduser())

        def model(name: str | None) -> str | None:
            if name is None or name in ("tiny", "tabular"):
                return name
            is_path = name.startswith((".", "~")) or Path(name).is_absolute() or (folder / name).is_dir()
            return absolute(name) if is_path else name

        task = self.task
        if isinstance(task, DataTask):
            update = {"path": absolute(task.path)}
            if task.grader.startswith("python:"):
                file, _, function = task.grader.removeprefix("python:").rpartition(":")
                update["grader"] = f"python:{absolute(file)}:{function}"
            task = task.model_copy(update=update)
        agents = tuple(agent.model_copy(update={"model": model(agent.model)}) for agent in self.team.agents)
        team = self.team.model_copy(update={"model": model(self.team.model), "agents": agents})
        return self.model_copy(update={"task": task, "team": team})


def _task_refusals(task: CodeTask | RolesTask | DataTask, team: TeamConfig) -> Iterator[_Refusal]:
    """What a task asks of the team that plays it."""
    agents: KeyPath = ("team", "agents")
    match task:
        case CodeTask():
            if set(team.names) != {"left", "right", "speaker"}:
                message = f"task code needs the agents left, right and speaker, got {', '.join(team.names)}"
                yield _Refusal(agents, message, at_key=True)
                return
            answering = team.speaking_order[-1] if team.answer == "last" else team.answer
            if answering in ("left", "right", "majority"):  # a name of nobody is the team's own mistake
                message = f'task code is answered by the speaker, but team.answer gives the word to "{answering}"'
                yield _Refusal(("team", "answer"), message, (("team", "answer"), ("team", "router", "order")))
            for i, agent in enumerate(team.agents):
                letters = task.half_length * (2 if agent.name == "speaker" else 1)
                if agent.model == "tiny" and agent.max_tokens < letters:
                    message = f'agent "{agent.name}" must say {letters} letters, but max_tokens is {agent.max_tokens}'
                    here: KeyPath = (*agents, i, "max_tokens")
                    yield _Refusal(here, message, (here, ("team", "max_tokens"), ("task", "half_length")))
        case RolesTask():
            expected = {f"a{i + 1}" for i in range(max(len(team.agents), 2))}
            if set(team.names) != expected:
                message = f"task roles needs two or more agents called a1, a2 and so on, got {', '.join(team.names)}"
                yield _Refusal(agents, message, at_key=True)
            elif not expected <= set(team.speaking_order):
                silent = ", ".join(sorted(expected - set(team.speaking_order)))
                message = f"task roles needs a message of every agent; team.router.order leaves out {silent}"
                yield _Refusal(("team", "router", "order"), message)
        case DataTask():
            for name in task.private:
                if name not in team.names:
                    message = f"task.private names no agent {_show(name)}{_hint(name, team.names, 'the agents are')}"
                    yield _Refusal(("task", "private", name), message, at_key=True)


# ---------------------------------------------------------------------------------------------------------------
# Reading the schema


@dataclass(frozen=True)
class SchemaKey:
    """One key of a team file. ``when`` says for which task it exists; an agent's keys are under team.agents.NAME."""

    key: str
    type: str
    default: str
    description: str
    required: bool
    when: str = ""


def schema_keys() -> tuple[SchemaKey, ...]:
    """Every key of a team file, in the order of the file."""
    return tuple(_walk_schema(TeamFile, "", ""))


def _walk_schema(model: type[_Section], prefix: str, when: str, inherited: str = "") -> Iterator[SchemaKey]:
    """The keys of a section; ``inherited`` says in words where the defaults of a whole section come from."""
    for name, info in model.model_fields.items():
        sections = _sections_of(info.annotation)
        key = f"{prefix}{name}"
        if len(sections) > 1:  # the task: its name chooses which other keys there are
            tags = " | ".join(map(_tag_of, sections))
            yield SchemaKey(f"{key}.name", tags, "", info.description or "", required=True)
            for section in sections:
                for below in _walk_schema(section, f"{key}.", f"{key}.name is {_tag_of(section)}"):
                    if below.key != f"{key}.name":
                        yield below
        elif sections:
            below_key = f"{key}.NAME." if typing.get_origin(info.annotation) is tuple else f"{key}."
            from_elsewhere = model.unset if info.default is None else ""
            yield from _walk_schema(sections[0], below_key, when, from_elsewhere)
        else:
            yield SchemaKey(
                key=key,
                type=_type_name(info.annotation, info.metadata),
                default="" if info.is_required() else inherited or _default_name(info, model.unset),
                description=info.description or "",
                required=info.is_required(),
                when=when,
            )


def _sections_of(annotation: Any) -> tuple[type[_Section], ...]:
    """The models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, _Section):
        return (annotation,)
    return tuple(section for part in typing.get_args(annotation) for section in _sections_of(part))


def _tag_of(task: type[_Section]) -> str:
    return str(typing.get_args(task.model_fields["name"].annotation)[0])


def _default_name(info: FieldInfo, unset: str) -> str:
    value = info.get_default(call_default_factory=True)
    return unset if value is None else json.dumps(value)


_PLAIN_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}
_BOUNDS: dict[type, tuple[str, str]] = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in words a person who writes a team file knows."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_name(parts[0], parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part, metadata) for part in parts if part is not type(None))
    if origin is tuple:
        many = "" if parts[-1] is Ellipsis else f"{len(parts)}: "
        return f"list of {many}{_type_name(parts[0])}"
    if origin is dict:
        return f"mapping of text to {_type_name(parts[1])}"
    known = [(_BOUNDS[type(bound)], bound) for bound in metadata if type(bound) in _BOUNDS]
    bounds = ", ".join(f"{sign} {getattr(bound, name):g}" for (sign, name), bound in known)
    return f"{_PLAIN_TYPES[annotation]} {bounds}".rstrip()


def _section_at(path: KeyPath, data: Any) -> type[_Section] | None:
    """The model that describes what stands at this path."""
    section: type[_Section] | None = TeamFile
    for depth, step in enumerate(path):
        if isinstance(step, int):
            continue
        if section is None or step not in section.model_fields:
            return None
        choices = _sections_of(section.model_fields[step].annotation)
        if len(choices) > 1:
            chosen = _at(data, (*path[: depth + 1], "name"))
            choices = tuple(choice for choice in choices if _tag_of(choice) == chosen)
        section = choices[0] if choices else None
    return section


# ---------------------------------------------------------------------------------------------------------------
# Loading


def load_team_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TeamFile:
    """Read a team file; paths in it are relative to its folder, and absolute in what is returned.

    Raises ConfigError with everything that is wrong in the file and in the overrides.
    """
    name = os.fspath(path)
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(name, "", [Mistake(f"cannot be read: {error.strerror}")]) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = _LINE_BREAK.split(raw[: error.start].decode("utf-8"))
        place = Place(len(before), len(before[-1]) + 1)
        shown = raw.decode("utf-8", errors="replace")
        raise ConfigError(name, shown, [Mistake("not UTF-8 text; save the file as UTF-8", place)]) from None
    return loads(text, name, overrides).anchored(Path(path).parent)


def loads(text: str, name: str = "<string>", overrides: Sequence[str] = ()) -> TeamFile:
    """Read a team file from text; ``name`` is what errors call it. Paths in it stay as they are."""
    document = _read(text)
    if document.mistakes and document.data is None:
        raise ConfigError(name, text, document.mistakes)
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        mistake = document.mistake(f"a team file is a mapping of keys to values, got {_show(document.data)}", ())
        raise ConfigError(name, text, [mistake])
    mistakes = [*document.mistakes, *(mistake for each in overrides for mistake in _override(document, each))]
    unread = {mistake.place for mistake in document.mistakes}
    team_file, found = _validate(document)
    mistakes += [mistake for mistake in found if mistake.place is None or mistake.place not in unread]
    if mistakes or team_file is None:
        in_turn = [None, *overrides]
        raise ConfigError(name, text, sorted(mistakes, key=lambda mistake: in_turn.index(mistake.override)))
    return team_file


def _override(document: _Document, override: str) -> Iterator[Mistake]:
    """Set one dotted key in the document. Mistakes of the key's form come out; of its meaning, in validation."""

    def wrong(message: str) -> Iterator[Mistake]:
        yield Mistake(message, override=override)

    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        yield from wrong("must be KEY=VALUE with a dotted key, such as plan.stages=10")
        return
    value = _read(text)
    if value.mistakes:
        yield from wrong(value.mistakes[0].message)
        return

    here = document.data
    path: KeyPath = ()
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        step: str | int = key
        if isinstance(here, list):
            index = _index(here, key)
            if index is None:
                yield from wrong(f"{_dotted(path, document.data)} has no item {_show(key)}; {_items(here)}")
                return
            step = index
        elif not isinstance(here, dict):
            yield from wrong(f"{_dotted(path, document.data)} is {_show(here)} and has no keys below it")
            return
        path = (*path, step)
        if last:
            here[step] = value.data
            for places in (document.keys, document.values, document.overridden):
                for old in [p for p in places if p[: len(path)] == path]:
                    del places[old]
            document.overridden[path] = override
        elif isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
            document.overridden[path] = override
        here = here[step]


def _index(items: list[Any], key: str) -> int | None:
    """The position that a key of an override means: a number, or the name of an agent."""
    if key.isdecimal():
        return int(key) if int(key) < len(items) else None
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    return names.index(key) if key in names else None


def _items(items: list[Any]) -> str:
    names = [str(item["name"]) for item in items if isinstance(item, dict) and "name" in item]
    return f"it has {', '.join(names)}" if names else f"it has {len(items)}, counted from 0"


def _dotted(path: KeyPath, data: Any) -> str:
    """A path as messages and overrides write it: ``team.agents.left.model``."""
    words = []
    for depth, step in enumerate(path):
        name = _at(data, (*path[: depth + 1], "name")) if isinstance(step, int) else None
        words.append(name if isinstance(name, str) and name else str(step))
    return ".".join(words) or "the team file"


def _at(data: Any, path: KeyPath) -> Any:
    """What stands at this path, or None."""
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


@dataclass(frozen=True)
class _Finding:
    """A mistake that pydantic found, carried back to the data."""

    kind: str
    path: KeyPath
    message: str
    at_key: bool = False
    meant: KeyPath | None = None  # for an unknown key: the valid one of the same section that was probably meant


def _refused(refusal: _Refusal) -> _Finding:
    return _Finding("between_fields", refusal.path, refusal.message, refusal.at_key)


def _validate(document: _Document) -> tuple[TeamFile | None, list[Mistake]]:
    """The team file, or everything that is wrong with it.

    Checks between fields run only on fields that are sound, so one bad number would hide them. Therefore what is
    wrong is taken out and the rest is looked at again; of that second look only checks between fields count, and
    only those that rest on nothing that was wrong.
    """
    try:
        return TeamFile.model_validate(document.data), []
    except PydanticValidationError as error:
        findings = _findings(error, document.data)

    rest = copy.deepcopy(document.data)
    for finding in findings:
        _take_out(rest, finding)
    if not isinstance(rest.get("name"), str):
        rest["name"] = "unnamed"  # nothing rests on the name of a run
    refusals: list[_Refusal] = []
    with suppress(PydanticValidationError):
        TeamFile.model_validate(rest, context=refusals)
    unsound = {path for finding in findings for path in (finding.path, finding.meant, _outside_list(finding.path))}
    told = {finding.message for finding in findings}
    findings += [_refused(r) for r in refusals if r.message not in told and unsound.isdisjoint(r.rests_on)]
    # A mistyped required key is one mistake, not an unknown key and a missing one.
    meant = {finding.meant for finding in findings}
    return None, [
        document.mistake(finding.message, finding.path, at_key=finding.at_key)
        for finding in findings
        if not (finding.kind == "missing" and finding.path in meant)
    ]


def _take_out(data: Any, finding: _Finding) -> None:
    """Remove what is wrong; of a list, the whole list, so that the places of its other items stay true."""
    if finding.kind in ("missing", "between_fields"):
        return
    path = _outside_list(finding.path)
    holder = _at(data, path[:-1])
    if isinstance(holder, dict) and path:
        holder.pop(path[-1], None)


def _outside_list(path: KeyPath) -> KeyPath:
    """The path of the list that an item stands in; any other path as it is."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return path


def _findings(error: PydanticValidationError, data: Any) -> list[_Finding]:
    return [finding for found in error.errors(include_url=False) for finding in _finding(found, data)]


def _finding(found: Mapping[str, Any], data: Any) -> Iterator[_Finding]:
    """One of pydantic's errors in our words."""
    kind, context = found["type"], found.get("ctx", {})
    path, absent = _locate(found["loc"], data)
    key, got = _dotted(path, data), _show(_at(data, path))
    match kind:
        case "between_fields":
            yield from map(_refused, context["refusals"])
        case "extra_forbidden":
            message, meant = _unknown_key(path, data)
            yield _Finding(kind, path, message, at_key=True, meant=meant)
        case "missing" | "union_tag_not_found" if isinstance(_at(data, path), dict):
            name = str(absent[-1]) if kind == "missing" else "name"
            yield _Finding("missing", (*path, name), f'missing key "{name}" in {key}')
        case "union_tag_invalid":
            tags = [_tag_of(task) for task in _sections_of(TaskConfig)]
            yield _Finding(kind, (*path, "name"), f"{key}.name {_one_of(tags, _at(data, (*path, 'name')))}")
        case "literal_error":
            options = re.findall("'([^']*)'", context["expected"])
            yield _Finding(kind, path, f"{key} {_one_of(options, _at(data, path))}")
        case "too_short" if len(_at(data, path)) >= context["min_length"]:
            return  # pydantic counts the sound items only; the others are told by themselves
        case "value_error":
            yield _Finding(kind, path, f"{key} {context['error']}")
        case _:
            must = _MUST.get(kind, lambda _: f"is wrong: {found['msg']}")(context)
            yield _Finding(kind, path, f"{key} {must}, got {got}{_remedy(kind, _at(data, path))}")


def _one_of(options: Sequence[str], value: Any) -> str:
    near = _nearest(value, options) if isinstance(value, str) else None
    return f"must be one of {', '.join(options)}, got {_show(value)}" + (f'; did you mean "{near}"?' if near else "")


def _locate(loc: Sequence[str | int], data: Any) -> tuple[KeyPath, tuple[str | int, ...]]:
    """Pydantic's location as a path of the data, and what of it is not there.

    The location also names the branch of a union (the task's name, text or list), which is no key of the file.
    """
    if loc[:1] == ("task",):
        loc = (*loc[:1], *loc[2:])
    path: KeyPath = ()
    absent: tuple[str | int, ...] = ()
    here = data
    for step in loc:
        is_key = isinstance(here, dict) and step in here
        is_item = isinstance(here, list) and isinstance(step, int) and step < len(here)
        if (is_key or is_item) and not absent:
            path, here = (*path, step), here[step]
        elif step not in ("text", "list"):
            absent = (*absent, step)
    return path, absent


_MUST: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "string_unicode": lambda _: "must be text of Unicode characters",
    "text_or_list": lambda _: "must be text or a list of text",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a mapping of keys to values",
    "model_type": lambda _: "must be a mapping of keys to values",
    "model_attributes_type": lambda _: "must be a mapping of keys to values",
    "union_tag_not_found": lambda _: "must be a mapping of keys to values",
    "missing": lambda _: "must have more items",
    "greater_than": lambda c: f"must be greater than {c['gt']:g}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']:g}",
    "less_than": lambda c: f"must be less than {c['lt']:g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:g}",
    "finite_number": lambda _: "must be a finite number",
    "string_too_short": lambda _: "must not be empty",
    "too_short": lambda c: f"must have at least {c['min_length']} item{'s' if c['min_length'] > 1 else ''}",
    "too_long": lambda c: f"must have at most {c['max_length']} items",
}


def _remedy(kind: str, value: Any) -> str:
    """A word on how to write it, where YAML 1.2 is the likely surprise."""
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f" (text in YAML 1.2; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'})"
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return ""


def _unknown_key(path: KeyPath, data: Any) -> tuple[str, KeyPath | None]:
    """The message for an unknown key, and the key of the same section that was probably meant."""
    key, around = str(path[-1]), path[:-1]
    section = _section_at(around, data)
    valid = tuple(section.model_fields) if section is not None else ()
    message = f'unknown key "{key}" in {_dotted(around, data)}'
    # The right key in the wrong section comes before a similar key in the right one.
    elsewhere = {known.key for known in schema_keys() if known.key.rpartition(".")[2] == key}
    elsewhere -= {f"{_dotted(around, None)}.{key}"}  # a key of another task
    if 0 < len(elsewhere) <= 3:
        return f"{message}; did you mean {' or '.join(map(_show, sorted(elsewhere)))}?", None
    near = _nearest(key, valid)
    return message + _hint(key, valid, "valid keys"), (*around, near) if near else None


# ---------------------------------------------------------------------------------------------------------------
# Writing, and the recipes


def dump(team_file: TeamFile) -> str:
    """The resolved team file as YAML that loads back to an equal object; every default is written out."""
    stream = StringIO()
    _yaml().dump(_to_plain(team_file), stream)
    return stream.getvalue()


def _to_plain(value: Any) -> Any:
    match value:
        case BaseModel():
            return {name: _to_plain(v) for name in type(value).model_fields if (v := getattr(value, name)) is not None}
        case dict():
            return {key: _to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_plain(item) for item in value]
        case _:
            return value


@dataclass(frozen=True)
class Recipe:
    """A team file that comes with the package."""

    name: str
    path: str
    summary: str


def recipes() -> dict[str, Recipe]:
    """The recipes by name, each with its path and its first comment line."""
    found = {}
    for file in sorted(_recipe_folder().iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            name = file.name.removesuffix(".yaml")
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            found[name] = Recipe(name, str(file), first.removeprefix("#").strip())
    return found


def recipe_text(name: str) -> str:
    """The text of a recipe; ConfigError with the nearest name when there is none of this name."""
    known = recipes()
    if name not in known:
        raise ConfigError("recipes", "", [Mistake(f"no recipe {_show(name)}{_hint(name, known, 'there are')}")])
    return (_recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _recipe_folder() -> Any:
    return resources.files("teamtr") / "recipes"
