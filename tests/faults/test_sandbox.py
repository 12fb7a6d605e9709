"""Hostile programs against the sandbox: nothing outside is changed or learned, nothing is rewarded, nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest

from teamtr.grading import Result
from teamtr.grading.sandbox import client as sandbox_module
from teamtr.grading.sandbox.client import (
    NAMESPACES,
    PRELOADED,
    WALLS,
    Limits,
    Program,
    Sandbox,
    Verification,
    same_json,
)

SECRET = f"secret-{secrets.token_hex(16)}"
HOSTILE_LIMITS = Limits(seconds=0.15, memory_bytes=256 << 20)
HONEST = Program("def double(x):\n    return 2 * x", "double", [[1], ["ab"]])
MARK = f"  # {secrets.token_hex(8)}"
BOOTSTRAP = sandbox_module._BOOTSTRAP + MARK
"""What our servers run, and a mark: other tests have sandboxes at the same time."""

MODES: dict[str, tuple[str, ...]] = {
    "all walls": (),
    "no namespaces": NAMESPACES,
    "no call filter": ("call filter",),
    "limits only": (*NAMESPACES, "empty root", "call filter"),
}

linux = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")
pytestmark = pytest.mark.filterwarnings("ignore:untrusted code runs behind fewer walls:RuntimeWarning")


class Outside:
    """What a hostile program could reach: a folder that anyone may write to, and a listener."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self.folder = folder
        self.listener = listener
        (folder / "secret.txt").write_text(SECRET)
        (folder / "planted.py").write_text(f"SECRET = {SECRET!r}\n")
        (folder / "victim.txt").write_text("untouched")
        for file in folder.iterdir():
            file.chmod(0o666)

    def code(self, body: str) -> str:
        return hostile.source(body, str(self.folder), self.listener.getsockname()[1], os.getpid())

    def state(self) -> dict[str, Any]:
        return {
            "files": sorted((f.name, f.lstat().st_mode, f.lstat().st_mtime_ns, digest(f)) for f in self.all_files()),
            "shared memory": sorted(f.name for f in Path("/dev/shm").glob("*teamtr*")),
        }

    def all_files(self) -> list[Path]:
        return [self.folder, *self.folder.iterdir()]

    def was_called(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return True
        return False


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("TEAMTR_TEST_SECRET", SECRET)
    folder = Path(tempfile.mkdtemp())  # not tmp_path, whose parents nobody may enter
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Outside(folder, listener)
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def marked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox_module, "_BOOTSTRAP", BOOTSTRAP)
        yield


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


def jailed() -> set[int]:
    """All processes of the sandboxes of this file: a fork keeps the command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if BOOTSTRAP.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [p for child in children for p in (child, *descendants(child))]


def in_the_end(happens: Callable[[], bool]) -> bool:
    """At once, or as soon as a busy machine comes to it; what never happens has not after a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.02)
    return False


def gone(pids: set[int]) -> bool:
    return in_the_end(lambda: not pids & jailed())


def run_hostile(outside: Outside, bodies: dict[str, str], without: tuple[str, ...]) -> None:
    """Half of them in each of two sandboxes, an honest program after each; then look at what is left of the world."""
    before, others = outside.state(), jailed()

    def run_half(names: list[str]) -> list[tuple[str, Result, Result]]:
        with Sandbox(without=without, preload=(*PRELOADED, *hostile.MODULES)) as box:
            done = []
            for name in names:
                [result] = box.run([Program(outside.code(bodies[name]), "solve", [[1]])], HOSTILE_LIMITS)
                done.append((name, result, *box.run([HONEST])))
            outer = box._servers[0]._process
            assert outer is not None
            assert len(descendants(outer.pid)) <= 1, "the server within its namespace, and nothing that a job left"
            return done

    with ThreadPoolExecutor(2) as threads:
        names = list(bodies)
        done = [one for half in threads.map(run_half, (names[::2], names[1::2])) for one in half]
    assert len(done) == len(bodies)
    assert [name for name, result, _ in done if SECRET in repr(result)] == []
    assert [name for name, result, _ in done if same_json(result.value, [SECRET])] == []
    spoilt = [name for name, _, honest in done if honest != Result("ok", [2, "abab"])]
    assert spoilt == [], "the program after it was not judged right"
    assert outside.state() == before
    assert not outside.was_called()
    assert gone(jailed() - others)


