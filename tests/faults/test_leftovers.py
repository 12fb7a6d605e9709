"""What killed commands leave half-written: the next owner of the folder removes it, and nothing of a living one's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_store_faults import exit_code, in_child

from teamtr.config import loads
from teamtr.session import evaluations
from teamtr.session.build import build
from teamtr.session.evaluations import Evaluation
from teamtr.store import RunFolder, StoreError, atomic, write_atomic
from teamtr.store.atomic import remove_leftovers, whole_file, whole_folder

TEAM = """\
name: table
task: {name: roles}
team: {model: tabular, max_tokens: 2, agents: [{name: a1}, {name: a2}, {name: a3}]}
eval: {problems: 4, samples: 2}
"""


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".tmp-*"))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    assert exit_code(in_child(lambda: (work(), None)[1])) == -signal.SIGKILL


def killed_in_a_write(path: Path) -> None:
    def write() -> None:
        os.replace = die  # type: ignore[assignment]
        write_atomic(path, b"half")

    killed(write)


@pytest.mark.parametrize("place", ["report.html", "evals/test-k2/report.json", "swap/request.json", "episodes/x.gz"])
def test_whoever_owns_a_run_removes_what_killed_commands_left_in_it(place: str, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path):
        pass
    killed_in_a_write(tmp_path / place)
    assert len(leftovers(tmp_path)) == 1
    with RunFolder.open(tmp_path):
        assert leftovers(tmp_path) == []


def test_what_a_living_process_is_writing_is_left_to_it(tmp_path: Path) -> None:
    """As ``teamtr eval`` beside a run that begins again."""
    with RunFolder.open(tmp_path):
        pass
    read, write = os.pipe()
    go_on, let = os.pipe()

    def evaluate() -> None:
        replace = os.replace

        def wait(a: Path, b: Path) -> None:
            os.write(write, b"x")
            os.read(go_on, 1)
            replace(a, b)

        os.replace = wait  # type: ignore[assignment]
        write_atomic(tmp_path / "evals" / "test-k2" / "report.json", b"whole")

    child = in_child(evaluate)
    assert os.read(read, 1) == b"x"
    with RunFolder.open(tmp_path):
        assert len(leftovers(tmp_path)) == 1
        os.write(let, b"x")
        assert exit_code(child) == 0
    assert (tmp_path / "evals" / "test-k2" / "report.json").read_bytes() == b"whole"
    assert leftovers(tmp_path) == []


def test_a_file_that_is_swept_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    name = atomic.temporary_beside

    class Swept(type(tmp_path)):  # type: ignore[misc]
        def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
            super().touch(mode, exist_ok)
            made.append(self)
            if len(made) == 1:
                remove_leftovers(tmp_path, recursive=False)

    monkeypatch.setattr(atomic, "temporary_beside", lambda path: Swept(name(path)))
    write_atomic(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert len(made) == 2
    assert leftovers(tmp_path) == []


@pytest.mark.long
def test_an_evaluation_that_was_killed_is_tidied_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "EPISODES_PER_CHUNK", 4)
    session = build(loads(TEAM, "table"))
    evaluation = Evaluation.of(session, session.current_team(), tmp_path / "evals", stage=0)

    def die_in_the_second_chunk() -> None:
        written = evaluations.write_episodes

        def write(file: Path, batch: object) -> None:
            if "problems-00002" in file.name:
                os.replace = die  # type: ignore[assignment]
            written(file, batch)  # type: ignore[arg-type]

        evaluations.write_episodes = write  # type: ignore[assignment]
        evaluation.run()

    killed(die_in_the_second_chunk)
    assert len(leftovers(tmp_path)) == 1
    undisturbed = Evaluation.of(session, session.current_team(), tmp_path / "alone", stage=0).run()
    found = evaluation.run()
    assert found.report == undisturbed.report
    assert found.kept == 4
    assert leftovers(tmp_path) == []


def test_a_folder_or_file_that_was_left_half_written_is_taken_over(tmp_path: Path) -> None:
    def half_a_folder() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "old" / "deep").mkdir(parents=True)
            (folder / "half").write_text("")
            die()

    def half_a_file() -> None:
        with whole_file(tmp_path / "file") as file:
            file.write("a line that is too long\n")
            file.flush()
            die()

    for work in (half_a_folder, half_a_file):
        killed(work)
    assert len(leftovers(tmp_path)) == 2
    with whole_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
        (folder / "new").write_text("")
    with whole_file(tmp_path / "file") as file:
        file.write("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert (tmp_path / "file").read_text() == "new"
    assert leftovers(tmp_path) == []


def test_two_processes_do_not_write_the_same(tmp_path: Path) -> None:
    read, write = os.pipe()

    def slowly() -> None:
        with whole_folder(tmp_path / "out") as folder, whole_file(tmp_path / "file"):
            (folder / "mine").write_text("")
            os.write(write, b"x")
            time.sleep(600)

    child = in_child(slowly)
    try:
        assert os.read(read, 1) == b"x"
        with pytest.raises(StoreError, match="out is being written by another process"), whole_folder(tmp_path / "out"):
            pass
        with pytest.raises(StoreError, match="file is being written by another process"), whole_file(tmp_path / "file"):
            pass
        assert [path.name for path in (tmp_path / ".tmp-out").iterdir()] == ["mine"]
    finally:
        os.kill(child, signal.SIGKILL)
        exit_code(child)
