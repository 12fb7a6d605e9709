"""Graders that hang, die, raise, print or lie: the one item is blamed, its neighbours are graded, nothing is left."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teamtr.config import loads
from teamtr.errors import TeamTRError
from teamtr.grading import GraderError, Result, WorkerPool
from teamtr.grading.workers import pool as pools
from teamtr.grading.workers.channel import Channel, LateError
from teamtr.grading.workers.forkserver import Child
from teamtr.grading.workers.pool import _Worker
from teamtr.session import train as run
from teamtr.session.checks import self_test
from teamtr.tasks import DataTask
from teamtr.team import Schedule
from teamtr.types import Verdict

ALLOWED_S = 0.3
"""Of processor time. By the clock it is an hour, unless a test is about the clock: a busy machine may stop an honest
grader for seconds."""

REWARDS = """
    import os, subprocess, sys, time

    def by_word(prompts, completions, **columns):
        print("noise " * 1000)
        os.write(1, b"raw noise")
        print("more", file=sys.stderr)
        return [obey(word) for word in completions]

    def obey(word):
        if word.startswith("loop"):
            if word != "loop":
                open(word.removeprefix("loop and tell "), "w").close()
            while True:
                pass
        if word == "sleep":
            time.sleep(1000)
        if word == "exit":
            os._exit(7)
        if word == "quit":
            sys.exit(3)
        if word == "raise":
            raise KeyError("no such thing")
        if word == "segfault":
            import ctypes
            ctypes.string_at(0)
        if word == "hog":
            bytearray(64 << 30)
        if word == "nan":
            return float("nan")
        if word == "children":
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
        return float(word)

    def drops_the_blank(prompts, completions, **columns):
        return [1.0 for text in completions if text]

    def not_a_list(prompts, completions):
        return 1.0

    def always_one(prompts, completions, **columns):
        return [1.0]

    def raises(prompts, completions, **columns):
        raise RuntimeError("out of paper")

    def hangs(prompts, completions, **columns):
        time.sleep(1000)

    class Same(type):
        __eq__ = lambda self, other: True
        __hash__ = lambda self: hash(float)
        __instancecheck__ = __subclasscheck__ = lambda self, other: True

    class Pretender(metaclass=Same):
        __class__ = float
        __eq__ = __ge__ = lambda self, other: True
        __hash__ = lambda self: 1

    def pretends(prompts, completions, **columns):
        return [Pretender() if text == "lie" else float(text) for text in completions]

    def not_a_number(prompts, completions, **columns):
        return [float("nan")] * len(completions)

    def level(prompts, completions, level, **columns):
        assert sorted(columns) == ["answer", "conversations", "note"], columns
        return [l / 10 + (c == a) for l, c, a in zip(level, completions, columns["answer"])]

    def level_only(prompts, completions, level):
        return [l / 10 for l in level]

    armed = []

    def remembers(prompts, completions):
        import threading
        if "arm" in completions:
            armed.append(threading.Event())
            threading.Thread(target=lambda: armed[0].wait() and os._exit(9)).start()
        if "wait" in completions and armed:
            armed[0].set()
            time.sleep(50)
        return [1.0] * len(completions)
"""


MISDEEDS = """
    import os, socket, stat, sys

    def misbehaves(prompts, completions, **columns):
        for word in completions:
            DEEDS.get(word, lambda: None)()
        return [0.5 if word in DEEDS else float(word) for word in completions]

    def to_channel(data):
        fd = next(fd for fd in range(3, 64) if is_socket(fd))
        socket.socket(fileno=os.dup(fd)).sendall(data)

    def is_socket(fd):
        try:
            return stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            return False

    worker = sys.modules["__main__"]
    encode = worker.encode_frame
    sent = []

    def kept(*content):
        sent.append(encode(*content))
        return sent[-1]

    def stutter():
        worker.encode_frame = lambda *content: 2 * encode(*content)

    def repeat_an_earlier_one():
        worker.encode_frame = lambda *content: sent[-2]

    def fork_and_pretend():
        pid = os.getpid()
        os.getpid = lambda: pid
        os.fork()

    worker.encode_frame = kept
    DEEDS = {
        "forks": os.fork,
        "forks and pretends": fork_and_pretend,
        "writes a verdict": lambda: to_channel(encode({"values": [1.0]})),
        "writes an error": lambda: to_channel(encode({"error": "none of mine", "miscounted": False})),
        "writes what it once sent": lambda: [to_channel(frame) for frame in sent[-1:]],
        "writes an empty frame": lambda: to_channel(bytes(8)),
        "writes garbage": lambda: to_channel(b"garbage " * 9),
        "writes the beginning of a frame": lambda: to_channel(bytes([0, 0, 0, 0, 0, 0, 2, 0])),
        "answers twice": stutter,
        "answers as it did before": repeat_an_earlier_one,
        "closes the channel": lambda: os.closerange(3, 64),
        "prints a verdict": lambda: [os.write(fd, encode({"values": [1.0]})) for fd in (1, 2)],
    }