def test_there_are_enough_hostile_programs() -> None:
    assert len(hostile.HOSTILE) >= 60


TRIED = ["all walls", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("no namespaces", "no call filter"))]


@pytest.mark.long
@linux
@pytest.mark.parametrize("mode", TRIED)
def test_hostile_programs_change_nothing_learn_nothing_and_earn_nothing(outside: Outside, mode: str) -> None:
    with Sandbox(without=MODES[mode]) as box:
        too_weak = set(NAMESPACES) | {"call filter"} <= set(box.missing())
    if too_weak:
        pytest.skip("this system offers neither namespaces nor a filter of system calls")
    run_hostile(outside, hostile.HOSTILE, MODES[mode])


@pytest.mark.slow
@linux
def test_limits_alone_stop_all_but_what_needs_neither_descriptor_nor_process(outside: Outside) -> None:
    if os.geteuid() != 0:
        pytest.skip("without any wall, only root (who becomes nobody) can try this without harm to itself")
    run_hostile(outside, hostile.WITHIN_LIMITS, MODES["limits only"])


@pytest.mark.long
@linux
def test_the_hostile_programs_would_do_harm_outside(outside: Outside) -> None:
    """Run in a plain child process some of them do succeed: they are not harmless for being ill-written."""
    before = outside.state()
    harm = {
        "read a file": SECRET,
        "read by descriptor": SECRET,
        "read through C": SECRET,
        "map a file": SECRET,
        "environment": SECRET,
        "import from a folder": SECRET,
    }
    if os.geteuid() == 0:
        harm["memory of the asker"] = SECRET
    for name, expected in harm.items():
        assert plainly(outside.code(hostile.HOSTILE[name])) == expected, name
    for name in ("write a new file", "write an old file", "make a folder", "delete a file", "connect", "spawn a shell"):
        plainly(outside.code(hostile.HOSTILE[name]))
    assert in_the_end(lambda: {"new.txt", "new", "spawned"} <= {file.name for file in outside.all_files()})
    assert not (outside.folder / "victim.txt").exists()
    assert in_the_end(outside.was_called)
    assert outside.state() != before


def plainly(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", f"{code}\nprint(solve(1))"], capture_output=True, text=True, timeout=60)
    return ran.stdout.strip()


@pytest.mark.long
@linux
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("endless loop", "timeout", "no answer within 0.15 s of processor time"),
        ("deaf to all signals", "timeout", "no answer within "),  # the clock's limit or the kernel's, which comes later
        ("sleep", "timeout", "no answer within 1.5 s"),
        ("endless output", "timeout", "no answer within 0.15 s"),
        ("leave early", "crash", "left with status 0 and no answer"),
        ("exit", "crash", "SystemExit: 0"),
        ("null pointer", "crash", "killed by signal 11"),
        ("8 GB", "crash", "MemoryError"),
        ("recursion", "crash", "RecursionError"),
        ("a reply of 10 MB", "crash", "a reply of more than 1048576 bytes"),
        ("endless reply", "crash", "a reply of more than 1048576 bytes"),
        ("equal to everything", "crash", "TypeError: a Equal cannot be told in JSON"),
        ("a text equal to everything", "crash", "TypeError: a Equal cannot be told in JSON"),
        ("more replies than inputs", "crash", "another form"),
        ("no such function", "crash", "KeyError: 'solve'"),
        ("no Python", "crash", "IndentationError"),
    ],
)
def test_what_became_of_a_program_is_told(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, message: str
) -> None:
    if "0.15 s" in message:
        monkeypatch.setattr(sandbox_module, "PATIENCE", 10_000)  # not by the clock, on whatever machine
    code = hostile.source(hostile.HOSTILE[name], "/nowhere", 1, os.getpid())
    limits = HOSTILE_LIMITS if kind == "timeout" else replace(HOSTILE_LIMITS, seconds=10.0)
    [result] = sandbox.run([Program(code, "solve", [[1]])], limits)
    assert result.kind == kind
    assert message in result.message


