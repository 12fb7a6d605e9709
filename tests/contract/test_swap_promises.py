"""What a swap promises of its parts: what is held out stays so, both sides see the same, what the new agent trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_swap import TEAM

from teamtr.chat.tokenizers import compare_tokenizers
from teamtr.config import loads
from teamtr.session import train as runs
from teamtr.session.build import build
from teamtr.session.resume import StoredRun
from teamtr.store import Log, RunFolder, read_episodes
from teamtr.swap import Request, probes, swap
from teamtr.swap.checklist import check_protocol, warnings_of
from teamtr.swap.probes import joined, play_probes
from teamtr.swap.request import new_team_file
from teamtr.swap.swap import _Swap
from teamtr.types import Problem

pytestmark = pytest.mark.long

SMALLER = (
    "tiny.width=16", "tiny.warmup_steps=60", "plan.problems=2", "learner.minibatches=1", "eval.samples=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("promises") / "run"
    for _ in runs.train(loads(TEAM, "small", SMALLER), folder):
        pass
    return folder


# -- probes that double ---------------------------------------------------------------------------------------


@pytest.fixture
def swapping(run, tmp_path) -> Iterator[_Swap]:
    stored = StoredRun.read(run)
    with RunFolder.open(tmp_path / "out") as target:
        yield _Swap(stored, target, Request("speaker", "tiny", probes=24))


def test_what_is_held_out_stays_so_when_probes_double(swapping, monkeypatch):
    """Further probes to learn from are of the problems trained on, and hotter; those to judge by of the problems held
    out, at the team's own temperature, three times at most."""
    played: list[tuple[frozenset[str], float | None]] = []
    play = probes.play

    def watched(context: Any, team: Any, problems: Sequence[Problem], group: int, **options: Any) -> Any:
        played.append((frozenset(problem.id for problem in problems), options["temperature"]))
        return play(context, team, problems, group, **options)

    monkeypatch.setattr(probes, "play", watched)
    batch = swapping._played("probes", swapping.old.task.problems("train"), 24)
    first = swapping._probes(batch, True, 0)
    learnt, judged = (
        {batch.problems[p].id for p in first.old.problem_M[rows]} for rows in (first.train, first.held_out)
    )
    assert learnt
    assert judged
    assert learnt.isdisjoint(judged)
    assert [temperature for _, temperature in played] == [None]

    doubled = swapping._probes(batch, True, 4)
    assert [temperature for _, temperature in played[1:]] == [1.5, None, 1.5, None, 1.5, None, 1.5]
    more, judges = [], []
    for k in range(1, 5):
        more.append(read_episodes(swapping.target.episodes / f"swap-probes-{k}.jsonl.gz"))
        assert {e.problem_id for e in more[-1].episodes} <= learnt
    for k in range(1, 4):
        judges.append(read_episodes(swapping.target.episodes / f"swap-judges-{k}.jsonl.gz"))
        assert {e.problem_id for e in judges[-1].episodes} <= judged
    assert not (swapping.target.episodes / "swap-judges-4.jsonl.gz").exists()
    assert {ids for ids, temperature in played[1:] if temperature is None} == {
        frozenset(e.problem_id for e in batch.episodes) for batch in judges
    }
    everything = joined([batch, *more, *judges])
    trained, held = (
        {everything.problems[p].id for p in doubled.old.problem_M[rows]} for rows in (doubled.train, doubled.held_out)
    )
    assert (trained, held) == (learnt, judged)
    assert len(doubled.train) == len(first.train) + sum(len(b.of("speaker")) for b in more)
    assert len(doubled.held_out) == len(first.held_out) + sum(len(b.of("speaker")) for b in judges)


# -- before and after -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "times"), [("direct", ["before", "at_swap"]), ("aligned", ["before", "at_swap", "after"])]
)
def test_the_very_same_model_makes_no_shock_at_all(run, tmp_path, mode, times):
    """Every evaluation sees the same problems and the same noise: any difference would come from the model. Aligned, it
    is within the radius before the first step."""
    store = RunFolder.read(run).checkpoints
    same = store.folder_of(store.latest(), "speaker")
    *_, record = swap(run, Request("speaker", str(same), mode=mode, train="full", probes=16), tmp_path / "out")
    assert record["shock"] == record["direct_shock"] == 0.0
    assert list(record["success"]) == times
    evaluations = Log(tmp_path / "out" / "swap" / "journal.jsonl").read()
    assert [told.pop("when") for told in evaluations] == times
    assert all(told == evaluations[0] for told in evaluations), "successes, verdicts and tokens, problem by problem"
    assert len(evaluations[0]["verdicts"]) > 1, "another noise could not be told from this one"


# -- the end of a message -------------------------------------------------------------------------------------


def test_an_end_that_the_new_agent_does_not_know_leaves_no_exact_kl(run):
    """Models declare ends of their own beside their tokenizer's: the same ids on every string are not enough."""
    session, team = StoredRun.read(run).build()
    other = build(loads(TEAM, "small", [*SMALLER, "seed=3"]))
    batch = play_probes(session, team, "speaker", session.task.problems("train"), 32, part="probes")
    ends = {
        int(t.token_ids[-1]) for e in batch.episodes for t in e.turns if t.agent == "speaker" and t.finish == "stop"
    }
    assert ends, "nobody stopped"
    tokenizers = compare_tokenizers(*(w.context.codecs["speaker"].tokenizer for w in (session, other)), ["AB", "C"])
    assert tokenizers.identical
    known = check_protocol(session, other, "speaker", tokenizers, batch)
    assert known.exact_kl
    assert not warnings_of(known)
    other.engine.learner("speaker").policy.end_ids = frozenset({max(ends) + 1})
    unknown = check_protocol(session, other, "speaker", tokenizers, batch)
    assert not unknown.exact_kl
    assert warnings_of(unknown) == [f"end of a message: the new agent does not stop at {sorted(ends)}"]


# -- what the new agent trains --------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", ["full", "lora"])
@pytest.mark.parametrize(
    ("model", "asked", "trains"),
    [
        ("tiny", None, "full"),
        ("somebody/model", None, "lora"),
        ("folder", None, "lora"),
        ("tiny", "lora", "lora"),
        ("somebody/model", "full", "full"),
        ("folder", "full", "full"),
    ],
)
def test_what_the_new_agent_trains(tmp_path, replaced, model, asked, trains):
    """As the help of --train says, and as a team file that names this model would have it: whatever was replaced."""
    if model == "folder":
        (tmp_path / "model").mkdir()
        model = str(tmp_path / "model")
    team_file = loads(TEAM.replace("speaker,", f"speaker, train: {replaced},"), "small", SMALLER)
    assert team_file.team.agents[2].train == replaced
    made = new_team_file(team_file, Request("speaker", model, train=asked), next_stage=1, models=tmp_path / "models")
    assert made.team.agents[2].model == model
    assert made.team.agents[2].train == trains
    assert [agent.train for agent in made.team.agents[:2]] == ["full", "full"]
    if asked is None:
        plain = loads(TEAM.replace("speaker,", f"speaker, model: {model},"), "small", SMALLER)
        assert plain.team.agents[2].train == trains
