"""Answers made to hang, crash or flood a grader: each gets its verdict, the others theirs, nothing is left running."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_growth import assert_linear
from teamtr.grading import GraderError, Result, WorkerPool
from teamtr.grading.math.rules import RULES, MathGrader
from teamtr.grading.math.statement import stated_answer
from teamtr.grading.workers import pool as pools

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def load_bench():
    spec = importlib.util.spec_from_file_location("bench_grading", ROOT / "bench" / "grading.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCH = load_bench()

GRADERS = """
    import os, time

    def busy():
        def grade(items):
            for item in items:
                until = time.process_time() + item["seconds"]
                while time.process_time() < until:
                    pass
                yield item["seconds"]
        return grade

    def chatty():
        def grade(items):
            for item in items:
                print("noise" * item["bytes"])
                yield "x" * item["bytes"]
        return grade

    def born():
        import sys
        at_birth = set(sys.modules)
        def grade(items):
            for item in items:
                yield [item["module"] in at_birth, os.getpid(), os.getppid()]
        return grade

    def preloaded():
        import sys
        def grade(items):
            for item in items:
                yield [item["module"] in sys.modules, os.getpid(), os.getppid()]
        return grade
"""


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_graders.py").write_text(textwrap.dedent(GRADERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "odd_graders"


def descendants(pid: int) -> set[int]:
    """Every live process below this one, by its number."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    living = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.add(pid)
        except OSError:
            continue
    return living


def gone(pids: set[int]) -> bool:
    """Now, or as soon as a busy machine comes to it; what is never killed is still there after a minute."""
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


# A thousand answers, five in a hundred of them pathological


@pytest.mark.parametrize(
    ("name", "count"),
    [("default", 1000), ("deepscaler", 100), pytest.param("deepscaler", 1000, marks=pytest.mark.slow)],
)
def test_a_thousand_answers_with_five_in_a_hundred_pathological(name: str, count: int) -> None:
    clean, mixed = (BENCH.answers(count, bad, seed=3) for bad in (0, count // 20))
    bad = [place for place in range(count) if clean[place] != mixed[place]]
    assert len(bad) == count // 20
    before = descendants(os.getpid())
    with MathGrader(RULES[name], seconds_per_item=10) as grader:
        verdicts = grader.grade(mixed)
        workers = descendants(os.getpid()) - before
        assert len(workers) >= 2, "the check sees what is there"
        assert sum(grader.counts.values()) == len(verdicts) == count, "every verdict is counted"
        assert grader.counts == Counter(verdict.kind for verdict in verdicts)
        assert not grader.failures, "what is pathological is seen to be: nobody waits for it or has to be killed"
        alone = MathGrader(RULES[name], seconds_per_item=10)
        expected = alone.grade([pair for place, pair in enumerate(clean) if place not in bad])
        alone.close()
        assert [v for place, v in enumerate(verdicts) if place not in bad] == expected, "the honest get their due"
    assert not any(verdicts[place].right for place in bad)
    assert gone(workers), "no process is left"


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("default", r"\frac{3\sqrt{2}}{5}"),
        ("default", "7"),
        ("default", "(1,2)"),
        ("default", r"\text{east}"),
        ("default", "x^2+1"),
        ("deepscaler", "7"),
        ("deepscaler", "x^2+1"),
    ],
)
def test_each_kind_of_pathology_is_bounded(name: str, truth: str) -> None:
    replies = [
        *BENCH.PATHOLOGICAL,
        r"\boxed{" + "9^" * 300 + "9}",
        r"\boxed{10^{10^{10^{10}}} - 10^{10^{10^{10}}}}",
        r"\boxed{\binom{10^{12}}{10^{11}}}",
        r"\boxed{(x+1)^{10^{9}}}",
        r"\boxed{" + "-" * 1500 + "1}",
        r"\boxed{" + "9" * 1900 + "}",
        r"\boxed{1e999999999}",
        r"\boxed{\sin(10^{10^{6}})}",
        r"\boxed{" + r"\pm 1" * 200 + "}",
        r"\boxed{" + "1," * 900 + "1}",
        r"\boxed{" + "{" * 900 + "}" * 900 + "}",
        r"\boxed{" + r"\left(" * 300 + "}",
        "\\boxed{" * 100_000,
        "answer: " * 100_000,
        "#### " * 200_000,
        "$" * 1_000_000,
        "\x00\ud800" * 1000,
    ]
    with MathGrader(RULES[name], workers=2, seconds_per_item=3) as grader:
        grader.grade([(r"\boxed{x\cdot x}", "x^2")])
        verdicts = grader.grade([(reply, truth) for reply in replies])
        assert sum(grader.failures.values()) <= 1, "one of them is killed for being late, the others never begin"
        assert not any(verdict.right for verdict in verdicts)
        assert grader.grade([(r"\boxed{x\cdot x}", "x^2")])[0].right, "it still works"


def test_what_hangs_in_the_mirror_is_killed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy takes for ever over this one, and nothing that can be seen beforehand says so."""
    monkeypatch.setattr(pools, "PATIENCE", 10_000)  # not by the clock, however little of the machine there is for it
    endless = r"\boxed{(x+y)^9*(x+y+1)^9*(x+y+2)^9*(x-y+3)^9*(x-y)^9*(x+3y)^9*(2x+y)^9*(x+5y+1)^9}"
    replies = [r"\boxed{x\cdot x}", endless, r"\boxed{x^2}", r"\boxed{x}"]
    with MathGrader(RULES["deepscaler"], seconds_per_item=2, workers=1) as grader:
        kinds = [verdict.kind for verdict in grader.grade([(reply, "x^2") for reply in replies])]
        assert kinds == ["right", "timeout", "right", "wrong"]
        assert grader.counts == {"right": 2, "timeout": 1, "wrong": 1}
        assert grader.failures == {"no answer within 2 s of processor time": 1}


@given(st.text(max_size=300))
@settings(max_examples=100)
def test_no_text_makes_a_rule_raise(text: str) -> None:
    for rule in RULES.values():
        for reply in (text, f"\\boxed{{{text}}}", f"Answer: {text}", f"#### {text}"):
            rule.judge(reply, r"\frac{1}{2}")
            rule.judge(r"\boxed{\frac{1}{2}}", text)


PIECES = r"""
    \frac \sqrt { } ( ) [ ] ^ _ 1 23 x + - , \pi \text{or} = | \begin{pmatrix} \end{pmatrix} & \\ \{ \} \cup \infty ! %
    \le < . \sin \log \pm \left \right \binom e i \cdot / ' \lfloor \rfloor : \text{ }
