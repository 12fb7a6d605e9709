"""Mutation testing of the training loop: applies small faults one at a time, and runs the tests against each.

    python tests/mutants.py [--jobs 2] [--only gate,update] [--limit N] [--out survivors.json]

Every fault changes one expression or statement of one module: a comparison, an operator, a constant, a condition, an
argument left out, a statement skipped. Faults that survive the tests are printed with their location. Some of them are
equivalent mutants, which do not change the behavior; docs/log.md counts them. The parent process loads torch and pytest
once and forks for every fault, so that a fault costs little more than the tests themselves.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOOP = {
    "algorithm": "teamtr.training.algorithm",
    "data": "teamtr.training.batch",
    "update": "teamtr.training.update",
    "certify": "teamtr.training.certify",
    "gate": "teamtr.training.gate",
    "scoring": "teamtr.training.scoring",
    "play": "teamtr.rollout.play",
    "conversing": "teamtr.rollout.conversing",
    "collect": "teamtr.rollout.collect",
    "shaping": "teamtr.rollout.shaping",
    "credit": "teamtr.rollout.credit",
    "crossing": "teamtr.rollout.crossing",
    "lesson": "teamtr.training.lesson",
    "fresh": "teamtr.rollout.staleness",
}
TESTS = [
    "tests/contract/test_algorithm.py",
    "tests/contract/test_update.py",
    "tests/contract/test_gate.py",
    "tests/contract/test_overlong_messages.py",
    "tests/contract/test_dynamic_sampling.py",
    "tests/contract/test_certificates_in_training.py",
    "tests/contract/test_environment.py",
    "tests/contract/test_play.py",
    "tests/contract/test_crossing.py",
    "tests/contract/test_credit.py",
]
"""Tests to run against every fault, the fastest first."""
MORE_TESTS = [
    "tests/contract/test_sampler_scores.py",
    "tests/e2e/test_teams.py",
    "tests/contract/test_reuse.py",
    "tests/contract/test_players.py",
    "tests/statistical/test_diagnostics_exact.py",
]
"""Tests to run against faults that survived ``TESTS``."""
SECONDS = 240.0

_OPPOSITE: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Fault:
    module: str
    line: int
    text: str
    """The text of the line, which identifies the fault after lines have moved."""
    what: str
    source: str

    @property
    def record(self) -> dict[str, Any]:
        return {"module": self.module, "line": self.line, "text": self.text, "what": self.what}


def faults(name: str) -> Iterator[Fault]:
    """Every fault of one module, each with the whole changed source."""
    module = LOOP[name]
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
    decorating = {id(n) for d in ast.walk(tree) for own in getattr(d, "decorator_list", ()) for n in ast.walk(own)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in decorating:
            continue  # the type checker notices whether a record is frozen
        for what, change in _changes(node):
            mutant = copy.deepcopy(tree)
            target = next(n for k, n in enumerate(ast.walk(mutant)) if k == number)
            change(target)
            try:
                source = ast.unparse(ast.fix_missing_locations(mutant))
            except ValueError:
                continue
            line = getattr(node, "lineno", 1)
            yield Fault(module, line, lines[line - 1].strip(), what, source)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Possible faults of one node: a description, and a function that applies it in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITE:
        other = _OPPOSITE[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OPPOSITE:
        if _is_type(node):
            return
        swapped = _OPPOSITE[type(node.op)]
        yield f"{type(node.op).__name__} -> {swapped.__name__}", lambda n: setattr(n, "op", swapped())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield f"{type(node.op).__name__} undone", lambda n: setattr(n, "operand", ast.UnaryOp(n.op, n.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        for value in (True, False):
            if not (isinstance(node, ast.While) and value):
                yield f"condition -> {value}", lambda n, v=value: setattr(n, "test", ast.Constant(v))
    if isinstance(node, ast.Call) and node.keywords and not _is_record(node):
        for k, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                yield f"argument {keyword.arg} left out", lambda n, k=k: n.keywords.pop(k)
    if isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If | ast.With):
        for k, statement in enumerate(node.body):
            if isinstance(statement, ast.AugAssign | ast.Raise | ast.Assert | ast.Break | ast.Continue) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            ):
                words = f"skipped: {ast.unparse(statement)[:60]}"
                yield words, lambda n, k=k: n.body.__setitem__(k, ast.Pass())


def _is_type(node: ast.AST) -> bool:
    """``X | None`` is an annotation, not arithmetic."""
    return isinstance(node, ast.BinOp) and any(
        isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)
    )


def _is_record(node: ast.Call) -> bool:
    """Whether the call constructs a record, where a missing field is an error anyway."""
    return isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


# -- running ---------------------------------------------------------------------------------------------------


class _Instead:
    """Imports one module from the given source, and all others as usual."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, f"<{self.module} with a fault>", "exec"), module.__dict__)


