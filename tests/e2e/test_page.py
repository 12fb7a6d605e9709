"""The pages in a real browser: they open quickly, filters work, a conversation can be read, hostile text does nothing,
no request leaves the page. Skipped where no Chromium is installed."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Page, chromium, find_chromium
from made_run import HOSTILE, made_batch, made_run, update_record, write_log
from teamtr.report import build_report, compare_page, compare_runs, report_page
from teamtr.report.serve import Library, LiveServer
from teamtr.store import Log

AGENTS = ("left", "right", "speaker")
pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: install one to test the pages")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    executable = find_chromium()
    assert executable is not None
    with chromium(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.look(1200, 900)
    browser.open("data:text/html,<html data-ready=yes>")
    browser.requests.clear()
    browser.problems.clear()
    return browser


def written(folder: Path, run: Path) -> str:
    path = folder / "report.html"
    path.write_text(report_page(build_report(run)))
    return path.as_uri()


def texts(page: Page, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.textContent)")


def test_every_section_is_there_and_every_plot_has_axes_and_a_caption(page, tmp_path):
    url = written(tmp_path, made_run(tmp_path / "run", batches=[made_batch(AGENTS, seed=s) for s in range(3)]))
    page.open(url)
    page.wait("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg'))")
    assert page.js("document.querySelectorAll('.plot svg').length") == 14
    sections = [
        "glance",
        "learning",
        "region",
        "certificate",
        "staleness",
        "timeline",
        "conversations",
        "cost",
        "reproduce",
    ]
    assert page.js("[...document.querySelectorAll('section')].map(s => s.id)") == sections
    plots = page.js(
        "[...document.querySelectorAll('figure.chart')].map(f => [f.querySelectorAll('svg .label').length,"
        " f.querySelectorAll('svg .tick').length, (f.querySelector('figcaption')?.textContent || '').length,"
        " f.classList.contains('small-multiple')])"
    )
    for labels, ticks, caption, multiple in plots:  # the small multiples share the caption below them
        assert labels == 2
        assert ticks >= 3
        assert multiple or caption > 40
    assert len(texts(page, ".card h3")) == 5
    assert page.requests == [url]
    assert page.problems == []


def test_probes_are_drawn_where_the_log_has_them(page, tmp_path):
    run = made_run(tmp_path / "run")
    rows = {key: [0.6, 0.3, 0.05, 0.05] for key in ("before_R", "after_R", "moved_R")}
    weights = {"effective_share": 0.9, "p95": 1.2, "p99": 1.4, "largest": 2.0, "above_ten": 0.0}
    probe = {
        "fresh": 0.05,
        "stale": 0.03,
        "weights": weights,
        "token_shift": {**rows, "flipped": 0.02, "positions": 64},
    }
    write_log(run, [{**r, "probe": probe} if r["kind"] == "update" else r for r in Log(run / "log.jsonl").read()])
    page.open(written(tmp_path, run))
    page.wait("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg'))")
    assert "60.0 % → 60.0 %" in texts(page, "#shift td")
    titles = texts(page, "#staleness h3")
    assert titles[:2] == ["Stale gap of each probed update", "What the stage's first rollouts are still worth"]
    assert page.problems == []


def test_hostile_text_does_nothing_and_can_be_read(page, tmp_path):
    run = made_run(tmp_path / "run", batches=[made_batch(AGENTS, said=HOSTILE, environment=True)])
    log = Log(run / "log.jsonl")
    log.append(update_record(10, 3, 0, HOSTILE, reason=HOSTILE))
    names = {"name": HOSTILE, "agents": [*AGENTS, HOSTILE], "precisions": {HOSTILE.replace("\ud83d", ""): HOSTILE}}
    log.append({"kind": "start", "stages": 3, **names})
    url = written(tmp_path, run)
    page.open(url)
    page.wait("document.querySelectorAll('.turn').length === 4")
    page.js("document.querySelector('.switch input').click()")
    page.js("document.querySelectorAll('.cell').forEach(c => c.click())")
    page.wait("document.querySelectorAll('.token').length > 0")
    page.js("document.querySelector('.switch input').click()")
    said = texts(page, ".turn .said")[1]
    assert said.startswith("</script><script>window.pwned = 1</script><img src=x onerror=")
    assert "⟨U+202E⟩gnp.exe⟨U+2066⟩" in said
    assert "⟨U+D83D⟩" in said
    assert page.js("window.pwned") is None
    assert page.js("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
    assert page.js("document.documentElement.innerHTML.includes('\\u202e')") is False
    assert page.js("document.title.includes('\\u202e')") is False
    assert page.requests == [url]
    assert page.problems == []


def test_the_policy_stops_what_would_slip_through(page, tmp_path):
    """Were the script ever to write markup, an inline script, a handler and a request would still be refused."""
    page.open(written(tmp_path, made_run(tmp_path / "run", stages=1)))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    page.js(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 1';"
        " document.body.append(s); const d = document.createElement('div');"
        " d.innerHTML = '<img src=' + URL + ' onerror=\"window.pwned = 2\">'; document.body.append(d);"
        " return fetch(URL).catch(() => 0); })()".replace("URL", json.dumps(url))
    )
    assert page.js("new Promise(done => setTimeout(() => done(window.pwned === undefined), 200))")
    assert len([p for p in page.problems if "Content Security Policy" in p]) >= 3
    assert select.select([listener], [], [], 0.2)[0] == []  # nobody knocked
    listener.close()


def test_filters_siblings_and_stages(page, tmp_path):
    batches = [made_batch(AGENTS, problems=6, group=4, seed=s) for s in range(3)]
    page.open(written(tmp_path, made_run(tmp_path / "run", batches=batches)))
    page.wait("document.querySelectorAll('.episode').length > 0")
    last = batches[2]
    rights = sum(e.verdict.right for e in last.episodes)

    def choose(label: str, value: str) -> None:
        page.js(
            f"(() => {{ const s = document.querySelector('[aria-label=\"{label}\"]'); s.value = '{value}';"
            " s.dispatchEvent(new Event('change')); s.dispatchEvent(new Event('input')); })()"
        )

    def shown() -> int:
        return page.js("document.querySelectorAll('.episode').length")

    assert shown() == 24
    choose("verdict", "right")
    assert shown() == rights
    choose("verdict", "")
    choose("reward to", "0.5")
    assert shown() == 24 - rights
    choose("reward to", "")
    choose("text contains", "problem 3")
    assert shown() == 4
    choose("text contains", "")
    choose("disagreement", "agents")
    assert shown() == 0  # all agents say the same
    choose("disagreement", "siblings")
    groups = [last.episodes[p * 4 : p * 4 + 4] for p in range(6)]
    assert shown() == 4 * sum(len({e.verdict.kind for e in group}) > 1 for group in groups)
    choose("disagreement", "")
    choose("stage and step", "stage-0000-step-01.jsonl.gz")
    page.wait("document.querySelector('.dialogue .meta').textContent.startsWith('stage 0, step 1')")
    page.js("document.querySelectorAll('.strip')[0].querySelectorAll('.chip')[2].click()")
    pressed = page.js("[...document.querySelectorAll('.strip')[0].querySelectorAll('.chip')].map(c => c.ariaPressed)")
    assert pressed == ["false", "false", "true", "false"]
    page.js("[...document.querySelectorAll('.strip')[1].querySelectorAll('.chip')].at(-1).click()")
    page.wait("document.querySelector('.dialogue .meta').textContent.startsWith('stage 2, step 2')")
    page.js("document.querySelector('.cell').click()")
    page.js("document.querySelector('.details .link').click()")
    page.wait("document.querySelector('.dialogue .meta').textContent.startsWith('stage 0, step 0')")
    assert page.problems == []


def test_light_dark_and_phone(page, tmp_path):
    url = written(tmp_path, made_run(tmp_path / "run"))
    paper = "getComputedStyle(document.body).backgroundColor"
    page.open(url)
    light = page.js(paper)
    page.look(1200, 900, dark=True)
    dark = page.js(paper)
    assert light != dark
    page.js("document.querySelector('.theme').click()")
    assert page.js(paper) == light
    page.look(390, 844, mobile=True)
    page.open(url)
    page.wait("document.querySelectorAll('.plot svg').length >= 8")
    assert page.js("document.documentElement.scrollWidth") <= 390  # nothing sticks out
    assert page.problems == []


def test_a_big_report_opens_in_two_seconds(page, tmp_path):
    batch = made_batch(AGENTS, problems=32, group=16, tokens=60)
    url = written(tmp_path, made_run(tmp_path / "run", stages=40, batches=[batch]))
    assert min(page.open(url) for _ in range(3)) < 2.0
    assert page.problems == []


def test_the_comparison(page, tmp_path):
    runs = [made_run(tmp_path / "a"), made_run(tmp_path / "b", preset="naive_sequential", gain=0.3)]
    path = tmp_path / "compare.html"
    path.write_text(compare_page(compare_runs(runs)))
    page.open(path.as_uri())
    page.wait("document.querySelectorAll('.plot svg').length === 2")
    assert "naive_sequential" in texts(page, "#settings td")
    assert page.requests == [path.as_uri()]
    assert page.problems == []


def test_the_live_page_grows_with_its_run(page, tmp_path):
    run = made_run(tmp_path / "runs" / "first", stages=1)
    made_run(tmp_path / "runs" / "second", stages=2, name=HOSTILE.replace("\ud83d", "")[:40].replace(":", ""))
    with LiveServer(Library([tmp_path / "runs"])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            page.open(server.link)
            page.wait("document.querySelectorAll('.runs .chip').length === 2")
            page.js("[...document.querySelectorAll('.runs .chip')].find(c => c.textContent === 'first').click()")
            page.wait("document.querySelectorAll('.cell').length === 3")
            page.wait("document.querySelectorAll('.turn').length === 3")
            Log(run / "log.jsonl").append(update_record(4, 1, 0, "left"))
            page.wait("document.querySelectorAll('.cell').length === 4")
            page.wait("document.querySelectorAll('.turn').length === 3")
            assert all(url.startswith(server.link) for url in page.requests)
            assert page.js("window.pwned") is None
            assert page.problems == []
        finally:
            page.open("data:text/html,<html data-ready=yes>")
            server.shutdown()
            thread.join()
