"""The JSON schema of the team file: it takes what the library takes, and refuses typical mistakes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from teamtr.config import json_schema, recipe_text, recipes, schema_keys
from teamtr.config.source import read
from teamtr.config.texts import ANSWER_WORDS
from teamtr.presets import PRESETS
from teamtr.tasks.registry import task_names
from teamtr.team.visibility import FORMS, MAPPING

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SMALL: dict[str, Any] = {
    "name": "small",
    "task": {"name": "roles"},
    "team": {"model": "tiny", "agents": [{"name": "a1"}, {"name": "a2"}]},
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made = json_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def mistakes(schema: dict[str, Any], data: Any) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def changed(key: str, value: Any) -> dict[str, Any]:
    """The small team file with one key set."""
    data = copy.deepcopy(SMALL)
    *around, last = key.split(".")
    part: Any = data
    for step in around:
        part = part[int(step)] if isinstance(part, list) else part.setdefault(step, {})
    part[last] = value
    return data


@pytest.mark.long
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_valid(schema: dict[str, Any], name: str) -> None:
    assert mistakes(schema, read(recipe_text(name)).data) == []


def written() -> list[tuple[str, dict[str, Any]]]:
    """What the pages show as YAML, completed to team files. A block that lists alternatives has one on each line."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            whole = read(block)
            parts = block.splitlines() if whole.mistakes else [block]
            for part in parts:
                data = read(part).data
                if data:
                    found.append((page.name, {**SMALL, **data}))
    return found


def test_the_yaml_of_the_pages_is_valid(schema: dict[str, Any]) -> None:
    shown = written()
    assert {"tasks.md", "teams.md", "trackers.md", "README.md"} <= {page for page, _ in shown}
    assert len(shown) >= 10
    for page, data in shown:
        assert mistakes(schema, data) == [], (page, data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", {"name": "python:my/task.py:Maze", "options": {"size": 3}}),
        ("task", {"name": "gym:chain_sum", "parameters": {"max_terms": 3}}),
        ("task", {"name": "data", "path": "q.jsonl", "grader": "python:r.py:reward", "private": {"a1": "hint"}}),
        ("task", {"name": "arbench:sp", "path": "p.jsonl", "player": {"agent": "judge"}}),
        ("team.router", {"kind": "python:r.py:Mine", "options": {"x": 1}}),
        ("team.router", {"rounds": [["a1"], ["a2", "a1"]]}),
        ("team.lora.targets", ["q_proj", "v_proj"]),
        ("team.agents.0.sees", {"blind": [0], "only": ["a2"]}),
        ("team.agents.0.lora", {"rank": 8}),
        ("team.template_kwargs", {"enable_thinking": False, "other": None}),
        ("plan.preset", "dapo"),
        ("plan.a_clip", float("inf")),
        ("plan.clip", None),
        ("learner.betas", [0.9, 0.95]),
        ("learner.learning_rate", 0),
        ("device", "cuda:1"),
        ("trackers", ["wandb"]),
    ],
)
def test_what_is_right_is_valid(schema: dict[str, Any], key: str, value: Any) -> None:
    assert mistakes(schema, changed(key, value)) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("plann", {}, "'plann' was unexpected"),
        ("plan.radious", 0.1, "'radious' was unexpected"),
        ("plan.stages", "ten", "plan.stages: 'ten' is not of type 'integer'"),
        ("plan.stages", 0, "plan.stages: 0 is less than the minimum"),
        ("plan.group_size", 1, "plan.group_size: 1 is less than the minimum of 2"),
        ("plan.preset", "trpo", "plan.preset: 'trpo' is not one of"),
        ("plan.gate", "yes", "plan.gate: 'yes' is not valid"),
        ("task.name", "rolls", "task.name: 'rolls' is not valid"),
        ("task.name", 3, "task.name: 3 is not of type 'string'"),
        ("task", {"tags": 2}, "task: 'name' is a required property"),
        ("task.terms", 2, "task: Additional properties are not allowed ('terms' was unexpected)"),
        ("task", {"name": "data", "rewards": [{}]}, "task.rewards.0: 'function' is a required property"),
        ("task", {"name": "data", "path": "q", "grader": "fuzzy"}, "task.grader: 'fuzzy' does not match"),
        ("task", {"name": "gym:Chain"}, "task.name: 'gym:Chain' is not valid"),
        ("task", {"name": "python:task.py"}, "task.name: 'python:task.py' is not valid"),
        ("team.agents", [], "team.agents: [] "),
        ("team.agents.0.modle", "tiny", "'modle' was unexpected"),
        ("team.agents.0.name", ANSWER_WORDS[0], "should not be valid under"),
        ("team.agents.0.name", "two words", "team.agents.0.name: 'two words' does not match"),
        ("team.agents.0.sees", "nothing", "team.agents.0.sees: 'nothing' is not valid"),
        ("team.agents.0.sees", {"blind": []}, "team.agents.0.sees: {'blind': []} is not valid"),
        ("team.router.kind", "random", "team.router.kind: 'random' is not valid"),
        ("team.router.rounds", "two", "team.router.rounds: 'two' is not valid"),
        ("learner.betas", [0.9], "learner.betas: [0.9] is too short"),
        ("name", "a/b", "name: 'a/b' does not match"),
        ("device", "gpu", "device: 'gpu' does not match"),
        ("trackers", ["excel"], "trackers.0: 'excel' is not one of"),
    ],
)
def test_typical_mistakes_are_told(schema: dict[str, Any], key: str, value: Any, said: str) -> None:
    (told,) = mistakes(schema, changed(key, value))
    assert said in told


