"""A run folder has one owner, also where locks do not reach other machines."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from teamtr.store import RunFolder, lease
from teamtr.store.folder import LOCK, RunLocked


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Touches and looks follow each other fast. A lease is longer than any machine stops a process."""
    monkeypatch.setattr(lease, "LEASE_S", 600.0)
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "LOOK_S", 0.02)


@pytest.fixture
def nobody_waits(monkeypatch):
    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(lease, "time", SimpleNamespace(time=time.time, sleep=sleep))


def say(folder, host: str) -> None:
    """Somebody's name in the lock, without the lock: as a machine leaves it that ours do not reach."""
    with RunFolder.open(folder):
        pass
    (folder / LOCK).write_text(json.dumps({"pid": 7, "host": host}))


@contextmanager
def beating(file, every: float):
    end = threading.Event()

    def beat() -> None:
        while not end.wait(every):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_living_owner_on_another_machine_is_respected(tmp_path):
    say(tmp_path / "run", "elsewhere")
    before = (tmp_path / "run" / LOCK).read_text()
    refused = pytest.raises(RunLocked, match="process 7 on elsewhere")
    with beating(tmp_path / "run" / LOCK, 0.05), refused, RunFolder.open(tmp_path / "run"):
        raise AssertionError("taken from a living owner")
    assert (tmp_path / "run" / LOCK).read_text() == before, "its name still stands there"


@pytest.mark.long
def test_a_dead_one_is_waited_out(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    began = time.monotonic()
    say(tmp_path / "run", "elsewhere")
    with RunFolder.open(tmp_path / "run"):
        assert time.monotonic() - began > 0.5 * lease.LEASE_S, "it might have lived"


def test_one_that_is_long_dead_is_not(tmp_path, nobody_waits):
    say(tmp_path / "run", "elsewhere")
    os.utime(tmp_path / "run" / LOCK, (0, 0))
    with RunFolder.open(tmp_path / "run"):
        pass


def test_on_this_machine_the_lock_alone_decides(tmp_path, nobody_waits):
    """What a killed process wrote here costs nobody a wait."""
    say(tmp_path / "run", socket.gethostname())
    with RunFolder.open(tmp_path / "run"):
        pass


def test_an_owner_touches_the_file_until_it_ends(tmp_path):
    file = tmp_path / "run" / LOCK

    def touched() -> bool:
        first, end = file.stat().st_mtime_ns, time.monotonic() + 60.0
        while file.stat().st_mtime_ns == first:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    with RunFolder.open(tmp_path / "run"):
        assert touched()
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert file.read_text() == ""
    assert "lease" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("left", ["", "{", "[]", '{"pid": "x", "host": 1}', "null"])
def test_a_lock_that_says_nothing_holds_nobody_up(left, tmp_path, nobody_waits):
    say(tmp_path / "run", "elsewhere")
    (tmp_path / "run" / LOCK).write_text(left)
    with RunFolder.open(tmp_path / "run"):
        pass


# -- told to whoever only looks ---------------------------------------------------------------------------------


def test_a_looker_sees_a_holder_without_taking_its_lock(tmp_path):
    run = tmp_path / "run"
    with RunFolder.open(run):
        assert RunFolder(run).is_in_use
    assert not RunFolder(run).is_in_use, "released"
    assert not RunFolder(tmp_path / "none").is_in_use


@pytest.mark.parametrize(
    ("host", "pid", "age", "is_in_use"),
    [
        ("here", "this process", 0.0, True),
        ("here", "this process", 1200.0, False),  # a process with the number of one that is gone
        ("here", 2**22 + 1, 0.0, False),  # more than Linux gives out
        ("here", -1, 0.0, False),  # all processes, to kill
        ("elsewhere", 7, 0.0, True),
        ("elsewhere", 7, 1200.0, False),
    ],
)
def test_a_name_that_was_left_behind(tmp_path, host, pid, age, is_in_use):
    host = socket.gethostname() if host == "here" else host
    pid = os.getpid() if pid == "this process" else pid
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_text(json.dumps({"pid": pid, "host": host}))
    then = time.time() - age
    os.utime(run / LOCK, (then, then))
    assert RunFolder(run).is_in_use is is_in_use


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 1}', '{"pid": 1e400, "host": "h"}', "null"])
def test_whatever_else_stands_there_holds_nothing(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    assert not RunFolder(tmp_path).is_in_use
