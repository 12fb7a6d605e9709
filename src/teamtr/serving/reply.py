"""Response bodies in the format of the OpenAI API: completions, stream chunks, models, errors."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from teamtr.calls import TOOL
from teamtr.serving.request import BadRequest, ChatRequest
from teamtr.serving.team import Choice

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The id of one answer and the fields that all its bodies share."""

    request: ChatRequest
    seed: int
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: Sequence[Choice]) -> Body:
        """The body of an answer that is not streamed."""
        told = [
            {
                "index": k,
                "message": self._message(choice),
                "finish_reason": choice.finish,
                "logprobs": None,
            }
            for k, choice in enumerate(choices)
        ]
        return {**self._head("chat.completion"), "choices": told, "usage": usage(choices), "teamtr": self._own(choices)}

    def chunk(self, choice: int, delta: Body, finish: str | None = None) -> Body:
        """A stream chunk of one choice."""
        told = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": None}
        more = {"usage": None} if self.wants_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [told], **more}

    def call_chunks(self, choice: int, found: Choice) -> list[Body]:
        """The tool calls of a choice, one stream chunk each."""
        return [self.chunk(choice, {"tool_calls": [{"index": k, **call.body}]}) for k, call in enumerate(found.calls)]

    def last_chunk(self, choices: Sequence[Choice]) -> Body:
        """The token usage, at the end of a stream whose client asks for it."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage(choices), "teamtr": self._own(choices)}

    @property
    def wants_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _head(self, kind: str) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
        }

    def _message(self, choice: Choice) -> Body:
        message: Body = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [call.body for call in choice.calls]}
        if self.request.shows_discussion:
            said = [
                line
                for spoken in choice.spoken
                if not spoken.answers
                for line in (f"{spoken.agent}: {spoken.text}", *(f"{TOOL}: {result}" for result in spoken.results))
            ]
            message["reasoning_content"] = "\n".join(said)
        return message

    def _own(self, choices: Sequence[Choice]) -> Body:
        """Our own fields: the seed that was used, tokens by agent, and the discussion if it is shown."""
        own: Body = {"seed": self.seed, "usage": _by_agent(choices)}
        if self.request.shows_discussion:
            own["turns"] = [
                [
                    {"agent": s.agent, "text": s.text, "answers": s.answers, "results": list(s.results)}
                    for s in choice.spoken
                ]
                for choice in choices
            ]
        return own


def usage(choices: Sequence[Choice]) -> Body:
    """Tokens that all agents together read and wrote."""
    read, written = sum(c.prompt_tokens for c in choices), sum(c.completion_tokens for c in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens for c in choices)},
    }


def _by_agent(choices: Sequence[Choice]) -> Body:
    found: defaultdict[str, Body] = defaultdict(lambda: {"prompt_tokens": 0, "completion_tokens": 0})
    for choice in choices:
        for message in choice.spoken:
            found[message.agent]["prompt_tokens"] += message.read
            found[message.agent]["completion_tokens"] += message.written
    return dict(found)


def model_body(name: str, created: int) -> Body:
    return {"id": name, "object": "model", "created": created, "owned_by": "teamtr"}


def error_body(
    message: str, code: str | None = None, *, kind: str = "invalid_request_error", param: str | None = None
) -> Body:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(error: BadRequest) -> Body:
    return error_body(error.message, error.code, param=error.param)
