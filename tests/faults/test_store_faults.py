"""What the store does with torn, flipped and missing bytes, a full disk, and a process that dies at any moment."""

from __future__ import annotations

import errno
import gzip
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.batches import RolloutBatch
from teamtr.store import (
    Checkpoints,
    Commit,
    Log,
    RunFolder,
    StoreError,
    commit_folder,
    read_episodes,
    verify_folder,
    write_atomic,
    write_episodes,
)
from teamtr.store.atomic import TornRead
from teamtr.types import Episode, Problem, Turn, Verdict

WEIGHTS = "model.safetensors"


def team(number: int) -> dict[str, str]:
    """The agents after ``number`` updates that alternate between two agents."""
    return {"left": f"a{(number + 1) // 2:x}", "right": f"b{number // 2:x}"}


def weights(agent: str, version: str) -> bytes:
    return random.Random(f"{agent} {version}").randbytes(2000)


def commit(checkpoints: Checkpoints, number: int) -> Commit:
    versions = team(number)

    def save(agent: str, folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(weights(agent, versions[agent]))
        (folder / "state.json").write_bytes(b"{}")

    return checkpoints.commit(number, versions, save, {"updates": number}, {"update": number})


def latest(checkpoints: Checkpoints) -> Commit:
    """The newest commit, if it and the bytes of every agent are those of its number."""
    found = checkpoints.latest()
    assert found is not None
    assert found.agents == team(found.number)
    assert found.progress == {"updates": found.number}
    for agent, version in found.agents.items():
        assert (checkpoints.folder_of(found, agent) / WEIGHTS).read_bytes() == weights(agent, version)
    return found


def three_commits(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for number in (0, 1, 2):
        commit(checkpoints, number)
    assert checkpoints.numbers() == [1, 2]
    return checkpoints


# --- reads that come back short -------------------------------------------------------------------------------------


def short_reads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The next so many reads give half of what is there."""
    read, left = Path.read_bytes, [count]

    def short(self: Path) -> bytes:
        data = read(self)
        left[0] -= 1
        return data[: len(data) // 2] if left[0] >= 0 else data

    monkeypatch.setattr(Path, "read_bytes", short)


def test_a_read_that_comes_back_short_once_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, log = three_commits(tmp_path / "checkpoints"), Log(tmp_path / "log.jsonl")
    log.append({"update": 1})
    log.append({"update": 2})
    short_reads(monkeypatch, 1)
    assert len(Log(log.path).read()) == 2
    short_reads(monkeypatch, 1)
    assert Checkpoints(checkpoints.folder).latest() == latest(checkpoints)


def test_nothing_is_cut_passed_over_or_discarded_for_short_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, log = three_commits(tmp_path / "checkpoints"), Log(tmp_path / "log.jsonl")
    log.append({"update": 1})
    log.append({"update": 2})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = Checkpoints(checkpoints.folder)
    for act in (Log(log.path).truncate_torn, again.latest, lambda: commit(again, 2), lambda: commit(again, 3)):
        with monkeypatch.context() as context:
            short_reads(context, 10**6)
            with pytest.raises(TornRead, match="could be read"):
                act()
        left = {path: path.read_bytes() for path in before if path.exists()}
        assert left == before


# --- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_log_torn_at_any_byte_keeps_every_record_before(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for update in (1, 2, 3):
        log.append({"update": update, "text": "é"})
    whole = log.path.read_bytes()
    line_bytes = len(whole) // 3
    for size in range(len(whole) + 1):
        log.path.write_bytes(whole[:size])
        fresh = Log(log.path)
        full_lines = size // line_bytes
        assert [r["update"] for r in fresh.read()] == [1, 2, 3][:full_lines]
        fresh.append({"update": 9})
        assert [r["update"] for r in fresh.read()] == [*[1, 2, 3][:full_lines], 9]


@pytest.mark.parametrize("tail", [b'{"update":3', b"\0\0\0\0", b"\0\0\0\n", b"12\n", b"\xff\xfe\n"])
def test_a_torn_tail_is_dropped_once(tmp_path: Path, tail: bytes) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append({"update": 1})
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + tail)
    assert log.read() == [{"update": 1}]
    assert log.path.read_bytes() == whole + tail  # reading writes nothing
    assert log.truncate_torn() == len(tail)
    assert log.path.read_bytes() == whole
    assert log.truncate_torn() == 0


def test_rewind_drops_a_torn_tail_too(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append({"update": 1})
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b'{"upd')
    assert log.rewind(lambda record: True) == 0
    assert log.path.read_bytes() == whole


@pytest.mark.parametrize("damaged", [b'{"update":', b"", b"[1]", b'{"x":{"$float":"oops"}}', b'{"x":{"$new":1}}'])
def test_a_torn_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"update":1}\n' + damaged + b'\n{"update":3}\n')
    with pytest.raises(StoreError, match=r"log\.jsonl, line 2 is damaged .*delete that line and the lines after it"):
        Log(path).read()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="line 2"):
        Log(path).append({"update": 4})
    assert path.read_bytes() == before


def test_an_append_that_fails_half_way_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append({"update": 1})
    fsync = os.fsync

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 3)  # the disk took a part of the line
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*log\.jsonl: No space left on device.*make room"):
        log.append({"update": 2})
    monkeypatch.setattr(os, "fsync", fsync)
    log.append({"update": 3})
    assert log.read() == [{"update": 1}, {"update": 3}]


# --- single files and folders ---------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "team.yaml"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*team\.yaml: No space left on device"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["team.yaml"]


def a_folder(path: Path) -> Path:
    tmp = path / ".tmp-x"
    (tmp / "sub").mkdir(parents=True)
    (tmp / WEIGHTS).write_bytes(bytes(range(256)))
    (tmp / "sub" / "state.json").write_bytes(b"{}")
    commit_folder(tmp, path / "v1")
    return path / "v1"


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("truncated", lambda f: truncate(f / WEIGHTS), r"model\.safetensors has 255 bytes instead of 256"),
    ("flipped byte", lambda f: flip(f / WEIGHTS, 100), r"model\.safetensors has changed"),
    ("deep file gone", lambda f: (f / "sub" / "state.json").unlink(), r"sub/state\.json is missing"),
    ("manifest gone", lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing"),
    (
        "manifest torn",
        lambda f: truncate(f / "manifest.json") or truncate(f / "manifest.json"),
        r"manifest\.json is dam",
    ),
    ("manifest of another shape", lambda f: (f / "manifest.json").write_bytes(b'{"a": 3}'), r"manifest\.json is dam"),
    ("not a folder any more", lambda f: shutil.rmtree(f), r"v1 is missing"),
    ("a file more", lambda f: (f / "model.bin").write_bytes(b""), r"model\.bin was not there .*remove that file"),
    ("a link", lambda f: (f / "link").symlink_to(f / WEIGHTS), r"link is a link"),
]


@pytest.mark.parametrize(("damage", "message"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_verify_names_what_is_wrong(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = a_folder(tmp_path)
    verify_folder(folder)
    damage(folder)
    with pytest.raises(StoreError, match=message):
        verify_folder(folder)


def test_hidden_files_do_not_spoil_a_folder(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    (folder / ".DS_Store").write_bytes(b"x")
    verify_folder(folder)


def test_commit_folder_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    before = (folder / "manifest.json").read_bytes()
    other = tmp_path / ".tmp-y"
    other.mkdir()
    (other / "a").write_bytes(b"")
    with pytest.raises(StoreError, match="v1 exists already"):
        commit_folder(other, folder)
    assert (folder / "manifest.json").read_bytes() == before
    (other / "manifest.json").write_bytes(b"{}")
    with pytest.raises(StoreError, match="needs for itself"):
        commit_folder(other, tmp_path / "v2")
    assert not (tmp_path / "v2").exists()


# --- damaged checkpoints --------------------------------------------------------------------------------------------

NEWEST: list[tuple[str, Callable[[Path], Any], str]] = [
    ("truncated weights", lambda c: truncate(c / "agents/right/b1" / WEIGHTS), "1999 bytes instead of 2000"),
    ("flipped weights", lambda c: flip(c / "agents/right/b1" / WEIGHTS, 7), "has changed"),
    ("agent manifest gone", lambda c: (c / "agents/right/b1/manifest.json").unlink(), "manifest.json is missing"),
    ("agent gone", lambda c: shutil.rmtree(c / "agents/right/b1"), "b1 is missing"),
    ("flipped commit", lambda c: flip(c / "commits/000002/team.json", 3), "team.json has changed"),
    ("commit manifest gone", lambda c: (c / "commits/000002/manifest.json").unlink(), "manifest.json is missing"),
    ("team.json gone", lambda c: (c / "commits/000002/team.json").unlink(), "team.json is missing"),
    ("empty commit", lambda c: [p.unlink() for p in (c / "commits/000002").iterdir()], "manifest.json is missing"),
]


@pytest.mark.parametrize(("damage", "reason"), [row[1:] for row in NEWEST], ids=[row[0] for row in NEWEST])
def test_a_damaged_newest_commit_is_passed_over_named_and_redone(
    tmp_path: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    checkpoints = three_commits(tmp_path)
    assert latest(checkpoints).number == 2
    damage(tmp_path)
    checkpoints = Checkpoints(tmp_path)  # as after a restart
    found = latest(checkpoints)
    assert found.number == 1
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("commit 2 was passed over: ")
    assert reason in found.skipped[0]
    # The update is done again: what was damaged is replaced, also under the same version.
    commit(checkpoints, 2)
    found = latest(Checkpoints(tmp_path))
    assert (found.number, found.skipped) == (2, ())


def test_an_agent_folder_replaced_by_another_whole_one_is_noticed(tmp_path: Path) -> None:
    """Each folder verifies by itself; only the commit knows that it is not the one it was made with."""
    checkpoints = three_commits(tmp_path)
    agent = tmp_path / "agents" / "right"
    shutil.rmtree(agent / "b1")
    shutil.copytree(agent / "b0", agent / "b1")
    found = latest(checkpoints)
    assert found.number == 1
    assert "is not the one that commit 2 was made with" in found.skipped[0]


def test_a_commit_under_another_number_is_noticed(tmp_path: Path) -> None:
    checkpoints = three_commits(tmp_path)
    os.rename(tmp_path / "commits" / "000002", tmp_path / "commits" / "000007")
    found = latest(checkpoints)
    assert found.number == 1
    assert "says that it is commit 2" in found.skipped[0]


def test_when_nothing_is_whole_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    checkpoints = three_commits(tmp_path)
    flip(tmp_path / "agents" / "left" / "a1" / WEIGHTS)  # both commits need it
    with pytest.raises(StoreError, match=r"none of the 2 commits .* is whole(.|\n)*commit 2 was(.|\n)*commit 1 was"):
        checkpoints.latest()


def test_damaged_commits_above_the_one_resumed_from_go_away(tmp_path: Path) -> None:
    """Else a commit of the abandoned future would become whole again when a folder it shares is rewritten."""
    checkpoints = Checkpoints(tmp_path, keep=0)
    for number in range(5):
        commit(checkpoints, number)
    flip(tmp_path / "agents" / "left" / "a2" / WEIGHTS)  # in commits 3 and 4
    checkpoints = Checkpoints(tmp_path, keep=0)
    assert latest(checkpoints).number == 2
    commit(checkpoints, 3)
    assert checkpoints.numbers() == [0, 1, 2, 3]
    assert latest(checkpoints).number == 3


def test_half_written_folders_are_ignored_and_swept_by_the_next_owner(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as run:
        commit(run.checkpoints, 0)
    # A commit that died before its rename: everything is there but the name.
    shutil.copytree(tmp_path / "checkpoints/commits/000000", tmp_path / "checkpoints/commits/.tmp-000001")
    shutil.copytree(tmp_path / "checkpoints/agents/left/a0", tmp_path / "checkpoints/agents/left/.tmp-1")
    (tmp_path / "episodes" / ".tmp-2").write_bytes(b"half")
    (tmp_path / ".tmp-3").write_bytes(b"half")
    (tmp_path / "mine" / ".tmp-4").mkdir(parents=True)  # not the store's
    assert latest(RunFolder.read(tmp_path).checkpoints).number == 0
    with RunFolder.open(tmp_path) as run:
        assert list(tmp_path.rglob(".tmp-*")) == [tmp_path / "mine" / ".tmp-4"]
        found = latest(run.checkpoints)
        assert (found.number, found.skipped) == (0, ())


def test_a_first_commit_half_written_is_no_commit(tmp_path: Path) -> None:
    (tmp_path / "commits" / ".tmp-x").mkdir(parents=True)
    assert Checkpoints(tmp_path).latest() is None


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")]
)
def test_a_save_that_fails_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    checkpoints = three_commits(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def save(agent: str, folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(b"half")
        raise error

    with pytest.raises(StoreError if isinstance(error, OSError) else type(error)):
        checkpoints.commit(3, team(3), save, {})
    assert sorted(tmp_path.rglob("*")) == before
    assert latest(checkpoints).number == 2
    with pytest.raises(StoreError, match="'left' saved no file"):
        checkpoints.commit(3, team(3), lambda agent, folder: None, {})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_reader_survives_pruning_under_its_eyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader lists may be gone when it looks; that is progress, not damage."""
    writer = three_commits(tmp_path)
    reader = Checkpoints(tmp_path, writable=False)
    listed = reader.numbers()

    def numbers_before_pruning() -> list[int]:
        monkeypatch.undo()
        for number in (3, 4):
            commit(writer, number)
        return listed

    monkeypatch.setattr(reader, "numbers", numbers_before_pruning)
    found = latest(reader)
    assert (found.number, found.skipped) == (4, ())


# --- damaged episodes -----------------------------------------------------------------------------------------------


def a_batch() -> RolloutBatch:
    ids = np.arange(3, dtype=np.int32)
    turn = Turn("left", 0, ids, ids, np.linspace(-3, 0, 3, dtype=np.float32), "stop", "aa", "text")
    episodes = tuple(Episode("p", g, (turn,), "a", Verdict("wrong", float("nan"), None), "bb") for g in range(2))
    return RolloutBatch((Problem("p", "q"),), episodes, 2)


@pytest.mark.long
def test_a_torn_or_flipped_episode_file_never_reads_as_other_episodes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    write_episodes(path, a_batch())
    whole = path.read_bytes()
    refused = 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"x\.jsonl\.gz"):
            read_episodes(path)
    for position in range(len(whole)):
        path.write_bytes(whole)
        flip(path, position)
        try:
            back = read_episodes(path)
        except StoreError:
            refused += 1
        else:  # a byte that says nothing, such as the time stamp: the episodes are the same ones
            write_episodes(tmp_path / "back.gz", back)
            assert (tmp_path / "back.gz").read_bytes() == whole
    assert refused >= len(whole) - 10  # a gzip header is ten bytes


def packed(content: bytes) -> bytes:
    """Without the time, which would give a test another name in every process that collects it."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"torn or damaged|does not hold episodes"),
        (packed(b""), "does not hold episodes"),
        (packed(b"{}\n"), "does not hold episodes"),
        (packed(b'{"kind":"other"}\n'), "its kind is 'other'"),
        (
            packed(b'{"kind":"teamtr-episodes","format":2}\n'),
            "has format 2, this version reads 1: update teamtr",
        ),
        (
            packed(
                b'{"kind":"teamtr-episodes","format":1,"group_size":1,'
                b'"problems":[{"id":"p","prompt":"","answer":null,"private":{},"columns":{}}]}\n'
            ),
            "needs 1 episodes, got 0",
        ),
    ],
)
def test_what_is_no_episode_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=message):
        read_episodes(path)


def test_a_missing_episode_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no episode file .*x\.gz"):
        read_episodes(tmp_path / "x.gz")


# --- a process that dies --------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; returns its pid."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
def test_dying_at_every_durable_operation_loses_at_most_the_update_in_progress(tmp_path: Path) -> None:
    """Sync, rename, replace and removal are where the disk's state changes: the process dies before each of them."""
    original = tmp_path / "original"
    with RunFolder.open(original) as run:
        for number in range(3):
            commit(run.checkpoints, number)
            run.log.append({"update": number})

    def update_and_die(path: Path, fatal: int) -> None:
        calls = 0

        def fatal_at(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == fatal:
                    os._exit(42)
                return function(*arguments, **options)

            return counted

        with RunFolder.open(path) as run:
            for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
                setattr(os, name, fatal_at(getattr(os, name)))
            commit(run.checkpoints, 3)
            run.log.append({"update": 3})

    found: list[int] = []
    for fatal in range(1, 200):
        path = tmp_path / f"{fatal}"
        shutil.copytree(original, path)
        code = exit_code(in_child(lambda path=path, fatal=fatal: update_and_die(path, fatal)))
        with RunFolder.open(path) as run:
            assert not list(path.rglob(".tmp-*"))
            resumed = latest(run.checkpoints)
            assert resumed.skipped == ()
            found.append(resumed.number)
            run.log.rewind(lambda record, number=resumed.number: record["update"] <= number)
            for number in range(resumed.number, 4):  # committing the resumed one again finishes its pruning
                commit(run.checkpoints, number)
                if number > run.log.read()[-1]["update"]:
                    run.log.append({"update": number})
            assert latest(run.checkpoints).number == 3
            assert run.checkpoints.numbers() == [2, 3]
        # Whenever it died, the run ends with the same files as the one that did not die.
        assert {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()} == finished(tmp_path)
        if code == 0:
            break
        assert code == 42
    assert code == 0
    assert found == sorted(found)  # once committed, it stays committed
    assert set(found) == {2, 3}
    assert len(found) > 20


def finished(tmp_path: Path) -> dict[Path, bytes]:
    """The files of the run that nothing disturbed."""
    path = tmp_path / "undisturbed"
    if not path.exists():
        with RunFolder.open(path) as run:
            for number in range(4):
                commit(run.checkpoints, number)
                run.log.append({"update": number})
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.long
def test_killed_at_random_moments_the_newest_commit_is_whole_and_never_older(tmp_path: Path) -> None:
    rng = random.Random(20)

    def train() -> None:
        with RunFolder.open(tmp_path) as run:
            found = run.checkpoints.latest()
            number = -1 if found is None else found.number
            run.log.rewind(lambda record: record["update"] <= number)
            while True:
                number += 1
                commit(run.checkpoints, number)
                run.log.append({"update": number})

    reached = -1
    for _ in range(10):
        child = in_child(train)
        try:
            deadline = time.monotonic() + 120
            while max(RunFolder(tmp_path).checkpoints.numbers(), default=-1) <= reached:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))
        finally:
            os.kill(child, signal.SIGKILL)
            code = exit_code(child)
        assert code == -signal.SIGKILL  # it did not fail by itself
        with RunFolder.open(tmp_path) as run:
            found = latest(run.checkpoints)
            assert found.skipped == ()
            assert found.number > reached
            reached = found.number
            logged = [record["update"] for record in run.log.read()]
            # At most the last record is missing from the log, and the commit holds it.
            assert logged in (list(range(reached + 1)), list(range(reached)))
            if len(logged) == reached:
                assert found.record is not None
                run.log.append(found.record)
