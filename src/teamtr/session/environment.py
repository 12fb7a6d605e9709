"""The environment of a run: versions of libraries, revision of the project, machine and threads."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from teamtr import version as own_version

LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "numpy", "sympy")


def environment() -> dict[str, str]:
    """The environment of this process, by name."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["teamtr"] = f"{own_version.__version__} ({library_digest()[:12]})"
    if (revision := git_revision(Path.cwd())) is not None:
        found["project revision"] = revision
    found["threads"] = str(torch.get_num_threads())
    return found


@cache
def library_digest(*packages: str) -> str:
    """Hash of TeamTR's own source, or of these packages of it."""
    root = Path(own_version.__file__).parent
    files = [file for package in packages or ("",) for file in (root / package).rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def git_revision(folder: Path) -> str | None:
    """The commit that is checked out in the repository around this folder; None if there is none. Runs no command."""
    for parent in (folder, *folder.parents):
        marker = parent / ".git"
        try:
            if marker.is_dir():
                return _head(marker, marker)
            if marker.is_file():  # a worktree, or a submodule
                git = (parent / marker.read_text().strip().removeprefix("gitdir: ")).resolve()
                common = git / "commondir"
                return _head(git, (git / common.read_text().strip()).resolve() if common.is_file() else git)
        except (OSError, ValueError):
            return None
    return None


def _head(git: Path, common: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    for loose in (git / name, common / name):
        if loose.is_file():
            return loose.read_text().strip()
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