"""
LATEX = st.lists(st.sampled_from([" ", *PIECES.split()]), max_size=14).map("".join)


@given(LATEX, LATEX)
@settings(max_examples=150)
def test_no_latex_makes_a_comparison_raise_and_every_answer_is_itself(given_text: str, truth: str) -> None:
    from teamtr.grading.math.deepscaler import judge
    from teamtr.grading.math.same import same_answer
    from teamtr.grading.math.text import quick_same

    same_answer(given_text, truth)
    judge(given_text, truth)
    assert quick_same(given_text, given_text) is True
    assert judge(given_text, given_text) is True


def test_an_answer_after_a_megabyte_of_text_is_found_in_linear_time() -> None:
    assert stated_answer("word " * 200_000 + r"\boxed{7}") == "7"
    assert_linear(stated_answer, lambda n: "word " * (n // 5) + r"\boxed{7}", 1_000_000)


# The pool: preloaded, forked, bounded


@pytest.mark.slow
def test_a_killed_worker_is_replaced_by_a_fork_that_has_everything_loaded(
    graders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 10_000)
    with WorkerPool(seconds_per_item=0.1, preload=["sympy"]) as pool:
        fine, late = {"seconds": 0}, {"seconds": 60}
        pool.submit(f"{graders}:busy", [fine])
        forkserver = pool._forkserver.pid
        results = pool.submit(f"{graders}:busy", [fine, late, fine] * 3)
        assert [r.kind for r in results] == ["ok", "timeout", "ok"] * 3
        for _ in range(2):
            (result,) = pool.submit(f"{graders}:born", [{"module": "sympy"}])
            at_birth, _, parent = result.value
            assert (at_birth, parent) == (True, forkserver), "sympy, which takes a second to import, came with the fork"
            assert pool.submit(f"{graders}:busy", [late])[0].kind == "timeout"


def test_what_is_preloaded_is_there_from_birth(graders: str) -> None:
    with WorkerPool(workers=2, preload=["fractions"]) as pool:
        items = [{"module": "fractions"}, {"module": "sympy"}]
        (loaded, first, parent), (absent, second, other_parent) = (
            result.value for result in pool.submit(f"{graders}:preloaded", items)
        )
        assert (loaded, absent) == (True, False)
        assert first != second
        assert parent == other_parent == pool._forkserver.pid
    with (
        WorkerPool(preload=["teamtr_has_no_such_module"]) as pool,
        pytest.raises(GraderError, match="teamtr_has_no_such_module"),
    ):
        pool.load("regex", {"pattern": "(x)"})


def test_an_answer_too_long_is_a_crash_and_no_flood(graders: str) -> None:
    with WorkerPool(output_bytes=10_000) as pool:
        sizes = [10, 100_000, 20]
        results = pool.submit(f"{graders}:chatty", [{"bytes": size} for size in sizes])
        assert results == [
            Result("ok", "x" * 10),
            Result("crash", message="an answer of more than 10000 bytes, or bytes that are no answer"),
            Result("ok", "x" * 20),
        ]


def test_a_nursery_that_dies_is_replaced(graders: str) -> None:
    with WorkerPool(seconds_per_item=5) as pool:
        (first,) = pool.submit(f"{graders}:preloaded", [{"module": "os"}])
        assert pool._forkserver.pid is not None
        os.kill(pool._forkserver.pid, signal.SIGKILL)
        assert gone({pool._forkserver.pid})
        assert pool.submit(f"{graders}:preloaded", [{"module": "os"}])[0].value[1] == first.value[1], (
            "its child lives on"
        )
        os.kill(first.value[1], signal.SIGKILL)
        (second,) = pool.submit(f"{graders}:preloaded", [{"module": "os"}])
        assert second.kind == "ok"
        assert second.value[1] != first.value[1]
        assert second.value[2] == pool._forkserver.pid
        family = {pool._forkserver.pid, second.value[1]}
    assert gone(family)


def test_no_process_is_left_when_the_owner_is_killed_while_sympy_works() -> None:
    program = textwrap.dedent(
        """
        import sys, threading
        from teamtr.grading.math.rules import RULES, MathGrader
        grader = MathGrader(RULES["deepscaler"], seconds_per_item=60)
        grader.grade([(r"\\\\boxed{x*x}", "x^2")])
        print(grader._pool._forkserver.pid, *(w._process.pid for w in grader._pool._workers if w._process), flush=True)
        endless = r"\\\\boxed{(x+y)^9*(x+y+1)^9*(x+y+2)^9*(x-y+3)^9*(x-y)^9*(x+3y)^9*(2x+y)^9*(x+5y+1)^9}"
        grader.grade([(endless, "x^2")])
        """
    ).replace("\\\\", "\\")
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    family = {int(pid) for pid in owner.stdout.readline().split()}
    time.sleep(0.3)
    assert len(alive(family)) == len(family) >= 2
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=60)
    assert gone(family)
