"""The chat codec: text to token ids and back, through one model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from teamtr.calls import Schema
from teamtr.chat.lookalikes import Lookalikes
from teamtr.chat.markers import Disarm, find_markers
from teamtr.chat.systems import SystemPolicy, with_system_policy
from teamtr.chat.tool_prompt import each_text, with_tools_told
from teamtr.errors import UserError
from teamtr.types import Ids

CACHED, CACHED_TOKENS = 20_000, 4_000_000
"""Bounds of the cache of prompts, and of the cache of messages, per tokenizer: entries and total tokens. Short games
repeat them all the time, and a server that runs for weeks must not keep every request."""


class ProtocolError(UserError):
    """A model's chat protocol does not fit the team."""


class ChatCodec:
    """One tokenizer with its chat template.

    Markers of the template (``<|im_end|>``, ``[INST]``, ``USER:``; see ``markers.py``) inside a message are broken by a
    space, so that no text can end a turn or open another role. Tools are described in the template's own way if it has
    one (``tells_tools``), otherwise as text in the system prompt. ``sharing`` maps a message to what the team sees of
    it (default: all of it); ``system`` says what happens to an empty system prompt (default: it is sent).
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        sharing: Callable[[str], str] | None = None,
        system: SystemPolicy = "explicit",
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ProtocolError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat template; "
                "use an instruction-tuned model or set `chat_template` in its tokenizer folder"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.sharing = sharing
        self.system: SystemPolicy = system
        self.fold_system = not self._accepts_system()
        self.tells_tools = self._accepts_tools()
        self.markers = find_markers(tokenizer, self._render)
        lookalikes = Lookalikes(tokenizer)
        self._disarm_turns = Disarm(self.markers.turns, lookalikes)
        self._disarm_all = Disarm((*self.markers.turns, *self.markers.tools), lookalikes)
        self._prompts: dict[tuple[tuple[tuple[str, str], ...], str], Ids] = {}
        self._texts: dict[bytes, str] = {}
        self._prompt_tokens = self._text_tokens = 0

    @cached_property
    def identity(self) -> tuple[str, str]:
        """Hashes of the tokenizer and of the chat template with its arguments."""
        tokenizer = self.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        whole = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
        added = sorted((i, str(t.content), t.special) for i, t in tokenizer.added_tokens_decoder.items())
        template = json.dumps([tokenizer.chat_template, self.template_kwargs], sort_keys=True, default=str)
        return _digest(json.dumps([whole, added, tokenizer.eos_token_id])), _digest(template)

    def text(self, messages: Sequence[dict[str, str]], *, tools: Sequence[Schema] = (), for_reply: bool = True) -> str:
        """The rendered prompt as text."""
        if tools and not self.tells_tools:
            messages, tools = with_tools_told(messages, tools), ()
        heard = with_system_policy(messages, self.system)
        clean = [{"role": m["role"], "content": self._disarmed(m)} for m in heard]
        if self.fold_system:
            clean = _fold_system(clean)
        return self._render(clean, for_reply, [each_text(tool, self._disarm_turns) for tool in tools])

    def encode(self, messages: Sequence[dict[str, str]], tools: Sequence[Schema] = ()) -> Ids:
        """The prompt's token ids, cached: rendering is a function of the text."""
        key = tuple((m["role"], m["content"]) for m in messages), json.dumps(tools) if tools else ""
        ids = self._prompts.get(key)
        if ids is None:
            ids = np.array(
                self.tokenizer.encode(self.text(messages, tools=tools), add_special_tokens=False), dtype=np.int32
            )
            self._prompt_tokens += len(ids)
            if len(self._prompts) >= CACHED or self._prompt_tokens > CACHED_TOKENS:
                self._prompts.clear()
                self._prompt_tokens = len(ids)
            self._prompts[key] = ids
        return ids

    def encode_message(self, text: str) -> Ids:
        """The token ids of a message as if its author had sampled it: the text and the end token. Markers stay text."""
        ids = self.tokenizer.encode(self._disarm_turns(text), add_special_tokens=False)
        return np.array([*ids, self.tokenizer.eos_token_id], dtype=np.int32)

    def decode(self, token_ids: Ids) -> str:
        """The text of a sampled message as the team sees it, without the template's marker tokens."""
        key = token_ids.tobytes()
        text = self._texts.get(key)
        if text is None:
            self._text_tokens += len(token_ids)
            if len(self._texts) >= CACHED or self._text_tokens > CACHED_TOKENS:
                self._texts.clear()
                self._text_tokens = len(token_ids)
            text = self.plain(token_ids.tolist())
            text = self._texts[key] = text if self.sharing is None else self.sharing(text)
        return text

    def plain(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, before ``sharing`` is applied."""
        kept = [i for i in token_ids if i not in self.markers.token_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def _disarmed(self, message: Mapping[str, str]) -> str:
        """Text of the agent itself and of the system prompt may contain tool-call markers, all other text no marker."""
        disarm = self._disarm_turns if message["role"] in ("assistant", "system") else self._disarm_all
        return disarm(message["content"])

    def _render(self, messages: Sequence[Mapping[str, str]], for_reply: bool, tools: Sequence[Schema] = ()) -> str:
        told = {"tools": list(tools)} if tools else {}
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=for_reply, **told, **self.template_kwargs
            )
        )

    def _accepts_tools(self) -> bool:
        """Whether the template renders a tool's name, description and parameters."""
        parameters = {"type": "object", "properties": {"q3": {"type": "string"}}, "required": ["q3"]}
        function = {"name": "q1", "description": "\u00a7q2\u00a7", "parameters": parameters}
        try:
            text = self._render([{"role": "user", "content": "u"}], True, [{"type": "function", "function": function}])
        except Exception:  # templates may raise anything; without tool support, tools are sent as text
            return False
        return "q1" in text and "q2" in text and "q3" in text

    def _accepts_system(self) -> bool:
        probe = [{"role": "system", "content": "\u00a7sys\u00a7"}, {"role": "user", "content": "u"}]
        try:
            text = self._render(probe, True)
        except Exception as error:  # templates may raise anything
            if "system" in str(error).lower():
                return False
            raise ProtocolError(f"the chat template could not be rendered: {error}") from error
        return "\u00a7sys\u00a7" in text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """For templates without a system role: prepend the system prompt to the first user message."""
    system = "\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"])
    rest = [m for m in messages if m["role"] != "system"]
    if system and rest:
        rest[0] = {"role": rest[0]["role"], "content": f"{system}\n\n{rest[0]['content']}"}
    return rest