def start(fault: Fault | None, tests: list[str]) -> int:
    """Fork a child that runs the tests with this fault and exits with pytest's status; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if fault is not None:
        sys.meta_path.insert(0, _Instead(fault.module, fault.source))
    import pytest

    status = 1
    try:
        status = int(pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]))
    finally:
        os._exit(status)


def run(chosen: list[Fault], tests: list[str], jobs: int) -> tuple[list[Fault], int]:
    """The faults that survived, and the number of timeouts, which count as noticed."""
    waiting, running, lived, late = list(reversed(chosen)), {}, [], 0
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop()
            running[start(fault, tests)] = (fault, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            fault, _ = running.pop(pid)
            done += 1
            if os.waitstatus_to_exitcode(status) == 0:
                lived.append(fault)
                print(f"lived: {fault.module}:{fault.line}: {fault.what}", flush=True)
            if done % 50 == 0:
                print(f"{done} of {len(chosen)}, {len(lived)} lived", flush=True)
            continue
        for pid, (_, since) in list(running.items()):
            if time.monotonic() - since > SECONDS:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del running[pid]
                done, late = done + 1, late + 1
        time.sleep(0.02)
    return lived, late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="modules, by comma", default=",".join(LOOP))
    parser.add_argument("--limit", type=int, help="so many faults, drawn at random")
    parser.add_argument("--again", type=Path, help="only what lived then: a file that --out wrote")
    parser.add_argument("--quick", action="store_true", help="do not try what lived against the slower tests")
    parser.add_argument("--out", type=Path, help="write what lived as JSON")
    asked = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis  # noqa: F401 -- loaded once, before the first fork
    import torch

    torch.set_num_threads(1)
    rounds = (TESTS,) if asked.quick else (TESTS, MORE_TESTS)
    for tests in rounds:
        if os.waitstatus_to_exitcode(os.waitpid(start(None, tests), 0)[1]) != 0:
            sys.exit(f"the tests fail without any fault: python -m pytest {' '.join(tests)}")
    chosen = [fault for name in asked.only.split(",") for fault in faults(name)]
    if asked.again is not None:
        then = {(f["module"], f["text"], f["what"]) for f in json.loads(asked.again.read_text())}
        chosen = [fault for fault in chosen if (fault.module, fault.text, fault.what) in then]
    if asked.limit is not None:
        chosen = random.Random(0).sample(chosen, min(asked.limit, len(chosen)))
    started = time.monotonic()
    lived, late = chosen, 0
    for tests in rounds:
        lived, later = run(lived, tests, asked.jobs)
        late += later
        print(f"{len(lived)} lived", flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps([fault.record for fault in lived], indent=1))
    for name in asked.only.split(","):
        own = [f for f in chosen if f.module == LOOP[name]]
        print(f"{name}: {sum(f.module == LOOP[name] for f in lived)} of {len(own)} lived")
    noticed = len(chosen) - len(lived)
    print(f"{noticed} of {len(chosen)} noticed ({100 * noticed / len(chosen):.1f} %), {late} of them by the clock")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