CHECK = "def check(answer):\n    return answer == {'a': {1, 2}, 'b': (3,)}\n"


def test_a_verifier_is_called_with_the_answer_as_data(sandbox: Sandbox) -> None:
    many = CHECK + "def last(answer):\n    return 'a' in answer\nchecks = [check, last]\n"
    right, wrong = "{'a': {1, 2}, 'b': (3,)}", "{'a': {1, 2}, 'b': [3]}"
    assert sandbox.verify([Verification(many, right, ("check", "checks"))]) == [Result("ok", True)]
    assert sandbox.verify([Verification(many, wrong, ("last", "checks"))]) == [
        Result("ok", False, "check returned False")
    ]
    # One object for all checks, as in the benchmark's own evaluator.
    shared = "def first(answer):\n    answer.append(1)\n    return True\ndef then(answer):\n    return answer == [1]\n"
    assert sandbox.verify([Verification(shared, "[]", ("first", "then"))]) == [Result("ok", True)]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("print('True')", "ok"),
        ("print(True); import os; os._exit(0)", "crash"),
        ("import sys; sys.exit(0)", "crash"),
        ("return None", "ok"),
        ("return 0", "ok"),
        ("return ''", "ok"),
        ("return Equal()", "ok"),
        ("return Text('True')", "ok"),
        ("return Pretender()", "ok"),
        ("raise ValueError(True)", "ok"),
        ("return True if forever() else True", "timeout"),
        ("raise KeyboardInterrupt", "crash"),
        ("import builtins; builtins.type = lambda x: bool; builtins.bool = lambda x: True; return Equal()", "ok"),
        ("return (yield)", "ok"),
    ],
)
def test_only_a_plain_true_value_lets_a_check_hold(sandbox: Sandbox, body: str, kind: str) -> None:
    code = textwrap.dedent("""
        class Equal:
            __eq__ = lambda self, other: True
            __bool__ = lambda self: True
        class Text(str):
            pass
        class Same(type):
            __eq__ = lambda self, other: True
            __hash__ = lambda self: hash(bool)
            __instancecheck__ = __subclasscheck__ = lambda self, other: True
        class Pretender(metaclass=Same):
            __class__ = bool
            __bool__ = lambda self: True
        def forever():
            while True:
                pass
        def check(answer):
    """)
    [result] = sandbox.verify(
        [Verification(f"{code}    {body}\n", "1", ("check",))], Limits(0.15 if kind == "timeout" else 10.0)
    )
    assert result.kind == kind
    assert result.value is not True


@pytest.mark.parametrize("value", ["True", "1", "'x'", "[0]", "{1}"])
def test_plain_values_are_true_as_python_has_it(sandbox: Sandbox, value: str) -> None:
    """The benchmark asks ``if not constraint(inputs)``: a verifier may return a set that is not empty."""
    job = Verification(f"def check(answer):\n    return {value}\n", "1", ("check",))
    assert sandbox.verify([job]) == [Result("ok", True)]


