"""How shared text becomes an agent's tokens."""

from teamtr.protocol.codec import ChatCodec, ProtocolError
from teamtr.protocol.render import render
from teamtr.protocol.template import TemplateReport, check_template

__all__ = ["ChatCodec", "ProtocolError", "TemplateReport", "check_template", "render"]
