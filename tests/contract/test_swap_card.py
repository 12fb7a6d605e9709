"""The model card of an exported agent: every figure in its place, and none of the model that it replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_run import eval_record, swap_record, update_record
from teamtr.config import loads
from teamtr.session.cards import model_card
from teamtr.session.export import agent_of
from teamtr.session.exported import Exported

TEAM = """\
name: made
seed: 4
task: {name: code}
team: {model: tiny, agents: [{name: left}, {name: right}, {name: speaker}]}
plan: {stages: 9, radius_nats_per_message: 0.02}
"""
NAMES = ("left", "right", "speaker")


def trained(stages: range, success: float, kl: float) -> list[dict[str, Any]]:
    """Stages of three updates, the first of them an evaluation, every fourth update of which is rejected."""
    records = []
    for stage in stages:
        for step, name in enumerate(NAMES):
            number = 3 * stage + step + 1
            outcome = "rejected" if number % 4 == 0 else "accepted"
            records.append(update_record(number, stage, step, name, outcome=outcome, kl_full=kl))
        records.append(eval_record(stage + 1, success + stage / 100, updates=3 * stage + 3))
    return records


def figures(agent: str, records: list[dict[str, Any]]) -> dict[str, str]:
    team_file = loads(TEAM, "made")
    card = model_card(team_file, agent_of(team_file, agent), records, Exported(agent, Path("x"), "model"))
    rows = (line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |")
    named = [(row[0], row[1]) for row in rows]
    assert len(dict(named)) == len(named), "a figure stands there twice"
    return dict(named)


BEGUN = [{"kind": "start"}, eval_record(0, 0.1, updates=0), *trained(range(4), 0.2, 0.004)]


def test_every_figure_of_a_run_in_its_place():
    found = figures("speaker", BEGUN)  # updates 3, 6, 9 and 12, of which 12 was rejected
    assert found == {
        "base": "the built-in tiny model (all weights trained)",
        "form of this folder": "Hugging Face model, weights in float32",
        "task": "code",
        "team": "left (tiny, full), right (tiny, full), speaker (tiny, full)",
        "plan": "teamtr, seed 4",
        "radius": "0.02 nats per message",
        "updates of this agent, since the run began": "3 kept of 4",
        "KL of the kept updates": "mean 0.004 nats",
        "held-out success of the team, first since the run began": (
            "10.0 % (5.0 to 15.0), 16 problems x 4, after 0 updates"
        ),
        "held-out success of the team, last since the run began": (
            "23.0 % (18.0 to 28.0), 16 problems x 4, after 12 updates"
        ),
    }


def test_a_model_that_was_never_trained_has_no_updates():
    """A direct swap: what stands in the log before it was done to the model that is gone."""
    swapped = swap_record(4, mode="direct", success={"before": 0.9, "at_swap": 0.4}, updates=12)
    found = figures("speaker", [*BEGUN, swapped])
    assert found["updates of this agent, since it joined after 4 stages"] == "0 kept of 0"
    assert found["swapped in"] == (
        "after 12 updates of the team, direct; not certified; held-out success of the team 90.0 % (90.0 to 99.0) "
        "before, 40.0 % (30.0 to 40.0) as installed"
    )
    assert not any("KL" in name or "held-out" in name for name in found), "no figure is left that is not its own"


def test_after_a_swap_only_what_came_after_it_counts_for_who_joined():
    records = [*BEGUN, swap_record(4, updates=12), *trained(range(4, 7), 0.5, 0.008)]
    found = figures("speaker", records)  # updates 15, 18 and 21
    assert found["updates of this agent, since it joined after 4 stages"] == "3 kept of 3"
    assert found["KL of the kept updates"] == "mean 0.008 nats"
    assert "95.0 % (90.0 to 98.0) as installed" in found["swapped in"]
    first, last = (f"held-out success of the team, {when} since it joined after 4 stages" for when in ("first", "last"))
    assert found[first].startswith("54.0 %")
    assert found[first].endswith("after 15 updates")
    assert found[last].startswith("56.0 %")
    assert found[last].endswith("after 21 updates")


def test_who_was_there_all_along_keeps_all_its_updates():
    records = [*BEGUN, swap_record(4, updates=12), *trained(range(4, 7), 0.5, 0.008)]
    found = figures("left", records)  # updates 1, 4, 7, 10, 13, 16 and 19, of which 4 and 16 were rejected
    assert found["updates of this agent, since the run began"] == "5 kept of 7"
    assert found["KL of the kept updates"] == "mean 0.0056 nats"
    assert "swapped in" not in found
    assert found["held-out success of the team, first since the run began"].startswith("10.0 %")
    assert found["held-out success of the team, last since the run began"].startswith("56.0 %")


def test_after_a_reset_only_what_came_after_it_counts_for_everyone():
    reset = swap_record(4, mode="reset", success={"before": 0.9, "at_swap": 0.1}, updates=12)
    records = [*BEGUN, reset, *trained(range(4, 7), 0.5, 0.008)]
    found = figures("left", records)  # updates 13, 16 and 19
    assert found["updates of this agent, since the team began anew after 4 stages"] == "2 kept of 3"
    assert found["KL of the kept updates"] == "mean 0.008 nats"
    assert found["held-out success of the team, first since the team began anew after 4 stages"].startswith("54.0 %")
    assert figures("speaker", records)["updates of this agent, since it joined after 4 stages"] == "3 kept of 3"


def test_of_several_swaps_the_last_counts():
    second = swap_record(6, updates=18, mode="direct")
    records = [
        *BEGUN,
        swap_record(4, updates=12),
        *trained(range(4, 6), 0.5, 0.008),
        second,
        *trained(range(6, 7), 0.6, 0.001),
    ]
    found = figures("speaker", records)
    assert found["updates of this agent, since it joined after 6 stages"] == "1 kept of 1"
    assert found["swapped in"].startswith("after 18 updates of the team, direct")
    other = [*records, swap_record(7, agent="left", updates=21)]
    assert figures("speaker", other)["updates of this agent, since it joined after 6 stages"] == "1 kept of 1"
    assert figures("left", other)["updates of this agent, since it joined after 7 stages"] == "0 kept of 0"