SCAN = """
import ctypes, gc, os, sys
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
PAGE = 4096
NEXT = bytes((byte + 1) % 256 for byte in range(256))

def page(address):
    buffer = ctypes.create_string_buffer(PAGE)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), PAGE)
    there = (ctypes.c_size_t * 2)(address, PAGE)
    return buffer.raw if libc.process_vm_readv(os.getpid(), here, 1, there, 1, 0) == PAGE else None

def buffers():
    frame = sys._getframe()
    while frame:
        yield from (value for value in frame.f_locals.values() if type(value) in (bytearray, memoryview))
        frame = frame.f_back

def scan(shifted):
    # The marker itself must not be in memory on our own account: a copy of a page, each byte its next, holds what is
    # wanted where the page held the marker, and never the marker, wherever that copy comes to lie.
    wanted = shifted.encode()
    hits = sum(bytes(buffer).translate(NEXT).count(wanted) for buffer in buffers())
    gc.unfreeze()
    chunks = {id(thing) >> 20 for thing in gc.get_objects()} | {(libc.sbrk(0) >> 20) - i for i in range(8)}
    for chunk in chunks:
        for at in range(chunk << 20, chunk + 1 << 20, PAGE):
            hits += (page(at) or b"").translate(NEXT).count(wanted)
    return hits
"""


def shifted(marker: str) -> str:
    return "".join(chr(ord(letter) + 1) for letter in marker)


@pytest.mark.long
@linux
def test_no_trace_of_another_job_is_in_the_memory_of_a_job() -> None:
    """A program that solved the same problem just before, or its reply, would be worth finding."""
    marker = secrets.token_hex(16)
    told = f"def solve(x):\n    return '{marker}' * 1000 + str(x)  # {marker * 1000}\n"
    planted = f"PLANTED = [b'{marker}' * 10, '{marker}' * 100]\n"
    # Without the filter, for a scan that must not die of a page that is not there.
    with Sandbox(without=("call filter",)) as box:
        [mine] = box.run([Program(planted + SCAN, "scan", [[shifted(marker)]])])
        assert mine.value[0] > 0, "the scan finds what is there"
        for _ in range(3):
            box.run([Program(told, "solve", [[marker]])])
            assert box.run([Program(SCAN, "scan", [[shifted(marker)]])]) == [Result("ok", [0])]


@linux
def test_a_job_has_neither_the_channel_nor_the_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda *_: nonce)
    descriptors = """
import os
def scan_all(shifted):
    found = []
    for fd in range(3, 64):
        try:
            os.write(fd, b"")
            found.append(fd)
        except OSError:
            pass
    return [len(found), scan(shifted)]
"""
    with Sandbox(without=("call filter",)) as box:
        assert box.run([Program(SCAN + descriptors, "scan_all", [[shifted(nonce)]])]) == [Result("ok", [[1, 0]])]


