"""The request body of ``/v1/chat/completions``, validated field by field.

Supported fields take effect. Fields that cannot affect an answer are accepted and ignored. Everything else is rejected
by name, so no setting is silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from teamtr.chat.tool_calls import is_name

MOST_CHOICES = 16
MOST_STOPS = 4
LONGEST_STOP = 256
MOST_TOOLS = 128
LONGEST_ID = 256


class BadRequest(Exception):
    """A request that cannot be answered: the message for the client, and the field at fault."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotKept(BadRequest):
    """A part of the API that this server does not support."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param} is not kept by this server: {why}", param, "unsupported_parameter")


class _Model(BaseModel):
    """Lists are read up to their first mistake (``fail_fast``): a megabyte of mistakes takes the event loop seconds."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Model):
    type: Literal["text"]
    text: str


class CalledFunction(_Model):
    """``arguments`` is JSON text, as in the API."""

    name: str
    arguments: str


class MadeCall(_Model):
    """A call that was returned to the client, as the client sends it back in the conversation."""

    id: Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Model):
    """A message of the conversation. Our answers can be sent back with all their fields, but only their text and calls
    become part of the conversation. ``conversation.py`` checks which role may have which fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class OfferedFunction(_Model):
    """``parameters`` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(_Model):
    """A tool that the client runs."""

    type: Literal["function"]
    function: OfferedFunction


class StreamOptions(_Model):
    include_usage: bool = False


class ChatRequest(_Model):
    """The body. ``show`` and ``private`` are our extensions (``extra_body`` of the openai client): whether the
    discussion is returned, and text that only one agent sees besides the question."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    show: Literal["answer", "discussion"] = "answer"
    private: dict[str, str] = Field(default_factory=dict)
    # accepted and ignored: they are meant for accounting and do not affect the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered(self) -> tuple[OfferedTool, ...]:
        """The tools that may be called."""
        return () if self.tool_choice == "none" else tuple(self.tools or ())

    @property
    def shows_discussion(self) -> bool:
        return self.show == "discussion"


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
"""Fields that are accepted only with these values or null, which have no effect."""
_WHY = {
    "response_format": "answers are text as the agents write it, and no form is forced upon them; leave it out",
}


def read_request(body: Any) -> ChatRequest:
    """Validate the body of a POST. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    kept = dict(body)
    for name, neutral in _NEUTRAL.items():
        value = kept.pop(name, None)
        if value is not None and value not in neutral:
            raise NotKept(name, _WHY.get(name, "only its default is; leave it out"))
    if kept.get("tool_choice") not in (None, "auto", "none"):
        raise NotKept("tool_choice", "nothing forces an agent to call a tool; auto and none are kept")
    try:
        request = ChatRequest.model_validate(kept)
    except ValidationError as error:
        raise _told(error) from None
    if len(request.stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in request.stops):
        raise BadRequest(
            f"stop takes at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters", "stop", "invalid_value"
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options goes with stream", "stream_options", "invalid_value")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise BadRequest("give max_tokens or max_completion_tokens, not both", "max_tokens", "invalid_value")
    if request.tools:
        _check_tools(request)
    return request


def _check_tools(request: ChatRequest) -> None:
    """Raises BadRequest if a tool cannot be described to an agent, or cannot be called."""
    tools = request.tools or []
    if len(tools) > MOST_TOOLS:
        raise BadRequest(f"at most {MOST_TOOLS} tools are taken, not {len(tools)}", "tools", "invalid_value")
    if request.parallel_tool_calls is False and request.offered:
        raise NotKept("parallel_tool_calls", "a message may hold several calls, and all are handed out; leave it out")
    known: set[str] = set()
    for k, tool in enumerate(tools):
        place, function = f"tools.{k}.function", tool.function
        if not is_name(function.name):
            form = "letters, digits, _ . - , at most 64, a letter or _ first"
            raise BadRequest(f"{place}.name: a name is {form}", "tools", "invalid_value")
        if function.name in known:
            raise BadRequest(f"{place}.name: {function.name} stands there twice", "tools", "invalid_value")
        if function.strict:
            raise NotKept("tools", f"{place}.strict asks for a form, and none is forced upon agents; leave strict out")
        if (why := _unreadable(function.parameters or {})) is not None:
            raise BadRequest(f"{place}.parameters: {why}", "tools", "invalid_value")
        known.add(function.name)


def _unreadable(schema: Mapping[str, Any]) -> str | None:
    """Why this schema cannot be the parameters of a function; None if it can."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        return "must be the schema of an object"
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        return "properties must be an object, with a schema for every name"
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return "required must be a list of names"
    return None


def _told(error: ValidationError) -> BadRequest:
    """The most deeply nested of the validation errors, without the values that the client sent."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
    place = ".".join(str(part) for part in first["loc"] if part != "str" and not str(part).startswith("list["))
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {place[:200]!r}", field and field[:200], "unknown_parameter")
    if first["type"] == "missing":
        return BadRequest(f"{place} is missing", field, "missing_required_parameter")
    return BadRequest(f"{place[:200]}: {first['msg'][:300]}", field, "invalid_value")