"""


BY_THE_CLOCK = pools.PATIENCE
"""Outside of tests."""


@pytest.fixture(autouse=True)
def hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 3600 / ALLOWED_S)


@pytest.fixture
def misdeeds(tmp_path: Path) -> dict[str, Any]:
    """The setup of a reward that does, on its way, what the completion names."""
    path = tmp_path / "misdeeds.py"
    path.write_text(textwrap.dedent(MISDEEDS))
    return {"path": str(path), "function": "misbehaves", "columns": []}


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(textwrap.dedent(REWARDS))
    return path


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(seconds_per_item=ALLOWED_S) as made:
        yield made


def task_of(folder: Path, rewards: Path, function: str, **settings: Any) -> DataTask:
    data = folder / "data.jsonl"
    rows = [{"question": f"q{k}", "answer": str(k), "level": k, "note": None} for k in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataTask(
        data, held_out=0, grader=f"python:{rewards}:{function}", **{"seconds_per_item": ALLOWED_S, **settings}
    )


def graded(task: DataTask, words: list[str]) -> list[Verdict]:
    problem = task.problems("train")[0]
    return task.grade([(problem, word, [word]) for word in words])


def live_members_of_groups(groups: set[int]) -> list[str]:
    """Processes, zombies aside, whose group is one of these."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        state, _, group = rest.split()[:3]
        if int(group) in groups and state != "Z":
            found.append(name)
    return found


def worker_pid(pool: WorkerPool, index: int = 0) -> int:
    process = pool._workers[index]._process
    assert process is not None
    return process.pid


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        ("loop", "timeout", f"no answer within {ALLOWED_S:g} s of processor time"),
        ("exit", "crash", "the worker exited with status 7"),
        ("quit", "crash", "SystemExit: 3 (rewards.py:"),
        ("raise", "crash", "KeyError: 'no such thing' (rewards.py:"),
        ("segfault", "crash", "killed by signal 11"),
        ("hog", "crash", "MemoryError"),
        ("", "crash", "ValueError: could not convert"),
    ],
)
def test_one_bad_completion_among_sixteen(tmp_path: Path, rewards: Path, word: str, kind: str, message: str) -> None:
    task = task_of(tmp_path, rewards, "by_word")
    words = ["1", "0.5"] * 8
    words[11] = word
    expected = [Verdict("right", 1.0), Verdict("wrong", 0.5)] * 8
    expected[11] = Verdict(kind, 0.0)  # type: ignore[arg-type]
    assert graded(task, words) == expected
    assert [(message in text, times) for text, times in task.failures.items()] == [(True, 1)]
    assert graded(task, ["1"]) == [Verdict("right", 1.0)], "the worker was replaced"
    task.close()


@pytest.mark.long
def test_several_bad_completions_each_get_their_own_verdict(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "by_word", workers=2)
    words = ["exit", "1", "raise", "0", "loop", "nan", "-2.5", "1", "exit"]
    verdicts = graded(task, words)
    assert [v.kind for v in verdicts] == [
        *("crash", "right", "crash", "wrong", "timeout", "crash", "wrong", "right", "crash"),
    ]
    assert [v.reward for v in verdicts if math.isfinite(v.reward)] == [0.0, 1.0, 0.0, 0.0, 0.0, -2.5, 1.0, 0.0]
    assert task.failures["the reward is nan"] == 1
    assert sum(task.failures.values()) == 5
    task.close()


