"""The store keeps what it is given to the last bit, once, for one writer at a time."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr.batches import RolloutBatch
from teamtr.bounded_json import DEEPEST
from teamtr.store import (
    Checkpoints,
    Log,
    NotARun,
    RunFolder,
    RunLocked,
    StoreError,
    batch_name,
    commit_folder,
    read_episodes,
    verify_folder,
    write_atomic,
    write_episodes,
)
from teamtr.store.log import decode, encode
from teamtr.store.removals import Removals
from teamtr.types import Episode, Problem, Turn, Verdict

# --- equality to the last bit, nan included -------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit, except that a list equals a tuple and all nans are one."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(type(a))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and (a.hex() == b.hex() or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and a == b


def test_same_sees_a_changed_bit() -> None:
    assert same({"a": [1, 0.1, math.nan]}, {"a": [1, 0.1, math.nan]})
    assert not same(0.0, -0.0)
    assert not same(1, 1.0)
    assert not same(np.float32([0.1]), np.float32([np.nextafter(np.float32(0.1), np.float32(1))]))


# --- generated records ----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(), max_size=12)  # lone surrogates included
KEYS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(["$float", "$int", "$$str", "$", "$other"]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(2**63 - 2, 2**64 + 2), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, dtype=np.int32))
LOGPROBS = st.lists(st.floats(width=32), max_size=6).map(lambda values: np.array(values, dtype=np.float32))
PROBLEMS = st.builds(
    Problem,
    id=TEXT,
    prompt=TEXT,
    answer=JSON,
    private=st.dictionaries(KEYS, TEXT, max_size=2),
    columns=st.dictionaries(KEYS, JSON, max_size=3),
)
TURNS = st.builds(
    Turn,
    agent=TEXT,
    round=st.integers(0, 9),
    context_ids=IDS,
    token_ids=IDS,
    sampler_logprobs=LOGPROBS,
    finish=st.sampled_from(["stop", "length"]),
    agent_version=TEXT,
    text=TEXT,
)
EPISODES = st.builds(
    Episode,
    problem_id=TEXT,
    group_index=st.integers(0, 9),
    turns=st.lists(TURNS, max_size=3).map(tuple),
    answer=TEXT,
    verdict=st.builds(
        Verdict,
        kind=st.sampled_from(["right", "wrong", "unparsed", "timeout", "crash"]),
        reward=st.floats(),
        extracted=st.none() | TEXT,
    ),
    team_version=TEXT,
)


@st.composite
def batches(draw: Callable[..., Any]) -> RolloutBatch:
    size_p, size_g = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    size_e = size_p * size_g
    return RolloutBatch(
        problems=tuple(draw(st.lists(PROBLEMS, min_size=size_p, max_size=size_p))),
        episodes=tuple(draw(st.lists(EPISODES, min_size=size_e, max_size=size_e))),
        group_size=size_g,
    )


def a_batch(reward: float = 1.0, logprob: float = -0.1) -> RolloutBatch:
    turn = Turn(
        agent="left",
        round=0,
        context_ids=np.array([1, 2, 3], dtype=np.int32),
        token_ids=np.array([7, 0], dtype=np.int32),
        sampler_logprobs=np.array([logprob, -2.5], dtype=np.float32),
        finish="stop",
        agent_version="ab12",
        text="3 – π\u2028\r\n",
    )
    problem = Problem("p0", "what?", answer={"b": 1, "a": [0.5]}, private={"left": "x"}, columns={"z": None, "y": 2})
    episodes = tuple(Episode("p0", g, (turn, turn), "3", Verdict("right", reward, "3"), "cd34") for g in range(2))
    return RolloutBatch((problem,), episodes, 2)


# --- episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=40)
@given(batch=batches())
def test_any_batch_comes_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, batch: RolloutBatch) -> None:
    path = tmp_path_factory.mktemp("episodes") / batch_name(3, 1)
    write_episodes(path, batch)
    first = path.read_bytes()
    back = read_episodes(path)
    assert same(batch, back)
    write_episodes(path, back)
    assert path.read_bytes() == first


def test_equal_batches_give_equal_bytes_whatever_the_order_of_keys(tmp_path: Path) -> None:
    batch = a_batch()
    problem = batch.problems[0]
    shuffled = dataclasses.replace(
        problem,
        answer=dict(reversed(problem.answer.items())),
        columns=dict(reversed(problem.columns.items())),
    )
    write_episodes(tmp_path / "a.gz", batch)
    write_episodes(tmp_path / "other-name.gz", dataclasses.replace(batch, problems=(shuffled,)))
    a, b = (tmp_path / "a.gz").read_bytes(), (tmp_path / "other-name.gz").read_bytes()
    assert a == b
    assert a[4:8] == bytes(4)  # no time stamp
    write_episodes(tmp_path / "b.gz", a_batch(logprob=float(np.nextafter(np.float32(-0.1), np.float32(0)))))
    assert (tmp_path / "b.gz").read_bytes() != a  # one bit of one log-probability is another file


def test_episode_file_is_gzip_of_a_header_and_one_line_per_episode(tmp_path: Path) -> None:
    path = tmp_path / batch_name(3, 1)
    assert path.name == "stage-0003-step-01.jsonl.gz"
    write_episodes(path, a_batch())
    header, *episodes, end = gzip.decompress(path.read_bytes()).split(b"\n")
    assert end == b""
    head = json.loads(header)
    assert (head["kind"], head["format"], head["group_size"]) == ("teamtr-episodes", 1, 2)
    assert len(episodes) == 2
    # A field added to a record must be added to the file.
    first = json.loads(episodes[0])
    for record, body in ((Problem, head["problems"][0]), (Episode, first), (Turn, first["turns"][0])):
        assert set(body) == {field.name for field in dataclasses.fields(record)}
    assert set(first["verdict"]) == {field.name for field in dataclasses.fields(Verdict)}


def test_batch_names_sort_in_time() -> None:
    names = [batch_name(stage, step) for stage in (0, 9, 10, 999, 1000) for step in (0, 9, 10)]
    assert names == sorted(names)
    with pytest.raises(ValueError, match="count from 0"):
        batch_name(-1, 0)


def test_arrays_of_another_type_are_refused_where_they_are(tmp_path: Path) -> None:
    batch = a_batch()
    turn = dataclasses.replace(batch.episodes[1].turns[0], sampler_logprobs=np.array([-0.1, -2.5]))
    bad = dataclasses.replace(batch.episodes[1], turns=(batch.episodes[1].turns[0], turn))
    with pytest.raises(StoreError, match=r"episode 1, turn 1: sampler_logprobs is float64 .* says float32"):
        write_episodes(tmp_path / "x.gz", dataclasses.replace(batch, episodes=(batch.episodes[0], bad)))
    assert not any(tmp_path.iterdir())


# --- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=40)
@given(records=st.lists(st.dictionaries(KEYS, JSON, max_size=3), max_size=4))
def test_any_record_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    log = Log(tmp_path_factory.mktemp("log") / "log.jsonl")
    for record in records:
        log.append(record)
    assert same(log.read(), records)


def test_log_is_plain_json_lines_in_the_order_written(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    assert log.read() == []
    log.append({"update": 1, "agent": "left", "kl": 0.5})
    log.append({"update": 2, "kl": math.nan, "grad": -math.inf, "seed": 2**70, "$x": np.float32(0.5)})
    assert log.path.read_bytes() == (
        b'{"update":1,"agent":"left","kl":0.5,"$crc":"609c6064"}\n'
        b'{"update":2,"kl":{"$float":"nan"},"grad":{"$float":"-inf"},"seed":{"$int":"0x400000000000000000"},"$$x":0.5,'
        b'"$crc":"895a358e"}\n'
    )
    assert same(log.read()[1], {"update": 2, "kl": math.nan, "grad": -math.inf, "seed": 2**70, "$x": 0.5})


def test_a_line_that_is_not_what_was_written_is_noticed(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.path.write_bytes(b'{"update":0}\n')  # of a version without checksums
    log.append({"update": 1, "reward": 0.25})
    log.append({"update": 2, "reward": 0.5})
    whole = log.path.read_bytes()
    assert log.altered() == []
    for old, new in ((b"0.25", b"0.35"), (b'"$crc"', b'"$crd"'), (b'"reward":0.25,', b"")):
        log.path.write_bytes(whole.replace(old, new, 1))
        if b"$crd" not in new:  # which nobody can read
            assert Log(log.path).altered() == [2]
    log.path.write_bytes(b"\n".join([*whole.split(b"\n")[:2], b'{"update":2}', b""]))
    assert Log(log.path).altered() == [3], "the lines before it have one"


def test_numpy_becomes_numbers_without_losing_nan(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append(
        {
            "ints": np.array([[1, 2], [3, 4]], dtype=np.int32),
            "floats": np.array([0.1, math.nan], dtype=np.float32),
            "scalar": np.array(2.5),
            "flag": np.bool_(True),
            "count": np.int64(-3),
        }
    )
    want = {
        "ints": [[1, 2], [3, 4]],
        "floats": [float(np.float32(0.1)), math.nan],
        "scalar": 2.5,
        "flag": True,
        "count": -3,
    }
    assert same(log.read(), [want])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": {"b": [0, Path("x")]}}, r"\.a\.b\[1\] is a PosixPath"),
        ({"a": {1: 2}}, r"\.a has the key 1"),
        ({"a": b"x"}, r"\.a is a bytes"),
        ({"a": np.array(["x"])}, r"\.a is a ndarray"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append({"ok": 1})
    with pytest.raises(StoreError, match=message):
        log.append(record)
    assert log.read() == [{"ok": 1}]


def test_rewind_keeps_the_longest_good_prefix_and_its_bytes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for update in (1, 2, 9, 3):
        log.append({"update": update, "x": math.nan})
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert log.rewind(lambda record: record["update"] <= 3) == 2  # the last one satisfies, behind one that does not
    assert log.path.read_bytes() == b"".join(lines[:2])
    assert log.rewind(lambda record: True) == 0
    log.append({"update": 4})
    assert [record["update"] for record in log.read()] == [1, 2, 4]
    assert log.rewind(lambda record: False) == 3
    assert log.path.read_bytes() == b""


# --- atomic writes and folders --------------------------------------------------------------------------------------


def test_write_atomic_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode  # as readable for others as any file of this user


def test_manifest_lists_size_and_sha256_of_every_file(tmp_path: Path) -> None:
    tmp = tmp_path / ".tmp-x"
    (tmp / "sub").mkdir(parents=True)
    (tmp / "a.bin").write_bytes(b"abc")
    (tmp / "sub" / "b.json").write_bytes(b"")
    manifest_hash = commit_folder(tmp, tmp_path / "final")
    body = (tmp_path / "final" / "manifest.json").read_bytes()
    assert orjson.loads(body) == {
        # the sha256 test vectors of "abc" and of nothing
        "a.bin": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        "sub/b.json": {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    }
    assert verify_folder(tmp_path / "final") == manifest_hash == hashlib.sha256(body).hexdigest()
    assert not tmp.exists()


def test_everything_is_synced_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that reaches the disk before its content is the classic way to lose both."""
    tmp = tmp_path / ".tmp-x"
    (tmp / "sub").mkdir(parents=True)
    (tmp / "a").write_bytes(b"abc")
    (tmp / "sub" / "b").write_bytes(b"def")
    events: list[Any] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def traced_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))

    commit_folder(tmp, tmp_path / "final")
    at = events.index("rename")
    final = tmp_path / "final"
    inodes = {path.stat().st_ino for path in (final, *final.rglob("*"))}
    assert len(inodes) == 5  # the folder, sub, a, b and the manifest
    assert inodes <= set(events[:at])
    assert events[at + 1 :] == [tmp_path.stat().st_ino]

    events.clear()
    write_atomic(tmp_path / "file", b"x")
    assert events == [(tmp_path / "file").stat().st_ino, "rename", tmp_path.stat().st_ino]

    events.clear()
    log = Log(tmp_path / "log.jsonl")
    log.append({})
    assert events == [log.path.stat().st_ino, tmp_path.stat().st_ino]
    log.append({})
    assert events[2:] == [log.path.stat().st_ino]


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Saver:
    """Writes a file per agent and remembers whom it was asked to save."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, agent: str, folder: Path) -> None:
        self.calls.append(agent)
        (folder / "model.safetensors").write_bytes(f"weights of {agent}".encode())
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "state.json").write_text("{}")


def stored(checkpoints: Checkpoints) -> dict[str, list[str]]:
    agents = checkpoints.folder / "agents"
    return {agent.name: sorted(p.name for p in agent.iterdir()) for agent in sorted(agents.iterdir())}


def test_commit_and_latest_round_trip(tmp_path: Path) -> None:
    checkpoints, save = Checkpoints(tmp_path), Saver()
    assert checkpoints.latest() is None
    progress = {"stage": 1, "beta": math.inf, "order": ["right", "left"]}
    record = {"update": 3, "kl": math.nan}
    made = checkpoints.commit(3, {"left": "aa", "right": "bb"}, save, progress, record)
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert same(dataclasses.asdict(found), dataclasses.asdict(made))
    assert found.number == 3
    assert found.agents == {"left": "aa", "right": "bb"}
    assert same(found.progress, progress)
    assert same(found.record, record)
    assert found.skipped == ()
    folder = checkpoints.folder_of(found, "left")
    assert folder == tmp_path / "agents" / "left" / "aa"
    assert (folder / "model.safetensors").read_bytes() == b"weights of left"
    assert found.manifests["left"] == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert (tmp_path / "commits" / "000003" / "team.json").is_file()
    with pytest.raises(StoreError, match="no agent 'middle'; it has left, right"):
        checkpoints.folder_of(found, "middle")


def test_only_new_versions_are_saved(tmp_path: Path) -> None:
    checkpoints, save = Checkpoints(tmp_path), Saver()
    checkpoints.commit(0, {"left": "a0", "right": "b0"}, save, {})
    checkpoints.commit(1, {"left": "a1", "right": "b0"}, save, {})
    assert save.calls == ["left", "right", "left"]
    checkpoints = Checkpoints(tmp_path)  # another process knows it from the disk
    checkpoints.commit(2, {"left": "a1", "right": "b1"}, save, {})
    assert save.calls == ["left", "right", "left", "right"]


def test_the_same_commit_twice_is_one_commit(tmp_path: Path) -> None:
    checkpoints, save = Checkpoints(tmp_path), Saver()
    first = checkpoints.commit(1, {"left": "a1"}, save, {"x": math.nan}, {"b": 1, "a": 2})
    body = (tmp_path / "commits" / "000001" / "team.json").read_bytes()
    again = checkpoints.commit(1, {"left": "a1"}, save, {"x": math.nan}, {"a": 2, "b": 1})
    assert same(dataclasses.asdict(first), dataclasses.asdict(again))
    assert save.calls == ["left"]
    assert (tmp_path / "commits" / "000001" / "team.json").read_bytes() == body


def test_history_is_not_rewritten(tmp_path: Path) -> None:
    checkpoints, save = Checkpoints(tmp_path), Saver()
    checkpoints.commit(1, {"left": "a1"}, save, {})
    checkpoints.commit(2, {"left": "a2"}, save, {})
    with pytest.raises(StoreError, match=r"cannot commit 2: .*000002 is intact and holds other content"):
        checkpoints.commit(2, {"left": "a3"}, save, {})
    with pytest.raises(StoreError, match=r"cannot commit 1: .* holds a later update"):
        checkpoints.commit(1, {"left": "a1"}, save, {})
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.agents == {"left": "a2"}
    assert save.calls == ["left", "left"]


def test_pruning_keeps_the_last_commits_and_what_they_need(tmp_path: Path) -> None:
    checkpoints, save = Checkpoints(tmp_path, keep=2), Saver()
    teams = [("a0", "b0"), ("a1", "b0"), ("a1", "b1"), ("a2", "b1"), ("a2", "b2")]
    for number, (left, right) in enumerate(teams):
        checkpoints.commit(number, {"left": left, "right": right}, save, {})
    assert checkpoints.numbers() == [3, 4]
    assert stored(checkpoints) == {"left": ["a2"], "right": ["b1", "b2"]}
    # A version that comes back after it was pruned is saved again.
    checkpoints.commit(5, {"left": "a0", "right": "b2"}, save, {})
    assert stored(checkpoints) == {"left": ["a0", "a2"], "right": ["b2"]}
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.number == 5


def test_a_commit_does_not_wait_for_what_it_prunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pruned is out of the way when the commit returns, and gone when the block ends."""
    remove, may_go, asked = shutil.rmtree, threading.Event(), []

    def slowly(folder: Path) -> None:
        asked.append(folder)
        assert may_go.wait(60)
        remove(folder)

    with RunFolder.open(tmp_path, keep_commits=1) as run:
        save = Saver()
        run.checkpoints.commit(0, {"left": "a0"}, save, {})
        monkeypatch.setattr(shutil, "rmtree", slowly)
        run.checkpoints.commit(1, {"left": "a1"}, save, {})  # returns, though nothing was removed yet
        assert run.checkpoints.numbers() == [1]
        assert [name for name in stored(run.checkpoints)["left"] if not name.startswith(".tmp-")] == ["a1"]
        assert len(list(tmp_path.rglob(".tmp-*"))) == 2  # a commit and an agent
        may_go.set()
        run.checkpoints.commit(2, {"left": "a2"}, save, {})
        assert len(asked) >= 2  # the removals of a commit are over before the next one is written
    assert not list(tmp_path.rglob(".tmp-*"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("removing")]


@pytest.mark.parametrize("when", ["the next commit", "the end of the block"])
def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def refused(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def commit_until_told() -> None:
        with RunFolder.open(tmp_path, keep_commits=1) as run:
            run.checkpoints.commit(0, {"left": "a0"}, save, {})
            monkeypatch.setattr(shutil, "rmtree", refused)
            run.checkpoints.commit(1, {"left": "a1"}, save, {})
            if when == "the next commit":
                with pytest.raises(StoreError, match="Read-only"):
                    run.checkpoints.commit(2, {"left": "a2"}, save, {})
                raise ZeroDivisionError

    save = Saver()
    with pytest.raises(ZeroDivisionError if when == "the next commit" else StoreError):
        commit_until_told()
    monkeypatch.undo()
    with RunFolder.open(tmp_path, keep_commits=1) as run:
        assert run.checkpoints.numbers() == [1]
        assert not list(tmp_path.rglob(".tmp-*"))  # leftovers are gone


def test_a_folder_is_given_back_by_who_does_not_wait_for_its_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(removals: Removals) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Removals, "end", interrupted)
        with pytest.raises(KeyboardInterrupt), RunFolder.open(tmp_path):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]
    with RunFolder.open(tmp_path):
        pass