@linux
def test_an_answer_without_the_nonce_does_not_count(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reports the nonce that it was sent; had it another, nothing of the answer would be believed."""
    monkeypatch.setattr(secrets, "compare_digest", lambda left, right: left == right[::-1])
    [result] = sandbox.run([HONEST])
    monkeypatch.undo()
    assert result.kind == "crash"
    assert sandbox.run([HONEST]) == [Result("ok", [2, "abab"])]


def test_values_are_told_in_plain_types(sandbox: Sandbox) -> None:
    values: list[Any] = [None, True, 1, 1.5, "é\ud800", [1, [2.0]], {"k": {"l": []}}]
    assert sandbox.run([Program("def same(x): return x", "same", [[v] for v in values])]) == [Result("ok", values)]
    assert sandbox.run([Program("def pair(): return (1, (2,))", "pair", [[]])]) == [Result("ok", [[1, [2]]])]
    [not_plain] = sandbox.run([Program("def f(): return {1}", "f", [[]])])
    assert not_plain.message == "TypeError: a set cannot be told in JSON"


@pytest.mark.parametrize("returned", ["Pretender()", "[Pretender()]", "{'k': Pretender()}", "{Pretender(): 1}"])
def test_a_class_that_says_it_equals_float_is_not_told_as_one(sandbox: Sandbox, returned: str) -> None:
    code = f"""
class Same(type):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: hash(float)
    __instancecheck__ = __subclasscheck__ = lambda self, other: True
class Pretender(metaclass=Same):
    __class__ = float
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 1
    __iter__ = lambda self: iter([1.0])
def f(): return {returned}
"""
    [result] = sandbox.run([Program(code, "f", [[]])])
    assert result.kind == "crash"
    assert "cannot be told in JSON" in result.message


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0, False, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 1], False),
        ([True], [1], False),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
        (None, [], False),
        ("1", 1, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_values_are_compared_with_their_types(left: Any, right: Any, same: bool) -> None:
    assert same_json(left, right) is same
    assert same_json(right, left) is same


def test_jobs_can_import_what_is_preloaded_and_nothing_else(sandbox: Sandbox) -> None:
    imports = "import collections, itertools, math, re\nfrom dataclasses import dataclass\nfrom typing import *\n"
    assert sandbox.run([Program(imports + "def f(): return math.comb(4, 2)", "f", [[]])]) == [Result("ok", [6])]
    [result] = sandbox.run([Program("import asyncio\ndef f(): return 1", "f", [[]])])
    assert result.message == "ModuleNotFoundError: No module named 'asyncio'"
    with Sandbox(preload=("numpy",), limits=Limits(memory_bytes=4 << 30)) as box:
        code = "import numpy\ndef f(n): return int(numpy.arange(n).sum())"
        assert box.run([Program(code, "f", [[5]])]) == [Result("ok", [10])]


def test_a_verdict_does_not_change_from_run_to_run() -> None:
    """Neither hashes nor random numbers differ between processes."""
    code = "import random\ndef f(): return [list({'a', 'b', 'c', 'd', 'e'}), random.random(), hash('x')]"
    seen = []
    for _ in range(2):
        with Sandbox() as box:
            seen += box.run([Program(code, "f", [[]])] * 2)
    assert len({repr(result) for result in seen}) == 1


@linux
def test_namespaces_are_not_ours() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may look into the namespaces of a process that hides its memory")
    with Sandbox() as box:
        if box.missing():
            pytest.skip(f"this system has not all walls: {box.missing()}")
        outer = box._servers[0]._process
        assert outer is not None
        [server] = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        for kind in ("user", "net", "pid", "mnt", "ipc", "uts"):
            assert os.readlink(f"/proc/{server}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server}/status").read_text().splitlines())
        assert set(status["Uid"].split()) == {"65534"}
        assert set(status["CapEff"] + status["CapPrm"] + status["CapBnd"]) == {"0"}
        assert os.listdir(f"/proc/{server}/root") == []
        assert status["NSpid"].split()[-1] == "1"


@linux
def test_missing_walls_are_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_warned", set())
    with Sandbox(without=NAMESPACES) as box, pytest.warns(RuntimeWarning, match="fewer walls .* no network namespace"):
        box.run([HONEST])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Sandbox(without=NAMESPACES) as again:
            assert again.run([HONEST]) == [Result("ok", [2, "abab"])]
            assert set(NAMESPACES) <= set(again.missing())


def in_user_namespace(script: str, *options: str) -> str:
    """The script's output, run where root is the only user, or where we are not root."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-U", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and a system that lets it make a user namespace")
    started = ["unshare", "-U", *options, sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ran = subprocess.run(started, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


RUN_AND_TELL = """
    from teamtr.grading.sandbox.client import Program, Sandbox
    with Sandbox(without=WITHOUT) as box:
        missing = box.missing()
        honest, thief = box.run([
            Program("def f(x): return 2 * x", "f", [[1]]),
            Program("def f(x): return open('/proc/self/status').read()", "f", [[1]]),
        ])
        print(sorted(missing), honest.value, thief.kind)
        print(*sorted(set(missing.values())))
"""


@pytest.mark.long
@linux
def test_a_system_that_refuses_namespaces() -> None:
    """Not by our choice: the kernel's limit on user namespaces is used up, and root cannot become nobody."""
    script = "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
    told = in_user_namespace(script + textwrap.dedent(RUN_AND_TELL).replace("WITHOUT", "()"), "-r")
    names, reasons = told.splitlines()
    assert names == "['network namespace', 'plain user', 'process namespace', 'user namespace'] [2] crash"
    assert "unshare: No space left on device" in reasons
    assert "root cannot become another user here" in reasons


@pytest.mark.long
@linux
@pytest.mark.parametrize("without", [(), NAMESPACES])
def test_a_user_who_is_not_root(without: tuple[str, ...]) -> None:
    if os.geteuid() == 0:
        options = ("--map-user=1000", "--map-group=1000")
    else:
        options = ("-c",)
    told = in_user_namespace(RUN_AND_TELL.replace("WITHOUT", repr(without)), *options)
    expected = sorted({*without, "empty root"} if without else ())
    assert told.splitlines()[0] == f"{expected} [2] crash"


@linux
@pytest.mark.parametrize("without", [(), NAMESPACES])
def test_no_process_is_left_when_the_owner_is_killed(without: tuple[str, ...]) -> None:
    others = jailed()
    script = f"""
        from teamtr.grading.sandbox import client as sandbox
        from teamtr.grading.sandbox.client import Limits, Program, Sandbox
        sandbox._BOOTSTRAP += {MARK!r}
        box = Sandbox(without={without!r})
        box.missing()
        print("ready", flush=True)
        box.run([Program("def f():\\n    while True: pass", "f", [[]])], Limits(seconds=1000))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            expected = 2 if without else 3
            assert in_the_end(lambda: len(jailed() - others) == expected), "server, process around its namespace, job"
            started = jailed() - others
        finally:
            owner.send_signal(signal.SIGKILL)
    assert gone(started)


@linux
def test_an_interrupt_leaves_no_reply_behind(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.run([HONEST])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    receive = sandbox_module.Channel.receive

    def soon_interrupted(channel: sandbox_module.Channel, deadline: float) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # only now: the answer is waited for
        return receive(channel, deadline)

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sandbox_module.Channel, "receive", soon_interrupted)
            with pytest.raises(KeyboardInterrupt):
                sandbox.run([Program("import time\ndef f(): time.sleep(30)", "f", [[]])])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert sandbox.run([HONEST]) == [Result("ok", [2, "abab"])]


def test_a_sandbox_that_cannot_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with Sandbox(preload=("teamtr_has_no_such_module",)) as box, pytest.raises(RuntimeError, match="did not start"):
        box.run([HONEST])
    assert "teamtr_has_no_such_module" in capfd.readouterr().err


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="needs a worker"):
        Sandbox(workers=0)
    with pytest.raises(ValueError, match="moat"):
        Sandbox(without=("moat",))
    for settings in ({"seconds": 0.0}, {"memory_bytes": 1}, {"reply_bytes": 0}):
        with pytest.raises(ValueError, match="a job needs"):
            Limits(**settings)
    box = Sandbox()
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.run([HONEST])
    assert set(WALLS) >= {"user namespace", "network namespace"}


def test_the_smallest_memory_is_enough_for_a_small_program() -> None:
    with Sandbox(limits=Limits(memory_bytes=64 << 20)) as box:
        assert box.run([HONEST]) == [Result("ok", [2, "abab"])]


@linux
def test_throughput_holds_beside_hostile_neighbours() -> None:
    """A program that dies costs no more than one that answers: no server is replaced for it."""
    crash = Program("import ctypes\ndef f(): ctypes.string_at(0)", "f", [[]])
    with Sandbox() as box:
        box.run([HONEST])
        first = box._servers[0]._process
        results = box.run([HONEST, crash] * 20)
        assert box._servers[0]._process is first
    assert [r.kind for r in results] == ["ok", "crash"] * 20
    assert "signal 11" in results[1].message