def test_a_reward_that_is_not_finite_stays_nan(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "by_word")
    for word in ("nan", "inf", "-inf"):
        (verdict,) = graded(task, [word])
        assert verdict.kind == "crash"
        assert math.isnan(verdict.reward)
    task.close()


def test_a_reward_that_only_claims_to_be_a_number_is_none(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "pretends")
    assert graded(task, ["1", "lie", "0.5"]) == [Verdict("right", 1.0), Verdict("crash", 0.0), Verdict("wrong", 0.5)]
    task.close()


def test_wrong_number_of_rewards_blames_only_the_item_that_is_dropped(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "drops_the_blank")
    assert [v.kind for v in graded(task, ["a", "b", "", "c", "d"])] == ["right", "right", "crash", "right", "right"]
    assert list(task.failures) == ["drops_the_blank returned 0 rewards for 1 completions"]
    task.close()
    scalar = task_of(tmp_path, rewards, "not_a_list")
    assert [v.kind for v in graded(scalar, ["a", "b"])] == ["crash", "crash"]
    assert "must return a list of rewards, it returned 1.0" in next(iter(scalar.failures))
    scalar.close()


def test_a_wrong_number_of_rewards_that_no_item_explains_is_an_error(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "always_one")
    assert [v.kind for v in graded(task, ["a"])] == ["right"]
    with pytest.raises(
        GraderError, match=r"^always_one returned 1 rewards for 3 completions: it must return one for each"
    ):
        graded(task, ["a", "b", "c"])
    task.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "RuntimeError: out of paper .rewards.py:"),
        pytest.param("hangs", f"no answer within {10 * ALLOWED_S:g} s", marks=pytest.mark.slow),
        ("not_a_number", "the reward is nan"),
        ("always_one", "always_one returned 1 rewards for 3 completions"),
    ],
)
def test_a_grader_that_always_fails_is_found_before_training(
    tmp_path: Path, rewards: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    if function == "hangs":
        monkeypatch.setattr(pools, "PATIENCE", BY_THE_CLOCK)
    task_of(tmp_path, rewards, "level").close()  # writes the data
    text = f"""
        name: small
        task:
          {{name: data, path: {tmp_path}/data.jsonl, grader: "python:{rewards}:{function}",
           seconds_per_item: {ALLOWED_S}}}
        team: {{model: tiny, max_tokens: 4, agents: [{{name: solo}}]}}
        tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
        plan: {{stages: 1, problems: 2, group_size: 2}}
    """
    with pytest.raises(TeamTRError, match=message) as refused:
        list(run.train(loads(textwrap.dedent(text), "team.yaml"), tmp_path / "run"))
    assert refused.value.exit_code in (2, 3)
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_a_grader_that_fails_on_some_replies_is_let_through(tmp_path: Path, rewards: Path) -> None:
    session = SimpleNamespace(
        task=task_of(tmp_path, rewards, "by_word"),
        team_file=SimpleNamespace(seed=0),
        context=SimpleNamespace(router=Schedule.repeated(("a",)), codecs={"a": None}, answer="last"),
    )
    assert self_test(session) == []
    assert not session.task.failures, "what it was tried with does not count"


def test_a_reward_sees_its_columns(tmp_path: Path, rewards: Path) -> None:
    task = task_of(tmp_path, rewards, "level")
    problems = list(task.problems("train"))
    verdicts = task.grade([(p, "2", []) for p in problems])
    assert [v.reward for v in verdicts] == pytest.approx([0.0, 0.1, 1.2, 0.3])
    assert [v.right for v in verdicts] == [False, False, True, False]
    assert not task.failures
    task.close()
    lenient = task_of(tmp_path, rewards, "level_only", threshold=0.2)
    assert [v.right for v in lenient.grade([(p, "", []) for p in problems])] == [False, False, True, True]
    lenient.close()


@pytest.mark.long
def test_a_pattern_that_backtracks_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill, killed = _Worker.kill, []
    monkeypatch.setattr(_Worker, "kill", lambda worker: killed.append(worker) or kill(worker))
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "q", "answer": "aa"}\n')
    task = DataTask(data, held_out=0, grader="regex", pattern=r"^((?:a+)+)$", seconds_per_item=ALLOWED_S)
    verdicts = graded(task, ["aa", "a" * 60 + "!", "AA", "b", "a" * 50 + "?", "aa"])
    assert len(killed) == 2, "it answers text by text, so each bad one costs its own time and no search"
    assert verdicts == [
        Verdict("right", 1.0, "aa"),
        Verdict("timeout", 0.0),
        Verdict("unparsed", 0.0),
        Verdict("unparsed", 0.0),
        Verdict("timeout", 0.0),
        Verdict("right", 1.0, "aa"),
    ]
    task.close()


