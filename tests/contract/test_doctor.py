"""``teamtr doctor``: what it finds is there, and what is degraded is told with its reason."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.ports import GB
from teamtr.session import doctor
from teamtr.session.doctor import EXTRAS, Finding, examine
from teamtr.version import __version__


def found(findings: list[Finding], area: str, what: str) -> Finding:
    [one] = [finding for finding in findings if (finding.area, finding.what) == (area, what)]
    return one


def test_every_area_is_looked_at(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert list(dict.fromkeys(f.area for f in findings)) == [
        "versions",
        "extras",
        "devices",
        "kernels",
        "sandbox",
        "disk",
    ]
    assert found(findings, "versions", "teamtr").found == __version__
    assert found(findings, "versions", "torch").found.startswith(torch.__version__.split("+")[0])
    assert found(findings, "devices", "CPU").found.startswith(f"{len(os.sched_getaffinity(0))} core")
    assert str(tmp_path) in found(findings, "disk", "runs").found
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_every_extra_that_a_person_may_install_is_known() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}


def test_a_missing_extra_is_no_fault_but_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    absent = found(list(doctor._extras()), "extras", "wandb")
    assert absent.found == "not installed; for a tracker: pip install 'teamtr[wandb]'"
    assert absent.degraded is None


@pytest.mark.parametrize(
    ("build", "why"), [(None, "this torch is a CPU build"), ("13.0", "driver is missing or too old")]
)
def test_a_card_that_torch_cannot_use_is_degraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "none")
    assert found(list(doctor._devices()), "devices", "GPU").degraded is None, "no card is no fault"
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    assert why in (found(list(doctor._devices()), "devices", "GPU").degraded or "")


def test_a_gpu_without_kernels_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for there, degraded in ((True, False), (False, True)):
        monkeypatch.setattr(doctor, "has_kernels", lambda there=there: there)
        [kernels] = doctor._kernels()
        assert (kernels.degraded is not None) is degraded


def test_walls_that_are_missing_are_named_with_their_reason() -> None:
    @contextmanager
    def weak():
        yield SimpleNamespace(missing=lambda: {"call filter": "no such call here"})

    findings = list(doctor._sandbox(weak))
    assert [f.what for f in findings if f.degraded is None] == [w for w in doctor.WALLS if w != "call filter"]
    assert "no such call here" in (found(findings, "sandbox", "call filter").degraded or "")

    def none():
        raise OSError("no process can be started")

    [broken] = doctor._sandbox(none)
    assert "no process can be started" in (broken.degraded or "")


def test_little_room_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=2 * GB))
    findings = list(doctor._disk(tmp_path / "not" / "yet"))
    assert "only 2.0 GB are free" in (found(findings, "disk", "runs").degraded or "")
    assert found(findings, "disk", "locks").degraded is None

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(doctor.fcntl, "flock", refuse)
    why = found(list(doctor._disk(tmp_path)), "disk", "locks").degraded or ""
    assert f"no run can be written in {tmp_path} (No locks available)" in why


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("devices", "GPU", "none", "because")
    monkeypatch.setattr(doctor, "examine", lambda folder: [Finding("versions", "teamtr", "1"), bad])
    said = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert said.exit_code == 0
    assert "degraded: GPU: because" in said.stdout
    record = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert record["degraded"] == [{"area": "devices", "what": "GPU", "found": "none", "degraded": "because"}]
    assert len(record["findings"]) == 2
    monkeypatch.setattr(doctor, "examine", lambda folder: [Finding("versions", "teamtr", "1")])
    assert "nothing is degraded here" in CliRunner().invoke(app, ["doctor"]).stdout
