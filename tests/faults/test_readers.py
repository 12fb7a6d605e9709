"""Readers beside a run that goes on: what they read stays until they are done, or dead, and no longer."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest
from test_store_faults import WEIGHTS, commit, exit_code, in_child, latest, team, weights

from teamtr.store import Checkpoints, RunFolder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def require_whole(checkpoints: Checkpoints, number: int) -> None:
    for agent, version in team(number).items():
        assert (checkpoints.folder / "agents" / agent / version / WEIGHTS).read_bytes() == weights(agent, version)


def test_a_commit_stays_while_a_reader_holds_it_and_no_longer(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path / "read", keep=1)
    undisturbed = Checkpoints(tmp_path / "alone", keep=1)
    for number in range(3):
        commit(writer, number)
        commit(undisturbed, number)
    reader = Checkpoints(writer.folder, writable=False)
    assert latest(reader).number == 2
    for number in range(3, 8):
        commit(writer, number)
        commit(undisturbed, number)
        require_whole(reader, 2)
    assert writer.numbers() == [2, 7]
    assert latest(reader).number == 7  # who asks again lets go
    commit(writer, 8)
    assert writer.numbers() == [7, 8]
    del reader
    for checkpoints in (writer, undisturbed):
        commit(checkpoints, 9)
    assert writer.numbers() == [9]
    assert files(writer.folder) == files(undisturbed.folder)


def test_several_readers_hold_one_commit(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, keep=1)
    commit(writer, 0)
    readers = [Checkpoints(tmp_path, writable=False) for _ in range(2)]
    assert [latest(reader).number for reader in readers] == [0, 0]
    for number in (1, 2):
        commit(writer, number)
        assert writer.numbers() == [0, number]
        readers.pop()
    commit(writer, 3)
    assert writer.numbers() == [3]


def test_a_dead_reader_holds_nothing(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, keep=1)
    commit(writer, 0)
    read, write = os.pipe()

    def hold() -> None:
        reader = Checkpoints(tmp_path, writable=False)
        assert reader.latest() is not None
        os.write(write, b"x")
        time.sleep(600)

    child = in_child(hold)
    try:
        assert os.read(read, 1) == b"x"
        commit(writer, 1)
        assert writer.numbers() == [0, 1]
        require_whole(writer, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        exit_code(child)
    commit(writer, 2)
    assert writer.numbers() == [2]


def test_a_child_of_a_reader_does_not_hold_what_its_parent_let_go(tmp_path: Path) -> None:
    """As a worker does that was forked while the weights were read."""
    writer = Checkpoints(tmp_path, keep=1)
    commit(writer, 0)
    reader = Checkpoints(tmp_path, writable=False)
    assert latest(reader).number == 0
    child = in_child(lambda: time.sleep(600))
    try:
        del reader
        commit(writer, 1)
        deadline = time.monotonic() + 60  # the child closes what it inherited when it is first scheduled
        number = 1
        while writer.numbers() != [number] and time.monotonic() < deadline:
            number += 1
            commit(writer, number)
        assert writer.numbers() == [number]
    finally:
        os.kill(child, signal.SIGKILL)
        exit_code(child)


def test_a_folder_that_may_not_be_written_to_can_be_read(tmp_path: Path) -> None:
    commit(Checkpoints(tmp_path), 0)
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert latest(Checkpoints(tmp_path, writable=False)).number == 0
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_file_system_without_locks_protects_nothing_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    writer, reader = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, writable=False)
    for number in range(3):
        commit(writer, number)
        assert latest(reader).number == number
    assert writer.numbers() == [2]


@pytest.mark.long
def test_readers_beside_a_writer_that_prunes_all_but_one_commit(tmp_path: Path) -> None:
    """Each reads, waits until the writer has gone on by two commits, and reads all of the old one again."""

    def train() -> None:
        with RunFolder.open(tmp_path, keep_commits=1) as run:
            number = 0
            while True:
                commit(run.checkpoints, number)
                number += 1

    def read() -> None:
        deadline = time.monotonic() + 300
        for _ in range(25):
            reader = RunFolder.read(tmp_path).checkpoints
            found = reader.latest()
            assert found is not None
            assert found.skipped == ()
            while max(reader.numbers()) < found.number + 2:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            require_whole(reader, found.number)

    writer = in_child(train)
    readers = []
    try:
        deadline = time.monotonic() + 120
        while not Checkpoints(tmp_path / "checkpoints").numbers():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        readers = [in_child(read) for _ in range(2)]
        assert [exit_code(child) for child in readers] == [0, 0]
        readers = []
    finally:
        for child in (writer, *readers):
            os.kill(child, signal.SIGKILL)
        codes = [exit_code(child) for child in (writer, *readers)]
    assert codes == [-signal.SIGKILL], "the writer went on to the end"
    with RunFolder.open(tmp_path, keep_commits=1) as run:
        number = latest(run.checkpoints).number
        commit(run.checkpoints, number + 1)
        assert run.checkpoints.numbers() == [number + 1], "nothing is held any more"
    assert len(list((run.checkpoints.folder / "agents").glob("*/*"))) == 2
