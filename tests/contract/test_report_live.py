"""The live page: who is let in, what is reached, how it follows a run, and what it costs the machine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from made_run import made_run, update_record, write_log
from teamtr.analysis.report import reading, serve
from teamtr.analysis.report.reading import LogTail, read_run
from teamtr.analysis.report.serve import Library, LiveServer
from teamtr.errors import UserError
from teamtr.store import Log, RunFolder
from teamtr.store.log import decode


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_summary_rests(monkeypatch):
    """However long one takes on a busy machine; the test of summaries that rest says otherwise."""
    monkeypatch.setattr(serve, "AT_ONCE", 60.0)


@contextmanager
def serving(*folders: Path):
    with LiveServer(Library(folders)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: LiveServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_run_that_is_killed_is_no_longer_running(run):
    """Nothing is logged when it happens: the lock alone tells."""
    records = Log(run / "log.jsonl").read()
    write_log(run, records[:-3])
    library = Library([run])
    [key] = library.runs()
    with RunFolder.open(run):
        first = library.summary(key, "")
        assert first["report"]["run"]["state"] == "running"
        assert library.summary(key, first["stamp"]) == {"unchanged": True, "stamp": first["stamp"]}
    after = library.summary(key, first["stamp"])
    assert after["report"]["run"]["state"] == "interrupted"


def test_without_the_token_every_route_answers_403(run):
    with serving(run) as server:
        key = server.library.names()[0]["key"]
        routes = ["", "api/runs", f"api/run/{key}", f"api/batch/{key}/stage-0000-step-00.jsonl.gz", "nonsense"]
        for prefix in ("/", "//", "/wrong/", f"/{server.token[:-1]}/", f"/{server.token}x/", f"/x/{server.token}/"):
            for route in routes:
                assert get(server, prefix + route)[0] == 403, prefix + route
        for path in ("/favicon.ico", "/robots.txt", f"/{server.token}", "*", f"/?token={server.token}"):
            assert get(server, path)[0] == 403, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert get(server, f"/{server.token}/", method)[0] == 403, method
        assert get(server, f"/{server.token}/")[0] == 200


def test_a_foreign_host_header_is_refused(run):
    with serving(run) as server:
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert get(server, f"/{server.token}/", host=host)[0] == 403, host
        assert get(server, f"/{server.token}/", host=f"localhost:{server.server_port}")[0] == 200


def test_at_port_80_clients_leave_the_port_out():
    with LiveServer(Library([])) as server:
        server.server_port = 80
        assert [server.admits(host) for host in (b"localhost", b"127.0.0.1", b"127.0.0.1:80")] == [True] * 3
        assert not server.admits(b"evil.example")
        server.server_port = 81
        assert not server.admits(b"localhost")


def test_other_machines_are_let_in_only_when_told():
    with pytest.raises(UserError, match="--allow-remote"):
        LiveServer(Library([]), host="0.0.0.0")
    with LiveServer(Library([]), host="0.0.0.0", allow_remote=True) as server:
        assert server.server_address[0] == "0.0.0.0"


@pytest.mark.long
def test_path_tricks_reach_nothing(tmp_path):
    """200 of them, as a run's key and as a batch's name; beside the runs lies a secret."""
    secret = tmp_path / "secret"
    secret.write_text("TOPSECRET")
    run = made_run(tmp_path / "runs" / "run")
    (run / "episodes" / "stage-0009-step-00.jsonl.gz").symlink_to(secret)
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    ups = ["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "....//", "..;/", "%252e%252e%252f", "..%c0%af"]
    ends = ["secret", "secret%00", "secret%00.jsonl.gz", "./secret"]
    tricks = [up * depth + end for up in ups for depth in (1, 2, 3, 5) for end in ends]
    tricks += [f"%2f{str(secret)[1:]}", str(secret), f"file:{secret}", "~", "~root", ".", "..", "%00", "link", "run"]
    tricks += [f"stage-0000-step-00.jsonl.gz{end}" for end in ("/", "%00", "/..", "%20", "?x=/secret", "#", ".bak")]
    tricks += ["stage-0009-step-00.jsonl.gz", "log.jsonl", "team.yaml", ".lock", "../log.jsonl", "..%2flog.jsonl"]
    tricks += [
        "\u2215secret",
        "．．／secret",
        "CON",
        "nul",
        "a" * 5000,
        "%",
        "%zz",
        "[",
        "{}",
        "*",
        "%2a",
        "|id",
        ";id",
        "$(id)",
    ]
    tricks += ["`id`", "%0d%0aX: y", "link/secret", "link%2fsecret"]
    assert len(tricks) >= 200
    with serving(tmp_path / "runs") as server:
        (entry,) = server.library.names()
        for trick in tricks:
            quoted = "".join(c if c.isascii() and c != " " else quote(c) for c in trick)
            for path in (f"api/run/{quoted}", f"api/batch/{entry['key']}/{quoted}", f"api/batch/{quoted}/x", quoted):
                status, body = get(server, f"/{server.token}/{path}")
                fine = path.endswith("stage-0000-step-00.jsonl.gz?x=/secret") or "jsonl.gz#" in path
                assert status in (400, 403, 404, 414) or (fine and status == 200), (path, status)
                assert b"TOPSECRET" not in body


def test_the_live_page_follows_a_growing_log(tmp_path):
    run = made_run(tmp_path / "run", stages=1)
    with serving(run) as server:
        (entry,) = json.loads(get(server, f"/{server.token}/api/runs")[1])["runs"]
        ask = f"/{server.token}/api/run/{entry['key']}?stamp="
        first = json.loads(get(server, ask)[1])
        assert len(first["report"]["updates"]) == 3
        again = json.loads(get(server, ask + first["stamp"])[1])
        assert again == {"unchanged": True, "stamp": first["stamp"]}
        with open(run / "log.jsonl", "ab") as file:
            line = json.dumps(update_record(4, 1, 0, "left")).encode()
            file.write(line[:50])
            file.flush()
            torn = json.loads(get(server, ask + first["stamp"])[1])
            assert len(torn["report"]["updates"]) == 3
            assert "torn" in torn["report"]["notes"][0]
            file.write(line[50:] + b"\n")
        grown = json.loads(get(server, ask + torn["stamp"])[1])
        assert len(grown["report"]["updates"]) == 4
        name = grown["report"]["batches"][0]["name"]
        batch = json.loads(get(server, f"/{server.token}/api/batch/{entry['key']}/{name}")[1])
        assert len(batch["episodes"]) == 16


def test_a_summary_that_takes_long_rests(run, monkeypatch):
    """The next one waits fifty times what this one took; a page that just opens gets what there is."""
    monkeypatch.setattr(serve, "AT_ONCE", 0.0)
    monkeypatch.setattr(serve, "REST", 1e9)
    library = Library([run])
    (entry,) = library.names()
    first = library.summary(entry["key"], "")
    Log(run / "log.jsonl").append(update_record(10, 3, 0, "left"))
    assert library.summary(entry["key"], first["stamp"]) == {"unchanged": True, "stamp": first["stamp"]}
    assert library.summary(entry["key"], "") == first
    later = time.monotonic() + 1e12
    monkeypatch.setattr("teamtr.analysis.report.serve.time.monotonic", lambda: later)
    assert len(library.summary(entry["key"], first["stamp"])["report"]["updates"]) == 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a thread has a priority of its own on Linux alone")
def test_answers_are_given_at_low_priority(run, monkeypatch):
    seen, before = [], os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    looked = Library.names

    def names(self):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return looked(self)

    monkeypatch.setattr(Library, "names", names)
    with serving(run) as server:
        assert get(server, f"/{server.token}/api/runs")[0] == 200
    assert seen == [max(10, before)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before  # and nothing else is slowed


def test_a_log_that_was_cut_back_is_read_again(run):
    tail = LogTail(run / "log.jsonl")
    assert tail.poll()
    assert len(tail.records) == 17
    assert not tail.poll()
    Log(run / "log.jsonl").rewind(lambda record: record["kind"] != "stage")
    assert tail.poll()
    assert [r["kind"] for r in tail.records] == ["start", "eval", "update", "update", "update"]


def test_a_log_written_over_in_place_is_read_again(run):
    tail = LogTail(run / "log.jsonl")
    tail.poll()
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    (run / "log.jsonl").write_bytes(b"".join([lines[0], *3 * lines[:0:-1]]))
    assert (run / "log.jsonl").stat().st_size > tail.offset
    assert tail.poll()
    assert tail.generation == 2
    assert len(tail.records) == 1 + 3 * 16
    assert not tail.damaged


def test_every_line_of_a_log_is_read_once(run, monkeypatch):
    read = []
    monkeypatch.setattr(reading, "decode", lambda line: read.append(line) or decode(line))
    library = Library([run])
    (entry,) = library.names()
    stamp = ""
    for number in (10, 11, 12):
        for _ in range(3):
            stamp = library.summary(entry["key"], stamp)["stamp"]
            assert library.batch(entry["key"], "stage-0000-step-00.jsonl.gz") is not None
        Log(run / "log.jsonl").append(update_record(number, 3, 0, "left"))
    lines = [line for line in read if b'"kind"' in line]
    assert len(lines) == len(set(lines)) == 17 + 2


def test_a_run_that_takes_long_keeps_nobody_waiting_who_looks_at_another(tmp_path, monkeypatch):
    made_run(tmp_path / "runs" / "big", name="big")
    made_run(tmp_path / "runs" / "small", name="small")
    begun, over = threading.Event(), threading.Event()
    summarised = serve.summarise

    def slow(found):
        if found.folder.name == "big":
            begun.set()
            assert over.wait(60)
        return summarised(found)

    monkeypatch.setattr(serve, "summarise", slow)
    library = Library([tmp_path / "runs"])
    keys = {entry["name"]: entry["key"] for entry in library.names()}
    first = threading.Thread(target=library.summary, args=(keys["big"], ""))
    first.start()
    try:
        assert begun.wait(60)
        answered = []
        second = threading.Thread(target=lambda: answered.append(library.summary(keys["small"], "")))
        second.start()
        second.join(30)
        assert answered, "the small run waits for the big one"
    finally:
        over.set()
        first.join()
    assert answered[0]["report"]["run"]["name"] == "small"


def test_addresses_that_cannot_be_read_are_refused_without_a_traceback(run, capfd):
    with serving(run) as server:
        for path in ("http://[::1/", "http://[", "//[::1/x", f"http://[::1/{server.token}/", "http://[v1.\x1b]/"):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as caller:
                caller.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                status = caller.makefile("rb").readline().split()[1]
            assert status in (b"400", b"403"), path
        with socket.create_connection(("127.0.0.1", server.server_port)) as caller:
            caller.sendall(b"GET / HTTP/1.0\r\n\r\n")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # hang up at once
        assert get(server, f"/{server.token}/")[0] == 200
    assert capfd.readouterr().err == ""


def test_looking_takes_no_lock_and_writes_nothing(run):
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    read_run(run)
    with serving(run) as server:
        key = server.library.names()[0]["key"]
        get(server, f"/{server.token}/api/run/{key}")
        get(server, f"/{server.token}/api/batch/{key}/stage-0000-step-00.jsonl.gz")
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before


def test_without_a_thread_to_be_had_it_says_so_and_goes_on(run, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with serving(run) as server:
        with monkeypatch.context() as scarce:
            scarce.setattr(server.threads, "submit", refuse)
            status, body = get(server, f"/{server.token}/api/runs")
        assert (status, json.loads(body)) == (503, {"error": "there is not enough memory to answer now"})
        assert get(server, f"/{server.token}/api/runs")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.long
def test_the_command_ends_when_it_is_told_to(run):
    """By Ctrl-C and by SIGTERM, with everything said."""
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "teamtr.cli", "view", str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            link = process.stdout.readline().strip()
            with urllib.request.urlopen(link, timeout=60) as page:
                assert page.status == 200
            process.send_signal(number)
            told = process.communicate(timeout=60)[1]
            assert process.returncode == 0
            assert told.endswith("closed\n")
