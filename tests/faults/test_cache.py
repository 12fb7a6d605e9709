"""What is kept between runs: read as it was made, made anew when it is damaged, and nothing when it is switched off."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from teamtr.config import loads, recipe_text
from teamtr.engines.torch.loading import TinyShape, teach_form, tiny_model
from teamtr.session import models
from teamtr.session.taught import KIND, teach_once
from teamtr.store import cache

EXAMPLES = [(np.array([3, 4, 5 + k]), np.array([6 + k, 7])) for k in range(4)]
SETTINGS = {"steps": 3, "learning_rate": 1e-3, "batch": 4, "seed": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    return tmp_path / KIND


class Taught:
    """Weights after teaching, and whether it took any."""

    def __init__(self, examples=EXAMPLES, seed: int = 0, **changes: float) -> None:
        self.times = 0
        model, _ = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=seed)
        teach_once(model, examples, self.teach, **{**SETTINGS, **changes})
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.training = model.training

    def teach(self, model, examples, **settings) -> None:
        self.times += 1
        teach_form(model, examples, **settings)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Taught)
        return all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())

    __hash__ = None  # type: ignore[assignment]


def test_what_was_taught_is_read_with_the_same_bits(folder: Path) -> None:
    first, second = Taught(), Taught()
    assert (first.times, second.times) == (1, 0)
    assert first == second
    assert not second.training
    assert len(list(folder.iterdir())) == 1


@pytest.mark.long
def test_whatever_makes_it_differ_is_taught_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Taught()
    source = folder.parent / "another_source.py"
    source.write_text("def teach(): ...")
    others = [Taught(seed=1), Taught(steps=2), Taught(learning_rate=2e-3), Taught(batch=3), Taught(EXAMPLES[::-1])]
    others.append(Taught([*EXAMPLES[:-1], (np.array([3, 4]), np.array([8, 9, 7]))]))
    monkeypatch.setattr("teamtr.session.taught._processor", lambda: "another processor")
    others.append(Taught())
    monkeypatch.setattr("teamtr.session.taught.version", lambda name: "another version")
    others.append(Taught())
    with monkeypatch.context() as changed:
        changed.setattr("inspect.getfile", lambda _: str(source))
        others.append(Taught())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        others.append(Taught())
    finally:
        torch.set_num_threads(threads)
    assert [other.times for other in others] == [1] * len(others)
    assert len(list(folder.iterdir())) == 1 + len(others)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_file_is_noticed_and_made_anew(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = Taught()
    (file,) = folder.iterdir()
    body = bytearray(file.read_bytes())
    body[-5] ^= 1
    file.write_bytes({"cut": bytes(body[: len(body) // 2]), "empty": b"", "flipped": bytes(body)}[damage])
    with caplog.at_level(logging.WARNING):
        second = Taught()
    assert second.times == 1
    assert second == first
    assert f"{file} is damaged" in caplog.text
    assert Taught().times == 0, "and kept again"


def test_what_a_killed_writer_left_is_not_read_and_goes(folder: Path) -> None:
    folder.mkdir()
    (folder / ".tmp-abc").write_bytes(b"half")
    assert Taught().times == 1
    assert [file.suffix for file in folder.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("written", ["off", "OFF"])
def test_switched_off_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.chdir(folder.parent)  # where a folder of that name would be made
    monkeypatch.setenv(cache.VARIABLE, written)
    assert (Taught().times, Taught().times) == (1, 1)
    assert cache.cache_folder() is None
    assert not list(folder.parent.iterdir())


def test_a_folder_that_cannot_be_written_is_told_and_hurts_nothing(folder: Path, caplog) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert Taught().times == 1
    assert "not kept for the next run" in caplog.text


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_folder() == Path("/home/somebody/.cache/teamtr")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.cache_folder() == Path("/elsewhere/teamtr")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.cache_folder() == Path("/home/somebody/.cache/teamtr")


def test_the_oldest_go_when_there_are_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 2)
    for k in range(4):
        cache.keep(KIND, f"file{k}", b"x")
        os.utime(folder / f"file{k}", (k, k))
    assert sorted(file.name for file in folder.iterdir()) == ["file2", "file3"]
    assert cache.cached(KIND, "file3") == b"x"
    assert cache.cached(KIND, "file0") is None


def test_a_file_that_another_process_removed_meanwhile_is_no_failure(folder: Path, caplog) -> None:
    folder.mkdir()
    (folder / "gone").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        cache.keep(KIND, "file", b"x")
    assert cache.cached(KIND, "file") == b"x"
    assert not caplog.text


def test_a_user_without_a_home_keeps_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """As in a container whose user is a number and nothing else."""
    for name in (cache.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with caplog.at_level(logging.WARNING):
        assert Taught().times == 1
    assert "set TEAMTR_CACHE=FOLDER" in caplog.text


@pytest.mark.parametrize(("device", "set_by_us"), [("cuda", True), ("cpu", False)])
def test_compiled_kernels_are_kept_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, set_by_us: bool
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    for name in cache.KERNELS:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(models, "device_of", lambda _: torch.device(device))
    models._keep_kernels(loads(recipe_text("code-exchange"), "team"))
    found = {name: os.environ.get(name) for name in cache.KERNELS}
    told = {name: str(tmp_path / folder) for name, folder in cache.KERNELS.items()}
    assert found == (told if set_by_us else dict.fromkeys(cache.KERNELS))


def test_where_compiled_kernels_lie_is_the_environments_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cache.KERNELS:
        monkeypatch.setenv(name, "/somewhere")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    cache.keep_kernels()
    assert {os.environ[name] for name in cache.KERNELS} == {"/somewhere"}
    monkeypatch.setenv(cache.VARIABLE, cache.OFF)
    for name in cache.KERNELS:
        monkeypatch.delenv(name)
    cache.keep_kernels()
    assert not set(cache.KERNELS) & set(os.environ)


def test_kernels_stay_where_they_were_if_our_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Else a home that is read-only would end in the compiler's error."""
    for name in cache.KERNELS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("where the folder should be")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        cache.keep_kernels()
    assert not set(cache.KERNELS) & set(os.environ)
    assert "compiled kernels are not kept" in caplog.text
