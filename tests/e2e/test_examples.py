"""The examples: they run as they stand, learn, stay short, and the page of the API shows what they do."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("own_reward.py", "own_router.py", "own_advantage.py")
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
PAGE = ROOT / "docs" / "python.md"


def ran(*words: object, cwd: Path) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_here(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this interpreter, which has the libraries loaded and remembers bases that were taught."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script.name, "run"])
    runpy.run_path(str(script), run_name="__main__")


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "fresh"),
    [
        ("own_reward.py", False),
        pytest.param("own_router.py", False, marks=pytest.mark.slow),
        pytest.param("own_advantage.py", False, marks=pytest.mark.slow),
        pytest.param("own_reward.py", True, marks=pytest.mark.slow),
        pytest.param("own_router.py", True, marks=pytest.mark.slow),
        pytest.param("own_advantage.py", True, marks=pytest.mark.slow),
    ],
)
def test_a_script_runs_and_its_team_learns(script: str, fresh: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    if fresh:
        said = ran(EXAMPLES / script, "run", cwd=tmp_path)
    else:
        run_here(EXAMPLES / script, tmp_path, monkeypatch)
        said = capsys.readouterr().out
    (listed,) = re.findall(r"\[.*\]", said)
    rewards = ast.literal_eval(listed)
    early, late = rewards[: len(rewards) // 3], rewards[-len(rewards) // 3 :]
    assert sum(late) / len(late) > sum(early) / len(early), said
    assert (tmp_path / "run" / "log.jsonl").is_file()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_under_forty_lines(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 40


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code)
    said = ran("notebook.py", cwd=tmp_path)
    assert re.search(r"right: [\d.]+ before, [\d.]+ after", said), said
    assert "model.safetensors" in said
    assert "Qwen3ForCausalLM" in said


def test_the_notebook_is_valid_and_holds_no_output() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells()}) == len(cells())
    for cell in cells():
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_importing_the_library_loads_nothing_heavy(tmp_path: Path) -> None:
    """What makes it fast (``python bench/imports.py`` takes the time): names come when they are asked for."""
    said = ran("-c", "import sys, teamtr; print(teamtr.__version__); print(*sys.modules)", cwd=tmp_path)
    loaded = {name.partition(".")[0] for name in said.split()}
    assert "teamtr" in loaded
    assert not loaded & {"numpy", "pydantic", "torch", "transformers", "peft", "ruamel", "rich", "typer", "sympy"}


@pytest.mark.long
def test_the_trainer_s_module_loads_no_model_library(tmp_path: Path) -> None:
    said = ran("-c", "import sys; from teamtr import Agent, Plan, TeamTrainer; print(*sys.modules)", cwd=tmp_path)
    assert not {name.partition(".")[0] for name in said.split()} & {"torch", "transformers", "peft"}


def test_the_page_shows_code_that_runs() -> None:
    """Every definition on the page stands in an example, as it is; all of its code parses."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert len(blocks) == 5
    notebook = "\n".join("".join(cell["source"]) for cell in cells())
    there = [notebook, *((EXAMPLES / script).read_text() for script in SCRIPTS)]
    for block in blocks:
        ast.parse(block)
    for block in blocks[1:]:
        for part in block.strip().split("\n\n\n"):
            assert any(part in text for text in there), part


@pytest.mark.long
def test_the_readme_s_program_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    (tmp_path / "readme.py").write_text(block)
    run_here(tmp_path / "readme.py", tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert float(said.split()[-1]) > 0.6, "from a third before training"
    assert (tmp_path / "solver" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "digits" / "log.jsonl").is_file()
