"""How shared text becomes an agent's tokens."""

from teamtr.protocol.codec import ChatCodec, ProtocolError
from teamtr.protocol.render import render
from teamtr.protocol.sharing import Sharing, check_thinking
from teamtr.protocol.template import TemplateReport, check_template

__all__ = ["ChatCodec", "ProtocolError", "Sharing", "TemplateReport", "check_template", "check_thinking", "render"]
