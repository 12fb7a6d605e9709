"""The HTTP stack that all servers share: addresses, timeouts of connections, and headers of responses."""

from teamtr.web.answers import Gone, TooLarge, TooSlow, header, read_body, send_bytes
from teamtr.web.server import LOOPBACK, WebServer

__all__ = ["LOOPBACK", "Gone", "TooLarge", "TooSlow", "WebServer", "header", "read_body", "send_bytes"]