def test_keep_0_keeps_all_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    everything, save = Checkpoints(tmp_path / "all", keep=0), Saver()
    for number in range(4):
        everything.commit(number, {"left": f"a{number}"}, save, {})
    assert everything.numbers() == [0, 1, 2, 3]
    assert stored(everything) == {"left": ["a0", "a1", "a2", "a3"]}

    few = Checkpoints(tmp_path / "few", keep=1)
    few.commit(0, {"left": "a0"}, save, {})
    (tmp_path / "few" / "agents" / "left" / "notes.txt").write_text("mine")
    few.commit(1, {"left": "a1"}, save, {})
    assert stored(few) == {"left": ["a1", "notes.txt"]}
    with pytest.raises(ValueError, match="keep must be 0"):
        Checkpoints(tmp_path, keep=-1)


def test_numbers_beyond_six_digits_stay_in_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in (999_998, 999_999, 1_000_000):
        checkpoints.commit(number, {"left": "a0"}, Saver(), {})
    assert checkpoints.numbers() == [999_999, 1_000_000]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ü", "x" * 101, "../../up"])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a folder: use at most 100 letters"):
        Checkpoints(tmp_path).commit(0, {name: "a0"}, Saver(), {})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("version", ["", "v1", "A0", "..", "a/b", "a0\n"])
