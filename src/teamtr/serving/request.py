"""What a client asks for: the body of ``/v1/chat/completions``, checked field by field.

What can be kept is kept, what changes nothing is passed over, and everything else is refused by name: no setting is
taken and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_CHOICES = 16
MOST_STOPS = 4
LONGEST_STOP = 256


class BadRequest(Exception):
    """A request that cannot be answered as it is: what a client is told, and which field it is about."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotKept(BadRequest):
    """Something of the API that this server does not keep."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param} is not kept by this server: {why}", param, "unsupported_parameter")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Model):
    type: Literal["text"]
    text: str


class ChatMessage(_Model):
    """A message of the conversation. What an answer of ours holds besides its text may be sent back, and is left out:
    a conversation is what was said aloud."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Model):
    include_usage: bool = False


class ChatRequest(_Model):
    """The body. ``show`` and ``private`` are ours (``extra_body`` of the openai client): whether the discussion is
    told, and what single agents alone are shown besides the question."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    show: Literal["answer", "discussion"] = "answer"
    private: dict[str, str] = Field(default_factory=dict)
    # passed over: they say something to whoever keeps accounts, and change no answer
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
    def shows_discussion(self) -> bool:
        return self.show == "discussion"


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
"""Fields that are taken with these values alone, or null: as if they were not there."""
_WHY = {
    "response_format": "answers are text as the agents write it, and no form is forced upon them; leave it out",
    "tools": "the agents of a team call no tools of a client; leave it out",
    "tool_choice": "there are no tools; leave it out",
}


def read_request(body: Any) -> ChatRequest:
    """The request that the body of a POST holds. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    kept = dict(body)
    for name, neutral in _NEUTRAL.items():
        value = kept.pop(name, None)
        if value is not None and value not in neutral:
            raise NotKept(name, _WHY.get(name, "only its default is; leave it out"))
    messages = kept.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "tool":
            raise NotKept("messages", "the agents of a team call no tools of a client, so that none can have answered")
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
    return request


def _told(error: ValidationError) -> BadRequest:
    """One thing that is wrong, the deepest of those that were tried, without what the client sent."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[", "str")))
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {place[:200]!r}", field and field[:200], "unknown_parameter")
    if first["type"] == "missing":
        return BadRequest(f"{place} is missing", field, "missing_required_parameter")
    return BadRequest(f"{place[:200]}: {first['msg'][:300]}", field, "invalid_value")
