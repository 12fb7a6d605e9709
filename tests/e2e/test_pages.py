"""The tutorial from its first command to its last, and the commands of the how-to page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from pages import DOCS, Command, File, Reader, section, steps, titles

TUTORIAL = (DOCS / "tutorial.md").read_text()
HOW = (DOCS / "how.md").read_text()
SHORT = ("plan.stages=1", "plan.problems=8", "plan.group_size=4", "eval.samples=1")
"""Settings that make a run of the pages take a second."""


def free_port() -> int:
    """Below those that a system gives to connections: none of another test gets it before the server has."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def shortened(step: Command) -> Command:
    return step.with_settings(*SHORT) if step.what == "teamtr train" else step


def follow(text: str, reader: Reader, *, without: tuple[str, ...] = ()) -> None:
    """Every step, training in short; not the commands of ``without``."""
    for step in steps(text):
        if isinstance(step, File):
            reader.do(step)
        elif step.what not in without:
            reader.do(shortened(step))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's folder after its steps up to the first training, in short."""
    folder = tmp_path_factory.mktemp("desk")
    before = Path.cwd()
    os.chdir(folder)
    try:
        follow(TUTORIAL.split("## 6. Look")[0], Reader(), without=("teamtr check",))
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def in_desk(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, the current folder."""
    shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path / "desk"


def test_the_pages_name_every_step_of_a_day() -> None:
    """What the tutorial must show, and the questions that must be answered, each with a command."""
    commands = {step.what for step in steps(TUTORIAL) if isinstance(step, Command)}
    day = "init check train report eval compare swap export serve chat"
    assert {f"teamtr {name}" for name in day.split()} <= commands
    assert titles(HOW) == [
        "How do I choose a radius?",
        "How do I write a reward?",
        "How do I add a router?",
        "How do I debug a run that does not learn?",
        "How do I fit my GPU?",
        "How do I read the report?",
    ]
    for title in titles(HOW):
        assert any(isinstance(step, Command) for step in steps(section(HOW, title))), title


def test_blocks_are_read_as_files_and_commands() -> None:
    text = (
        '```python\n# a.py\nx = 1\n```\n```text\nteamtr no\n```\n```sh\necho "a b" | teamtr chat r\nexport K=1\n```\n'
    )
    assert steps(text) == [
        File("a.py", "x = 1\n"),
        Command(("teamtr", "chat", "r"), "a b\n"),
        Command(("export", "K=1")),
    ]


@pytest.mark.long
def test_the_tutorial_after_training_runs_in_short(in_desk: Path) -> None:
    """All but the swap and the server, which take longest; the slow test has them."""
    rest = TUTORIAL.split("## 5. Train")[1].partition("```sh")[2].partition("```\n")[2]
    reader = Reader()
    serving = ("export TEAMTR_API_KEY=a-key-for-this-tutorial", "teamtr serve", "python ask.py")
    follow(rest, reader, without=("teamtr swap", *serving))
    assert (in_desk / "runs" / "desk" / "report.html").is_file()
    assert {"reader", "sorter"} <= {path.name for path in (in_desk / "exported").iterdir()}
    compared = reader.said["teamtr compare runs/desk runs/wide"]
    shown = section(TUTORIAL, "7. Evaluate and compare").partition("```text\n")[2].partition("```")[0]
    heads = "run  ", "setting that differs", "plan.radius"
    as_printed = [line.split() for line in compared.splitlines() if line.startswith(heads)]
    assert as_printed == [line.split() for line in shown.splitlines() if line.startswith(heads)]
    assert len(as_printed) == 3
    assert "sorter, the answer:" in reader.said["teamtr chat runs/desk --seed 1"]


@pytest.mark.slow
def test_the_tutorial_from_data_to_a_served_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command as it stands; only the run that is compared with is short. The team learns, and the server answers
    as the chat does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEAMTR_API_KEY", "")  # the page sets it; it is as before when the test ends
    reader = Reader()
    try:
        for step in steps(TUTORIAL.replace("8765", str(free_port()))):
            reader.do(shortened(step) if isinstance(step, Command) and "runs/wide" in step.words else step)
        chat = reader.said["teamtr chat runs/desk --seed 1"]
        served = reader.said["python ask.py parcel 12"].strip()
    finally:
        reader.leave()
    assert re.search(rf"sorter, the answer:\s+{re.escape(served)}\n", chat)
    (learned,) = re.findall(r"^avg@8 +([\d.]+) %", reader.said["teamtr eval runs/desk --samples 8"], flags=re.M)
    assert float(learned) > 50, "a third is right by chance once queues are named"
    (swapped,) = (said for command, said in reader.said.items() if command.startswith("teamtr swap"))
    before, at_once, after = map(float, re.findall(r"held-out success ([\d.]+) %", swapped))
    assert at_once < 20 < after, f"alignment gives back what the swap takes: {before}"


LONGEST = ("How do I choose a radius?",)


@pytest.mark.long
@pytest.mark.parametrize("title", [pytest.param(t, marks=pytest.mark.slow) if t in LONGEST else t for t in titles(HOW)])
def test_the_commands_of_an_answer_run(title: str, in_desk: Path) -> None:
    reader = Reader()
    follow(section(HOW, title), reader)
    assert reader.said
