"""A reward in a container: what it cannot reach, what it is still given, and what is said where there is none."""

from __future__ import annotations

import json
import os
import socket
import stat
import textwrap
from pathlib import Path
from typing import Any

import pytest

from teamtr.config import ConfigError, loads
from teamtr.grading import Container, GraderError
from teamtr.tasks import DataTask
from teamtr.types import Verdict

REWARDS = """
    import os, socket
    from pathlib import Path
    import numpy  # installed packages are there
    import beside  # so are the modules of the folder

    def looks(prompts, completions, answer, **columns):
        return [float(TRIES[text]()) if text in TRIES else float(text) for text in completions]

    def reaches(place):
        family = socket.AF_INET
        with socket.socket(family) as caller:
            caller.settimeout(5)
            return caller.connect_ex(tuple(place)) == 0

    def writes(path):
        try:
            Path(path).write_text("was here")
        except OSError:
            return False
        return True

    def forked():
        if os.fork() == 0:
            os._exit(0)
        return os.wait()[1] == 0

    PLACES = beside.PLACES
    TRIES = {
        "reads its folder": lambda: Path(PLACES["own"]).read_text() == "own",
        "reads a secret": lambda: os.path.exists(PLACES["secret"]),
        "writes to its folder": lambda: writes(PLACES["own"] + ".new"),
        "writes to /tmp": lambda: writes(PLACES["temporary"]),
        "reaches a port": lambda: reaches(PLACES["port"]),
        "sees its owner": lambda: os.path.exists(f"/proc/{PLACES['pid']}/environ") and PLACES["pid"] != os.getpid(),
        "has the key": lambda: "A_SECRET_KEY" in os.environ,
        "is root": lambda: os.getuid() == 0,
        "loops": lambda: [None for _ in iter(int, 1)],
        "dies": lambda: os._exit(3),
        "forks": forked,
    }
"""
WITHIN = ("reads its folder", "writes to /tmp", "forks")
"""What works in a container too."""
WITHOUT = ("reads a secret", "writes to its folder", "reaches a port", "sees its owner", "has the key")
"""What does not, though it does without one."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with a reward, and beside it a secret, a listening port and a key in the environment."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "own.txt").write_text("own")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setenv("A_SECRET_KEY", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {
            "own": str(folder / "own.txt"),
            "secret": str(tmp_path / "secret.txt"),
            "port": server.getsockname(),
            "temporary": str(trace(tmp_path)),
            "pid": os.getpid(),
        }
        (folder / "beside.py").write_text(f"PLACES = {places!r}\n")
        (folder / "rewards.py").write_text(textwrap.dedent(REWARDS))
        yield folder
    trace(tmp_path).unlink(missing_ok=True)


def trace(folder: Path) -> Path:
    """A file in /tmp that no other test writes."""
    return Path("/tmp") / f"teamtr-was-here-{os.getpid()}-{folder.name}"


def task_in(folder: Path, container: Any, seconds_per_item: float = 60.0) -> DataTask:
    data = folder.parent / "data.jsonl"
    data.write_text(json.dumps({"question": "q", "answer": "1"}) + "\n")
    grader = f"python:{folder}/rewards.py:looks"
    return DataTask(data, held_out=0, grader=grader, container=container, seconds_per_item=seconds_per_item)


def tried(task: DataTask, words: list[str]) -> dict[str, Verdict]:
    (problem,) = task.problems("train")
    return dict(zip(words, task.grade([(problem, word, [word]) for word in words]), strict=True))


def kinds(task: DataTask, words: list[str]) -> dict[str, str]:
    return {word: verdict.kind for word, verdict in tried(task, words).items()}


def bubblewrap_or_skip() -> None:
    refusal = Container(()).refusal()
    if refusal:
        pytest.skip(refusal)


@pytest.mark.long
def test_a_reward_in_bubblewrap_reaches_its_own_folder_and_nothing_else(place: Path) -> None:
    bubblewrap_or_skip()
    open_air = task_in(place, "none")
    assert set(kinds(open_air, [*WITHIN, *WITHOUT]).values()) == {"right"}, "the tries try something"
    open_air.close()
    trace(place.parent).unlink()
    walled = task_in(place, "bubblewrap")
    assert kinds(walled, [*WITHIN, *WITHOUT, "is root"]) == {
        **dict.fromkeys(WITHIN, "right"),
        **dict.fromkeys((*WITHOUT, "is root"), "wrong"),
    }
    assert not walled.failures
    assert not trace(place.parent).exists(), "its /tmp is its own"
    walled.close()


@pytest.mark.long
def test_workers_in_bubblewrap_are_killed_and_replaced_as_all_others(place: Path) -> None:
    bubblewrap_or_skip()
    task = task_in(place, "bubblewrap", seconds_per_item=1.0)
    verdicts = tried(task, ["1", "loops", "0.5", "dies", "0.25"])
    assert [(v.kind, v.reward) for v in verdicts.values()] == [
        *(("right", 1.0), ("timeout", 0.0), ("wrong", 0.5), ("crash", 0.0), ("wrong", 0.25)),
    ]
    assert any("exited with status 3" in why for why in task.failures)
    task.close()


def program(folder: Path, text: str) -> None:
    """A program called bwrap, found before any other."""
    folder.mkdir(exist_ok=True)
    path = folder / "bwrap"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_what_bubblewrap_is_told(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program in its place, which notes its arguments and starts the rest as it is."""
    told = tmp_path / "told"
    program(
        tmp_path / "bin",
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\nenv > {told}.env\n'
        'while [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    task = task_in(place, "bubblewrap")
    assert kinds(task, ["1", "0", "reads its folder"]) == {"1": "right", "0": "wrong", "reads its folder": "right"}
    task.close()
    arguments = told.read_text().splitlines()
    walls = arguments[: arguments.index("--")]
    assert {"--unshare-all", "--unshare-user", "--cap-drop"} <= set(walls)
    bound = {walls[k + 1] for k, word in enumerate(walls) if word.startswith("--ro-bind")}
    assert str(place.resolve()) in bound
    assert not {"/", "/tmp", "/etc", "/root", "/home", str(tmp_path), str(Path.home()), str(Path.cwd())} & bound
    assert not [word for word in walls if word in ("--bind", "--dev-bind", "--share-net")], "nothing can be written"
    assert walls[walls.index("--tmpfs") + 1] == "/tmp"
    assert walls.index("--tmpfs") < walls.index(str(place.resolve())), "a folder under /tmp is laid over it"
    assert arguments[-1].endswith("worker.py")
    assert "A_SECRET_KEY" not in (tmp_path / "told.env").read_text()


def test_without_the_program_the_error_says_what_to_install_and_how_to_go_without(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(GraderError, match=r"bwrap, which is not on PATH.*apt install bubblewrap.*container: none"):
        task_in(place, "bubblewrap")


def test_where_the_kernel_refuses_the_error_says_so(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(GraderError, match=r"No permissions to create new namespace\).*user namespaces.*none"):
        task_in(place, "bubblewrap")


def test_a_container_is_for_graders_that_run_code(tmp_path: Path) -> None:
    text = """
        name: small
        task: {name: data, path: data.jsonl, container: %s, grader: %s}
        team: {model: tiny, max_tokens: 4, agents: [{name: solo}]}
    """
    made = loads(textwrap.dedent(text % ("bubblewrap", '"python:rewards.py:f"')), "team.yaml")
    assert made.task.container == "bubblewrap"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r'not for "number": leave it out'):
        loads(textwrap.dedent(text % ("bubblewrap", "number")), "team.yaml")
    with pytest.raises(ConfigError, match=r"task.container"):
        loads(textwrap.dedent(text % ("docker", "regex")), "team.yaml")
