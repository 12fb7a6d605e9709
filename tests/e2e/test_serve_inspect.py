"""inspect_ai evaluates a team through its API, unchanged. It pins an older fsspec than ours, and so has an environment
of its own (``make inspect-env``); skipped without it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from served import KEY, make_session, serving
from teamtr.rollout import play
from teamtr.types import Problem

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-inspect" / "bin" / "python"
TASK = ROOT / "tests" / "inspect_task.py"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make inspect-env`")
@pytest.mark.parametrize("model", ["trio", "trio/speaker"])
def test_inspect_hears_what_the_team_says(tmp_path: Path, model: str):
    session = make_session()
    questions = [f"What is {k}+{k}?" for k in range(12)]
    with serving(session) as server:
        if model == "trio":
            team = session.current_team()
            batches = [play(session.context, team, [Problem("p", q, answer="0")], 1, seed=7) for q in questions]
            targets = [batch.episodes[0].answer for batch in batches]
        else:
            targets = ["?"] * len(questions)
        asked = {"seed": 7, "samples": [{"input": q, "target": t} for q, t in zip(questions, targets, strict=True)]}
        (tmp_path / "questions.json").write_text(json.dumps(asked))
        found = subprocess.run(
            [PYTHON, TASK, f"openai-api/teamtr/{model}", tmp_path / "questions.json", tmp_path / "logs"],
            env={**os.environ, "TEAMTR_API_KEY": KEY, "TEAMTR_BASE_URL": server.url, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert found.returncode == 0, found.stderr[-2000:]
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["status"] == "success", told["error"]
    if model == "trio":
        assert told["answers"] == targets
        assert told["exact"] == 1.0
    else:
        assert len(set(told["answers"])) == len(questions)
