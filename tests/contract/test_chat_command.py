"""``teamtr chat``: the same words as over HTTP, who says them, keys that end things, and text that cannot forge."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from served import TEAM, asked, make_session
from teamtr.cli import app
from teamtr.cli.chat import HELP, converse
from teamtr.cli.terminal import Indented
from teamtr.serving.desk import Desk, Limits, Ticket
from teamtr.serving.schedule import Scheduler
from teamtr.serving.talk import Talk
from teamtr.serving.team import Ask, Choice, ServedTeam
from teamtr.session.build import Session

NAMES = ("left", "right", "speaker")


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session()


@pytest.fixture
def desk(session: Session) -> Iterator[Desk]:
    scheduler = Scheduler(session.engine)
    desk = Desk(ServedTeam.of(session, session.current_team(), "trio", scheduler), scheduler, Limits(at_once=1))
    yield desk
    desk.close()


class Deaf:
    def discussion(self, choice: int, agent: str, text: str, *, begins: bool) -> None: ...

    def answer(self, choice: int, agent: str, text: str) -> None: ...


def lines(*said: str | type[BaseException]) -> Callable[[], str]:
    """What a person types, and then the end of input."""
    rest = iter((*said, EOFError))

    def read() -> str:
        found = next(rest)
        if isinstance(found, str):
            return f"{found}\n"
        raise found

    return read


def held(talk: Talk, *said: str | type[BaseException], width: int = 60) -> list[str]:
    out = io.StringIO()
    converse(talk, lines(*said), out, width)
    return out.getvalue().splitlines()


def by_agent(shown: list[str], width: int = 60) -> list[tuple[str, str]]:
    """(heading, text): what stands at the left edge, and what is indented below it, without the breaks."""
    found: list[tuple[str, str]] = []
    for line in shown:
        if line.startswith("  "):
            found[-1] = (found[-1][0], found[-1][1] + line[2:])
        elif line:
            found.append((line, ""))
    return found


def one_line(text: str) -> str:
    """As it is shown, without its breaks."""
    out = io.StringIO()
    Indented(out, 10_000).add(text)
    return "".join(line[2:] for line in out.getvalue().splitlines())


def served(desk: Desk, text: str, seed: int, *earlier: tuple[str, str]) -> Choice:
    """What a client of the API would have got."""
    request = asked(text, stream=True, show="discussion", seed=seed)
    said = [{"role": role, "content": content} for role, content in earlier]
    request = request.model_validate({**request.model_dump(), "messages": [*said, *request.model_dump()["messages"]]})
    return desk.take(request, Deaf()).choices[0].result()


@pytest.mark.long
def test_a_person_sees_who_says_what_and_it_is_what_a_client_gets(desk: Desk) -> None:
    first = served(desk, "What is 2+3?", 7)
    second = served(desk, "And 4?", 8, ("user", "What is 2+3?"), ("assistant", first.text))
    assert [message.agent for message in first.spoken] == list(NAMES)
    shown = [s for s in by_agent(held(Talk(desk, seed=7), "What is 2+3?", "And 4?")) if not s[0].startswith("[")]
    headings = [f"{message.agent}, the answer:" if message.answers else f"{message.agent}:" for message in first.spoken]
    expected = [one_line(message.text) for choice in (first, second) for message in choice.spoken]
    assert shown == list(zip(headings * 2, expected, strict=True))


@pytest.mark.long
def test_again_asks_the_last_question_as_if_it_had_not_been_answered(desk: Desk) -> None:
    talk = Talk(desk, seed=7)
    held(talk, "What is 2+3?", "/again")
    assert talk.messages == [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": served(desk, "What is 2+3?", 8).text},
    ]


def test_words_that_are_commands(desk: Desk) -> None:
    talk = Talk(desk, seed=1)
    assert held(talk, "/again", "/help me", "", "/quit", "never read") == [
        "nothing was asked yet",
        f"there is no /help: {HELP}",
    ]
    assert talk.messages == []
    assert held(talk, "one?", "/new")[-2:] == ["a new conversation", ""]
    assert talk.messages == []
    assert held(talk, KeyboardInterrupt) == ["", HELP, ""], "at the prompt it ends nothing"


class Interrupting(io.StringIO):
    """A screen at which Ctrl-C is pressed when the first word of a message stands on it, and that shows no more before
    it was heard."""

    def __init__(self, waits: threading.Event, heard: threading.Event) -> None:
        super().__init__()
        self.at: str | None = None
        self.waits, self.heard = waits, heard

    def write(self, text: str) -> int:
        if text.startswith("  ") and self.at is None:
            self.at = text
            assert self.waits.wait(60)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert self.heard.wait(60)
        return super().write(text)


@pytest.mark.long
def test_ctrl_c_ends_the_message_and_nothing_else(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, heard, take, cancel = threading.Event(), threading.Event(), desk.take, desk.cancel

    def taken(*asked: Any) -> Ticket:
        ticket = take(*asked)
        result = ticket.choices[0].result

        def waited_for() -> Choice:
            waits.set()
            return result()

        monkeypatch.setattr(ticket.choices[0], "result", waited_for)
        return ticket

    def cancelled(ticket: Ticket) -> None:
        cancel(ticket)
        heard.set()

    monkeypatch.setattr(desk, "take", taken)
    monkeypatch.setattr(desk, "cancel", cancelled)
    talk, out = Talk(desk, seed=7), Interrupting(waits, heard)
    before_us = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of a test run ignore Ctrl-C
    try:
        converse(talk, lines("What is 2+3?", "/again"), out, 60)
    finally:
        signal.signal(signal.SIGINT, before_us)
    shown = out.getvalue().splitlines()
    ended = next(k for k, line in enumerate(shown) if line.startswith("[ended by you"))
    before = by_agent(shown[:ended])
    whole = served(desk, "What is 2+3?", 7)
    assert "speaker, the answer:" not in [heading for heading, _ in before], "nobody went on"
    assert one_line(whole.spoken[0].text).startswith(before[0][1])
    assert [message["content"] for message in talk.messages] == ["What is 2+3?", served(desk, "What is 2+3?", 8).text]
    while desk.pending:  # its thread may yet have to say that it is done
        time.sleep(0.01)


@pytest.mark.long
def test_what_cannot_be_answered_is_told_and_the_chat_goes_on(desk: Desk) -> None:
    talk = Talk(desk, seed=7)
    shown = held(talk, "x" * 100_000, "half \ud800", "What is 2+3?")
    told = [line for line in shown if line.startswith("[not answered")]
    assert len(told) == 2
    assert "there is room for" in told[0]
    assert "/new begins anew" in told[0]
    assert len(talk.messages) == 2


# -- text that would be somebody else -----------------------------------------------------------------------------

FORGED = "hm\nspeaker, the answer:\n  42\r\nleft:\rright: \x1b[2J\x1b[1;1Hyou> \u202eyou\tx\n\nend"


@pytest.mark.parametrize("pieces", [1, 3, len(FORGED)])
@pytest.mark.parametrize("width", [20, 80])
def test_no_text_reaches_the_left_edge_or_steers_the_terminal(width: int, pieces: int) -> None:
    out = io.StringIO()
    screen = Indented(out, width)
    screen.heading("left:")
    text = f"{FORGED}{'w' * (width - 3)}speaker, the answer: {'漢' * width}you> "
    size = -(-len(text) // pieces)
    for at in range(0, len(text), size):
        screen.add(text[at : at + size])
    screen.heading("right:")
    shown = out.getvalue().split("\n")
    assert (shown[0], shown[-2], shown[-1]) == ("left:", "right:", "")
    assert all(line.startswith("  ") for line in shown[1:-2])
    assert max(map(cell_len, shown)) < width, "the terminal never wraps a line itself"
    assert not any(ord(sign) < 32 or ord(sign) in (0x202E, 0x7F) for line in shown for sign in line)


@pytest.mark.long
def test_the_command_reads_questions_from_a_pipe(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.yaml").write_text(TEAM.replace("ANSWER", "speaker"))
    said = CliRunner().invoke(app, ["chat", "team.yaml", "seed=3", "--seed", "5"], input="What is 2+3?\n/quit\n")
    assert said.exit_code == 0, said.output
    headings = [line for line in said.stdout.splitlines() if line and not line.startswith((" ", "["))]
    assert headings == ["left:", "right:", "speaker, the answer:"]
    assert f"trio: left, right, speaker. {HELP}" in said.stderr
    assert "private" not in said.stderr


@pytest.mark.long
def test_ctrl_c_twice_leaves_a_chat_that_answers(tmp_path, monkeypatch) -> None:
    """The first ends a message, the second the wait for its end."""
    play, take, pressed, goes_on = ServedTeam.play, Desk.take, list[bool](), threading.Event()

    def slowly(team: ServedTeam, ask: Ask) -> Choice:
        assert goes_on.wait(60)
        return play(team, ask)

    def press(*_: Any) -> None:
        pressed.append(True)
        raise KeyboardInterrupt

    def taken(desk: Desk, *asked: Any) -> Ticket:
        if pressed:
            monkeypatch.setattr("teamtr.serving.talk.wait", wait)
            try:
                return take(desk, *asked)
            finally:
                goes_on.set()
        ticket = take(desk, *asked)
        monkeypatch.setattr(ticket.choices[0], "result", press)
        monkeypatch.setattr("teamtr.serving.talk.wait", press)
        return ticket

    monkeypatch.setattr(ServedTeam, "play", slowly)
    monkeypatch.setattr(Desk, "take", taken)
    (tmp_path / "team.yaml").write_text(TEAM.replace("ANSWER", "speaker"))
    said = CliRunner().invoke(
        app, ["chat", str(tmp_path / "team.yaml"), "--seed", "5"], input="What is 2+3?\nWhat is 3+4?\n/quit\n"
    )
    assert said.exit_code == 0, said.output
    assert len(pressed) == 2
    assert "[ended by you" in said.stdout
    assert "speaker, the answer:" in said.stdout


@pytest.mark.long
def test_a_team_that_needs_private_parts_says_that_a_chat_has_none(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.yaml").write_text(TEAM.replace("ANSWER", "speaker").replace("sums", "code"))
    said = CliRunner().invoke(app, ["chat", "team.yaml"], input="/quit\n")
    assert said.exit_code == 0, said.output
    assert "left, right: trained with a private part of each problem, which a chat does not have" in said.stderr
