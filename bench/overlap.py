"""Gain of grading, scoring and saving in parallel with sampling, as ratios within one run.

    python bench/overlap.py [--json] [--parts grading,scoring,saving] [--seconds 0,0.05,0.1,0.5] [--rounds 2]
                            [--millions 135]

``grading``: one rollout whose answers are graded by a Python reward in its own process, which sleeps ``--seconds`` per
answer; graded after sampling and in parallel with it, alternately. ``scoring``: sampling one batch and scoring the
messages of another, one after the other with all threads, and in parallel with half of the threads each. ``saving``:
one stage whose updates are saved before the next batch is sampled, as with an engine that takes one call at a time, and
in parallel with sampling, split into sampling, updating, hashing and committing; the same with a sampler on another
device; and the parts of a commit, for random weights of ``--millions`` million parameters with two moments each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from common import report, seconds, so_far
from teamtr.batches import RolloutBatch
from teamtr.config import TeamFile, loads
from teamtr.engines.hashing import hash_tensors
from teamtr.engines.learner import PolicyLearner
from teamtr.engines.optim import Adam
from teamtr.engines.saving import LearnerFiles
from teamtr.randomness import uniforms
from teamtr.rollout import Ledger, play
from teamtr.session.beside import work_beside
from teamtr.session.build import Session, build
from teamtr.session.driver import Driver
from teamtr.session.rollouts import Ahead, StageRollouts
from teamtr.session.train import train
from teamtr.store import Checkpoints, RunFolder

TEAM = """
name: overlap
task: {name: data, path: PATH, grader: "python:REWARD:reward", grade_early: true, seconds_per_item: 60}
team: {model: tiny, max_tokens: TOKENS, agents: [{name: solver}, {name: checker}]}
tiny: {layers: LAYERS, width: WIDTH, heads: 4, warmup_steps: 0}
plan: {preset: teamtr, stages: 1, problems: 8, group_size: 8, radius_nats_per_message: 0.05}
eval: {every: 0}
"""
REWARD = """
import time
def reward(prompts, completions, **columns):
    time.sleep(SECONDS * len(completions))
    return [float(len(text) % 3 == 0) for text in completions]
