"""Tools that agents can call: a task's toolboxes, user functions and MCP servers, behind one port (``ports.Tools``).

It imports nothing, because the workers that run user functions import it and should load little.
"""
