"""``teamtr chat``: talk to a team in the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from teamtr.cli.common import Overrides, app, errors, open_team
from teamtr.cli.terminal import Indented, write

if TYPE_CHECKING:
    from teamtr.serving.talk import Talk
    from teamtr.serving.team import Choice

HELP = "/again asks the last question once more, /new begins anew, /quit or Ctrl-D ends; Ctrl-C ends a message"
API = "the API of `teamtr serve` takes it as `private`"
PROMPT = "you> "


@app.command()
def chat(
    team: Annotated[Path, typer.Argument(help="A run folder, whose latest checkpoint speaks, or a team file.")],
    overrides: Overrides = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy. [default: as evaluated]")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the first answer; later ones count on.")] = None,
) -> None:
    """Talk to a team in the terminal, and watch its messages as they are generated.

    Ctrl-C stops a message, Ctrl-D or `/quit` ends the chat; `/again` repeats the last question, `/new` starts a new
    conversation. Questions may also come from a pipe, one per line. The team answers as it does behind `teamtr serve`:
    it reads the first question exactly as in training, and later questions together with the conversation.
    """
    from teamtr.cli.terminal import say

    with errors():
        from teamtr.serving.desk import Desk, Limits
        from teamtr.serving.schedule import Scheduler
        from teamtr.serving.talk import Talk
        from teamtr.serving.team import ServedTeam

        opened = open_team(team, overrides)
        scheduler = Scheduler.of(opened.session.engine)
        try:
            served = ServedTeam.of(opened.session, opened.team, opened.label, scheduler)
            desk = Desk(served, scheduler, Limits(at_once=1))
            say(f"{opened.label}: {', '.join(opened.team.names)}. {HELP}")
            if told := sorted(next((problem.private for problem in opened.session.task.problems("train")), {})):
                say(
                    f"{', '.join(told)}: trained with a private part of each problem, which a chat does not have; {API}"
                )
            try:
                converse(Talk(desk, seed=seed, temperature=temperature), _reader(sys.stdin, sys.stdout), sys.stdout)
            finally:
                desk.close()
        finally:
            scheduler.close()
            opened.session.engine.close()


def converse(talk: Talk, read: Callable[[], str], out: TextIO, width: int | None = None) -> None:
    """Answer questions until ``read`` raises EOFError or the user quits."""
    from teamtr.serving.request import BadRequest
    from teamtr.serving.talk import NothingToRepeat

    columns = width or shutil.get_terminal_size().columns
    while True:
        try:
            text = read().strip()
        except EOFError:
            write("", out)
            return
        except KeyboardInterrupt:
            write(f"\n{HELP}", out)
            continue
        screen = _Screen(out, columns)
        try:
            if text == "/quit":
                return
            if text == "/new":
                talk.forget()
                write("a new conversation", out)
            elif text == "/again":
                screen.finish(talk.again(screen))
            elif text.startswith("/"):
                write(f"there is no {text.split()[0]}: {HELP}", out)
            elif text:
                screen.finish(talk.ask(text, screen))
        except KeyboardInterrupt:
            screen.text.heading("[ended by you; it is no part of the conversation. /again asks once more]")
        except NothingToRepeat:
            write("nothing was asked yet", out)
        except BadRequest as error:
            hint = "; /new begins anew" if error.code == "context_length_exceeded" else ""
            screen.text.heading(f"[not answered: {error.message}{hint}]")


class _Screen:
    """Shows who says what. Called from the thread that runs the team, while the user's thread waits."""

    def __init__(self, out: TextIO, width: int) -> None:
        self.text = Indented(out, width)
        self._answering = False

    def discussion(self, choice: int, agent: str, text: str, *, begins: bool) -> None:
        if begins:
            self.text.heading(f"{agent}:")
        self.text.add(text)

    def answer(self, choice: int, agent: str, text: str) -> None:
        if not self._answering:
            self._answering = True
            self.text.heading(f"{agent or 'team'}, the answer:")
        self.text.add(text)

    def finish(self, choice: Choice) -> None:
        self.text.end()
        if not choice.text:
            self.text.heading("[an empty answer]")
        elif choice.finish == "length":
            self.text.heading("[cut off: the answer was as long as a message may be]")


def _reader(lines: TextIO, screen: TextIO) -> Callable[[], str]:
    """Return a function that reads lines: from a terminal with a prompt and editing, or from a pipe."""
    if lines.isatty() and screen.isatty():
        with suppress(ImportError):  # then lines cannot be edited
            import readline  # noqa: F401 (importing it is what makes input() edit)
        return lambda: input(PROMPT)

    def line() -> str:
        found = lines.readline()
        if not found:
            raise EOFError
        return found

    return line
