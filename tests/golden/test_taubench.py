"""tau-bench: how dialogues are graded, and the labeled ones done again, result by result and reward by reward."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from small_taubench import ANY_JSON, small, start
from teamtr.calls import ToolCall
from teamtr.errors import UserError
from teamtr.tasks.benchmarks.taubench import Airline, Retail
from teamtr.tasks.benchmarks.taubench.replay import NotATrajectory, Replay, earns_reward, replay, turns_in
from teamtr.tasks.benchmarks.taubench.state import State
from teamtr.tasks.benchmarks.taubench.task import TauBench, World
from teamtr.tools.kinds import object_schema

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TEAMTR_DATA", ROOT.parent / "shared" / "data")) / "taubench"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no tau-bench data in {DATA}; set TEAMTR_DATA")

DOMAINS = [Airline, Retail]


# -- dialogues ------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        for name, arguments in named
    ]
    return {"role": "assistant", "content": content, "tool_calls": [{"function": each} for each in functions]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


CANCEL = ("cancel_reservation", {"reservation_id": "OLD111"})
TRANSFER = ("transfer_to_human_agents", {"summary": "s"})
END = user("Bye ###STOP###")


def played(*messages: dict[str, Any]) -> Replay:
    return replay(Airline.toolbox, start(Airline), turns_in(list(messages)))


def verdict_of(*messages: dict[str, Any], problem: int = 0) -> tuple[str, float]:
    task = small(Airline)
    (verdict,) = task.grade_replies([(task.problems("test")[problem], json.dumps(messages))])
    return verdict.kind, verdict.reward


def test_the_right_data_and_every_output_earn_the_reward() -> None:
    right = [user("Hi"), calls(CANCEL), says("YES, it costs $1,286."), END]
    assert verdict_of(*right) == ("right", 1.0)
    assert verdict_of(*right[:2], says("yes"), says("1286"), END) == ("right", 1.0), "in some message each"
    assert verdict_of(*right[:2], says("It costs 1286."), END) == ("wrong", 0.0), "an output is missing"
    assert verdict_of(right[0], *right[2:]) == ("wrong", 0.0), "nothing was cancelled"
    assert verdict_of(right[0], calls(CANCEL), calls(CANCEL), *right[2:]) == ("wrong", 0.0), "entered twice"
    stray = calls(("send_certificate", {"user_id": "ada_1", "amount": 1}))
    assert verdict_of(*right[:3], stray, END) == ("wrong", 0.0), "something else was changed"


def test_what_is_said_beside_a_call_is_not_heard() -> None:
    assert verdict_of(calls(CANCEL, content="yes 1286"), END) == ("wrong", 0.0)


def test_a_dialogue_that_is_not_over_earns_nothing() -> None:
    right = [calls(CANCEL), says("yes 1286")]
    assert verdict_of(*right) == ("unparsed", 0.0)
    assert verdict_of(*right, user("One more thing.")) == ("unparsed", 0.0)
    assert verdict_of(says("I say ###STOP###"), *right) == ("unparsed", 0.0), "the user ends it"
    assert verdict_of(*right, calls(TRANSFER)) == ("right", 1.0)
    assert verdict_of(*right, calls(("transfer_to_human_agents", "no JSON"))) == ("unparsed", 0.0)


def test_what_comes_after_the_end_does_not_count() -> None:
    assert verdict_of(calls(TRANSFER), calls(CANCEL), problem=1) == ("right", 1.0)
    assert verdict_of(END, calls(CANCEL), problem=1) == ("right", 1.0)
    assert verdict_of(calls(CANCEL), END, problem=1) == ("wrong", 0.0)


def test_results_are_compared_with_the_record_as_json() -> None:
    sum_, think = ("calculate", {"expression": "1 + 1"}), ("think", {"thought": "x"})
    same = played(calls(sum_), result("2.00"), calls(think), result(""), END)
    assert (same.results, same.differing) == (("2.0", ""), ())
    assert played(calls(sum_, think), result("3.0"), result("y"), END).differing == (0, 1)
    assert played(calls(sum_, think), result("2.0"), END).differing == (), "what was not recorded cannot differ"
    bad = played(calls(("calculate", "{"), ("think", "[]")), END)
    assert bad.results[0] == "Error: the arguments of calculate must be a JSON object"
    assert bad.results[1] == "Error: the arguments of think must be a JSON object"
    assert bad.state.changes() == {}


def test_a_verdict_names_the_records_that_changed_and_results_that_differ() -> None:
    task = small(Airline)
    problem = task.problems("test")[0]
    dialogue = [calls(CANCEL), result("{}"), calls(("think", {"thought": ""})), result(""), END]
    (verdict,) = task.grade_replies([(problem, json.dumps(dialogue))])
    assert verdict.extracted is not None
    assert verdict.extracted.startswith("reservations/OLD111 (")
    assert verdict.extracted.endswith("; 1 of 2 results differ from those recorded")
    assert task.extract(json.dumps([END])) == "nothing changed"
    assert task.extract("[]") is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("text", "a trajectory is a list of messages, found 'text'"),
        (["text"], "message 1: must be an object with a role of system, user, assistant, tool, found 'text'"),
        ([END, {"role": "judge"}], "message 2: must be an object with a role"),
        ([{"role": ["user"]}], "message 1: must be an object with a role"),
        ([{"role": "user", "content": ["x"]}], "message 1: 'content' must be text, found ['x']"),
        ([{"role": "assistant", "tool_calls": "x"}], "message 1: each of 'tool_calls' must be"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}], "message 1: each of 'tool_calls' must"),
        ([result("x")], "message 1: the result of a tool, but no call waits for one"),
        ([calls(CANCEL), result("x"), result("y")], "message 3: the result of a tool, but no call waits for one"),
    ],
)
def test_what_is_no_trajectory_is_explained(messages: Any, message: str) -> None:
    with pytest.raises(NotATrajectory) as caught:
        turns_in(messages)
    assert str(caught.value).startswith(message)


@pytest.mark.long
@given(ANY_JSON)
def test_any_reply_gets_a_verdict(value: Any) -> None:
    task = small(Retail)
    problem = task.problems("test")[0]
    texts = [json.dumps(value), json.dumps([value]), json.dumps([{"role": "assistant", "tool_calls": value}])]
    assert {verdict.reward for verdict in task.grade_replies([(problem, text) for text in texts])} == {0.0}


def assert_gold_is_right_and_wrong_is_not(task: TauBench, problems: list[Any]) -> None:
    rng = np.random.default_rng(0)
    for problem in problems:
        wrong = task.wrong(problem, rng)
        assert len({each.kind for each in wrong}) >= 5
        replies = [(problem, task.gold(problem)), *((problem, each.reply) for each in wrong)]
        verdicts = task.grade_replies(replies)
        assert [verdict.right for verdict in verdicts] == [True] + [False] * len(wrong), problem.id


@pytest.mark.parametrize("domain", DOMAINS)
def test_known_answers_of_the_small_worlds(domain: type[TauBench]) -> None:
    task = small(domain)
    assert_gold_is_right_and_wrong_is_not(task, list(task.problems("test")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user_id": 3}, "row 7: 'user_id' must be text, found 3"),
        ({"user_id": "eve"}, "row 7: there is no user 'eve' in the data of taubench:airline"),
        ({"actions": [{"name": "think"}]}, "row 7: 'actions' must be"),
        ({"actions": [{"name": "fly", "kwargs": {}}]}, "row 7: there is no tool 'fly' in taubench:airline"),
        ({"outputs": [3]}, "row 7: 'outputs' must be a list of texts, found [3]"),
    ],
)
def test_a_row_that_states_no_task_is_refused(change: dict[str, Any], message: str) -> None:
    row = {"user_id": "ada_1", "instruction": "Do.", "actions": [], "outputs": []}
    with pytest.raises(UserError) as caught:
        small(Airline).problem({**row, **change}, "row 7")
    assert str(caught.value).startswith(message)


# -- the benchmark's own files --------------------------------------------------------------------------------


def of_the_golden_file() -> TauBench:
    """The airline's data with the one key as it was when the golden file was made."""
    world = World.read(DATA / "airline", Airline.tables)
    users = {
        key: {**user, "address": {{"state": "province"}.get(k, k): v for k, v in user["address"].items()}}
        for key, user in world.tables["users"].items()
    }
    changed = replace(world, tables={**world.tables, "users": users})
    reader = Airline(world=changed)
    return Airline({"test": reader.problems_of(Airline.rows(DATA / "airline" / "tasks_test.jsonl"))}, world=changed)


def hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, hashable(item)) for key, item in sorted(value.items()))
    return tuple(map(hashable, value)) if isinstance(value, list) else value


class Hashes:
    """The benchmark's hash of a whole database, with the records that no dialogue touched read once."""

    def __init__(self, tables: Any) -> None:
        self._tables = {
            name: {key: hashable(record) for key, record in table.items()} for name, table in tables.items()
        }

    def of(self, state: State) -> str:
        tables = {name: dict(table) for name, table in self._tables.items()}
        for place, record in state.changed.items():
            tables[place.table][place.key] = hashable(record)
        whole = tuple((name, tuple(sorted(table.items()))) for name, table in sorted(tables.items()))
        return hashlib.sha256(str(whole).encode()).hexdigest()


@needs_data
@pytest.mark.long
def test_every_labeled_trajectory_comes_out_as_recorded() -> None:
    """Every result of a tool, every reward, and the hash of the data after each task's own actions."""
    rows = json.loads((DATA / "airline" / "golden_trajectories_gpt-4o.json").read_text(encoding="utf-8"))
    task = of_the_golden_file()
    problems = {int(problem.id): problem for problem in task.problems("test")}
    wanted = {number: task.wanted(problem) for number, problem in problems.items()}
    hashes = Hashes(wanted[0].tables)
    hash_of: dict[int, str] = {}
    results = hashed = 0
    for row in rows:
        number, where = row["task_id"], (row["task_id"], row["trial"])
        made = task.replayed(turns_in(row["traj"]))
        assert made.differing == (), where
        results += len(made.results)
        problem = problems[number]
        earned = made.over and earns_reward(made.state, wanted[number], made.said, problem.answer["outputs"])
        assert float(earned) == row["reward"], where
        assert made.over == (row["info"]["reward_info"] is not None), "a dialogue that was cut off has no reward"
        told = (row["info"]["reward_info"] or {}).get("info", {})
        if "gt_data_hash" in told:
            if number not in hash_of:
                hash_of[number] = hashes.of(wanted[number])
            assert hash_of[number] == told["gt_data_hash"], where
            hashed += 1
        if "r_actions" in told:
            assert (made.state.changes() == wanted[number].changes()) == bool(told["r_actions"]), where
    assert len(rows) >= 60
    assert results >= 377
    assert hashed >= 50


