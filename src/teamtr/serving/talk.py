"""A user's conversation with a team without HTTP, through the same desk and loop as requests."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from teamtr.serving.desk import Desk
from teamtr.serving.request import read_request
from teamtr.serving.team import Choice, Teller


class NothingToRepeat(Exception):
    """``Talk.again`` was called before any question."""


class Talk:
    """The conversation so far. A question that was interrupted or could not be answered is not part of it; ``again``
    asks it once more.

    ``seed`` is the seed of the first question, as in a request; it increases by one with each question. None draws a
    new seed for each.
    """

    def __init__(self, desk: Desk, *, seed: int | None = None, temperature: float | None = None) -> None:
        self.desk, self.temperature = desk, temperature
        self.messages: list[dict[str, str]] = []
        self._seed = seed
        self._asked: str | None = None
        self._answered = False

    def ask(self, text: str, teller: Teller) -> Choice:
        """Return the team's answer; ``teller`` gets it while it is sampled, but nothing after a KeyboardInterrupt.
        Raises BadRequest, Busy or Draining, or what the engine raises."""
        self._asked, self._answered = text, False
        question = {"role": "user", "content": text}
        body: dict[str, Any] = {
            "model": self.desk.served.name,
            "messages": [*self.messages, question],
            "temperature": self.temperature,
            "seed": self._seed,
            "stream": True,
            "show": "discussion",
        }
        request, ticket = read_request(body), None
        self._seed = None if self._seed is None else self._seed + 1
        try:
            ticket = self.desk.take(request, teller)
            choice = ticket.choices[0].result()
        finally:
            if ticket is not None:
                self.desk.cancel(ticket)  # no-op if it has ended
                wait(ticket.choices)
        self.messages += [question, {"role": "assistant", "content": choice.text}]
        self._answered = True
        return choice

    def again(self, teller: Teller) -> Choice:
        """Ask the last question once more, as if it had not been answered. Raises NothingToRepeat."""
        if self._asked is None:
            raise NothingToRepeat
        if self._answered:
            del self.messages[-2:]
        return self.ask(self._asked, teller)

    def forget(self) -> None:
        """Start a new conversation."""
        self.messages.clear()
        self._asked, self._answered = None, False
