"""A small MCP server over stdio for tests, with tools that answer, fail, hang, die and write garbage."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def double(n: int) -> str:
    """Twice a number."""
    return str(2 * n)


@server.tool()
def refuse(word: str) -> str:
    raise ValueError(f"not {word}")


@server.tool()
def hang() -> str:
    time.sleep(1000)
    return "late"


@server.tool()
def die() -> str:
    os._exit(7)


@server.tool()
def garble() -> str:
    sys.stdout.write("this is no message\n{]\n")
    sys.stdout.flush()
    os.write(1, b"neither is this\n\xff\xfe\n")
    return "after garbage"


@server.tool()
def who() -> str:
    return str(os.getpid())


if __name__ == "__main__":
    server.run()
