"""Training on tau-bench: a run that is killed while tools are asked, and one that is stopped after updates, resume to
the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import taubench_run
from faults.killing import result
from taubench_run import team_in, toy
from teamtr.session import train as run
from teamtr.store import read_episodes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the data and of a run that nobody disturbed, and what it came to."""
    folder = tmp_path_factory.mktemp("taubench")
    with toy():
        list(run.train(team_in(folder), folder / "whole"))
    return folder, result(folder / "whole")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes cannot be killed here")
@pytest.mark.slow  # tests/faults has a short one of the same kind
def test_a_run_that_is_killed_in_the_middle_of_tool_turns_resumes_to_the_same_bits(whole: Any) -> None:
    folder, wanted = whole
    done = subprocess.run([sys.executable, taubench_run.__file__, str(folder), "9"], check=False)
    assert done.returncode == -signal.SIGKILL, "it was killed"
    with toy():
        assert list(run.train(team_in(folder), folder / "run"))[-1]["kind"] == "finished"
    assert result(folder / "run") == wanted


@pytest.mark.slow
def test_a_run_that_is_stopped_after_updates_resumes_to_the_same_bits(whole: Any) -> None:
    folder, wanted = whole
    with toy():
        for number in (1, 2):
            records = run.train(team_in(folder), folder / "parts")
            assert next(r["update"] for r in records if r["kind"] == "update") == number
            records.close()
        assert list(run.train(team_in(folder), folder / "parts"))[-1]["kind"] == "finished"
    assert result(folder / "parts") == wanted


@pytest.mark.long
def test_such_a_run_learns_from_dialogues_with_tool_turns_of_every_kind(whole: Any) -> None:
    """Or the tests above would show nothing."""
    folder, wanted = whole
    outcomes = [r["outcome"] for r in wanted["records"] if r["kind"] == "update"]
    assert outcomes.count("accepted") >= 2, outcomes
    files = sorted((folder / "whole" / "episodes").iterdir())
    episodes = [episode for file in files for episode in read_episodes(file).episodes]
    assert {episode.verdict.kind for episode in episodes} == {"right", "wrong", "unparsed"}
    assert any(len(turn.results) == 2 for episode in episodes for turn in episode.turns)
    assert {turn.agent for e in episodes for turn in e.turns if turn.results} == {"planner", "clerk"}
    chained = [(a, b) for e in episodes for a, b in pairwise(e.turns) if (a.agent, a.round) == (b.agent, b.round)]
    assert chained
    assert all(first.results for first, _ in chained)
