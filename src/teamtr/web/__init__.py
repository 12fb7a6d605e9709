"""The one HTTP stack: addresses, connections that cannot hold a server up, and what every answer carries."""

from teamtr.web.answers import Gone, TooLarge, TooSlow, header, read_body, send_bytes
from teamtr.web.server import LOOPBACK, WebServer

__all__ = ["LOOPBACK", "Gone", "TooLarge", "TooSlow", "WebServer", "header", "read_body", "send_bytes"]
