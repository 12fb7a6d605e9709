"""From a trained team to a server that listens."""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from teamtr.errors import UserError
from teamtr.serving.app import ServingApp
from teamtr.serving.desk import Desk, Limits
from teamtr.serving.schedule import Scheduler
from teamtr.serving.team import ServedTeam
from teamtr.session.build import Session
from teamtr.team import Team
from teamtr.web import WebServer
from teamtr.web.connections import Patience

KEY_VARIABLE = "TEAMTR_API_KEY"
SHORTEST_KEY = 16


class TeamServer(WebServer):
    """Serves one team. ``link`` is what a person opens, ``page`` the same without the key, ``url`` what clients are
    given."""

    def __init__(
        self,
        *,
        key: str,
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self.key = key
        self.limits = limits or Limits()
        super().__init__(
            self._app,
            host=host,
            port=port,
            allow_remote=allow_remote,
            shown="whoever holds the key can use the models, and keys and conversations travel",
            patience=patience,
            drain_seconds=int(self.limits.request_seconds),
        )
        self.page = f"http://{host}:{self.server_port}/"
        self.url = f"{self.page}v1"
        self.link = f"{self.page}#key={key}"

    def take_up(self, session: Session, team: Team, name: str) -> None:
        """Serve this team. Before, whoever has connected waits: an address that cannot be had is told of before models
        are loaded."""
        scheduler = Scheduler.of(session.engine)
        try:
            self.desk = Desk(ServedTeam.of(session, team, name, scheduler), scheduler, self.limits)
        except BaseException:
            scheduler.close()
            raise
        self._serving = ServingApp(self.desk, self.key)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serving(scope, receive, send)

    def serve_forever(self) -> None:
        try:
            super().serve_forever()
        finally:
            self.desk.close()


class Key(NamedTuple):
    """What clients must send, and whether nobody knew it before."""

    key: str
    is_new: bool


def key_from_environment() -> Key:
    """The environment's key, or a new one. Raises UserError where that is too short."""
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return Key(f"sk-teamtr-{secrets.token_urlsafe(24)}", True)
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"{KEY_VARIABLE} must have at least {SHORTEST_KEY} printable ASCII characters and no blank: choose a "
            "longer one, or unset it for a new one"
        )
    return Key(key, False)
