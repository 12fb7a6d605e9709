"""Parses and validates tool calls in the two notations that they may be written in.

Nothing is executed. The result is a name and plain JSON values, or the reason why the text is not a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from teamtr import bounded_json
from teamtr.bounded_json import NotJson
from teamtr.calls import ToolCall
from teamtr.literal import CALLS, NotALiteral, Reader
from teamtr.text import has_half_character

MOST_CHARACTERS = 65_536
MOST_DEPTH = CALLS.deepest
MOST_CALLS = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""The key of the arguments: OpenAI, Hermes and Mistral; Llama; Gemini and LangChain; Anthropic."""
WRAPPERS = ("tool_calls", "function_call", "function")
_MARKS_OF_A_CALL = ("id", "type", "index", "call_id", "tool_call_id", "status")
_PARTS_OF_A_MESSAGE = (
    "role", "content", "refusal", "annotations", "audio", "reasoning", "reasoning_content", "thought"
)  # fmt: skip


class Malformed(ValueError):
    """Not a valid tool call; the message is the reason."""


# -- JSON -----------------------------------------------------------------------------------------------------


def read_json(text: str) -> Any:
    """Parse strict JSON (no NaN, no duplicate keys, no lone surrogates), within bounds on length and depth."""
    try:
        return bounded_json.read_json(
            text, longest=MOST_CHARACTERS, deepest=MOST_DEPTH, strict=True, half_characters=False
        )
    except NotJson as error:
        raise Malformed(str(error)) from None


def calls_in(value: Any, tools: Collection[str] | None) -> list[ToolCall]:
    """The calls in a JSON value, in any of the usual layouts."""
    if isinstance(value, list):
        if not value:
            raise Malformed("an empty list of calls")
        if len(value) > MOST_CALLS:
            raise Malformed(f"more than {MOST_CALLS} calls")
        return [call for item in value for call in calls_in(item, tools)]
    if not isinstance(value, dict):
        raise Malformed(f"a call is an object with a name and arguments, not {type(value).__name__}")
    for wrapper in WRAPPERS:
        if isinstance(value.get(wrapper), list | dict):
            _check_keys({k: v for k, v in value.items() if k != wrapper and not (k in WRAPPERS and v is None)}, wrapper)
            return calls_in(value[wrapper], tools)
    return [_call(value, tools)]


def _check_keys(beside: Mapping[str, Any], what: str) -> None:
    """Accept beside a call or a wrapper only the keys that a dialect puts there, with plain values. Otherwise something
    meant as a call, or as an argument of one, could be dropped silently."""
    known = _MARKS_OF_A_CALL if what == "name" else (*_MARKS_OF_A_CALL, *_PARTS_OF_A_MESSAGE)
    for key, value in beside.items():
        if key not in known:
            raise Malformed(f"{_shown(key)} does not belong beside {what}")
        if isinstance(value, dict) or (isinstance(value, list) and value):
            raise Malformed(f"{_shown(key)} beside {what} holds more than a text or a number")


def _shown(key: str) -> str:
    """A key as a reason names it. Reasons enter the shared context, so only a word without markup is quoted."""
    return f"the key {key}" if _NAME.fullmatch(key) else "a key that is no word"


def looks_like_calls(value: Any) -> bool:
    """Whether JSON that is not declared to be a call is one nevertheless."""
    if isinstance(value, list):
        return bool(value) and all(looks_like_calls(item) for item in value)
    if not isinstance(value, dict):
        return False
    if any(isinstance(value.get(wrapper), list | dict) for wrapper in WRAPPERS):
        return True
    if not isinstance(value.get("name"), str):
        return False
    # Much JSON that is not a call has a name and an input; a call has an object there, and nothing else beside it.
    bare = value.keys() <= {"name", *ARGUMENTS, *_MARKS_OF_A_CALL}
    return (
        "arguments" in value
        or "parameters" in value
        or (bare and any(isinstance(value.get(k), dict) for k in ARGUMENTS))
    )


def _call(value: Mapping[str, Any], tools: Collection[str] | None) -> ToolCall:
    given = [key for key in ARGUMENTS if key in value]
    if len(given) > 1:
        raise Malformed(f"both {given[0]} and {given[1]}")
    _check_keys({k: v for k, v in value.items() if k not in ("name", *ARGUMENTS)}, "name")
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # some servers write the arguments as a JSON string
        arguments = read_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed("the arguments are not an object")
    return checked(value.get("name"), arguments, tools)


def is_name(name: str) -> bool:
    """Whether this is a valid name of a tool."""
    return _NAME.fullmatch(name) is not None


def checked(name: Any, arguments: Mapping[str, Any], tools: Collection[str] | None) -> ToolCall:
    if not isinstance(name, str) or not is_name(name):
        raise Malformed("the name is not one: letters, digits, _ . - , at most 64")
    if tools is not None and name not in tools:
        raise Malformed(f"there is no tool {name}")
    return ToolCall(name, arguments)


# -- name(key=value, ...) -------------------------------------------------------------------------------------


def read_signature(text: str, tools: Collection[str] | None) -> list[ToolCall] | None:
    """Parse ``name(key="value", n=3)`` or a list of such; None if the text is something else (``f(x)``, say).

    Values are literals as ``CALLS`` defines them: text in either quotes, numbers, true, false, null and their Python
    names, lists and mappings.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        return _signatures(Reader(text, CALLS), tools)
    except NotALiteral as error:
        raise Malformed(str(error)) from None


def _signatures(reader: Reader, tools: Collection[str] | None) -> list[ToolCall] | None:
    listed = reader.taken("[")
    calls: list[ToolCall] = []
    while True:
        name = reader.match(_NAME)
        if name is None or (tools is not None and name not in tools) or not reader.taken("("):
            return None
        arguments: dict[str, Any] = {}
        while not reader.taken(")"):
            key = reader.match(_KEY)
            if key is None or not reader.taken("=") or reader.peek() == "=":
                return None
            if key in arguments:
                raise Malformed("an argument stands there twice")
            arguments[key] = reader.value()
            if not reader.taken(",") and reader.peek() != ")":
                raise Malformed(f"expected , or ) at character {reader.at}")
        calls.append(checked(name, arguments, tools))
        if len(calls) > MOST_CALLS:
            raise Malformed(f"more than {MOST_CALLS} calls")
        if not (listed and reader.taken(",")):
            break
    if (listed and not reader.taken("]")) or reader.peek():
        return None
    for call in calls:
        _check_text(dict(call.arguments))
    return calls


def _check_text(value: Any) -> None:
    """Raise Malformed if a text has a lone surrogate. The value is no deeper than ``CALLS`` allows."""
    if isinstance(value, str) and has_half_character(value):
        raise Malformed("half of a surrogate pair stands alone")
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_text(item)
