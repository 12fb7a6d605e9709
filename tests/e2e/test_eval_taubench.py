"""``teamtr eval`` on tau-bench: a tiny model as the agent, and as the user a script at an endpoint or another model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contract.test_players import FakeEndpoint
from own_rows import DATA
from small_taubench import write_world
from teamtr.cli import app
from teamtr.config import load_team_file
from teamtr.errors import UserError
from teamtr.session.build import build
from teamtr.session.checks import self_test
from teamtr.session.task import build_task
from teamtr.store import read_episodes
from teamtr.tasks.benchmarks.taubench import Airline, Retail
from teamtr.tasks.benchmarks.taubench.dialogue import GREETING
from teamtr.tasks.benchmarks.taubench.replay import STOP
from teamtr.tasks.benchmarks.taubench.task import TauBench

TEAM = """\
name: small
task: {{name: '{name}', path: '{path}', player: {player}}}
tiny: {{layers: 1, width: 16, heads: 2, warmup_steps: 0}}
tools: {{steps: 2}}
team:
  model: tiny
  max_tokens: 3
  agents: [{{name: desk}}, {{name: customer, frozen: true}}]
  router: {{rounds: {rounds}, order: [desk]}}
"""


def team_file(folder: Path, domain: type[TauBench], path: Path, player: str, rounds: int = 3) -> Path:
    file = folder / "team.yaml"
    file.write_text(TEAM.format(name=domain.name, path=path, player=player, rounds=rounds), encoding="utf-8")
    return file


def invoke(*arguments: object, code: int = 0) -> tuple[Any, str]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.strip().splitlines()[-1]), result.stderr


@pytest.fixture
def scripted_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    """Greets, and is content with whatever it hears."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = FakeEndpoint()

    def say(content: str, number: int) -> tuple[int, dict[str, str], bytes]:
        said = "I have a question." if content == GREETING else f"Thanks. {STOP}"
        return 200, {}, json.dumps({"choices": [{"message": {"content": said}}]}).encode()

    server.trouble = say
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
def test_a_scripted_user_at_an_endpoint(scripted_user: FakeEndpoint, tmp_path: Path) -> None:
    """The agent does nothing, which is right where nothing is to be done: the second task of two."""
    world = write_world(tmp_path / "world", Airline)
    file = team_file(tmp_path, Airline, world, f"{{base_url: '{scripted_user.url}', model: script}}")
    report, told = invoke("eval", "--team", file, "--samples", 2, "--out", tmp_path / "evals")
    assert report["verdicts"] == {"wrong": 2, "right": 2}
    assert (report["avg_at_k"], report["success_P"]) == (0.5, [0.0, 1.0])
    assert report["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert report["pass_hat_k"] == {"1": 0.5, "2": 0.5}
    assert "pass^2" in told
    assert report["consensus_on_correct"] is None, "a message of a dialogue states no answer"
    assert "warning: taubench:airline: team.router.rounds is 3" in " ".join(told.split())
    (chunk,) = Path(report["folder"]).glob("*.jsonl.gz")
    episodes = read_episodes(chunk).episodes
    assert [[message.author for message in episode.messages] for episode in episodes] == [["user", "desk", "user"]] * 4
    assert "Cancel your trip" in json.dumps([body for _, _, body in scripted_user.requests])
    asked = len(scripted_user.requests)
    again, _ = invoke("eval", "--team", file, "--samples", 2, "--out", tmp_path / "evals", "--regrade")
    assert again["verdicts"] == report["verdicts"]
    assert len(scripted_user.requests) == asked, "nobody was asked again"


@pytest.mark.long
@pytest.mark.parametrize("domain", [Airline, Retail])
def test_a_frozen_agent_as_the_user(domain: type[TauBench], tmp_path: Path) -> None:
    """Random letters never stop: every dialogue is cut off, and earns nothing."""
    world = write_world(tmp_path / "world", domain)
    file = team_file(tmp_path, domain, world, "{agent: customer, max_tokens: 2}", rounds=2)
    report, _ = invoke("eval", "--team", file, "--limit", 1, "--samples", 2, "--out", tmp_path / "evals")
    assert report["verdicts"] == {"unparsed": 2}
    assert report["mean_reward"] == 0


@pytest.mark.long
@pytest.mark.skipif(not (DATA / "taubench").is_dir(), reason=f"no tau-bench data in {DATA}; set TEAMTR_DATA")
def test_the_benchmarks_own_tasks_with_a_scripted_user(scripted_user: FakeEndpoint, tmp_path: Path) -> None:
    """Of the first two tasks of the airline, both want something changed. The policy is too long for the tiny model."""
    folder = DATA / "taubench" / "airline"
    file = team_file(tmp_path, Airline, folder, f"{{base_url: '{scripted_user.url}', model: script}}", rounds=2)
    of_tables = ("team.model=tabular", "--out", tmp_path / "evals")
    report, _ = invoke("eval", "--team", file, "--limit", 2, "--samples", 1, *of_tables)
    assert report["verdicts"] == {"wrong": 2}


@pytest.mark.long
def test_the_grader_is_tried_with_whole_dialogues_whose_length_is_no_messages(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Retail)
    (world / "tasks_train.jsonl").write_text((world / "tasks_test.jsonl").read_text("utf-8"), encoding="utf-8")
    session = build(load_team_file(team_file(tmp_path, Retail, world, "{agent: customer, max_tokens: 2}", rounds=2)))
    assert self_test(session) == []


@pytest.mark.long
def test_an_agent_may_be_given_some_of_the_tools_of_a_task_that_has_no_problems_to_train_on(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    file = team_file(tmp_path, Airline, world, "{agent: customer, max_tokens: 2}", rounds=2)
    some = ["team.agents.desk.tools=[think, calculate]"]
    assert build(load_team_file(file, some)).team["desk"].tools == ("think", "calculate")
    with pytest.raises(UserError, match="names no tool 'fly'"):
        build(load_team_file(file, ["team.agents.desk.tools=[fly]"]))


def test_few_rounds_are_warned_of(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", Airline)
    few = build_task(load_team_file(team_file(tmp_path, Airline, world, "{agent: customer}", rounds=9)))
    assert [warning for warning in few.warnings if "team.router.rounds is 9" in warning]
    enough = build_task(load_team_file(team_file(tmp_path, Airline, world, "{agent: customer}", rounds=10)))
    assert enough.warnings == ()
