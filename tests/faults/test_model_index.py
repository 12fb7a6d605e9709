"""The kept index of transformers' model files: as without it, and made anew when a file is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from teamtr.store import cache
from teamtr.store.model_index import KIND, MODULE, keep_model_index, read_once

LOOK = """
import json
from teamtr.store.model_index import keep_model_index
if {keep}:
    keep_model_index()
import transformers
import transformers.models
from transformers.utils import import_utils
def told(lazy):
    return sorted((name, str(place)) for name, place in lazy._class_to_module.items())
index = import_utils.define_import_structure(transformers.__path__[0] + "/models", prefix="models")
rows = sorted((sorted(needs), sorted((n, sorted(own)) for n, own in parts.items())) for needs, parts in index.items())
print(json.dumps([rows, told(transformers), told(transformers.models)]))
"""
BUILD = """
from teamtr.config import loads, recipe_text
from teamtr.session.build import build
build(loads(recipe_text("code-exchange"), "team", ["tiny.warmup_steps=0"]))
"""


def look(keep: bool, folder: Path) -> list:
    run = subprocess.run(
        [sys.executable, "-c", LOOK.format(keep=keep)], env={**os.environ, cache.VARIABLE: str(folder)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


@pytest.mark.long
def test_transformers_is_imported_as_without_it(tmp_path: Path) -> None:
    plain = look(False, tmp_path)
    assert not (tmp_path / KIND).exists()
    first, second = look(True, tmp_path), look(True, tmp_path)
    assert plain == first == second
    assert len(list((tmp_path / KIND).iterdir())) == 1


@pytest.mark.long
def test_who_loads_models_keeps_it(tmp_path: Path) -> None:
    """Not too late: nothing has imported transformers before."""
    subprocess.run([sys.executable, "-c", BUILD], env={**os.environ, cache.VARIABLE: str(tmp_path)}, check=True)
    assert len(list((tmp_path / KIND).iterdir())) == 1


class Package:
    """A package like transformers: models in folders, and the file that searches them. ``searched``: how often."""

    def __init__(self, root: Path) -> None:
        self.code, self.models, self.searched = root / "utils" / "import_utils.py", root / "models", 0
        for file in (self.code, self.models / "a" / "modeling_a.py", self.models / "b" / "modeling_b.py"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("...")

    def define(self, module_path: str | Path, prefix: str | None = None) -> dict:
        self.searched += 1
        start = f"{prefix}." if prefix else ""
        names = sorted(file.stem for file in Path(module_path).rglob("modeling_*.py"))
        return {frozenset({"torch"}): {f"{start}{name}": {name.upper()} for name in names}, frozenset(): {}}

    def found(self, prefix: str | None = None, path: Path | None = None) -> dict:
        """As a new process finds it."""
        return read_once(self.define, self.code)(self.models if path is None else path, prefix)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return Package(tmp_path / "package")


def test_an_index_is_searched_for_once(package: Package) -> None:
    expected = package.define(package.models, "models")
    assert package.found("models") == expected
    assert package.searched == 2
    assert package.found("models") == expected
    assert package.found(path=package.models / "__init__.py") == package.define(package.models)
    assert package.searched == 3, "that of the test itself"


@pytest.mark.parametrize("what", ["changed", "added", "removed", "the search itself"])
def test_it_is_searched_for_again_when_a_file_is_another(package: Package, what: str) -> None:
    package.found()
    file = package.models / "b" / "modeling_b.py"
    match what:
        case "changed":
            os.utime(file, ns=(1, 1))
        case "added":
            (file.parent / "modeling_c.py").write_text("...")
        case "removed":
            file.unlink()
        case "the search itself":
            package.code.write_text("changed")
    expected = package.define(package.models)
    assert package.found() == expected
    assert package.searched == 3


def test_what_a_caller_adds_is_not_in_the_next_ones_index(package: Package) -> None:
    found = read_once(package.define, package.code)
    found(package.models)[frozenset()]["more"] = {"More"}
    found(package.models)[frozenset({"torch"})]["modeling_a"].add("More")
    assert found(package.models) == package.define(package.models)


def test_a_folder_of_one_model_is_searched_as_before(package: Package) -> None:
    assert package.found(path=package.models / "a") == package.define(package.models / "a")
    assert package.searched == 2


def test_a_damaged_index_is_made_anew(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    expected = package.found()
    (file,) = (cache.cache_folder() / KIND).iterdir()  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-1])
    assert package.found() == expected
    assert (package.searched, "is damaged" in caplog.text) == (2, True)


@pytest.mark.parametrize("entry", [[[1, 2, 3]], [[["torch"], ["a"]]], 7, None, "text"])
def test_an_index_of_another_form_is_made_anew(package: Package, entry: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its hash is right: another version may have written it."""
    expected = package.found()
    (file,) = (cache.cache_folder() / KIND).iterdir()  # type: ignore[operator]
    cache.keep(KIND, file.name, json.dumps(entry).encode())
    assert package.found() == expected
    assert (package.searched, "cannot be read" in caplog.text) == (2, True)
    assert package.found() == expected
    assert package.searched == 2, "and kept"


@pytest.mark.parametrize("answer", [None, [], {"torch": ["a"]}, {frozenset(): {"a": None}}])
def test_a_search_that_answers_otherwise_is_let_be(package: Package, answer: Any) -> None:
    found = read_once(lambda path, prefix=None, deep=False: (answer, prefix, deep), package.code)
    assert found(package.models, "models") == (answer, "models", False)
    assert found(package.models, deep=True) == (answer, None, True)


def test_other_finders_are_asked_where_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that was packed with its modules: the one behind ours is asked, too."""
    asked = []

    class Packed:
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            asked.append(name)
            return ModuleSpec(name, None) if name == MODULE else None

    monkeypatch.setattr(sys, "meta_path", [Packed()])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    keep_model_index()
    keep_model_index()
    assert len(sys.meta_path) == 2
    monkeypatch.setattr("teamtr.store.model_index.PathFinder.find_spec", lambda *_: None)
    assert find_spec_anywhere(MODULE) is not None
    assert asked == [MODULE]


def find_spec_anywhere(name: str) -> ModuleSpec | None:
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, []))), None)


def test_nothing_is_kept_without_a_cache_or_files(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as off:
        off.setenv(cache.VARIABLE, cache.OFF)
        assert package.found() == package.found()
        assert package.searched == 2
    package.code.unlink()
    assert package.found() == package.found()
    assert package.searched == 4


def test_who_has_imported_transformers_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, sys)
    before = list(sys.meta_path)
    keep_model_index()
    assert sys.meta_path == before