def test_a_missing_section_is_told(schema: dict[str, Any]) -> None:
    assert mistakes(schema, {}) == [f": {name!r} is a required property" for name in ("name", "task", "team")]


def keys_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every key by its dotted name, as ``schema_keys`` lists them; several tasks may have a key of the same name."""
    found: dict[str, dict[str, Any]] = {}

    def walk(part: dict[str, Any], prefix: str) -> None:
        resolved = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        for rule in resolved.get("allOf", ()):
            walk(rule["then"], prefix)
        if "$ref" in part or part is schema:
            assert resolved["additionalProperties"] is False, prefix
        for name, each in resolved.get("properties", {}).items():
            if each is True:
                continue
            inner = each.get("items", {}) if "$ref" in each.get("items", {}) else each
            inner = next((one for one in each.get("anyOf", ()) if "$ref" in one), inner)
            named = inner.get("$ref", "").endswith(("AgentConfig", "McpConfig"))
            item = "NAME." if named else "NUMBER."
            below = f"{prefix}{name}." + (item if inner is each.get("items") else "")
            if "$ref" in inner or "allOf" in inner:
                walk(inner, below)
            if "$ref" not in inner and "allOf" not in inner:
                found.setdefault(f"{prefix}{name}", each)

    walk(schema, "")
    return found


def test_it_has_every_key_with_its_meaning_and_no_other(schema: dict[str, Any]) -> None:
    found = keys_of(schema)
    meanings: dict[str, set[str]] = {}
    for key in schema_keys():
        meanings.setdefault(key.key, set()).add(key.description)
    assert found.keys() == meanings.keys()
    for key, said in found.items():
        assert key == "task.name" or said["description"] in meanings[key], key
    assert found["plan.stages"]["default"] == 40
    assert "default" not in found["plan.clip"]
    assert found["plan.preset"]["enum"] == list(PRESETS)


def test_every_task_that_there_is_can_be_named(schema: dict[str, Any]) -> None:
    for name in task_names():
        given = name.replace("FILE:CLASS", "f.py:C").replace("NAME", "chain_sum")
        assert not any(told.startswith("task.name:") for told in mistakes(schema, changed("task", {"name": given})))


def test_each_form_of_sees_is_in_the_schema() -> None:
    assert MAPPING["properties"].keys() == FORMS.keys()


def test_tools_may_be_a_name_a_list_or_a_section(schema: dict[str, Any]) -> None:
    for good in ("python:own.py:f", ["python:own.py:f", "python:own.py:g"], {"use": ["python:own.py:f"], "steps": 2}):
        assert mistakes(schema, changed("tools", good)) == []
    for bad in ("own.py", ["own.py:f"], {"uses": []}, 3):
        assert mistakes(schema, changed("tools", bad)) != []
