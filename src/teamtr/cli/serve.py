"""``teamtr serve``: serve a team behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from teamtr.cli.common import Overrides, app, errors, open_team
from teamtr.cli.terminal import write


@app.command()
def serve(
    team: Annotated[Path, typer.Argument(help="A run folder, whose latest checkpoint is served, or a team file.")],
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients. [default: the run folder's, or the team file's]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    allow_remote: Annotated[bool, typer.Option(help="Allow a --host that other machines can reach.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Answers that are worked on together.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait besides; more are refused (429).")] = 256,
    request_seconds: Annotated[float, typer.Option(min=1, max=604_800, help="Longest time for one request.")] = 600.0,
) -> None:
    """Serve a team behind an OpenAI-compatible API: one model for the team, and one for each of its agents.

    Clients need the key that is printed, or the one in the environment variable TEAMTR_API_KEY. The link opens a page
    for talking to the team. On SIGTERM or Ctrl-C the server answers all pending requests, then stops.
    """
    from teamtr.cli.terminal import say

    with errors():
        from teamtr.serving.desk import Limits
        from teamtr.serving.server import KEY_VARIABLE, TeamServer, key_from_environment

        key, is_new = key_from_environment()
        limits = Limits(at_once=at_once, waiting=queue, request_seconds=request_seconds)
        with TeamServer(key=key, limits=limits, host=host, port=port, allow_remote=allow_remote) as server:
            opened = open_team(team, overrides)
            server.take_up(opened.session, opened.team, name or opened.label)
            write(server.link if is_new else server.page, sys.stdout)
            say(f"API: {server.url}, models {', '.join(server.desk.served.models)}")
            say(f"key: {key}" if is_new else f"key: the one in {KEY_VARIABLE}; the page takes it as #key=KEY")
            logging.getLogger("asyncio").setLevel(logging.ERROR)  # asyncio warns about every client that disconnects
            server.serve_forever()
            say("closed")
            opened.session.engine.close()
