"""The training process executes no text and unpickles nothing: checked in the source of every module it can import.

The one module that executes text, ``grading/sandbox/program.py``, runs in a process of its own (``sandbox/client.py``)
and is imported by nobody else. ``ast.literal_eval`` and ``model.eval()`` execute nothing and are no concern here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "teamtr"
SANDBOX = SOURCE / "grading" / "sandbox"
FAR_SIDE = {SANDBOX / f"{name}.py" for name in ("server", "program", "isolation", "syscalls")}
EXECUTES_TEXT = {SANDBOX / "program.py": {"exec", "compile"}}
"""All there may ever be, and only because nobody imports it."""

BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "pickletools",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
    ),
    *("builtins", "code", "codeop", "runpy"),
}
CALLS = {
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "torch.hub.load": "runs code",
    "torch.package.PackageImporter": "runs code",
    "yaml.load": "may build any object",
    "yaml.load_all": "may build any object",
    "yaml.full_load": "may build any object",
    "yaml.unsafe_load": "builds any object",
    "pandas.read_pickle": "unpickles",
    "pandas.eval": "executes text",
    "numpy.fromregex": "may unpickle",
}
BY_NAME = {"getattr", "import_module", "find_spec", "attrgetter", "__getattribute__"}
WATCHED = (ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Call)
"""What ``complaints`` looks at."""
KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True), ("typ", "unsafe")}


def violations(source: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """What a module does that no module may, each with its line."""
    tree = ast.parse(source)
    names = imported_names(tree)
    found = [
        (node.lineno, complaint)
        for node in ast.walk(tree)
        if isinstance(node, WATCHED)
        for complaint in complaints(node, names)
        if complaint not in allowed
    ]
    return [f"{line}: {complaint}" for line, complaint in sorted(found)]


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What a name at hand stands for: {"np": "numpy", "load": "torch.load"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def complaints(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases if alias.name.partition(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module), level=0, names=aliases):
            if module.partition(".")[0] in MODULES:
                yield module
            yield from (full for a in aliases if (full := f"{module}.{a.name}") in CALLS)
        case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS and name not in names:
            yield name  # called or only handed on
        case ast.Attribute(attr=("__builtins__" | "__globals__") as name):
            yield name
        case ast.Name(id="__builtins__"):
            yield "__builtins__"
        case ast.Attribute():
            if (full := dotted(node, names)) in CALLS:
                yield str(full)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            given = [a.value for a in arguments if isinstance(a, ast.Constant)]
            if (dotted(function, names) or "").rpartition(".")[2] in BY_NAME:
                yield from (f"{text!r} by name" for text in given if text in BUILTINS | MODULES)
            for keyword in keywords:
                if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in KEYWORDS:
                    yield f"{keyword.arg}={keyword.value.value!r}"


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([names.get(node.id, node.id), *parts]) if isinstance(node, ast.Name) else None


@pytest.mark.long
def test_no_module_executes_text_or_unpickles() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 80
    found = {
        str(file.relative_to(SOURCE)): bad
        for file in files
        if (bad := violations(file.read_text(encoding="utf-8"), EXECUTES_TEXT.get(file, set())))
    }
    assert found == {}


def test_the_exception_is_needed_and_exact() -> None:
    for file, allowed in EXECUTES_TEXT.items():
        assert {line.partition(": ")[2] for line in violations(file.read_text(encoding="utf-8"))} == allowed


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("eval('1')", "eval"),
        ("exec(text, {})", "exec"),
        ("compile(text, 'f', 'exec')", "compile"),
        ("run = eval", "eval"),
        ("list(map(eval, texts))", "eval"),
        ("import builtins\nbuiltins.eval('1')", "builtins"),
        ("from builtins import eval as harmless", "builtins"),
        ("__builtins__['eval']('1')", "__builtins__"),
        ("f.__globals__['x']", "__globals__"),
        ("getattr(x, 'eval')('1')", "'eval' by name"),
        ("__import__('os')", "__import__"),
        ("import pickle", "pickle"),
        ("import pickle as json", "pickle"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("import cloudpickle", "cloudpickle"),
        ("import dill.source", "dill.source"),
        ("import marshal, json", "marshal"),
        ("importlib.import_module('pickle')", "'pickle' by name"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch as t\nt.load(path)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import torch\ntorch.save(state, path)", "torch.save"),
        ("import torch\nread = torch.load", "torch.load"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("from yaml import unsafe_load", "yaml.unsafe_load"),
        ("from ruamel.yaml import YAML\nYAML(typ='unsafe')", "typ='unsafe'"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("Model.from_pretrained(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("import pandas as pd\npd.read_pickle(path)", "pandas.read_pickle"),
        ("import runpy", "runpy"),
    ],
)
def test_a_planted_violation_is_caught(line: str, complaint: str) -> None:
    planted = "import json\n" + line + "\n"
    assert complaint in [bad.partition(": ")[2] for bad in violations(planted)]


@pytest.mark.parametrize(
    "line",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "torch.compile(model)",
        "import ast\nast.literal_eval('1')",
        "import yaml\nyaml.safe_load(text)",
        "from safetensors.torch import load_file",
        "import json\njson.load(file)",
        "def evaluate(): ...",
        "spec.loader.exec_module(module)",
        "from teamtr.grading import worker",
        "x = 'eval'",
        "class Settings:\n    eval: int = 1",
        "getattr(settings, 'name')",
    ],
)
def test_what_is_harmless_is_let_through(line: str) -> None:
    assert violations(line) == []


def test_a_planted_violation_in_a_real_module_is_caught() -> None:
    for file in (SANDBOX / "client.py", SOURCE / "tasks" / "benchmarks" / "autologi.py"):
        text = file.read_text(encoding="utf-8")
        assert violations(text) == []
        assert violations(text + "\n\ndef grade(reply):\n    return eval(reply)\n") != []


@pytest.mark.long
def test_nobody_imports_the_far_side_of_the_sandbox() -> None:
    """Neither in its source, nor when every module that the training process can import is imported."""
    far = {file.stem for file in FAR_SIDE}
    for file in SOURCE.rglob("*.py"):
        if file not in FAR_SIDE:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    module = getattr(node, "module", None) or ""
                    mentioned = [f"{module}.{alias.name}".split(".") for alias in node.names]
                    assert not any("sandbox" in name and far & set(name) for name in mentioned), file
    modules = [
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in SOURCE.rglob("*.py")
        if file not in FAR_SIDE
    ]
    assert len(modules) > 80
    program = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("teamtr"):
            raise  # one that needs an extra which is not installed is no concern here
from teamtr.grading.sandbox.client import Program, Sandbox
with Sandbox() as box:
    assert box.run([Program("def f(): return 1", "f", [[]])])[0].value == [1]
print("teamtr.cli" in sys.modules, sorted(name for name in sys.modules if name.startswith("teamtr.grading.sandbox.")))
"""
    started = [sys.executable, "-W", "ignore", "-c", program, *modules]
    ran = subprocess.run(started, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True ['teamtr.grading.sandbox.client']\n"