def test_versions_that_are_no_hash_are_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(StoreError, match="is not a hash"):
        Checkpoints(tmp_path).commit(0, {"left": version}, Saver(), {})


@pytest.mark.parametrize("name", ["left", "_a", "-", "Agent-2.b", "x" * 100])
def test_ordinary_names_are_taken(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.folder_of(checkpoints.commit(0, {name: "a0"}, Saver(), {}), name).name == "a0"


# --- the run folder -------------------------------------------------------------------------------------------------


def test_a_run_folder_has_its_rooms(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunFolder.open(path, keep_commits=3) as run:
        assert run.team_file == path / "team.yaml"
        assert run.log.path == path / "log.jsonl"
        assert run.checkpoints.folder == path / "checkpoints"
        assert run.checkpoints.keep == 3
        assert run.checkpoints is run.checkpoints  # it remembers what it has hashed
        assert run.episodes == path / "episodes"
        run.log.append({"update": 1})
        run.checkpoints.commit(1, {"left": "aa"}, Saver(), {})
        write_episodes(run.episodes / batch_name(0, 0), a_batch())
    assert sorted(p.name for p in path.iterdir()) == [".lock", "checkpoints", "episodes", "log.jsonl"]


def test_reading_needs_no_lock_and_cannot_write(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run") as run:
        run.log.append({"update": 1})
        run.checkpoints.commit(1, {"left": "aa"}, Saver(), {})
        reader = RunFolder.read(tmp_path / "run")
        assert reader.log.read() == [{"update": 1}]
        latest = reader.checkpoints.latest()
        assert latest is not None
        assert latest.number == 1
        for write in (
            lambda: reader.log.append({}),
            lambda: reader.log.rewind(lambda record: False),
            lambda: reader.log.truncate_torn(),
            lambda: reader.checkpoints.commit(2, {"left": "aa"}, Saver(), {}),
        ):
            with pytest.raises(StoreError, match=r"opened for reading.*RunFolder\.open"):
                write()
        assert run.log.read() == [{"update": 1}]


def test_paths_that_are_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run folder .*teamtr train"), RunFolder.open(tmp_path / "x", create=False):
        pass
    assert not (tmp_path / "x").exists()
    with pytest.raises(StoreError, match="is not a run folder"):
        RunFolder.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotARun, match="is a file"), RunFolder.open(tmp_path / "file"):
        pass
    assert NotARun.exit_code == 2


@pytest.mark.parametrize("names", [["team.yaml"], ["data/rows.jsonl", ".git/config"], ["checkpoints/epoch-1/model.pt"]])
def test_a_folder_of_somebody_else_is_not_taken(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    with pytest.raises(NotARun, match=r"neither empty nor a run folder \(there are .*choose a new"):
        RunFolder.open(tmp_path).__enter__()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(names)


@pytest.mark.parametrize("names", [[], [".lock"], [".lock", ".tmp-ab12"], ["checkpoints/", "swap/request.json"]])
def test_what_an_interrupted_start_left_is_taken(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
    with RunFolder.open(tmp_path) as run:
        run.log.append({"update": 1})


def test_a_second_opening_in_one_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path):
        with pytest.raises(RunLocked, match=f"in use by process {os.getpid()} on "), RunFolder.open(tmp_path):
            pass
        with pytest.raises(RunLocked), RunFolder.open(tmp_path):  # the refused attempt did not release it
            pass
    with RunFolder.open(tmp_path, create=False):
        pass


HOLDER = textwrap.dedent("""
    import os, sys, time
    from teamtr.store import RunFolder
    with RunFolder.open(sys.argv[1]):
        if sys.argv[2] == "alone":
            print(-1, flush=True)
        elif os.fork() == 0:
            print(os.getpid(), flush=True)  # by the worker, so that it has begun to live
        time.sleep(600)
""")


@pytest.mark.parametrize("worker", ["alone", "with-worker"])
def test_a_second_process_is_refused_and_a_killed_one_lets_go(tmp_path: Path, worker: str) -> None:
    """Also when a forked worker outlives the killed process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(RunLocked, match=rf"in use by process {holder.pid} on .*: wait until it ends, stop it"):
                RunFolder.open(tmp_path / "run").__enter__()
            holder.send_signal(signal.SIGKILL)
            assert holder.wait(60) == -signal.SIGKILL
            if worker == "with-worker":
                os.kill(child, 0)  # it lives
            with RunFolder.open(tmp_path / "run") as run:
                run.log.append({"mine": True})
        finally:
            holder.kill()
            if child > 0:
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_leaves_the_block_touches_neither_the_lock_nor_its_own_files(tmp_path: Path) -> None:
    block = RunFolder.open(tmp_path / "run")
    block.__enter__()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # The child closed the inherited lock; its next files take over that number.
            files = [os.open(tmp_path / f"file{i}", os.O_RDWR | os.O_CREAT) for i in range(8)]
            for file in files:
                os.write(file, b"mine")
            block.__exit__(None, None, None)
            code = 0 if all(os.fstat(file).st_size == 4 for file in files) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RunLocked, match=f"process {os.getpid()} "), RunFolder.open(tmp_path / "run"):
        pass
    block.__exit__(None, None, None)
    with RunFolder.open(tmp_path / "run"):
        pass


# --- what is imported -----------------------------------------------------------------------------------------------


def test_the_store_imports_no_torch() -> None:
    code = "import sys, teamtr.store; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize("leaf", ["text", 1.5, 7, None])
@pytest.mark.parametrize("hold", [lambda value: [value], lambda value: {"k": value}])
def test_what_is_too_deep_is_told_whatever_stands_there(leaf, hold):
    value = leaf
    for _ in range(DEEPEST - 2):
        value = hold(value)
    assert decode(encode(value, "here")) == value
    with pytest.raises(StoreError, match="nested deeper than"):
        encode(hold(value), "here")
