"""docs/layout.md, made from the docstrings of packages and modules: ``python tests/layout_page.py`` writes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "teamtr"
PAGE = ROOT / "docs" / "layout.md"
PACKAGES = (
    *("training", "theory", "team", "chat", "rollout", "tools", "tasks", "grading", "engines", "session", "planning"),
    *("evaluation", "baselines", "analysis", "serving", "swap", "api", "cli", "config", "settings", "web", "store"),
    *("lab", "reproduce", "sweep", "trackers"),
)
"""In the order of the page; a package that is not named comes last."""
HEAD = """\
# Repository layout

Every module of `src/teamtr`, with the first sentence of its docstring. `make docs` writes this page, and a test keeps
it up to date.
"""
TABLE = "| module | what it holds |\n|---|---|\n"
BESIDE = """
## Beside the library

| folder | what it holds |
|---|---|
| `src/teamtr/recipes` | ready team files |
| `tests` | theory, statistical, contract, golden, faults, fuzz, e2e, gpu |
| `bench` | timings beside what one would use instead |
| `examples` | training from Python: an own reward, router and advantage estimator, and a notebook |
| `experiments` | the scripts behind [experiments](experiments.md) |
"""


def first_sentence(file: Path) -> str:
    """Of the module's docstring, on one line, as a cell of a table."""
    paragraph = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0].rstrip(".:").replace("|", "\\|")


def rows(files: Iterator[Path]) -> str:
    modules = sorted(file for file in files if file.name not in ("__init__.py", "__main__.py"))
    return TABLE + "".join(f"| `{file.relative_to(SOURCE)}` | {first_sentence(file)} |\n" for file in modules)


def page() -> str:
    packages = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").is_file()}
    ordered = [name for name in PACKAGES if name in packages] + sorted(packages - set(PACKAGES))
    parts = [HEAD, "\n## At the top\n\n" + rows(SOURCE.glob("*.py"))]
    for name in ordered:
        folder = SOURCE / name
        parts.append(f"\n## {name}\n\n{first_sentence(folder / '__init__.py')}.\n\n{rows(folder.rglob('*.py'))}")
    return "".join([*parts, BESIDE])


if __name__ == "__main__":
    PAGE.write_text(page())
