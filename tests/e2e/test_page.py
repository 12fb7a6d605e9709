"""The pages in a real browser: they open quickly, filters work, a conversation can be read, hostile text does nothing,
no request leaves the page. Skipped where no Chromium is installed."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from chromium import Page, chromium, find_chromium
from made_run import (
    HOSTILE,
    chosen,
    hostile_parts,
    made_batch,
    made_run,
    probe_record,
    swap_record,
    swapped,
    update_record,
    write_log,
)
from teamtr.analysis.report import build_report, compare_page, compare_runs, report_page, serve
from teamtr.analysis.report.section import Section, register
from teamtr.analysis.report.serve import Library, LiveServer
from teamtr.analysis.report.words import num, percent, signed
from teamtr.store import Log

AGENTS = ("left", "right", "speaker")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: install one to test the pages"),
]


@pytest.fixture(autouse=True)
def no_summary_rests(monkeypatch) -> None:
    """However long one takes on a busy machine."""
    monkeypatch.setattr(serve, "AT_ONCE", 60.0)


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
    page.wait(ALL_DRAWN)
    assert page.js("document.querySelectorAll('.plot svg').length") == 20
    sections = [
        "headlines",
        "health",
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
    assert len(texts(page, ".card h3")) == 6
    assert page.requests == [url]
    assert page.problems == []


ALL_BUT_EMPTY_DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg, .nothing'))"
ALL_DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg'))"


def probed_run(folder: Path, **changes: Any) -> Path:
    """A run whose updates were all probed on the episodes that it stores."""
    run = made_run(folder, **changes)
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "probe": probe_record()} if r["kind"] == "update" else r for r in records])
    return run


def test_probes_are_drawn_where_the_log_has_them(page, tmp_path):
    page.open(written(tmp_path, probed_run(tmp_path / "run")))
    page.wait(ALL_DRAWN)
    assert "60.0 % → 60.0 %" in texts(page, "#shift td")
    assert texts(page, "#shift h3")[:2] == ["Inside the region", "Beyond the region"]
    assert "5.5 radii" in texts(page, "#shift td")  # the step made three times as long
    titles = texts(page, "#staleness h3")
    assert titles[:3] == [
        "Stale gap of each probed update",
        "Δ stale of each probed stage",
        "What the stage's first rollouts are still worth",
    ]
    assert "by importance weights" in texts(page, "#staleness td")
    assert "50 % of 9" in texts(page, "#region td")  # one of the two draws of each share flips
    assert page.problems == []


def test_where_rollouts_came_from_is_drawn(page, tmp_path):
    """Every decision at its share, what was redrawn crossed out; and the choice that is told of an update."""
    url = written(tmp_path, chosen(made_run(tmp_path / "run", preset="partial", stages=4), "partial"))
    page.open(url)
    page.wait(ALL_DRAWN)
    assert texts(page, "#staleness h3")[:4] == [
        "What the rollouts were still worth",
        "Tokens sampled, and by the other choices",
        "Bias of redrawing",
        "Decisions by their reason",
    ]
    worth = "document.querySelector('#staleness figure')"
    assert page.js(f"{worth}.querySelectorAll('circle.dot').length") == 12  # of twelve updates
    assert page.js(f"{worth}.querySelectorAll('.cross').length") == 4
    assert page.js(f"{worth}.querySelectorAll('.rule line').length") == 1  # the share that is needed
    assert "75 % of the tokens stayed when redrawn" in texts(page, "#staleness .pill")
    told = [
        "Learnt from a batch of its own, sampled under the team as it was then (a stage begins). ",
        "Learnt from a batch of an earlier team, redrawn in part (worth 60% of new ones, needed 70% ",
    ]
    for cell, words in zip((0, 2), told, strict=True):
        page.js(f"document.querySelectorAll('.cell')[{cell}].click()")
        assert texts(page, "#timeline .details p")[-1].startswith(words)
    assert page.requests == [url]
    assert page.problems == []


def test_the_tokens_view_shows_what_the_update_moved(page, tmp_path):
    page.open(written(tmp_path, probed_run(tmp_path / "run")))
    page.wait("document.querySelectorAll('.episode').length > 0")
    page.js("document.querySelector('.switch input').click()")
    page.wait("document.querySelectorAll('.token').length === 9")
    assert page.js("document.querySelectorAll('.token.moved').length") == 3  # the first turn alone was probed
    tip = page.js("document.querySelector('.token.moved').tip()")
    assert tip.endswith("exact KL of the update 0.02 nats")
    page.js(
        "(() => { const s = document.querySelector('[aria-label=\"KL by token\"]'); s.value = 'kl';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert page.js("document.querySelectorAll('.episode').length") == 8  # every second of sixteen
    assert page.problems == []


def test_a_swap_is_told_from_its_record(page, tmp_path):
    run = made_run(tmp_path / "run", stages=3)
    records = Log(run / "log.jsonl").read()
    place = next(k for k, r in enumerate(records) if r["kind"] == "update" and r["stage"] == 2)
    hostile = swap_record(2, mode=HOSTILE, protocol={"items": [{"point": HOSTILE, "ok": False, "note": HOSTILE}]})
    write_log(run, [*records[:place], swap_record(2), *records[place:], hostile])
    url = written(tmp_path, run)
    page.open(url)
    page.wait(ALL_DRAWN)
    pills = texts(page, "#swap .pill")
    assert pills[:4] == ["uncertified", "shock 1 points", "60 points as it came", "alignment reached the radius"]
    assert "wider" in texts(page, "#swap h3")[0]
    assert "/somebody" not in page.js("document.documentElement.outerHTML")
    assert "On 120 messages that steered nothing: 0.0052, upper bound 0.0061." in texts(page, "#swap .caption")[4]
    assert texts(page, "#swap td .bad") == ["differs", "differs"]  # one of each swap
    assert texts(page, "#swap figure h3")[:2] == ["Recovery", "Alignment: held-out probes"]
    # the two evaluations after the swap, joined to what was installed
    recovered = page.js("document.querySelector('#swap figure').querySelectorAll('circle.dot').length")
    assert recovered == 2 + 1  # evaluations of stages 0 and 1 before it, of stage 3 after it
    assert "swap" in page.js("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert page.js("window.pwned") is None
    assert page.requests == [url]
    assert page.problems == []


@pytest.mark.parametrize("older", [False, True])
def test_updates_from_stale_batches_are_told_to_have_no_certificate(page, tmp_path, older):
    """None is issued for them; in an older log, those that were are not shown. What was not kept has none anyway."""
    run = made_run(tmp_path / "run", preset="naive_sequential", reused=True)
    records = Log(run / "log.jsonl").read()
    lost = {9: {"outcome": "restored", "version_after": "a" * 32, "certificates": []}}
    for record in records:
        if record["kind"] == "update":
            record |= {"certificates": update_record(1, 0, 0, "left")["certificates"]} if older else {}
            record |= lost.get(record["update"], {})
    write_log(run, records)
    page.open(written(tmp_path, run))
    assert texts(page, "#certificate .pill") == ["5 of 8 kept updates without a certificate: batch was stale"]

    def told(cell: int) -> str:
        page.js(f"document.querySelectorAll('.cell')[{cell}].click()")
        return " ".join(texts(page, "#timeline .details .meta"))

    assert told(0).startswith("Certified at least: ")
    assert told(1) == "No certificate applies: batch was stale."
    assert told(8) == ""
    assert page.problems == []


def test_hostile_text_does_nothing_and_can_be_read(page, tmp_path):
    run = made_run(tmp_path / "run", batches=[made_batch(AGENTS, said=HOSTILE, environment=True)])
    log = Log(run / "log.jsonl")
    log.append(update_record(10, 3, 0, HOSTILE, reason=HOSTILE, health=None))  # names are keys in it
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


def test_one_file_adds_a_section_to_the_page(page, tmp_path, new_section):
    """And to the live page, which has read no conversations."""
    run = made_run(tmp_path / "runs" / "run")
    url = written(tmp_path, run)
    page.open(url)
    page.wait(ALL_DRAWN)
    assert texts(page, "#lengths h2, #lengths .lead, #lengths h3") == [
        "Message lengths",
        "Do messages grow?",
        "Tokens of a message",
    ]
    assert page.js("document.querySelectorAll('#lengths svg circle.dot').length") == 9  # three agents, three stages
    assert page.js("document.querySelector('#lengths .target').tip") == "left, stage 0: 3"
    links = page.js("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert links == page.js("[...document.querySelectorAll('section')].map(s => s.id)")
    assert links.index("lengths") == links.index("staleness") + 1
    assert page.requests == [url]
    with LiveServer(Library([run])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page.open(server.link)
            page.wait("document.querySelector('#lengths .nothing') !== null")
            assert "Message lengths" in texts(page, "nav a")
        finally:
            page.open("data:text/html,<html data-ready=yes>")
            server.shutdown()
            thread.join()
    assert page.problems == []


def test_hostile_text_in_any_part_of_a_section_does_nothing(page, tmp_path, new_section):
    register(Section("hostile", HOSTILE, 1, HOSTILE, show=lambda data: hostile_parts()))
    url = written(tmp_path, made_run(tmp_path / "run", stages=1))
    page.open(url)
    page.wait(ALL_BUT_EMPTY_DRAWN)
    assert page.js("document.querySelectorAll('#hostile svg').length") == 2
    shown = page.js("document.querySelector('#hostile').textContent")
    assert shown.count("</script><script>window.pwned = 1</script><img src=x onerror=") >= 20
    assert not set(shown) & set("\u202e\u2066\u2028\x07")
    assert page.js("document.querySelectorAll('#hostile img, #hostile script').length") == 0
    assert page.js("window.pwned") is None
    assert page.requests == [url]
    assert page.problems == []


def test_the_script_says_numbers_as_the_sections_do(page):
    """A section's words come from Python, those of the conversations and of the timeline from the script."""
    script = (files("teamtr.analysis.report") / "assets" / "dom.js").read_text()
    values = [0, 1, -3, 0.1, 0.125, 0.3125, 0.00012345, -0.5, 12.345, 999.96, 1234.5, 12345678, 1234567.8, 2 / 3, 1e-9]
    said = page.js(f"(() => {{ {script}; return {values}.map(x => [num(x), num(x, 2), signed(x), percent(x)]); }})()")
    assert said == [[num(x), num(x, 2), signed(x), percent(x)] for x in values]


