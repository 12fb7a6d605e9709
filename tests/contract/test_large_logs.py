"""Reports of logs that are larger than memory should hold: what is left out, what is still right, what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from made_run import made_run
from teamtr.analysis.diagnostics.accounting import overhead
from teamtr.analysis.report import build_report, reading
from teamtr.analysis.report.reading import LogTail, read_run
from teamtr.records import whole

STAGES = 200


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", stages=STAGES, batch_stages=1)


@pytest.mark.long
@pytest.mark.parametrize("held_share", [0.6, 0.3, 0.05])
def test_of_a_large_log_whole_stages_are_shown(run: Path, monkeypatch: pytest.MonkeyPatch, held_share: float) -> None:
    everything = read_run(run)
    size = (run / "log.jsonl").stat().st_size
    monkeypatch.setattr(reading, "HELD_BYTES", int(held_share * size))
    found = read_run(run)
    tail = LogTail(run / "log.jsonl")
    tail.poll()
    assert tail.every > 1
    assert tail._held_bytes <= held_share * size
    stages: dict[int | None, int] = {}
    for update in found.updates:
        stages[whole(update, "stage")] = stages.get(whole(update, "stage"), 0) + 1
    shown = [stage for stage, count in stages.items() if count == 3]
    assert shown == list(range(0, STAGES, tail.every)), "three agents were updated in each"
    assert found.updates[-1] == everything.updates[-1]
    assert (found.evals[0], found.evals[-1]) == (everything.evals[0], everything.evals[-1])
    assert len([r for r in found.records if r["kind"] == "stage"]) == STAGES
    assert f"of its {3 * STAGES} updates those of one stage in {tail.every} are shown" in found.notes[0]
    assert not [note for note in everything.notes if "large" in note]
    ratio = overhead(everything.updates).token_ratio
    assert overhead(found.updates).token_ratio == pytest.approx(ratio, rel=0.01)
    before, after = build_report(everything).data, build_report(found).data
    assert [before["run"][key] for key in ("state", "stages_done", "order")] == [
        after["run"][key] for key in ("state", "stages_done", "order")
    ]
    assert before["cost"]["sampled_tokens"] == after["cost"]["sampled_tokens"]
    assert before["evals"][-1] == after["evals"][-1]


def test_a_large_log_of_one_stage_is_gone_through_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to thin out, and looking for it at every line would take for ever."""
    run = made_run(tmp_path / "run", stages=1, agents=[f"agent{k}" for k in range(400)], batches=())
    looks = []
    thinned = reading._thinned
    monkeypatch.setattr(reading, "_thinned", lambda *given: looks.append(1) or thinned(*given))
    monkeypatch.setattr(reading, "HELD_BYTES", 1000)
    tail = LogTail(run / "log.jsonl")
    tail.poll()
    assert len(tail.records) > 400
    assert len(looks) < 50


PROGRAM = """
import resource, sys
from pathlib import Path
from teamtr.analysis.report import build_report, report_page
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
page = report_page(build_report(Path(sys.argv[1])))
assert "The log is large" in page
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the largest memory of a process is told in other units")
def test_a_report_of_a_large_log_takes_bounded_memory(tmp_path: Path) -> None:
    """48 MB of a true log's lines: held as they come they take 330 MB, and four times the log four times as much."""
    true = Path(__file__).parents[1] / "fixtures" / "old_run"
    run = tmp_path / "run"
    run.mkdir()
    (run / "team.yaml").write_bytes((true / "team.yaml").read_bytes())
    lines = (true / "log.jsonl").read_bytes()
    with open(run / "log.jsonl", "wb") as log:
        for _ in range(48_000_000 // len(lines)):
            log.write(lines)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)], capture_output=True, text=True, timeout=600, check=True
    )
    assert float(done.stdout) < 240