@pytest.mark.long
def test_a_late_death_is_not_blamed_on_the_next_item(rewards: Path) -> None:
    """One item leaves a thread behind that ends the process while the next one is being graded."""
    setup = {"path": str(rewards), "function": "remembers", "columns": []}
    with WorkerPool(seconds_per_item=60.0) as pool:
        assert pool.submit("reward", [{"prompt": "", "completion": "arm", "columns": {}}], setup) == [Result("ok", 1.0)]
        first = worker_pid(pool)
        assert pool.submit("reward", [{"prompt": "", "completion": "wait", "columns": {}}], setup) == [
            Result("ok", 1.0)
        ]
        assert worker_pid(pool) != first


HARMLESS = ("forks", "prints a verdict")
"""What a grader may do without harm: its one answer counts."""


@pytest.mark.long
@pytest.mark.parametrize(
    "deed",
    [
        *("forks", "writes a verdict", "writes an error", "writes what it once sent", "writes an empty frame"),
        *("writes garbage", "answers twice", "answers as it did before", "closes the channel", "prints a verdict"),
    ],
)
def test_what_a_grader_does_to_the_channel_spoils_its_own_verdict_alone(misdeeds: dict[str, Any], deed: str) -> None:
    with WorkerPool(seconds_per_item=5.0) as pool:

        def submit(*words: str) -> list[Result]:
            return pool.submit("reward", [{"prompt": "", "completion": w, "columns": {}} for w in words], misdeeds)

        assert submit("1") == [Result("ok", 1.0)]
        own = [Result("ok", 0.5)] if deed in HARMLESS else submit(deed)
        assert own[0].kind == ("ok" if deed in HARMLESS else "crash"), own
        numbers = [k / 64 for k in range(1, 8)]
        words = [str(x) for x in numbers]
        results = submit(*words[:3], deed, *words[3:])
        # Not the words of the crash: one that ends by itself may be killed before it has.
        assert [(result.kind, result.value) for result in results] == [
            *(("ok", x) for x in numbers[:3]),
            (own[0].kind, own[0].value),
            *(("ok", x) for x in numbers[3:]),
        ]
        for word, x in zip(words, numbers, strict=True):
            assert submit(word) == [Result("ok", x)], "each answer belongs to its own request"