@needs_data
@pytest.mark.parametrize("domain", DOMAINS)
def test_our_tools_take_the_arguments_that_the_schemas_say(domain: type[TauBench]) -> None:
    def bare(schema: Any) -> Any:
        """Without descriptions, and with what is required in one order."""
        if not isinstance(schema, dict):
            return schema
        kept = {key: bare(value) for key, value in schema.items() if not isinstance(value, str) or key != "description"}
        return {**kept, "required": sorted(kept["required"])} if "required" in kept else kept

    file = DATA / domain.name.removeprefix("taubench:") / "tool_schemas.json"
    told = {each["function"]["name"]: each["function"]["parameters"] for each in json.loads(file.read_text())}
    ours = {name: object_schema(tool.parameters) for name, tool in domain.toolbox.items()}
    assert {name: bare(schema) for name, schema in ours.items()} == {name: bare(each) for name, each in told.items()}


@pytest.mark.long
@needs_data
@pytest.mark.parametrize("domain", DOMAINS)
def test_known_answers_of_every_task(domain: type[TauBench]) -> None:
    folder = DATA / domain.name.removeprefix("taubench:")
    task = domain.from_data(domain.name, folder)
    assert len(task.problems("test")) == {Airline: 50, Retail: 115}[domain]
    assert len(task.problems("train")) == {Airline: 0, Retail: 500}[domain]
    assert_gold_is_right_and_wrong_is_not(task, [*task.problems("test"), *task.problems("train")[:50]])


@pytest.mark.long
@needs_data
def test_the_tasks_own_changes_of_retail_go_through() -> None:
    """All but four of the test tasks' own changes: those break the policy, or pay with too small a gift card."""
    task = Retail.from_data("taubench:retail", DATA / "retail" / "tasks_test.jsonl")
    refused, changes = [], 0
    for problem in task.problems("test"):
        state = State(task.wanted(problem).tables)
        for action in problem.answer["actions"]:
            outcome = Retail.toolbox.step(state, ToolCall(action["name"], action["kwargs"]))
            is_change = not action["name"].startswith(("get_", "find_", "list_", "calculate", "transfer_"))
            changes += is_change
            if is_change and outcome.text.startswith("Error"):
                refused.append((problem.id, action["name"]))
            state = outcome.state
    assert changes == 178
    assert refused == [
        ("12", "return_delivered_order_items"),
        ("13", "return_delivered_order_items"),
        ("64", "exchange_delivered_order_items"),
        ("106", "exchange_delivered_order_items"),
    ]
