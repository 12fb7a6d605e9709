"""``teamtr eval``: every benchmark with a tiny model, kept replies, going on after a kill, grading again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_rows import OWN, source, write_rows
from teamtr.batches import RolloutBatch
from teamtr.cli import app
from teamtr.cli.evaluate import _told
from teamtr.cli.samples import sample_record, told_samples
from teamtr.config import load_team_file
from teamtr.evaluation.metrics import summarise
from teamtr.session import evaluations
from teamtr.session.build import build
from teamtr.session.evaluations import Evaluation
from teamtr.store import read_episodes, write_episodes
from teamtr.types import Episode, Problem, Turn, Verdict

TEAM = """\
name: small
task: {task}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
team: {{model: tiny, max_tokens: 3, agents: [{{name: a}}, {{name: b, frozen: true}}], router: {router}}}
"""
TWO_ROUNDS = "{rounds: 2, order: [a]}"


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stderr if code else json.loads(result.stdout.strip().splitlines()[-1])


def team_file(folder: Path, task: str, router: str = "{}") -> Path:
    file = folder / "team.yaml"
    file.write_text(TEAM.format(task=task, router=router), encoding="utf-8")
    return file


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A team that is asked eight sums, two problems a chunk."""
    monkeypatch.setattr(evaluations, "EPISODES_PER_CHUNK", 4)
    write_rows(tmp_path, OWN["math500"])
    return team_file(tmp_path, "{name: math500, path: rows.jsonl}")


@pytest.mark.long
@pytest.mark.parametrize("name", [*OWN, "gym:chain_sum"])
def test_every_benchmark_is_evaluated_offline(name: str, tmp_path: Path) -> None:
    split = "train" if name in ("deepscaler", "dapo") else "test"
    if name.startswith("gym:"):
        task = f"{{name: '{name}', train_problems: 2, test_problems: 2}}"
    else:
        player = ", player: {agent: b, max_tokens: 2}" if name in ("arbench:sp", "arbench:dc") else ""
        task = f"{{name: '{name}', {split}: '{source(name, tmp_path)}'{player}}}"
    file = team_file(tmp_path, task, TWO_ROUNDS if name.startswith("arbench") else "{}")
    report = invoke("--team", file, "--limit", 1, "--samples", 2, "--split", split, "--out", tmp_path / "evals")
    assert (report["problems"], report["samples"]) == (1, 2)
    assert sum(report["verdicts"].values()) == 2
    assert not {"crash", "timeout"} & set(report["verdicts"])
    assert report["tokens"] > 0
    assert ("cell_accuracy" in report["measures"]) == (name == "zebralogic")
    if name == "arbench:sp":
        assert report["mean_reward"] > 0, "character F1 gives something for almost any text"


@pytest.mark.long
def test_the_papers_k_is_the_default(tmp_path: Path) -> None:
    for name, samples in {"aime24": 64, "math500": 4, "planbench": 8, "zebralogic": 64, "gsm8k": 1}.items():
        write_rows(tmp_path, OWN[name])
        session = build(load_team_file(team_file(tmp_path, f"{{name: {name}, test: rows.jsonl}}")))
        made = Evaluation.of(session, session.current_team(), tmp_path, stage=0)
        assert (made.samples, made.limit) == (samples, None)
    changed = load_team_file(tmp_path / "team.yaml", ["eval.samples=3", "eval.problems=2"])
    session = build(changed)
    made = Evaluation.of(session, session.current_team(), tmp_path, stage=0)
    assert (made.samples, made.limit) == (3, 2)


@pytest.mark.long
def test_tables_by_label(tmp_path: Path) -> None:
    write_rows(tmp_path, OWN["zebralogic"])
    file = team_file(tmp_path, "{name: zebralogic, test: rows.jsonl}")
    report = invoke("--team", file, "--samples", 1, "--out", tmp_path / "evals")
    assert {size: part["problems"] for size, part in report["tables"]["size"].items()} == {"2*2": 4, "3*2": 4}
    assert list(report["tables"]["group"]) == ["small"]


def figures(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("tokens", "folder")}


