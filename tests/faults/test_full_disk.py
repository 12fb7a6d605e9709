"""A disk that is full while models are written: a clear error, everything from before intact, and nothing left over."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from test_store_faults import exit_code, in_child
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.engines import saving
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.saving import raising_os_errors
from teamtr.engines.tabular import TabularPolicy
from teamtr.engines.torch.loading import TinyShape, quieten, tiny_model
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.store import Checkpoints, StoreError

FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
TEAM = """\
name: small
task: {name: code, symbols: AB, half_length: 1, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 40, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents: [{name: left, max_tokens: 2}, {name: right, max_tokens: 2}, {name: speaker, max_tokens: 3}]
plan: {stages: 1, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 0}
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and beside it its team file."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "team.yaml").write_text(TEAM)
    told("train", folder / "team.yaml", "--out", folder / "run", code=0)
    return folder / "run"


def told(*arguments: object, code: int) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (SafetensorError(FULL), errno.ENOSPC),
        (SafetensorError("IoError(Os { code: 28, kind: StorageFull, message: ... })"), errno.ENOSPC),
        (Exception("No space left on device (os error 28)"), errno.ENOSPC),  # as tokenizers raises it
        (SafetensorError("something else"), errno.EIO),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),
    ],
)
def test_what_libraries_raise_is_an_os_error(error: Exception, number: int) -> None:
    with pytest.raises(OSError) as raised, raising_os_errors():
        raise error
    assert raised.value.errno == number
    assert raised.value.strerror


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), raising_os_errors():
        raise KeyError("os")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The operating system refuses to write more into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def tabular() -> PolicyLearner:
    return PolicyLearner("a", TabularPolicy(6, end_ids=frozenset({0}), rows=512))


def transformer() -> PolicyLearner:
    quieten()
    return PolicyLearner("a", TransformerPolicy(*tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)))


@pytest.mark.parametrize("make", [tabular, transformer])
def test_a_checkpoint_that_the_operating_system_cuts_off(make: Callable[[], PolicyLearner], tmp_path: Path) -> None:
    learner, store = make(), Checkpoints(tmp_path / "store")
    store.commit(0, {"a": "00"}, lambda name, folder: learner.save(folder), {})
    before = sorted(store.folder.rglob("*"))

    def save_beyond_the_limit() -> None:
        with files_of_at_most(2000), pytest.raises(StoreError, match=r"cannot write .+: File too large.+intact"):
            store.commit(1, {"a": "01"}, lambda name, folder: learner.save(folder), {})

    assert exit_code(in_child(save_beyond_the_limit)) == 0  # in a child: the limit is that of a process
    assert sorted(store.folder.rglob("*")) == before
    assert store.latest() == store.commit(0, {"a": "00"}, lambda name, folder: None, {})


@pytest.mark.long
def test_a_run_whose_disk_fills_up_goes_on_when_there_is_room(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = undisturbed.parent / "team.yaml", tmp_path / "run"
    save_file, calls = saving.save_file, []

    def until_full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 3:  # the three agents of the beginning
            raise SafetensorError(FULL)
        save_file(tensors, path)

    monkeypatch.setattr(saving, "save_file", until_full)
    said = told("train", file, "--out", run, code=1)
    assert "cannot write" in said
    assert "No space left on device. What was saved before is intact: make room" in said
    assert not list(tmp_path.rglob(".tmp-*"))
    monkeypatch.undo()
    told("train", file, "--out", run, code=0)
    assert weights(run) == weights(undisturbed)


def weights(run: Path) -> dict[str, bytes]:
    found = sorted((run / "checkpoints" / "agents").rglob("*.safetensors"))
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


@pytest.mark.long
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing(
    error: BaseException, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copy = tmp_path / "out", shutil.copy2

    def until_full(source: Path, target: Path) -> None:
        if source.name == "tokenizer.json":
            raise error
        copy(source, target)

    monkeypatch.setattr(shutil, "copy2", until_full)
    said = told("export", undisturbed, out, code=1 if isinstance(error, OSError) else 130)
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert f"cannot write {out}: No space left on device" in said
    monkeypatch.undo()
    out.mkdir()  # an empty folder will do
    told("export", undisturbed, out, code=0)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "left", "right", "speaker"]