@pytest.mark.slow
def test_the_beginning_of_a_frame_is_no_late_answer(misdeeds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = (
        [{"prompt": "", "completion": word, "columns": {}}] for word in ("writes the beginning of a frame", "0.25")
    )
    with WorkerPool(seconds_per_item=ALLOWED_S) as pool:
        pool.load("reward", misdeeds)
        with monkeypatch.context() as patched:
            patched.setattr(pools, "PATIENCE", BY_THE_CLOCK)
            (spoilt,) = pool.submit("reward", bad, misdeeds)
        (fine,) = pool.submit("reward", good, misdeeds)
    assert (spoilt.kind, fine) == ("crash", Result("ok", 0.25))


@pytest.mark.long
def test_a_fork_that_answers_as_well_is_never_taken_for_the_answer_to_another_request(
    misdeeds: dict[str, Any],
) -> None:
    """Its answer comes at any time, and may be cut: a request may fail for it, but none gets another one's value."""
    with WorkerPool(seconds_per_item=1.0) as pool:
        for k in range(12):
            word = "forks and pretends" if k % 3 == 0 else str(k)
            (result,) = pool.submit("reward", [{"prompt": "", "completion": word, "columns": {}}], misdeeds)
            assert result.kind != "ok" or result.value == (0.5 if k % 3 == 0 else float(k))


def test_of_items_answered_one_by_one_the_one_that_answers_twice_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stutters.py").write_text(
        textwrap.dedent("""
        import sys
        worker = sys.modules["__main__"]
        encode = worker.encode_frame

        def lengths():
            def grade(items):
                for item in items:
                    times = 2 if item["text"] == "twice" else 1
                    worker.encode_frame = lambda *content: times * encode(*content)
                    yield len(item["text"])
            return grade
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(seconds_per_item=30.0) as pool:
        texts = ["a", "bb", "twice", "ccc", "twice", "dddd"]
        results = pool.submit("stutters:lengths", [{"text": text} for text in texts])
    assert [(r.kind, r.value) for r in results] == [
        *(("ok", 1), ("ok", 2), ("crash", None), ("ok", 3), ("crash", None), ("ok", 4))
    ]


@pytest.mark.long
def test_only_processor_time_makes_a_grader_late_unless_it_waits_ten_times_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting is what a grader does on a busy machine."""
    (tmp_path / "waits.py").write_text(
        textwrap.dedent("""
            import time

            def seconds():
                def grade(items):
                    for item in items:
                        time.sleep(item["asleep"])
                        start = time.process_time()
                        while time.process_time() - start < item["at_work"]:
                            pass
                        yield "done"
                return grade
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    times = [(0.6, 0.0), (0.0, 60.0), (0.0, 0.01), (60.0, 0.0)]
    items = [{"asleep": asleep, "at_work": at_work} for asleep, at_work in times]
    with WorkerPool(seconds_per_item=0.2) as pool:
        results = pool.submit("waits:seconds", items[:3])
        monkeypatch.setattr(pools, "PATIENCE", BY_THE_CLOCK)
        results += pool.submit("waits:seconds", items[3:])
    assert [(r.kind, r.value or r.message) for r in results] == [
        ("ok", "done"),
        ("timeout", "no answer within 0.2 s of processor time"),
        ("ok", "done"),
        ("timeout", "no answer within 2 s"),
    ]


@pytest.mark.long
def test_no_process_is_left(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = {"path": str(rewards), "function": "by_word", "columns": []}
    pool = WorkerPool(workers=2, seconds_per_item=ALLOWED_S)
    pool.submit("reward", [{"prompt": "", "completion": "1", "columns": {}}] * 2, setup)
    late = worker_pid(pool, 0)
    groups = {late, worker_pid(pool, 1)}
    assert len(live_members_of_groups(groups)) == 2, "the check sees what is there"
    with monkeypatch.context() as patched:
        patched.setattr(pools, "PATIENCE", BY_THE_CLOCK)
        (result,) = pool.submit("reward", [{"prompt": "", "completion": "children", "columns": {}}], setup)
    assert result.kind == "timeout"
    assert gone(late), "the late worker took its child along"
    pool.submit("reward", [{"prompt": "", "completion": "1", "columns": {}}] * 2, setup)
    groups |= {worker_pid(pool, 0), worker_pid(pool, 1)}
    pool.close()
    pool.close()
    assert all(gone(group) for group in groups)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("regex", [{"text": ""}], {"pattern": "(x)"})


PARENT = """
    import sys
    from teamtr.grading import WorkerPool
    pool = WorkerPool(seconds_per_item={seconds})
    setup = {{"path": {path!r}, "function": "by_word", "columns": []}}
    pool.load("reward", setup)
    print(pool._workers[0]._process.pid, flush=True)
    {then}
"""


def start_parent(rewards: Path, then: str, seconds: float) -> tuple[subprocess.Popen[str], int]:
    program = textwrap.dedent(PARENT.format(path=str(rewards), then=then, seconds=seconds))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def gone(group: int) -> bool:
    """Now, or as soon as a busy machine comes to it; what is never killed is still there after a minute."""
    deadline = time.monotonic() + 60
    while live_members_of_groups({group}):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)  # the test has failed; the machine need not suffer for it
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("then", ["pass", "raise SystemExit(4)", "1 / 0"])
def test_no_process_is_left_when_the_owner_exits_without_closing(rewards: Path, then: str) -> None:
    parent, group = start_parent(rewards, then, seconds=60)
    parent.communicate(timeout=60)
    assert gone(group)


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True])
def test_no_process_is_left_when_the_owner_is_killed(tmp_path: Path, rewards: Path, busy: bool) -> None:
    """Idle, the worker sees the channel close; busy in an endless loop, the kernel's alarm ends it."""
    loops = tmp_path / "loops"
    item: dict[str, Any] = {"prompt": "", "completion": f"loop and tell {loops}", "columns": {}}
    then = f'pool.submit("reward", [{item!r}], setup)' if busy else "__import__('time').sleep(1000)"
    parent, group = start_parent(rewards, then, seconds=0.5)
    if busy:
        while not loops.exists():
            assert parent.poll() is None, "it never began"
            time.sleep(0.01)
    else:
        assert live_members_of_groups({group})
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=60)
    assert gone(group)


def test_a_fork_of_the_owner_does_not_end_its_workers(pool: WorkerPool) -> None:
    pool.load("regex", {"pattern": "(x)"})
    child = os.fork()
    if child == 0:
        pool._end()
        os._exit(0)
    os.waitpid(child, 0)
    assert live_members_of_groups({worker_pid(pool)})


@pytest.mark.long
def test_a_grader_that_does_not_load_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    slow = tmp_path / "slow.py"
    dying = tmp_path / "dying.py"
    broken.write_text("import teamtr_has_no_such_module\n")
    slow.write_text("import time\ntime.sleep(1000)\n")
    dying.write_text("import os\nos._exit(5)\n")
    with WorkerPool() as pool:
        for path, allowed_s, complaint in (
            (broken, 60.0, r"did not load: ModuleNotFoundError.*\(broken\.py:1\)"),
            (slow, 2.0, "did not load within 2 s"),
            (dying, 60.0, "exited with status 5 on loading"),
        ):
            pool._seconds_to_load = allowed_s
            with pytest.raises(GraderError, match=complaint):
                pool.load("reward", {"path": str(path), "function": "f", "columns": []})
        pool._seconds_to_load = 60.0
        with pytest.raises(GraderError, match=r"no grader 'nope': use one of \['regex', 'reward'\]"):
            pool.submit("nope", [{}])
        assert pool.submit("regex", [{"text": "x7"}], {"pattern": r"x(\d)"}) == [Result("ok", "7")]


def test_a_grader_from_any_module_sees_our_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def lengths(scale):\n"
        "    def grade(items):\n"
        "        for item in items:\n"
        "            yield scale * len(item['text'])\n"
        "    return grade\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(workers=3) as pool:
        items = [{"text": "a" * k} for k in range(10)]
        assert [r.value for r in pool.submit("mine:lengths", items, {"scale": 2})] == [2 * k for k in range(10)]
        assert [r.value for r in pool.submit("mine:lengths", items, {"scale": 3})] == [3 * k for k in range(10)]
        assert pool.submit("mine:lengths", [], {"scale": 3}) == []


def test_large_items_and_odd_text_cross_the_channel() -> None:
    texts = ["x" * 3_000_000 + "\ud800é", "\x00\u2028", ""]
    with WorkerPool(seconds_per_item=60.0) as pool:
        results = pool.submit("regex", [{"text": text} for text in texts], {"pattern": r"(?s)\A(.*)\Z"})
    assert [r.value for r in results] == texts


def test_what_has_come_is_not_late_however_late_it_is_looked_for() -> None:
    """The owner may be stopped, by a busy machine or by Ctrl-Z, while its worker answers in time."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, over = Channel(ours, 1 << 20), time.monotonic() - 1.0
        with pytest.raises(LateError):
            channel.receive(over)
        Channel(theirs, 1 << 20).send({"value": 1}, over)
        assert channel.receive(over) == {"value": 1}
        with pytest.raises(LateError):
            channel.receive(over)


def test_an_interrupt_leaves_no_reply_behind(pool: WorkerPool, rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a call, then another call: it must not read the first one's answer."""
    setup = {"path": str(rewards), "function": "by_word", "columns": []}
    pool.load("reward", setup)
    before = worker_pid(pool)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hear = Child.hear

    def soon_interrupted(child: Child, deadline: float) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # only now: the answer is waited for
        return hear(child, deadline)

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Child, "hear", soon_interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.submit("reward", [{"prompt": "", "completion": "sleep", "columns": {}}], setup)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not live_members_of_groups({before})
    assert pool.submit("reward", [{"prompt": "", "completion": "0.25", "columns": {}}], setup) == [Result("ok", 0.25)]


@pytest.mark.parametrize("settings", [{"workers": 0}, {"seconds_per_item": 0.0}, {"seconds_to_load": -1.0}])
def test_pool_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least one worker and positive times"):
        WorkerPool(**settings)
