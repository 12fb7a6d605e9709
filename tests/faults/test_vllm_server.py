"""vLLM servers as processes, with a stand-in for vLLM: they start, end, die and are left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM

from teamtr.config import loads
from teamtr.engines.vllm import server as servers
from teamtr.engines.vllm import watch
from teamtr.engines.vllm.client import Drawing
from teamtr.engines.vllm.hosts import OwnServer, SharedBase
from teamtr.engines.vllm.server import Launch, Server
from teamtr.errors import TeamTRError
from teamtr.ports import EngineLost
from teamtr.randomness import uniforms
from teamtr.session.build import build
from teamtr.session.models import weights_hash

pytestmark = pytest.mark.long

PROMPT = np.array([5, 6, 7], dtype=np.int32)
FAKE = Path(__file__).parents[1] / "fake_vllm.py"
NAME = ("--served-model-name", "base")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python that has the stand-in where others have vLLM."""
    script = tmp_path / "python"
    own, theirs = f'exec {sys.executable} "$@"', f'shift 2; exec {sys.executable} {FAKE} "$@"'
    script.write_text(f'#!/bin/sh\nif [ "$1" = -m ]; then {theirs}; fi\n{own}\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    return folder


def launch(python: str, manner: str = "", **settings: float) -> Launch:
    return Launch(python, ("--dtype=float32",), {"FAKE_VLLM": manner}, **{"start_s": 600.0, **settings})


def seen_to_end(server: Server) -> Server:
    """What ends it is known at the latest when it is asked for: a busy machine takes longer than a moment."""
    wait = server.process.wait
    server.process.wait = lambda timeout=None: wait(60.0)  # type: ignore[method-assign]
    return server


def programs(folder: Path) -> list[psutil.Process]:
    """The server in this folder, and who watches over it before it."""
    found = [p for p in psutil.process_iter(["cmdline"]) if str(folder / "socket") in (p.info["cmdline"] or ())]
    return sorted(found, key=lambda process: watch.__file__ not in process.info["cmdline"])


def wait_until(true: object, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def drawing(name: str = "base") -> Drawing:
    return Drawing(name, salt="x", end_ids=frozenset({1}))


def test_a_server_starts_answers_and_ends(python, place):
    server = Server(launch(python), place, "model", NAME)
    assert server.client.message(PROMPT, 4, 1, drawing()).finish == "length"
    assert "--model model --dtype=float32 --served-model-name base --uds" in server.last_lines()
    assert len(programs(place)) == 2
    server.close()
    assert programs(place) == []
    assert not place.exists()
    server.close()  # once more does nothing


def test_it_reads_no_packages_of_ours(python, place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    server = Server(launch(python), place, "model", NAME)
    environments = [process.environ() for process in programs(place)]
    server.close()
    assert environments
    for environment in environments:
        assert "PYTHONPATH" not in environment
        assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_one_that_does_not_start_is_told_with_its_last_lines(python, place):
    with pytest.raises(TeamTRError, match=r"(?s)did not start with model: .*exit code 7.*no room for the model"):
        Server(launch(python, "dies"), place, "model", NAME)
    assert not place.exists()


class Hours:
    """A clock that flies once the server has said something, however long it took to say it."""

    def __init__(self, output: Path) -> None:
        self.output, self.passed = output, 0.0

    def monotonic(self) -> float:
        if b"fake vLLM" in self.output.read_bytes():
            self.passed += 60.0
        return self.passed

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_one_that_takes_too_long_is_ended(python, place, monkeypatch, caplog):
    monkeypatch.setattr(servers, "time", Hours(place / "output"))
    caplog.set_level(logging.INFO)
    with pytest.raises(TeamTRError, match=r"(?s)has not started with model in 300 s .*last lines:\nfake vLLM"):
        Server(launch(python, "hangs", start_s=300.0), place, "model", NAME)
    assert "waiting for vLLM since" in caplog.text
    assert programs(place) == []


def test_one_that_dies_in_the_middle_is_lost_with_its_last_words(python, place):
    server = seen_to_end(Server(launch(python, "dies:3"), place, "model", NAME))
    server.client.message(PROMPT, 4, 1, drawing())
    server.client.message(PROMPT, 4, 2, drawing())
    with pytest.raises(EngineLost, match=r"(?s)vLLM is gone \(it has ended with exit code 9.*out of memory"):
        server.client.sample([PROMPT] * 8, [4] * 8, range(8), drawing())
    with pytest.raises(EngineLost, match="is gone"):
        server.client.message(PROMPT, 4, 1, drawing())
    server.close()


def test_one_that_is_killed_is_lost(python, place):
    server = seen_to_end(Server(launch(python), place, "model", NAME))
    (vllm,) = [
        process for process in programs(place) if "--uds" in process.cmdline() and FAKE.name in str(process.cmdline())
    ]
    vllm.kill()
    with pytest.raises(EngineLost, match="exit code 137"):
        server.client.message(PROMPT, 4, 1, drawing())
    server.close()


def test_it_ends_with_whoever_started_it_however_that_ends(python, place):
    """Else a card stays full of a model that nobody asks anything."""
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from teamtr.engines.vllm.server import Launch, Server
        server = Server(Launch({python!r}), Path({str(place)!r}), "model", {NAME!r})
        print("started", flush=True)
        time.sleep(1000)
    """)
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"started\n"
    assert len(programs(place)) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not programs(place) and not place.exists())


# -- hosts ----------------------------------------------------------------------------------------------------


def writer(*names: str):
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("weights")

    return write


WEIGHTS = writer("model.safetensors", "config.json", "optimizer.safetensors", "critic.safetensors")


@pytest.mark.slow
def test_all_weights_of_an_agent_have_a_server_of_their_own_each_time(python, tmp_path):
    host = OwnServer(launch(python), tmp_path / "place")
    assert host.serve("left", "v1", WEIGHTS) == "left-v1"
    assert host.serve("left", "v1", WEIGHTS) == "left-v1"
    first = host._server
    assert first is not None
    assert sorted(p.name for p in Path(first.model).iterdir()) == ["config.json", "model.safetensors"]
    assert host.client.message(PROMPT, 4, 1, drawing("left-v1")).finish == "length"
    assert host.serve("left", "v2", WEIGHTS) == "left-v2"
    assert host._server is not None
    assert (host._server.process.pid, host._server.model) != (first.process.pid, first.model)
    assert first.process.poll() is not None
    with pytest.raises(EngineLost, match="does not have left-v1"):
        host.client.message(PROMPT, 4, 1, drawing("left-v1"))
    host.close()
    assert list((tmp_path / "place").iterdir()) == []


TEAM = """
name: v
task: {name: roles}
team: {model: tiny, train: lora, agents: [{name: a1}, {name: a2}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
sampling: {engine: vllm, memory_gb: 0.5, vllm: {VLLM}}
"""


@pytest.mark.slow
def test_a_base_that_is_in_no_folder_is_written_for_its_server(python, tmp_path):
    """The built-in model is made anew from its seed, and a model that a program gave is saved."""
    vllm = f"python: {python}, context_tokens: 99, folder: {tmp_path / 'w'}"
    engine: Any = build(loads(TEAM.replace("VLLM", vllm), "v")).engine
    samples = engine.sample("a2", [PROMPT], uniforms(0, 1, 3))
    host = engine.hosts["a1"]
    assert host is engine.hosts["a2"]
    base = Path(host._server.model)
    started = host._server.last_lines()
    assert weights_hash(AutoModelForCausalLM.from_pretrained(base)) == engine.info("a1").base_version
    assert (base / "tokenizer.json").is_file()
    engine.close()
    assert samples[0].version == engine.version("a2")
    for told in (
        "float32",
        "processed_logprobs",
        "--max-model-len=99",
        "--kv-cache-memory-bytes=536870912",
        "--gpu-memory-utilization=0.010",
        "--max-loras=2",
    ):
        assert told in started
    assert list((tmp_path / "w").iterdir()) == []


@pytest.mark.slow
def test_two_bases_have_two_servers_and_adapters_the_room_that_is_asked_for(python, tmp_path):
    hosts = [
        SharedBase(source, launch=launch(python), place=tmp_path / "place", rank=rank, adapters=adapters)
        for source, rank, adapters in (("one", 32, 3), ("two", 0, 0))
    ]
    hosts[1].unchanged = {"judge": "v"}
    assert hosts[0].serve("left", "v1", writer("adapter_model.safetensors")) == "left-v1"
    assert hosts[1].serve("judge", "v", WEIGHTS) == "base"
    started = [host._server.last_lines() for host in hosts if host._server is not None]
    assert "--model one" in started[0]
    assert "--enable-lora --max-lora-rank=32 --max-loras=3 --max-cpu-loras=4" in started[0]
    assert "--model two" in started[1]
    assert "--enable-lora" not in started[1]
    assert [m.name for m in hosts[0].client.models()] == ["base", "left-v1"]
    with pytest.raises(TeamTRError, match="'judge' is frozen, and its weights are not those of two"):
        hosts[1].serve("judge", "w", WEIGHTS)
    for host in hosts:
        host.close()
