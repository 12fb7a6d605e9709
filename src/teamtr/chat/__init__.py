"""Chat: renders the shared text into an agent's tokens, and filters what its messages share."""

from teamtr.chat.codec import ChatCodec, ProtocolError
from teamtr.chat.message_filter import MessageFilter, check_thinking
from teamtr.chat.render import render
from teamtr.chat.template import TemplateReport, check_template

__all__ = [
    "ChatCodec",
    "MessageFilter",
    "ProtocolError",
    "TemplateReport",
    "check_template",
    "check_thinking",
    "render",
]
