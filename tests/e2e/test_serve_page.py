"""The page on which a person talks to the team, in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import Page, chromium, find_chromium
from served import KEY, make_session, serving
from teamtr.rollout import play
from teamtr.serving.server import TeamServer
from teamtr.serving.team import Ask, Choice, ServedTeam, Spoken
from teamtr.session.build import Session
from teamtr.types import Problem

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: install one to test the pages"),
]
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script></p>\u202egnp"


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session("team.max_tokens=64")


@pytest.fixture(scope="module")
def server(session: Session) -> Iterator[TeamServer]:
    with serving(session) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = find_chromium()
    assert executable is not None
    with chromium(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, server: TeamServer) -> Page:
    browser.look(1000, 800)
    browser.open("data:text/html,<html data-ready=yes>")
    browser.requests.clear()
    browser.problems.clear()
    return browser


def texts(page: Page, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.textContent)")


def send(page: Page, text: str) -> None:
    page.js(f"document.getElementById('question').value = {json.dumps(text)}")
    page.js("document.getElementById('form').requestSubmit()")


def answered(page: Page, count: int) -> None:
    page.wait(f"document.querySelectorAll('.answer .spent').length === {count}")


def said(session: Session, question: str, seed: int) -> list[str]:
    team = session.current_team()
    [episode] = play(session.context, team, [Problem("p", question, answer="0")], 1, seed=seed).episodes
    return [turn.text for turn in episode.turns]


def test_a_person_asks_and_sees_who_said_what(
    page: Page, server: TeamServer, session: Session, monkeypatch: pytest.MonkeyPatch
):
    """With a seed with which one of them says nothing."""
    monkeypatch.setattr("teamtr.serving.desk.secrets.randbits", lambda bits: 79)
    page.open(server.link)
    assert texts(page, "#title") == ["trio"]
    assert texts(page, "#model option") == ["trio", "trio/left", "trio/right", "trio/speaker"]
    send(page, "What is 2+3?")
    answered(page, 1)
    seed = int(texts(page, ".spent")[0].rpartition("seed ")[2])
    assert texts(page, ".user .text") == ["What is 2+3?"]
    assert texts(page, ".turn .name") == ["left", "right"]
    assert texts(page, ".answer > .name") == ["speaker answers"]
    assert texts(page, ".turn .text, .answer > .text") == said(session, "What is 2+3?", seed)
    assert seed == 79
    origin = f"http://127.0.0.1:{server.server_port}"
    assert page.requests == [server.link.partition("#")[0], f"{origin}/v1/models", f"{origin}/v1/chat/completions"]
    assert not any(KEY in request for request in page.requests)
    assert page.problems == []


def test_what_is_shown_is_what_the_team_said(
    page: Page, server: TeamServer, session: Session, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("teamtr.serving.desk.secrets.randbits", lambda bits: 11)
    page.open(server.link)
    send(page, "What is 4+4?")
    answered(page, 1)
    left, right, speaker = said(session, "What is 4+4?", 11)
    assert texts(page, ".turn .text") == [left, right]
    assert texts(page, ".answer > .text") == [speaker]
    page.js("document.getElementById('show').click()")
    send(page, "And now?")
    answered(page, 2)
    talk = f"User: What is 4+4?\nTeam: {speaker}\nUser: And now?"
    assert texts(page, ".answer > .text")[1] == said(session, talk, 11)[2] or ":" in speaker
    assert texts(page, ".turn .text") == [left, right], "the second discussion is hidden"
    page.js("document.getElementById('clear').click()")
    assert texts(page, ".answer") == []
    page.js("document.getElementById('model').value = 'trio/left'")
    page.js("document.getElementById('model').dispatchEvent(new Event('change'))")
    send(page, "Alone?")
    answered(page, 1)
    assert texts(page, ".turn") == []
    assert page.problems == []


def hostile(self: ServedTeam, ask: Ask) -> Choice:
    for text, begins in ((HOSTILE[:9], True), (HOSTILE[9:], False)):
        ask.teller.discussion(ask.choice, "left", text, begins=begins)
    ask.teller.answer(ask.choice, "speaker", HOSTILE)
    return Choice(HOSTILE, "stop", (Spoken("left", HOSTILE, 1, 1, False), Spoken("speaker", HOSTILE, 1, 1, True)))


def test_hostile_words_do_nothing(page: Page, server: TeamServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ServedTeam, "play", hostile)
    page.open(server.link)
    send(page, HOSTILE)
    answered(page, 1)
    assert texts(page, ".user .text, .turn .text, .answer > .text") == [HOSTILE] * 3
    assert page.js("document.querySelectorAll('img, main script').length") == 0
    injected = (
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s);"
    )
    page.js(f"(() => {{ {injected} }})()")
    assert page.js("window.broken") is None, "the policy lets no other script run"
    assert page.js("fetch('https://example.com').then(() => 'reached', () => 'blocked')") == "blocked"


def test_an_answer_can_be_stopped_and_errors_are_told(
    page: Page, server: TeamServer, session: Session, monkeypatch: pytest.MonkeyPatch
):
    page.open(f"http://127.0.0.1:{server.server_port}/#key=wrong")
    assert "no valid key" in texts(page, "#note")[0]
    page.open("data:text/html,<html data-ready=yes>")
    page.open(server.link)
    send(page, "w " * 5000)
    page.wait("document.getElementById('note').textContent.includes('room for 4096')")
    sample = session.engine.sample
    page.problems.clear()

    def endless(agent: str, prompts: Any, noise_BT: Any, *, follow: Any, **settings: Any) -> Any:
        while all(follow(row, 0, prompts[row][:0]) for row in range(len(prompts))):
            if server.desk.is_draining or any(ticket_gone()):
                break
        return sample(agent, prompts, noise_BT, follow=follow, **settings)

    taken: list[Any] = []
    take = server.desk.take
    monkeypatch.setattr(server.desk, "take", lambda *asked: taken.append(take(*asked)) or taken[-1])

    def ticket_gone() -> list[bool]:
        return [ticket.cancelled.is_set() for ticket in taken]

    monkeypatch.setattr(session.engine, "sample", endless)
    send(page, "Are you there?")
    page.wait("document.getElementById('send').textContent === 'Stop'")
    while not taken:
        time.sleep(0.01)
    page.js("document.getElementById('form').requestSubmit()")
    page.wait("document.getElementById('note').textContent.startsWith('Stopped')")
    assert taken[0].cancelled.wait(60)
    while server.desk.pending:
        time.sleep(0.01)
    assert page.js("document.getElementById('question').value") == "Are you there?"
    assert page.problems == []


@pytest.mark.parametrize(("width", "height", "dark"), [(1000, 800, False), (390, 800, True)])
def test_it_fits_a_screen_and_a_telephone(
    page: Page, server: TeamServer, tmp_path: Path, width: int, height: int, dark: bool
):
    page.look(width, height, dark=dark, mobile=width < 500)
    page.open(server.link)
    send(page, "What is 2+3, and why does nobody of you ever say it in one word?")
    answered(page, 1)
    page.screenshot(tmp_path / "page.png", whole=False)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    bottom = page.js("document.getElementById('send').getBoundingClientRect().bottom")
    assert 0 < bottom <= height
    assert (tmp_path / "page.png").stat().st_size > 5000
