"""The protocol checklist of a swap: whether the new agent reads and writes messages as the old one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from teamtr.batches import RolloutBatch
from teamtr.chat import ChatCodec
from teamtr.chat.thinking import ThinkPolicy
from teamtr.chat.tokenizers import Compatibility
from teamtr.session.build import Session

_TALK = (
    {"role": "system", "content": "You are one of several."},
    {"role": "user", "content": "1 + 1 = ?"},
)


@dataclass(frozen=True)
class ProtocolCheck:
    """One point of the checklist. ``ok`` False does not forbid the swap; alignment has to bridge the difference."""

    point: str
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Checklist:
    items: tuple[ProtocolCheck, ...]
    exact_kl: bool

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def check_protocol(old: Session, new: Session, agent: str, tokenizers: Compatibility, batch: RolloutBatch) -> Checklist:
    """Compare the two agents' protocols. Templates that cannot render a shared context were rejected by ``build``."""
    old_codec: Any = old.context.codecs[agent]
    new_codec: Any = new.context.codecs[agent]
    ends = {int(t.token_ids[-1]) for e in batch.episodes for t in e.turns if t.agent == agent and t.finish == "stop"}
    new_ends = new.engine.info(agent).end_ids
    ends_known = ends <= new_ends
    same_rendering = old_codec.text(_TALK) == new_codec.text(_TALK)
    protocol = new.team_file.team.protocol
    items = [
        ProtocolCheck("token ids", tokenizers.identical, str(tokenizers)),
        ProtocolCheck(
            "end of a message", ends_known, "" if ends_known else f"the new agent does not stop at {sorted(ends)}"
        ),
        ProtocolCheck("chat template", same_rendering, "" if same_rendering else "renders the same talk to other text"),
        ProtocolCheck("system prompt", *_system(new_codec, new.team[agent].system_prompt)),
        ProtocolCheck("reasoning tags", *_thinks(old_codec, new_codec, protocol.think)),
        ProtocolCheck(
            "tool calls", True, "one JSON form" if protocol.tools == "canonical" else "shared as they are written"
        ),
    ]
    return Checklist(tuple(items), tokenizers.identical and ends_known)


def _system(codec: Any, prompt: str) -> tuple[bool, str]:
    """Whether the new agent's system prompt is exactly what the team file says."""
    if prompt:
        return True, "explicit"
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "u"}]
    if codec.text(talk) != ChatCodec(codec.tokenizer, codec.template_kwargs).text(talk):
        return False, "the new agent's template says words of its own; use --system explicit"
    return True, "explicitly empty"


def _thinks(old_codec: Any, new_codec: Any, policy: ThinkPolicy) -> tuple[bool, str]:
    """Checks that both templates or neither use reasoning tags, or that tags are removed from the shared context."""
    tags = ["<think>" in str(codec.tokenizer.chat_template) for codec in (old_codec, new_codec)]
    if tags[0] == tags[1]:
        return True, "in both templates" if tags[0] else "in neither template"
    alone = f"the {'old' if tags[0] else 'new'} agent's template alone knows them"
    if policy != "keep":
        return True, f"{alone}; taken out of what is shared"
    return False, f"{alone}; set template_kwargs, or use --think strip"


def warnings_of(checklist: Checklist) -> Sequence[str]:
    return [f"{item.point}: {item.note}" for item in checklist.items if not item.ok]
