"""A run that is killed while tools are at work, and resumed, ends with the bits of one that never was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import tool_killing
from faults.killing import result
from teamtr.session import train as run
from teamtr.store import read_episodes


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_tool_turns_resumes_to_the_same_bits(tmp_path: Path):
    list(run.train(tool_killing.team_file(), tmp_path / "whole"))
    whole = result(tmp_path / "whole")
    stored = [read_episodes(file) for file in sorted((tmp_path / "whole" / "episodes").iterdir())]
    episodes = [[turn.agent for turn in episode.turns] for batch in stored for episode in batch.episodes]
    assert ["asker", "asker", "answerer"] in episodes, "somebody spoke again after a result"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for dies_at in (5, 4):  # the count begins anew with every process
        command = [sys.executable, tool_killing.__file__, str(tmp_path / "parts"), str(dies_at)]
        assert subprocess.run(command, env=here, check=False, capture_output=True).returncode == -9
    assert list(run.train(tool_killing.team_file(), tmp_path / "parts"))[-1]["kind"] == "finished"
    assert result(tmp_path / "parts") == whole
