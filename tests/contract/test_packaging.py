"""The wheel holds all that the package needs, its metadata is right, and shells can complete commands."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.config import recipes
from teamtr.presets import PRESETS
from teamtr.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy without git, so that nothing is in it only because git knows it."""
    copied = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied)
    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copied, check=True, capture_output=True)
    (built,) = (copied / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


@pytest.mark.long
def test_the_wheel_holds_every_file_of_the_source_and_no_other(wheel: zipfile.ZipFile) -> None:
    files = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "teamtr").rglob("*") if path.is_file()
    }
    source = {name for name in files if "__pycache__" not in name}
    assert {"teamtr/py.typed", "teamtr/recipes/roles.yaml", "teamtr/analysis/report/assets/main.js"} <= source
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == source


@pytest.mark.long
def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"teamtr-{__version__}.dist-info"
    said = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert said["Version"] == __version__
    assert said["License-Expression"] == "Apache-2.0"
    assert "teamtr = teamtr.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert CliRunner().invoke(app, ["--version"]).stdout == f"teamtr {__version__}\n"


@pytest.mark.long
def test_all_that_is_imported_is_declared() -> None:
    """Nothing may be there only because another package happens to bring it."""
    needed = _names(PROJECT["dependencies"])
    extras = _names(
        each for extra, group in PROJECT["optional-dependencies"].items() if extra != "dev" for each in group
    )
    brought_by_torch = {"triton"}  # on Linux with a GPU; the modules that use it are loaded only there
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert set(_imports(tree, deep=False)) <= needed | brought_by_torch, path
        assert set(_imports(tree, deep=True)) <= needed | extras | brought_by_torch, path


def _names(requirements: Any) -> set[str]:
    return {re.split(r"[<>=!;\[ ]", each)[0].lower().replace("_", "-") for each in requirements}


def _imports(tree: ast.Module, *, deep: bool) -> Iterator[str]:
    """The distributions of other projects that a module imports: anywhere, or as soon as it is loaded."""
    for node in ast.walk(tree) if deep else tree.body:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for top in {module.partition(".")[0] for module in modules}:
            if top not in sys.stdlib_module_names and top != "teamtr":
                yield {"ruamel": "ruamel.yaml", "pydantic_core": "pydantic"}.get(top, top).lower().replace("_", "-")


# --- completion -----------------------------------------------------------------------------------------------


def test_show_completion_prints_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # a test may not run under a shell
    shown = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="teamtr")
    assert shown.exit_code == 0
    assert "complete -o default -F _teamtr_completion teamtr" in shown.stdout


def completed(*words: str) -> list[str]:
    """What bash would offer after these words; the last is being typed."""
    asked = {
        "_TEAMTR_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("teamtr", *words)),
        "COMP_CWORD": str(len(words)),
    }
    return CliRunner().invoke(app, [], prog_name="teamtr", env=asked).stdout.split()


@pytest.mark.long
def test_names_are_completed(tmp_path: Path) -> None:
    assert {"schema", "swap"} <= set(completed("s"))
    assert completed("init", "--recipe", "") == list(recipes())
    assert completed("recipes", "ro") == ["roles"]
    assert completed("demo", "--compare", "re") == [name for name in PRESETS if name.startswith("re")]
    file = recipes()["code-exchange"].path
    assert completed("train", file, "plan.group") == ["plan.group_size="]
    assert completed("train", file, "team.agents.left.max") == ["team.agents.left.max_tokens="]
    run = ROOT / "tests" / "fixtures" / "old_run"
    assert completed("swap", str(run), "--agent", "")
    assert completed("export", str(run), "out", "--agent", "") == completed("swap", str(run), "--agent", "")
    assert completed("swap", str(tmp_path), "--agent", "") == [], "no run folder, and no traceback"


@pytest.mark.long
def test_completing_loads_no_torch() -> None:
    program = "import sys; from teamtr.cli.complete import *; preset_names(''); recipe_names('')"
    check = "from teamtr.config import schema_keys; schema_keys(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"{program}; {check}"], check=True)
