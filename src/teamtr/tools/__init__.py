"""What agents can call: pure toolboxes of a task, own functions, and servers, behind one port (``ports.Tools``).

It imports nothing itself, because workers that run own functions import it and should have little to load.
"""