"""


def team_text(folder: Path, pause: float, tokens: int, width: int, layers: int) -> str:
    folder.mkdir()
    rows = [{"question": f"What is {k} and {k}?", "answer": str(2 * k)} for k in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD.replace("SECONDS", str(pause)))
    text = TEAM.replace("PATH", str(folder / "rows.jsonl")).replace("REWARD", str(folder / "reward.py"))
    return text.replace("TOKENS", str(tokens)).replace("WIDTH", str(width)).replace("LAYERS", str(layers))


def session_of(folder: Path, pause: float, tokens: int, width: int) -> Session:
    return build(loads(team_text(folder, pause, tokens, width, 2), "overlap"))


def rollout(session: Session, early: bool) -> tuple[RolloutBatch, dict[str, float]]:
    session.task.grades_early = early
    ledger, began = Ledger(), time.perf_counter()
    problems = session.task.problems("train")[: session.plan.problems]
    batch = play(session.context, session.current_team(), problems, session.plan.group_size, seed=1, ledger=ledger)
    whole = time.perf_counter() - began
    return batch, {"sample": sum(ledger.seconds.values()), "grade": ledger.grading_seconds, "whole": whole}


def verdicts(batch: RolloutBatch) -> list[Any]:
    return [episode.verdict for episode in batch.episodes]


def grading(folder: Path, pause: float, tokens: int, rounds: int) -> dict[str, Any]:
    session = session_of(folder / f"grade-{pause}", pause, tokens, 64)
    best: dict[bool, dict[str, float]] = {}
    said: list[Any] = []
    rollout(session, early=False)
    for _ in range(rounds):
        for early in (False, True):
            batch, taken = rollout(session, early)
            said.append(verdicts(batch))
            if early not in best or taken["whole"] < best[early]["whole"]:
                best[early] = taken
    session.task.close()
    assert all(one == said[0] for one in said), "the same verdicts, whenever they are given"
    after, beside = best[False], best[True]
    row = {
        "s per answer": pause,
        "sample": after["sample"],
        "grade after": after["grade"],
        "whole, after": after["whole"],
        "sample beside": beside["sample"],
        "grade left": beside["grade"],
        "whole, beside": beside["whole"],
        "ratio": beside["whole"] / after["whole"],
    }
    so_far("grading", row)
    return row


def side_by_side(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Scores the second agent's messages while the first agent samples. They are two models that share nothing."""
    session = session_of(folder / "score", 0, tokens, 256)
    batch, _ = rollout(session, early=False)
    learner, first = session.engine.learner("checker"), batch.of("solver")
    noise = uniforms(1, len(first), tokens)
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)

    def sample() -> None:
        session.engine.sample("solver", first.prompts, noise)

    def score() -> None:
        learner.begin(batch.of("checker"))
        learner.end()

    def together() -> None:
        torch.set_num_threads(max(1, threads // 2))
        with ThreadPoolExecutor(1) as beside:
            scored = beside.submit(_with_threads, max(1, threads // 2), score)
            sample()
            scored.result()
        torch.set_num_threads(threads)

    best = {
        name: min(seconds(work) for _ in range(rounds))
        for name, work in {"sample": sample, "score": score, "side by side": together}.items()
    }
    in_turns = best["sample"] + best["score"]
    row = {"threads": threads, **best, "in turns": in_turns, "ratio": best["side by side"] / in_turns}
    session.task.close()
    so_far("scoring", row)
    return row


def _with_threads(count: int, work: Callable[[], None]) -> None:
    torch.set_num_threads(count)  # for this thread only
    work()


def saving(folder: Path, kind: str, width: int, layers: int, tokens: int, rounds: int) -> dict[str, Any]:
    """A stage whose updates are saved before the next batch is sampled, and in parallel with it, alternately; the
    fastest of each counts. With two agents, one of the stage's two updates is followed by sampling. Seconds are counted
    from the start of the stage; ``waited`` are those in which only saving was going on."""
    folder = folder / f"save-{kind}-{width}"
    text = team_text(folder, 0, tokens, width, layers)
    small = (f"team.train={kind}", "plan.problems=4", "plan.group_size=4")
    best: dict[bool, dict[str, float]] = {}
    agents: list[dict[str, str]] = []
    for number, beside in enumerate((False, True) * rounds):
        out = folder / f"run-{number}"
        taken = stage_of(loads(text, "overlap", small), out, beside)
        last = RunFolder.read(out).checkpoints
        commit = last.latest()
        assert commit is not None
        agents.append(dict(commit.agents))
        size = sum(file.stat().st_size for file in last.folder_of(commit, "solver").iterdir())
        shutil.rmtree(out)
        if beside not in best or taken["stage"] < best[beside]["stage"]:
            best[beside] = taken
    assert all(one == agents[0] for one in agents), "the same weights and moments, whenever they are saved"
    first, both = best[False], best[True]
    row = {
        "train": kind,
        "width": width,
        "MB of an agent": size / 1e6,
        "stage, first": first["stage"],
        "sample": first["sample"],
        "update": first["update"],
        "hash": first["hash"],
        "commit": first["commit"],
        "share of saving": (first["hash"] + first["commit"]) / first["stage"],
        "waited, first": first["waited"],
        "stage, beside": both["stage"],
        "sample beside": both["sample"],
        "waited, beside": both["waited"],
        "ratio": both["stage"] / first["stage"],
    }
    so_far("saving", row)
    return row


def stage_of(team_file: TeamFile, out: Path, beside: bool) -> dict[str, float]:
    spent: Counter[str] = Counter()
    with ExitStack() as stack:
        for owner, name, what in (
            (StageRollouts, "gather", "sample"),
            (Driver, "_teach", "update"),
            (Driver, "_save", "save"),
            (Ahead, "sample_early", "early"),
            (PolicyLearner, "fingerprint", "hash"),
            (Checkpoints, "commit", "commit"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), what, spent)))
        if not beside:
            stack.enter_context(mock.patch.object(PolicyLearner, "set_aside", return_value=None))
        records = train(team_file, out)
        next(records)
        spent.clear()
        whole = seconds(lambda: list(records))
    return {"stage": whole, **spent, "waited": spent["save"] - spent["early"]}


def saving_elsewhere(folder: Path, millions: int, pause: float) -> dict[str, Any]:
    """Saving while a sampler on a GPU or a server leaves the processor idle; here a sleep of ``pause`` seconds."""
    tensors = {f"w{k}": torch.randn(millions * 100_000) for k in range(30)}
    weights, moments = (dict(list(tensors.items())[part]) for part in (slice(10), slice(10, 30)))

    def write(out: Path) -> None:
        save_file(weights, out / "model.safetensors")

    aside = LearnerFiles("00", write, moments, Adam((0.9, 0.99)).counters(), None)
    taken = {}
    for name in ("in turns", "beside"):
        store = Checkpoints(folder / f"elsewhere-{name}")

        def commit(store: Checkpoints = store) -> None:
            store.commit(0, {"a": aside.fingerprint()}, lambda name, out: aside.save(out), {})

        if name == "in turns":
            taken["saving"] = seconds(commit)
            taken[name] = taken["saving"] + seconds(lambda: time.sleep(pause))
        else:
            taken[name] = seconds(lambda work=commit: work_beside(work, lambda: time.sleep(pause), "saving"))
        shutil.rmtree(store.folder)
    row = {
        "GB": sum(tensor.nbytes for tensor in tensors.values()) / 1e9,
        "sampling elsewhere": pause,
        **taken,
        "ratio": taken["beside"] / taken["in turns"],
    }
    so_far("elsewhere", row)
    return row


def files(folder: Path, millions: int) -> dict[str, Any]:
    """Time of each part of writing a checkpoint in float32, with one thread."""
    folder = folder / "files"
    folder.mkdir()
    torch.set_num_threads(1)
    tensors = {f"w{k}": torch.randn(millions * 100_000) for k in range(30)}
    names = {"model": list(tensors)[:10], "optimizer": list(tensors)[10:]}

    def write() -> None:
        for name, own in names.items():
            save_file({key: tensors[key] for key in own}, folder / f"{name}.safetensors")

    def read() -> None:
        for file in sorted(folder.iterdir()):
            with open(file, "rb") as stream:
                hashlib.file_digest(stream, "sha256")

    def sync() -> None:
        for file in sorted(folder.iterdir()):
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())

    row = {
        "GB": sum(tensor.nbytes for tensor in tensors.values()) / 1e9,
        "hash": seconds(lambda: hash_tensors(tensors)),
        "copy": seconds(lambda: [tensor.clone() for tensor in tensors.values()]),
        "write": seconds(write),
        "checksum": seconds(read),
        "sync": seconds(sync),
    }
    so_far("files", row)
    return row


def _timed(work: Callable[..., Any], what: str, spent: Counter[str]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*arguments, **options)
        finally:
            spent[what] += time.perf_counter() - began  # type: ignore[assignment]

    return timed


def table(title: str, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    report(title, list(rows[0]), [list(row.values()) for row in rows], {"rows": rows, "title": title}, as_json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", default="0,0.05,0.1,0.5")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--millions", type=int, default=135)
    parser.add_argument("--parts", default="grading,scoring,saving")
    settings = parser.parse_args()
    parts, tokens, rounds = settings.parts.split(","), settings.tokens, settings.rounds
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "grading" in parts:
            rows = [grading(folder, float(each), tokens, rounds) for each in settings.seconds.split(",")]
            table("grading after and beside sampling, 64 episodes, seconds", rows, settings.json)
        if "scoring" in parts:
            rows = [side_by_side(folder, tokens // 4, rounds)]
            table("scoring beside sampling, 64 messages of each, seconds", rows, settings.json)
        if "saving" in parts:
            sizes = (("full", 512, 6, rounds), ("lora", 512, 6, rounds), ("full", 64, 2, 5 * rounds))
            rows = [saving(folder, kind, width, layers, tokens // 8, times) for kind, width, layers, times in sizes]
            table("a stage of two agents saved before and beside sampling, 16 episodes, seconds", rows, settings.json)
            rows = [saving_elsewhere(folder, settings.millions, pause) for pause in (2.0, 5.0, 10.0)]
            table("one agent saved before and beside sampling elsewhere, seconds", rows, settings.json)
            table("one agent's files, seconds", [files(folder, settings.millions)], settings.json)


if __name__ == "__main__":
    main()