@pytest.mark.long
def test_a_killed_evaluation_goes_on_to_the_same_figures(
    sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = invoke("--team", sums, "--samples", 2, "--out", tmp_path / "whole")
    asked: list[int] = []
    real = evaluations.play_method

    def counted(method: Any, cast: Any, problems: Any, *more: Any, **others: Any) -> Any:
        asked.append(len(problems))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(method, cast, problems, *more, **others)

    monkeypatch.setattr(evaluations, "play_method", counted)
    invoke("--team", sums, "--samples", 2, "--out", tmp_path / "killed", code=130)
    rest = invoke("--team", sums, "--samples", 2, "--out", tmp_path / "killed")
    assert asked == [2, 2, 2, 2, 2], "two chunks were kept; the third is played again"
    assert figures(rest) == figures(whole)
    assert 0 < rest["tokens"] < whole["tokens"]
    again = invoke("--team", sums, "--samples", 2, "--out", tmp_path / "killed")
    assert len(asked) == 5
    assert again["tokens"] == 0
    assert figures(again) == figures(whole)


@pytest.mark.long
def test_a_larger_limit_plays_the_rest_only(sums: Path, tmp_path: Path) -> None:
    first = invoke("--team", sums, "--samples", 2, "--limit", 4, "--out", tmp_path / "evals")
    all_eight = invoke("--team", sums, "--samples", 2, "--out", tmp_path / "evals")
    fresh = invoke("--team", sums, "--samples", 2, "--out", tmp_path / "fresh")
    assert all_eight["tokens"] == fresh["tokens"] - first["tokens"]
    assert figures(all_eight) == figures(fresh)


@pytest.mark.long
def test_other_problems_are_not_taken_for_the_same(sums: Path, tmp_path: Path) -> None:
    invoke("--team", sums, "--samples", 2, "--limit", 2, "--out", tmp_path / "evals")
    write_rows(tmp_path, [{**row, "problem": "What else?"} for row in OWN["math500"]])
    assert invoke("--team", sums, "--samples", 2, "--limit", 2, "--out", tmp_path / "evals")["tokens"] > 0


@pytest.mark.long
def test_kept_replies_are_graded_again_without_sampling(
    sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from teamtr.tasks.benchmarks.math import Math

    out = tmp_path / "evals"
    before = invoke("--team", sums, "--samples", 2, "--out", out)
    assert before["avg_at_k"] < 1

    def no_play(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be sampled")

    monkeypatch.setattr(evaluations, "play_method", no_play)
    monkeypatch.setattr(Math, "grade_replies", lambda self, replies: [Verdict("right", 1.0, r) for _, r in replies])
    assert invoke("--team", sums, "--samples", 2, "--out", out)["avg_at_k"] == before["avg_at_k"]
    after = invoke("--team", sums, "--samples", 2, "--out", out, "--regrade")
    assert after["avg_at_k"] == 1
    assert after["tokens"] == 0
    kept = sorted(Path(after["folder"]).glob("problems-*.jsonl.gz"))
    assert len(kept) == 4
    assert all(episode.verdict.right for file in kept for episode in read_episodes(file).episodes)
    stderr = invoke("--team", sums, "--samples", 5, "--out", out, "--regrade", code=2)
    assert "nothing to grade again" in " ".join(stderr.split())


@pytest.mark.long
def test_a_run_is_evaluated_in_its_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(
        TEAM.format(task="{name: sums, digits: 1, problems: 16}", router="{}")
        + "plan: {stages: 1, problems: 2, group_size: 2}\neval: {every: 0}\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    assert CliRunner().invoke(app, ["train", str(file), "--out", str(folder)]).exit_code == 0
    report = invoke(folder, "--samples", 2)
    assert Path(report["folder"]).parent == folder / "evals"
    assert report["updates"] == 1
    assert invoke(folder, "--samples", 2, "--regrade")["verdicts"] == report["verdicts"]

    write_rows(tmp_path, OWN["math500"])
    other = ("task.name=math500", f"task.path={tmp_path / 'rows.jsonl'}")
    elsewhere = invoke(folder, *other, "--samples", 2)
    assert elsewhere["problems"] == len((tmp_path / "rows.jsonl").read_text().splitlines())
    assert elsewhere["updates"] == 1
    assert elsewhere["folder"] != report["folder"], "answers to other problems are kept apart"
    assert invoke(folder, "--samples", 2)["verdicts"] == report["verdicts"]
    for change, message in {
        "eval.samples=2": "eval.samples=2: a run is evaluated as it was trained; only its task, its device",
        "task.grader=exact": "another task needs task.name=NAME and its keys; nothing of the run's own task is kept",
        "task.name=matth500": 'got "matth500"; did you mean "math500"?',
    }.items():
        told = invoke(folder, change, code=2)
        assert message in " ".join(told.split()), told


def test_equal_rewards_have_no_interval_but_shares_do() -> None:
    """Nobody told the range of rewards below zero; that of shares is known, and one problem is no certainty."""
    verdicts = [[Verdict("wrong", -1.0)] * 2] * 8
    told = _told(summarise(verdicts, [["x", "x"]] * 8, None, np.random.default_rng(0)))
    shown = {line.split("  ")[0]: " ".join(line.split()) for line in told.splitlines()}
    assert shown["mean reward"] == "mean reward -1.000"
    assert shown["avg@2"] == "avg@2 0.0 % 0.0 to 31.2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to evaluate"),
        (
            ("folder", "--team", "team.yaml"),
            "'folder' is no setting (KEY=VALUE): give a team file with --team or",
        ),
        (("folder", "other"), "'other' is no setting (KEY=VALUE): give one run folder"),
    ],
)
def test_what_to_evaluate_must_be_said(arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(invoke(*arguments, code=2).split())


@pytest.mark.long
def test_settings_stand_behind_a_team_file(sums: Path, tmp_path: Path) -> None:
    report = invoke("--team", sums, "eval.samples=3", "eval.problems=2", "--limit", 2, "--out", tmp_path / "evals")
    assert (report["samples"], report["problems"]) == (3, 2)
    told = invoke("--team", sums, "eval.smaples=3", code=2)
    assert "eval.smaples" in told
    assert "did you mean" in told


# -- verdicts follow the answers and the grader --------------------------------------------------------------


def test_replies_of_another_training_temperature_are_not_taken_for_these(sums: Path, tmp_path: Path) -> None:
    def played(*settings: str) -> tuple[int, str]:
        found = invoke("--team", sums, *settings, "--out", tmp_path / "evals", "--samples", 2)
        return found["tokens"], found["folder"]

    usual = played()
    assert usual[0] > 0
    assert played("sampling.temperature=1") == (0, usual[1])
    cool = played("sampling.temperature=0.2")
    assert cool[0] > 0
    assert cool[1] != usual[1]
    assert played("sampling.temperature=0.2") == (0, cool[1])


def asked(folder: Path, answers: Mapping[str, str]) -> None:
    """Twelve questions, with these answers where there are some."""
    rows = [{"question": f"say {k}", "answer": answers.get(f"say {k}", "not this")} for k in range(12)]
    write_rows(folder, rows)


def replies(folder: str) -> dict[str, str]:
    files = sorted(Path(folder).glob("problems-*.jsonl.gz"))
    batches = [read_episodes(file) for file in files]
    return {p.prompt: e.answer or "" for batch in batches for p, e in zip(batch.problems, batch.episodes, strict=True)}


@pytest.mark.long
def test_corrected_answers_are_graded_again_without_sampling(tmp_path: Path) -> None:
    asked(tmp_path, {})
    file = team_file(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5}")
    arguments = ("--team", file, "--samples", 1, "--out", tmp_path / "evals")
    first = invoke(*arguments)
    assert "right" not in first["verdicts"]
    said = replies(first["folder"])
    assert all(reply.strip() for reply in said.values()), "the untrained model says something every time"
    asked(tmp_path, said)
    second = invoke(*arguments)
    assert second["verdicts"] == {"right": len(said)}
    assert second["tokens"] == 0, "nothing was sampled"
    assert len(list(Path(second["folder"]).glob("problems-*"))) == 1, "no verdicts of before are left"
    assert invoke(*arguments)["verdicts"] == {"right": len(said)}


@pytest.mark.long
def test_another_grader_grades_again(tmp_path: Path, monkeypatch) -> None:
    """Also one that is as long and as old, to the second: bytecode of the first would pass for it."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    asked(tmp_path, {})
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(prompts, completions, **columns):\n    return [1.0 for text in completions]\n")
    file = team_file(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5, grader: 'python:reward.py:reward'}")
    arguments = ("--team", file, "--samples", 1, "--out", tmp_path / "evals")
    os.utime(reward, (1, 1))
    assert set(invoke(*arguments)["verdicts"]) == {"right"}
    reward.write_text(reward.read_text().replace("1.0", "0.0"))
    os.utime(reward, (1, 1))
    second = invoke(*arguments)
    assert (set(second["verdicts"]), second["tokens"]) == ({"wrong"}, 0)


@pytest.mark.long
def test_an_environment_may_depend_on_the_answer_so_that_all_is_played_again(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"id": "n", "answer": "0123"}])
    file = team_file(tmp_path, "{name: 'arbench:gn', test: rows.jsonl}", TWO_ROUNDS)
    arguments = ("--team", file, "--samples", 1, "--out", tmp_path / "evals")
    assert invoke(*arguments)["tokens"] > 0
    assert invoke(*arguments)["tokens"] == 0
    write_rows(tmp_path, [{"id": "n", "answer": "9876"}])
    assert invoke(*arguments)["tokens"] > 0


# -- several tasks, and samples to look at ---------------------------------------------------------------------------


@pytest.mark.long
def test_several_tasks_stand_in_one_table(sums: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, OWN["gsm8k"], "other.jsonl")
    options = ["--team", sums, "--samples", 2, "--limit", 2, "--out", tmp_path / "evals"]
    other = f"{{name: gsm8k, test: {tmp_path / 'other.jsonl'}}}"
    found = invoke(*options, "--task", "own", "--task", other)
    assert [each["task"] for each in found["tasks"]] == ["math500", "gsm8k"]
    assert {path.name for path in (tmp_path / "evals").iterdir()} == {"math500", "gsm8k"}, "one does not hide the other"
    alone = invoke(*options, "--show", 0)
    assert found["tasks"][0]["seeds"][0]["problem_ids"] == alone["problem_ids"]
    assert found["tasks"][0]["avg_at_k"] == alone["avg_at_k"]
    assert {each["of"] for each in found["samples_shown"]} == {"math500", "gsm8k"}
    assert alone["samples_shown"] == []
    told = CliRunner().invoke(app, ["eval", *map(str, options), "--task", "own", "--task", other]).stdout
    header, first, second = told.splitlines()[1:4]
    assert header.split()[:4] == ["task", "problems", "K", "avg@K"]
    assert (first.split()[:3], second.split()[:3]) == (["math500", "2", "2"], ["gsm8k", "2", "2"])
    assert "both choose a task" in invoke(*options, "eval.samples=1", "--task", "own", code=2)
    assert "use one of them" in invoke(*options, "--task", "own", "--method", "team", code=2)


def sample(problem: str, right: bool, texts: tuple[str, ...] = ("said",)) -> tuple[Problem, Episode]:
    none = np.zeros(0, np.int32)
    turns = tuple(Turn("a", k, none, none, none.astype(np.float32), "stop", "v", text) for k, text in enumerate(texts))
    verdict = Verdict("right" if right else "wrong", float(right))
    return Problem(problem, f"ask {problem}", answer="42"), Episode(problem, 0, turns, texts[-1], verdict, "v")


def evaluated(folder: Path, *chunks: list[tuple[Problem, Episode]]) -> evaluations.Evaluated:
    files = []
    for k, chunk in enumerate(chunks):
        files.append(folder / f"{k}.jsonl.gz")
        problems, episodes = zip(*chunk, strict=True)
        write_episodes(files[-1], RolloutBatch(tuple(problems), tuple(episodes), 1))
    report: Any = None
    return evaluations.Evaluated(report, evaluations.Spent(), 0, tuple(files))


def test_samples_are_right_and_wrong_in_turn_and_of_different_problems(tmp_path: Path) -> None:
    found = evaluated(
        tmp_path,
        [sample("p", False), sample("p", True), sample("q", False), sample("r", False)],
        [sample("s", True), sample("t", True)],
    )
    chosen = [(each.problem.id, each.episode.verdict.right) for each in found.samples(4)]
    assert chosen == [("p", True), ("q", False), ("s", True), ("r", False)]
    assert len(found.samples(9)) == 5, "no problem twice"
    assert found.samples(0) == []


def test_a_sample_is_told_on_lines_that_a_person_reads(tmp_path: Path) -> None:
    (one,) = evaluated(tmp_path, [sample("p", False, ("one\ntwo", "x" * 500))]).samples(2)
    told = told_samples([one], "gsm8k").splitlines()
    assert told[1:3] == ["wrong, reward 0: gsm8k, problem p", "  asked: ask p"]
    assert told[3] == "  a: one two"
    assert told[4] == f"  a: {'x' * 400}… (100 more characters)"
    assert told[5].endswith("(right: 42)")
    assert sample_record(one)["messages"][1]["text"] == "x" * 500
    many = evaluated(tmp_path, [sample("p", True, tuple("abcdefghijklmno"))]).samples(1)
    assert "  … 3 more messages" in told_samples(many)
