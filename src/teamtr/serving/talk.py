"""One person's conversation with a team, without HTTP: through the desk and the loop that answer requests."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from teamtr.serving.desk import Desk
from teamtr.serving.request import read_request
from teamtr.serving.team import Choice, Teller


class NothingToRepeat(Exception):
    """Nothing was asked yet."""


class Talk:
    """What was said so far, by the person and by the team. A question that was interrupted, or that could not be
    answered, is no part of it; ``again`` asks it once more.

    ``seed`` is that of the first question, as of a request; later ones count on. None draws one for each.
    """

    def __init__(self, desk: Desk, *, seed: int | None = None, temperature: float | None = None) -> None:
        self.desk, self.temperature = desk, temperature
        self.messages: list[dict[str, str]] = []
        self._seed = seed
        self._asked: str | None = None
        self._answered = False

    def ask(self, text: str, teller: Teller) -> Choice:
        """The team's answer, told while it comes. Raises BadRequest, or what the engine raises. After a
        KeyboardInterrupt nothing is told any more."""
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
                self.desk.cancel(ticket)  # where it has ended there is nothing to cancel
                wait(ticket.choices)
        self.messages += [question, {"role": "assistant", "content": choice.text}]
        self._answered = True
        return choice

    def again(self, teller: Teller) -> Choice:
        """The last question once more, as if it had not been answered."""
        if self._asked is None:
            raise NothingToRepeat
        if self._answered:
            del self.messages[-2:]
        return self.ask(self._asked, teller)

    def forget(self) -> None:
        """The next question is the first one."""
        self.messages.clear()
        self._asked, self._answered = None, False
