"""``teamtr eval --method``: methods side by side on a tiny team, kept, resumed, within a budget, over seeds."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_rows import OWN, write_rows
from teamtr.baselines.registry import method_names, methods, settings_of
from teamtr.cli import app
from teamtr.cli.evaluate import evaluate
from teamtr.session import evaluations
from teamtr.store import read_episodes

TEAM = """\
name: small
task: {task}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
team: {{model: tiny, max_tokens: 3, agents: [{{name: a}}, {{name: b}}]}}
"""


def invoke(*arguments: object, code: int = 0, as_json: bool = True) -> Any:
    flags = ["--json"] if as_json else []
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), *flags])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if code:
        return " ".join(result.stderr.split())
    return json.loads(result.stdout.strip().splitlines()[-1]) if as_json else result.stdout


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return written(tmp_path, "{name: sums, digits: 1, problems: 32}")


def written(folder: Path, task: str) -> Path:
    file = folder / "team.yaml"
    file.write_text(TEAM.format(task=task), encoding="utf-8")
    return file


def by_name(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["method"]: each for each in record["methods"]}


def figures(record: dict[str, Any]) -> list[dict[str, Any]]:
    """All that does not depend on the clock or on where it is stored."""
    return [{k: v for k, v in m.items() if k not in ("seconds_per_answer", "folders")} for m in record["methods"]]


def stored(folder: str) -> list[Any]:
    return [e for file in sorted(Path(folder).glob("problems-*")) for e in read_episodes(file).episodes]


@pytest.mark.long
def test_every_method_is_evaluated_side_by_side(sums: Path, tmp_path: Path) -> None:
    names = ["team", *(name for name in method_names() if name != "team")]
    arguments = ("--team", sums, "--samples", 2, "--limit", 4, "--out", tmp_path / "evals", "--method", ",".join(names))
    record = invoke(*arguments)
    found = by_name(record)
    assert list(found) == names
    for each in found.values():
        episodes = stored(each["folders"][0])
        assert each["answers"] == len(episodes) == 8
        sampled = [sum(len(turn.token_ids) for turn in episode.turns) for episode in episodes]
        read = [sum(len(turn.context_ids) for turn in episode.turns) for episode in episodes]
        assert each["tokens_per_answer"] == np.mean(sampled)
        assert each["prompt_tokens_per_answer"] == np.mean(read)
        assert each["seconds_per_answer"] > 0
        assert each["avg_at_k"] == np.mean([episode.verdict.right for episode in episodes])
    assert record["tokens"] == sum(8 * each["tokens_per_answer"] for each in found.values())
    apart = {name: each["difference"] for name, each in found.items()}
    assert apart.pop("team") is None
    for name, value in apart.items():
        assert value == pytest.approx(found[name]["avg_at_k"] - found["team"]["avg_at_k"])
    shown = invoke(*arguments, as_json=False)
    lines = {line.split()[0]: line for line in shown.splitlines()[2:]}
    assert set(lines) == set(method_names())
    assert f"{found['debate']['tokens_per_answer']:.1f}" in lines["debate"]


@pytest.mark.long
def test_the_team_among_methods_is_the_plain_evaluation(sums: Path, tmp_path: Path) -> None:
    arguments = ("--team", sums, "--samples", 2, "--limit", 4, "--out", tmp_path / "evals")
    plain = invoke(*arguments)
    found = by_name(invoke(*arguments, "--method", "team"))["team"]
    assert found["folders"] == [plain["folder"]]
    assert found["seeds"][0]["verdicts"] == plain["verdicts"]
    assert plain["tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--budget-tokens", 20, "--seeds", 2)], ids=["plain", "budget and seeds"])
def test_a_killed_comparison_goes_on_to_the_same_figures(
    more: tuple[object, ...], sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluations, "EPISODES_PER_CHUNK", 12)
    command = ("--team", sums, "--samples", 1, "--limit", 6, "--method", "team,self_consistency,debate", "--votes", 3)
    whole = invoke(*command, *more, "--out", tmp_path / "whole")
    real, played, stops = evaluations.play_method, [], iter((1, 2, 3, 99))
    stop = next(stops)

    def counted(*arguments: Any, **others: Any) -> Any:
        if len(played) == stop:
            raise KeyboardInterrupt
        played.append(arguments[0].name)
        return real(*arguments, **others)

    monkeypatch.setattr(evaluations, "play_method", counted)
    for following in stops:
        invoke(*command, *more, "--out", tmp_path / "killed", code=130)
        stop = following
    rest = invoke(*command, *more, "--out", tmp_path / "killed")
    assert figures(rest) == figures(whole)
    assert 0 < rest["tokens"] < whole["tokens"]
    count = len(played)
    again = invoke(*command, *more, "--out", tmp_path / "killed")
    assert (again["tokens"], len(played)) == (0, count), "all is kept"
    assert again["methods"] == rest["methods"], "seconds too: they are those of the time when it was played"


@pytest.mark.long
def test_a_damaged_note_of_seconds_costs_nothing_else(sums: Path, tmp_path: Path) -> None:
    command = ("--team", sums, "--samples", 1, "--limit", 2, "--method", "debate", "--out", tmp_path / "evals")
    before = invoke(*command)
    note = Path(before["methods"][0]["folders"][0]) / "seconds.json"
    note.write_text('{"problems')
    after = invoke(*command)
    assert figures(after) == figures(before)
    assert after["methods"][0]["seconds_per_answer"] is None
    assert " - " in invoke(*command, as_json=False).splitlines()[-1] + " "


@pytest.mark.long
def test_other_settings_are_other_evaluations(sums: Path, tmp_path: Path) -> None:
    command = ("--team", sums, "--samples", 1, "--limit", 2, "--out", tmp_path / "evals", "--method", "debate")
    variants = [(), ("--rounds", 3), ("--agent", "a"), ("--agent", "b"), ("--max-tokens", 2), ("--seeds", 2)]
    folders = [folder for more in variants for folder in invoke(*command, *more)["methods"][0]["folders"]]
    assert len(set(folders)) == len(variants), "the first of two seeds is the one seed of the others"
    assert all("-debate-" in Path(folder).name for folder in folders)


@pytest.mark.long
def test_a_budget_decides_how_often_each_method_tries(sums: Path, tmp_path: Path) -> None:
    """An untrained tiny model hardly ever ends before its three tokens, so that one try takes nearly what it may."""
    command = ("--team", sums, "--samples", 2, "--limit", 4, "--out", tmp_path / "evals", "--budget-tokens", 36)
    names = "chain_of_thought,self_consistency,best_of_n,debate,tree_of_thoughts"
    found = by_name(invoke(*command, "--method", names, "--rounds", 1, "--breadth", 4, "--depth", 4))
    assert found["chain_of_thought"]["tries"] == found["self_consistency"]["tries"] >= 12
    assert found["chain_of_thought"]["settings"]["of"] == {"name": "chain_of_thought"}
    assert found["best_of_n"]["tries"] >= 6
    assert found["debate"]["tries"] == 4
    assert found["tree_of_thoughts"]["tries"] == 1
    for name, tokens_of_a_try in {"chain_of_thought": 3, "self_consistency": 3, "best_of_n": 6, "debate": 9}.items():
        assert abs(found[name]["tokens_per_answer"] - 36) <= tokens_of_a_try
    assert found["tree_of_thoughts"]["tokens_per_answer"] > 36, "what was really spent is told"
    result = CliRunner().invoke(app, ["eval", *map(str, command), "--method", "tree_of_thoughts"])
    assert "tree_of_thoughts: one try samples" in result.stderr
    assert "over the budget" in result.stderr


@pytest.mark.long
def test_seeds_are_other_draws_with_a_mean_and_a_deviation(sums: Path, tmp_path: Path) -> None:
    command = ("--team", sums, "--samples", 4, "--out", tmp_path / "evals")
    one = invoke(*command)
    three = invoke(*command, "--seeds", 3)
    assert three["folders"][0] == one["folder"], "the first seed is the plain evaluation"
    assert len(set(three["folders"])) == 3
    for name, key, k in (("avg@4", "avg_at_k", None), ("pass@2", "pass_at_k", "2"), ("pass^4", "pass_hat_k", "4")):
        values = [seed[key] if k is None else seed[key][k] for seed in three["seeds"]]
        assert three["over_seeds"][name]["mean"] == pytest.approx(np.mean(values))
        assert three["over_seeds"][name]["deviation"] == pytest.approx(np.std(values, ddof=1))
    texts = [[turn.text for e in stored(folder) for turn in e.turns] for folder in three["folders"]]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    shown = invoke(*command, "--seeds", 3, as_json=False).splitlines()
    assert shown[0] == "8 problems x 4 samples x 3 seeds"
    assert "± over seeds" in shown[1]


@pytest.mark.long
def test_a_method_is_graded_again_by_the_answers_of_today(tmp_path: Path) -> None:
    """The vote is taken anew from the stored texts, and nothing is sampled."""
    write_rows(tmp_path, [{"question": f"say {k}", "answer": "not this"} for k in range(12)])
    file = written(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5}")
    command = (
        "--team",
        file,
        "--samples",
        1,
        "--out",
        tmp_path / "evals",
        "--method",
        "self_consistency",
        "--votes",
        3,
    )
    before = invoke(*command)["methods"][0]
    assert before["avg_at_k"] == 0
    batches = [read_episodes(f) for f in Path(before["folders"][0]).glob("problems-*")]
    said = {p.prompt: e.answer for batch in batches for p, e in zip(batch.problems, batch.episodes, strict=True)}
    rows = [{"question": f"say {k}", "answer": said.get(f"say {k}", "not this")} for k in range(12)]
    write_rows(tmp_path, rows)
    record = invoke(*command)
    assert (record["methods"][0]["avg_at_k"], record["tokens"]) == (1, 0)


@pytest.mark.long
def test_a_trained_run_plays_methods_with_the_agent_that_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "{name: sums, digits: 1, problems: 16}")
    plan = "plan: {stages: 1, problems: 2, group_size: 2}\neval: {every: 0}\n"
    named = file.read_text().replace("{name: a}", "{name: a, system_prompt: Be very brief.}")
    file.write_text(named + plan, encoding="utf-8")
    folder = tmp_path / "run"
    assert CliRunner().invoke(app, ["train", str(file), "--out", str(folder)]).exit_code == 0
    read = {}
    for more in ((), ("--agent", "a"), ("--agent", "b")):
        record = invoke(folder, "--samples", 1, "--limit", 2, "--method", "chain_of_thought", *more)
        found = record["methods"][0]["folders"][0]
        assert Path(found).parent == folder / "evals"
        assert record["updates"] == 2
        read[more] = record["methods"][0]["prompt_tokens_per_answer"]
    assert read[()] == read["--agent", "b"] < read["--agent", "a"], "b answers, and is told less"


def test_every_setting_of_a_method_is_an_option() -> None:
    options = set(inspect.signature(evaluate).parameters)
    assert {name for cls in methods().values() for name in settings_of(cls)} <= options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", 3), "--rounds goes with --method"),
        (("--budget-tokens", 3), "--budget-tokens goes with --method"),
        (("--agent", "a"), "--agent goes with --method"),
        (("--method", "debate", "--votes", 3), "--votes is a setting of self_consistency"),
        (("--method", "debat"), "the nearest is 'debate'"),
        (("--method", "debate", "--agent", "eve"), "no agent 'eve' in the team; it has a, b"),
        (("--method", "team,judged_debate", "--judge", "eve"), "no agent 'eve' in the team; it has a, b"),
        (("--method", "self_consistency", "--temperature", 0), "at temperature 0 they are all the same"),
        (("--method", "role_play", "--roles", "x,x"), "roles must be different names"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_sampled(
    arguments: tuple[object, ...], message: str, sums: Path, tmp_path: Path
) -> None:
    assert message in invoke("--team", sums, "--out", tmp_path / "evals", *arguments, code=2)
    assert not (tmp_path / "evals").exists()


@pytest.mark.long
def test_a_task_that_grades_the_conversation_takes_no_method(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(
        "name: r\ntask: {name: roles}\ntiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}\n"
        "team: {model: tiny, max_tokens: 2, agents: [{name: a1, sees: blind}, {name: a2, sees: blind}]}\n"
    )
    command = ("--team", file, "--samples", 1, "--limit", 2, "--out", tmp_path / "evals", "--method")
    assert "roles grades what every agent of the team says" in invoke(*command, "debate", code=2)
    assert invoke(*command, "team")["methods"][0]["answers"] == 2


@pytest.mark.long
def test_an_interactive_task_is_played_by_single_conversations(tmp_path: Path) -> None:
    write_rows(tmp_path, OWN["arbench:gn"])
    file = written(tmp_path, "{name: 'arbench:gn', test: rows.jsonl}")
    file.write_text(file.read_text().replace("agents:", "router: {rounds: 2}, agents:"))
    command = ("--team", file, "--samples", 1, "--limit", 1, "--out", tmp_path / "evals", "--method")
    assert [m["answers"] for m in invoke(*command, "chain_of_thought,role_play,debate")["methods"]] == [1, 1, 1]
    assert "best_of_n cannot be played on an interactive task" in invoke(*command, "team,best_of_n", code=2)