def test_tables_below_each_other_are_apart(page, tmp_path):
    """The decisions of a plan without redraws, and the drift of contexts."""
    batches = [made_batch(AGENTS, seed=s) for s in range(3)]
    page.open(written(tmp_path, chosen(made_run(tmp_path / "run", preset="auto", batches=batches), "auto")))
    box = "document.querySelectorAll('#staleness > .panel')"
    first, second = page.js(f"[...{box}].map(p => [p.getBoundingClientRect().top, p.getBoundingClientRect().bottom])")
    assert second[0] - first[1] >= 10


CLIPPED = """(() => {
  const nav = document.querySelector('nav .links'), edge = nav.getBoundingClientRect();
  return [...nav.children].filter(link => {
    const box = link.getBoundingClientRect();
    return box.right > edge.right + 1 || box.left < edge.left - 1 || box.bottom > edge.bottom + 1;
  }).map(link => link.textContent);
})()"""


@pytest.mark.parametrize("width", [1024, 1280])
def test_no_link_of_the_navigation_is_clipped(page, tmp_path, width):
    """With every section that a run can have, in the report and in the live page, whose clock takes room too."""
    run = swapped(tmp_path / "run", "aligned")
    records = Log(run / "log.jsonl").read()
    write_log(run, [{**r, "probe": probe_record()} if r["kind"] == "update" else r for r in records])
    page.look(width, 800)
    page.open(written(tmp_path, run))
    assert len(texts(page, "nav .links a")) >= 11
    assert page.js(CLIPPED) == []
    with LiveServer(Library([run])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page.open(server.link)
            page.wait("document.querySelectorAll('nav .links a').length >= 11")
            assert page.js(CLIPPED) == []
            # A section that is jumped to is not under the navigation.
            page.js("location.hash = '#cost'")
            page.wait("document.querySelector('#cost').getBoundingClientRect().top < 300")
            top = page.js("document.querySelector('#cost').getBoundingClientRect().top")
            assert top >= page.js("document.querySelector('nav').offsetHeight")
        finally:
            server.shutdown()
            thread.join()


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


@pytest.mark.slow
@pytest.mark.parametrize(("most", "group"), [(20, 4), (40, 16)])
def test_a_big_report_opens_as_fast_as_its_size_allows(page, tmp_path, most, group):
    """Up to 40 stages x 3 agents x 512 episodes, every update probed: a second or two, and four times that of a
    quarter."""
    batch = made_batch(AGENTS, problems=32, group=group, tokens=60)
    took = []
    for stages in (most // 4, most):
        (tmp_path / str(stages)).mkdir()
        url = written(
            tmp_path / str(stages), probed_run(tmp_path / str(stages) / "run", stages=stages, batches=[batch])
        )
        took.append(min(page.open(url) for _ in range(3)))
    print("opened in {:.2f} s and {:.2f} s".format(*took))
    assert took[1] < min(10 * took[0] + 1.0, 60.0)
    assert page.problems == []


@pytest.mark.slow
def test_a_live_page_of_a_run_ten_times_as_big_stays_responsive(page, tmp_path):
    """400 stages x 3 agents x 512 episodes, of which the page asks for one batch."""
    batch = made_batch(AGENTS, problems=32, group=16, tokens=60)
    run = made_run(tmp_path / "runs" / "big", stages=400, batches=[batch])
    with LiveServer(Library([tmp_path / "runs"])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            page.open("data:text/html,<html data-ready=yes>")
            page.requests.clear()
            started = time.monotonic()
            page.open(server.link)
            page.wait("document.querySelectorAll('.cell').length === 1200")
            shown = time.monotonic() - started
            page.wait("document.querySelectorAll('.turn').length === 3")
            assert len([url for url in page.requests if "/batch/" in url]) == 1  # what is looked at, and no more
            page.wait(ALL_DRAWN)
            page.js(
                "(() => { window.longest = 0; const seen = (list) => list.getEntries().forEach((e) => {"
                " window.longest = Math.max(window.longest, e.duration); });"
                " new PerformanceObserver(seen).observe({ entryTypes: ['longtask'] }); })()"
            )
            clicked = page.js(
                "(() => { const t = performance.now(); document.querySelectorAll('.cell')[600].click();"
                " return performance.now() - t; })()"
            )
            Log(run / "log.jsonl").append(update_record(1201, 400, 0, "left"))
            page.wait("document.querySelectorAll('.cell').length === 1201")
            page.wait("document.querySelectorAll('.turn').length === 3")
            page.js("new Promise(done => setTimeout(done, 500))")
            longest = page.js("window.longest")
            print(f"shown after {shown:.2f} s, click {clicked:.0f} ms, longest task while it grew {longest:.0f} ms")
            # A second, some milliseconds and half a second on an idle machine; minutes where work is quadratic.
            assert shown < 60.0
            assert clicked < 5_000.0
            assert longest < 20_000.0
            assert page.problems == []
        finally:
            page.open("data:text/html,<html data-ready=yes>")
            server.shutdown()
            thread.join()


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
        thread = threading.Thread(target=server.serve_forever)
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
