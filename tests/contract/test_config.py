"""The team file: exact errors with their places, YAML 1.2, overrides, round trip, recipes."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from teamtr.config import (
    AgentConfig,
    ConfigError,
    LoraConfig,
    PlanConfig,
    SchemaKey,
    TeamConfig,
    TeamFile,
    changed,
    changed_for_evaluation,
    dump,
    load_team_file,
    loads,
    loads_stored,
    recipe_text,
    recipes,
    schema_keys,
)
from teamtr.config.reference import PRESET_KEYS, preset_differences
from teamtr.presets import PRESETS, DynamicSampling, Order, Overlong, Radii, Region, Resample
from teamtr.tasks import DataTask, Roles
from teamtr.tasks.registry import task_names
from teamtr.theory.estimators import GroupAdvantage
from teamtr.theory.objective import Objective

BASE = """\
name: trial
task: {name: data, path: x}
team:
  model: tiny
  agents:
    - name: ann
    - name: bob
"""  # seven lines: what a test appends begins at line 8


def errors(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, "team.yaml", overrides)
    return str(caught.value)


def heads(text: str, *overrides: str) -> list[str]:
    """The messages without the source lines under them."""
    return [line for line in errors(text, *overrides).splitlines() if line.startswith(("team.yaml:", "override "))]


def only(text: str, *overrides: str) -> str:
    found = heads(text, *overrides)
    assert len(found) == 1, found
    return found[0]


# --- what an error looks like ---------------------------------------------------------------------------------


def test_unknown_key_with_source_line_and_caret() -> None:
    text = BASE + "plan:\n  stages: 5\n  radious: 0.01\n"
    assert errors(text) == (
        'team.yaml:10:3: unknown key "radious" in plan; did you mean "radius_nats_per_message"?\n'
        "   10 |   radious: 0.01\n"
        "      |   ^^^^^^^"
    )


def test_several_errors_at_once_in_the_order_of_lines() -> None:
    text = """\
name: trial
plan:
  stages: ten
  group_sice: 8
task:
  name: code
  half_length: 0
team:
  model: tiny
  answer: speeker
  agents:
    - {name: left, max_tokens: -1}
    - {name: right}
    - {name: speaker}
"""
    assert (
        errors(text)
        == """\
team.yaml:3:11: plan.stages must be a whole number, got "ten"
    3 |   stages: ten
      |           ^^^
team.yaml:4:3: unknown key "group_sice" in plan; did you mean "group_size"?
    4 |   group_sice: 8
      |   ^^^^^^^^^^
team.yaml:7:16: task.half_length must be at least 1, got 0
    7 |   half_length: 0
      |                ^
team.yaml:10:11: team.answer must be last, majority or an agent, got "speeker"; did you mean "speaker"?
   10 |   answer: speeker
      |           ^^^^^^^
team.yaml:12:32: team.agents.left.max_tokens must be at least 1, got -1
   12 |     - {name: left, max_tokens: -1}
      |                                ^^"""
    )


def test_mistakes_carry_their_places() -> None:
    with pytest.raises(ConfigError) as caught:
        loads(BASE + "seed: -1\n", "team.yaml", ["plan.stages=x"])
    first, second = caught.value.mistakes
    assert first.place is not None
    assert (first.place.line, first.place.column, first.place.width) == (8, 7, 2)
    assert (second.place, second.override) == (None, "plan.stages=x")


def check_marked(marked: str, message: str) -> None:
    """The only mistake of this text is the given one, and it points exactly at what stands between « and »."""
    before, rest = marked.split("«")
    inside, after = rest.split("»")
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    text = before + inside + after
    lines = text.split("\n")
    assert errors(text) == (
        f"team.yaml:{line}:{column}: {message}\n"
        f"{line:5d} | {lines[line - 1]}\n"
        f"      | {' ' * (column - 1)}{'^' * max(len(inside), 1)}"
    )


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        # unknown keys: near, by initials, in another section, and none near
        ("learner: {«epoch»: 1}", 'unknown key "epoch" in learner; did you mean "epochs"?'),
        ("learner: {«lr»: 1}", 'unknown key "lr" in learner; did you mean "learning_rate"?'),
        ("«group_size»: 3", 'unknown key "group_size" in the team file; did you mean "plan.group_size"?'),
        (
            "learner: {«temperature»: 3}",
            'unknown key "temperature" in learner; did you mean "eval.temperature" or "sampling.temperature"?',
        ),
        ("store: {«zzz»: 1}", 'unknown key "zzz" in store; valid keys: keep_checkpoints, episodes'),
        # wrong types
        ("seed: «one»", 'seed must be a whole number, got "one"'),
        ("seed: «true»", "seed must be a whole number, got true"),
        ("seed: «2.0»", "seed must be a whole number, got 2.0; write 2"),
        ("learner: {learning_rate: «'1e-5'»}", 'learner.learning_rate must be a number, got "1e-5"'),
        (
            "store: {episodes: «no»}",
            'store.episodes must be true or false, got "no" (text in YAML 1.2; write false)',
        ),
        ("store: {episodes: «1»}", "store.episodes must be true or false, got 1"),
        ("device: «3»", "device must be text, got 3; put it in quotes"),
        ("plan: «3»", "plan must be a mapping of keys to values, got 3"),
        ("«plan»:", "plan must be a mapping of keys to values, got nothing"),
        ("learner: {betas: «0.9»}", "learner.betas must be a list, got 0.9"),
        # out of range
        ("plan:\n  stages: 3\n  gamma: «1.5»", "plan.gamma must be at most 1, got 1.5"),
        ("plan: {group_size: «1»}", "plan.group_size must be at least 2, got 1"),
        ("sampling: {temperature: «0»}", "sampling.temperature must be greater than 0, got 0"),
        ("learner: {confidence: «1.0»}", "learner.confidence must be less than 1, got 1.0"),
        ("plan: {beta: «.inf»}", "plan.beta must be a finite number, got inf"),
        ("plan: {a_clip: «.nan»}", "plan.a_clip must be greater than 0, got nan"),
        ("learner: {betas: «[0.9]»}", "learner.betas must have more items, got a list of 1"),
        ("learner: {betas: «[0.9, 0.9, 0.9]»}", "learner.betas must have at most 2 items, got a list of 3"),
        ("learner: {betas: [0.9, «1»]}", "learner.betas.1 must be less than 1, got 1"),
        # choices
        (
            "plan: {order: «revers»}",
            "plan.order must be one of fixed, reverse, random, largest_gain, together, "
            'got "revers"; did you mean "reverse"?',
        ),
        ("plan: {preset: «naive»}", 'plan.preset must name a preset, got "naive"; did you mean "naive_sequential"?'),
        ("device: «gpu»", 'device must be auto, cpu, cuda or cuda:N, got "gpu"'),
        # between fields
        ("tiny: {width: «63»}", "tiny.width must be an even multiple of tiny.heads (4), got 63"),
        (
            "plan: {radius_nats_per_message: 0.1, «radius_nats_per_token»: 0.1}",
            "plan.radius_nats_per_message and plan.radius_nats_per_token exclude each other; give one",
        ),
        (
            "plan: {«dynamic_sampling_limit»: 3}",
            "plan.dynamic_sampling_limit limits nothing: set plan.dynamic_sampling: true, or leave it out",
        ),
        (
            "plan: {allocate: gain, «adapt_radius»: true}",
            "plan.adapt_radius changes nothing with plan.allocate: gain, which sets every radius anew at each stage; "
            "leave one of them out",
        ),
        (
            "plan: {preset: reweighted, min_effective_share: 0, «resample_partially»: true}",
            "plan.resample_partially redraws episodes that are worth too little: set plan.min_effective_share or "
            "plan.sampling_cost, which say how much is enough",
        ),
        (
            "plan: {preset: partial, «min_effective_share»: 0}",
            "plan.resample_partially redraws episodes that are worth too little: set plan.min_effective_share or "
            "plan.sampling_cost, which say how much is enough",
        ),
        (
            "plan: {preset: auto, order: «together»}",
            "plan.order: together updates all agents from the batch that the stage begins with, whatever it is worth "
            "by then; min_effective_share, sampling_cost and resample_partially need another order",
        ),
        # keys that have no effect with other settings
        (
            "learner: {«value_learning_rate»: 0.1}",
            "learner.value_learning_rate is the critic's, and this plan has none: set plan.critic: true, or leave it "
            "out",
        ),
        (
            "learner: {«score_memory_gb»: 1}",
            "learner.score_memory_gb needs learner.score: sampler; with own, no features are kept",
        ),
        (
            "learner: {base: «file»}",
            "learner.base: file is about frozen weights below adapters, and no agent has an adapter: set train: lora, "
            "or leave it out",
        ),
        (
            "plan: {preset: dapo}\nlearner: {«certify_share»: 0.5}",
            "learner.certify_share holds out problems for certificates, and with plan.dynamic_sampling: true there are "
            "none: leave it out",
        ),
        (
            "plan: {credit: own}\nlearner: {«certify_share»: 0.5}",
            "learner.certify_share holds out problems for certificates, and with plan.credit: own there are none: "
            "leave it out",
        ),
        (
            "plan: {problems: 2}\nlearner: {certify_share: «0.5»}",
            "learner.certify_share holds out two problems or more and trains on the others: plan.problems must be 3 or "
            "more, got 2",
        ),
        (
            "plan: {problems: 8}\nlearner: {cross_fit: true, certify_share: «0.6»}",
            "learner.cross_fit halves the problems that learner.certify_share leaves, 3 of 8: they must be 4 or more; "
            "raise plan.problems, or lower learner.certify_share",
        ),
        (
            "sampling: {engine: plain, «precision»: fp16}",
            "sampling.precision changes nothing with sampling.engine: plain: it samples with the learner's own "
            "weights; leave it out",
        ),
        (
            "sampling: {engine: plain, «compiled»: true}",
            "sampling.compiled changes nothing with sampling.engine: plain: it compiles nothing; leave it out",
        ),
        (
            "sampling: {engine: plain, «adapters»: by_row}",
            "sampling.adapters changes nothing with sampling.engine: plain: it samples for one agent at a time; leave "
            "it out",
        ),
        (
            "sampling: {engine: plain, «memory_gb»: 4}",
            "sampling.memory_gb changes nothing with sampling.engine: plain: it has no KV blocks; leave it out",
        ),
        (
            "sampling: {engine: vllm, vllm: {python: py}, «compiled»: true}",
            "sampling.compiled is for the paged engine; vLLM compiles by settings of its own: leave it out",
        ),
        (
            "sampling: {vllm: {«python»: py}}",
            "sampling.vllm.python is for sampling.engine: vllm, and auto never chooses it: set sampling.engine: vllm, "
            "or leave sampling.vllm out",
        ),
        (
            "cluster: {«address»: auto}",
            "cluster.address needs cluster.engine: ray; without it the run is in this process",
        ),
        (
            "tools: {«seconds»: 9}",
            "tools.seconds is about your own tools, and there are none: give them in tools.use, or leave it out",
        ),
        (
            "tools: {mcp: [{name: m, command: c}], «workers»: 2}",
            "tools.workers is about your own tools, and there are none: give them in tools.use, or leave it out",
        ),
        # a field that cannot be read is one mistake, not two
        ("plan: {critic: «x»}\nlearner: {value_learning_rate: 0.1}", 'plan.critic must be true or false, got "x"'),
        ("tiny: {width: 66, heads: «x»}", 'tiny.heads must be a whole number, got "x"'),
        # YAML itself
        ("«name»: again", 'duplicate key "name" in the team file (first at line 1)'),
        ("«1»: 2", 'a key must be text; write "1"'),
        ("seed: «!!int x»", '"x" is not of the YAML type int'),
        ("seed: «!seed 3»", 'the tag "!seed" has no meaning in a team file'),
        (
            "plan: {stages: 3\n«»",
            "not valid YAML: expected ',' or '}', but got '<stream end>' while parsing a flow mapping that began "
            "at line 8",
        ),
        (
            "seed: 1\n«\t»device: cpu",
            "not valid YAML: found character '\\t' that cannot start any token while scanning for the next token",
        ),
        ("device: «*»cpu", "not valid YAML: found undefined alias 'cpu'"),
        (
            "seed: 1\n«-»--\nseed: 2",
            "not valid YAML: expected a single document in the stream, but found another document",
        ),
        ("device: c«\x07»pu", "not valid YAML: the character '\\x07' is not allowed"),
    ],
)
def test_one_mistake(appended: str, message: str) -> None:
    check_marked(BASE + appended, message)


@pytest.mark.parametrize(
    "appended",
    [
        "plan: {preset: ppo}\nlearner: {value_learning_rate: 0.1}",
        "learner: {value_learning_rate: 1e-2, score_memory_gb: 4, base: fp32, certify_share: 0}",
        "learner: {score: sampler, score_memory_gb: 1}",
        "plan: {problems: 8}\nlearner: {cross_fit: true, certify_share: 0.5}",
        # auto is paged on another machine
        "sampling: {precision: fp16, compiled: true, adapters: by_row, memory_gb: 4}",
        "sampling: {engine: plain, precision: auto, compiled: false, adapters: merged, vllm: {}}",
        "sampling: {engine: auto, vllm: {urls: [], arguments: [], start_s: 900, patience_s: 600}}",
        "sampling: {engine: paged, vllm: {python: py}}",
        "sampling: {engine: vllm, precision: fp16, memory_gb: 4, vllm: {python: py, start_s: 9, cards: '1'}}",
        "cluster: {max_restarts: 1}",  # of vLLM servers, too
        "tools: {mcp: [{name: m, command: c}], seconds: 9}",
        "tools: {steps: 2, tell: false, max_characters: 9}",  # the task may have tools
    ],
)
def test_keys_that_may_have_an_effect_are_accepted(appended: str) -> None:
    text = BASE.replace("model: tiny", "model: o/m") + appended
    assert loads(dump(loads(text))) == loads(text)


def test_a_stored_team_file_may_hold_keys_without_effect() -> None:
    """Nobody can take them out of a run that an earlier version began; what is wrong stays wrong."""
    idle = "learner: {value_learning_rate: 0.1}\nsampling: {engine: plain, precision: fp16}\n"
    assert len(heads(BASE + idle)) == 2
    stored = loads_stored(BASE + idle, "team.yaml", Path("run"))
    assert stored.learner.value_learning_rate == 0.1
    assert changed(stored, ["plan.stages=3"], "team.yaml").sampling.precision == "fp16"
    assert changed_for_evaluation(stored, ["device=cpu"], "team.yaml").sampling.precision == "fp16"
    with pytest.raises(ConfigError, match=r"learner\.cross_fit changes what the gate is judged on"):
        loads_stored(BASE + "plan: {preset: grpo}\nlearner: {cross_fit: true}\n", "team.yaml", Path("run"))


@pytest.mark.parametrize(
    ("sampling", "key", "message"),
    [
        ("precision: fp16", "sampling.precision", "run already: start them with it"),
        ("memory_gb: 4", "sampling.memory_gb", "run already: start them with it"),
        ("context_tokens: 99", "sampling.vllm.context_tokens", "run already: leave it out"),
        ("cards: '1'", "sampling.vllm.cards", "run already: leave it out"),
        ("arguments: [-x]", "sampling.vllm.arguments", "run already: leave it out"),
        ("start_s: 9", "sampling.vllm.start_s", "run already: leave it out"),
    ],
)
def test_keys_of_servers_that_a_run_starts_are_refused_for_servers_that_run(
    sampling: str, key: str, message: str
) -> None:
    text = BASE.replace("model: tiny", "model: o/m")
    beside, within = ("", f", {sampling}") if ".vllm." in key else (f"{sampling}, ", "")
    told = only(text + f"sampling: {{{beside}engine: vllm, vllm: {{urls: ['http://a:1']{within}}}}}\n")
    assert f" {key} is for servers started here" in told
    assert told.endswith(message) or message in told


ONE = "{model: tiny, agents: [{name: a}]}"
DATA = "{name: data, path: x}"


@pytest.mark.parametrize(
    ("task", "team", "message"),
    [
        (
            "{name: roles}",
            "{model: tiny, «agents»: [{name: a1}]}",
            "task roles needs two or more agents called a1, a2 and so on, got a1",
        ),
        (
            "{name: roles}",
            "{model: tiny, «agents»: [{name: a1}, {name: bob}]}",
            "task roles needs two or more agents called a1, a2 and so on, got a1, bob",
        ),
        (
            "{name: roles}",
            "{model: tiny, agents: [{name: a1}, {name: a2}, {name: a3}], router: {order: «[a3, a1]»}}",
            "task roles needs a message of every agent; team.router.order leaves out a2",
        ),
        (
            "{name: roles, tags: «27»}",
            "{model: tiny, agents: [{name: a1}, {name: a2}]}",
            "task.tags must be at most 26, got 27",
        ),
        (
            "{name: code, half_length: «9»}",
            "{model: tiny, agents: [{name: left}, {name: right}, {name: speaker, max_tokens: 18}]}",
            "4 symbols and task.half_length 9 make more than 65536 halves; use fewer or shorter",
        ),
        (
            "{name: code}",
            "{model: tiny, «agents»: [{name: left}, {name: rigth}, {name: speaker}]}",
            "task code needs the agents left, right and speaker, got left, rigth, speaker",
        ),
        (
            "{name: code}",
            "{model: tiny, answer: «left», agents: [{name: left}, {name: right}, {name: speaker}]}",
            'task code is answered by the speaker, but team.answer gives the word to "left"',
        ),
        (
            "{name: code, half_length: 3}",
            "{model: tiny, agents: [{name: left}, {name: right}, {name: speaker, max_tokens: «5»}]}",
            'agent "speaker" must say 6 letters, but max_tokens is 5',
        ),
        (
            "{name: code, half_length: 8}",
            "{model: tiny, max_tokens: «x», agents: [{name: left}, {name: right}, {name: speaker}]}",
            'team.max_tokens must be a whole number, got "x"',  # and not that the default is too short
        ),
        (
            "{name: code, symbols: «ABa»}",
            "{model: tiny, agents: [{name: left}, {name: right}, {name: speaker}]}",
            'task.symbols must be at least two characters that differ in more than case, no spaces, got "ABa"',
        ),
        (
            "{name: «cod»}",
            ONE,
            "task.name must be one of " + ", ".join(task_names()) + ', got "cod"; did you mean "code"?',
        ),
        ("«code»", ONE, 'task must be a mapping of keys to values, got "code"'),
        ("{name: data, «pth»: x}", ONE, 'unknown key "pth" in task; did you mean "path"?'),
        (
            "{name: data, path: x, «symbols»: AB}",
            ONE,
            'unknown key "symbols" in task; valid keys: name, path, train, test, held_out, question, answer, columns, '
            "grader, pattern, threshold, rewards, private, seconds_per_item, grade_early, container",
        ),
        ("{name: data, path: x, grader: «regex»}", ONE, 'task.grader is "regex", which needs task.pattern'),
        (
            "{name: data, path: x, pattern: «(y)»}",
            ONE,
            'task.pattern is used by grader "regex" only, and task.grader is "exact"',
        ),
        # A pattern that cannot be read must not also count as absent, nor a grader as "exact".
        (
            "{name: data, path: x, grader: regex, pattern: «'('»}",
            ONE,
            "task.pattern must be a regular expression: missing ), unterminated subpattern at position 0",
        ),
        (
            "{name: data, path: x, grader: regex, pattern: «'a|b'»}",
            ONE,
            "task.pattern must have exactly one group, round the answer, got 0; write (?:...) for others",
        ),
        (
            "{name: data, path: x, grader: «reg», pattern: (a)}",
            ONE,
            'task.grader must be exact, number, regex or python:FILE:FUNCTION, got "reg"',
        ),
        (
            "{name: data, path: x, private: {«bob»: hint}}",
            "{model: tiny, agents: [{name: bo}]}",
            'task.private names no agent "bob"; did you mean "bo"?',
        ),
        (DATA, "{model: tiny, agents: «[]»}", "team.agents must have at least 1 item, got an empty list"),
        (DATA, "{model: tiny, agents: [«5»]}", "team.agents.0 must be a mapping of keys to values, got 5"),
        (
            DATA,
            "{agents: [{name: a, model: tiny}, «{name: b}»]}",
            'agent "b" has no model; give it one, or set team.model for all',
        ),
        (DATA, "{«modle»: tiny, agents: [{name: b}]}", 'unknown key "modle" in team; did you mean "model"?'),
        (
            DATA,
            "{model: tiny, agents: [{name: a}, {name: «a»}]}",
            'two agents are called "a"; names must differ',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: «1a»}]}",
            "team.agents.1a.name must be a letter (a-z, A-Z), then letters, digits (0-9), dashes or underscores, got "
            '"1a"',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: «last»}]}",
            'team.agents.last.name must not be "last": team.answer gives that word a meaning of its own',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: «You»}]}",
            'team.agents.You.name must not be "You": so every agent\'s own lines are labelled in what it is shown',
        ),
        (
            "{name: data, path: x, grader: number, «threshold»: 0.5}",
            ONE,
            'task.threshold is about rewards of a grader of your own (python:FILE:FUNCTION), and "number" says itself '
            "what is right: leave it out",
        ),
        (
            "{name: 'arbench:dc', path: x, player: {model: m, base_url: 'http://h/v1', «revision»: r}}",
            "{model: tiny, agents: [{name: a}], router: {rounds: 2}}",
            "task.player.revision is of a model loaded here, and the player is that of task.player.base_url: leave it "
            "out",
        ),
        (
            DATA,
            "{«revision»: main, agents: [{name: a, model: o/m}]}",
            "team.revision is of team.model, which is not given: give each agent its own revision",
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: a, «lora»: {rank: 4}}]}",
            'agent "a" trains all its weights and has no adapter: set train: lora, or leave lora out',
        ),
        (
            DATA,
            "{model: tabular, train: lora, agents: [«{name: a}»]}",
            'agent "a" is tabular and cannot train lora; set train: full',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: ann}, {name: bob}], router: {order: [bob, «an»]}}",
            'team.router.order names no agent "an"; did you mean "ann"?',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: a}, {name: b}], answer: «b», router: {order: [a]}}",
            'team.answer names "b", who never speaks in team.router',
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: a}], lora: {targets: «5»}}",
            "team.lora.targets must be text or a list of text, got 5",
        ),
        (
            DATA,
            "{model: tiny, agents: [{name: a, lora: {targets: [q, «5»]}}]}",
            "team.agents.a.lora.targets.1 must be text, got 5; put it in quotes",
        ),
    ],
)
def test_one_mistake_of_task_and_team(task: str, team: str, message: str) -> None:
    check_marked(f"name: trial\ntask: {task}\nteam: {team}\n", message)


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("«n»ame: trial\nteam: {model: tiny, agents: [{name: a}]}\n", 'missing key "task" in the team file'),
        (f"name: trial\n«task»: {{path: x}}\nteam: {ONE}\n", 'missing key "name" in task'),
        (
            f"name: trial\ntask: «{{name: data}}»\nteam: {ONE}\n",
            "task data needs its data, which does not come along: give task.path, or task.train and task.test",
        ),
        (
            f"name: trial\ntask: {DATA}\nteam:\n  agents:\n    - name: a\n      model: tiny\n    - «m»odel: tiny\n",
            'missing key "name" in team.agents.1',
        ),
        (
            "name: trial\ntask: {name: code}\n«team»:\n  model: tiny\n"
            "  agents: [{name: left}, {name: speaker}, {name: right}]\n",
            'task code is answered by the speaker, but team.answer gives the word to "right"',
        ),
    ],
)
def test_what_is_absent_is_told_where_it_should_stand(marked: str, message: str) -> None:
    check_marked(marked, message)


def test_checks_between_fields_are_told_beside_other_mistakes() -> None:
    """One bad number must not hide what is wrong elsewhere, in the same section or across sections."""
    text = """\
task: {name: data, path: x, grader: regex, private: {eve: hint}}
team:
  agents: [{name: ann}]
  max_tokens: none
plan: {stages: x, radius_nats_per_message: 1, radius_nats_per_token: 1}
"""
    assert heads(text) == [
        'team.yaml:1:1: missing key "name" in the team file',
        'team.yaml:1:37: task.grader is "regex", which needs task.pattern',
        'team.yaml:1:54: task.private names no agent "eve"; the agents are: ann',
        'team.yaml:3:12: agent "ann" has no model; give it one, or set team.model for all',
        'team.yaml:4:15: team.max_tokens must be a whole number, got "none"',
        'team.yaml:5:16: plan.stages must be a whole number, got "x"',
        "team.yaml:5:47: plan.radius_nats_per_message and plan.radius_nats_per_token exclude each other; give one",
    ]


def test_empty_file_and_list() -> None:
    missing = [f'team.yaml:1:1: missing key "{key}" in the team file' for key in ("name", "task", "team")]
    assert heads("") == missing
    assert heads("# nothing but a comment\n") == missing
    assert only("- name: x\n") == "team.yaml:1:1: a team file is a mapping of keys to values, got a list of 1"


def test_alias_inside_itself_is_refused() -> None:
    text = BASE.replace("model: tiny", "model: tiny\n  template_kwargs: &self {again: *self}")
    assert only(text) == "team.yaml:5:20: an alias must not stand inside what it names"


def test_a_tab_before_the_mistake_stays_a_tab_under_it() -> None:
    text = (
        f'name: trial\ntask: {DATA}\nteam: {{model: tiny, system_prompt: "ü\tü", answer: 3, agents: [{{name: a}}]}}\n'
    )
    _, source, caret = errors(text).splitlines()
    assert caret.index("^") == source.index("3,")
    assert caret[source.index("\t")] == "\t"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file or directory"):
        load_team_file(tmp_path / "absent.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(BASE.encode() + "device: \xfc\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml:8:9: not UTF-8 text"):
        load_team_file(latin)
    marked = tmp_path / "marked.yaml"
    marked.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())  # a byte order mark, Windows lines
    assert load_team_file(marked) == loads(BASE).anchored(tmp_path)


# --- YAML 1.2 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("12", 12),
        ("012", 12),
        ("+12", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("=", "="),
        ("<<", "<<"),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5e3", 500.0),
        (".5", 0.5),
        (".", "."),
        ("-.inf", -math.inf),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ("!!float 12", 12.0),
    ],
)
def test_yaml_1_2_core_schema(written: str, value: Any) -> None:
    team_file = loads(BASE + f"  template_kwargs: {{key: {written} }}\n")
    read = team_file.team.template_kwargs["key"]
    assert (type(read), read) == (type(value), value)


def test_a_yaml_1_1_directive_changes_nothing() -> None:
    text = "%YAML 1.1\n---\n" + BASE + "  template_kwargs: {key: no, octal: 012}\n"
    assert loads(text).team.template_kwargs == {"key": "no", "octal": 12}


def test_numbers_without_a_dot_reach_float_fields() -> None:
    learner = loads(BASE + "learner: {learning_rate: 1e-5, max_grad_norm: 2}\n").learner
    assert (learner.learning_rate, learner.max_grad_norm) == (1e-5, 2.0)


# --- overrides ------------------------------------------------------------------------------------------------


def test_overrides_set_values_of_their_yaml_type() -> None:
    team_file = loads(
        BASE + "plan: {stages: bad}\n",
        overrides=[
            "plan.stages=10",  # also repairs what the file has wrong
            "learner.learning_rate=1e-5",
            "team.agents.0.max_tokens=7",
            "team.agents.bob.model=tabular",
            "team.router.order=[bob, ann]",
            "device=cuda:1",
            "plan.a_clip=null",
            "name=a-b",
            "seed=1",
            "seed=2",  # the later one wins
        ],
    )
    ann, bob = team_file.team.agents
    assert (ann.max_tokens, ann.model, bob.max_tokens, bob.model) == (7, "tiny", 16, "tabular")
    assert team_file.plan.stages == 10
    assert team_file.plan.a_clip is None
    assert team_file.learner.learning_rate == 1e-5
    assert team_file.team.speaking_order == ("bob", "ann")
    assert (team_file.device, team_file.name, team_file.seed) == ("cuda:1", "a-b", 2)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("plan.stagse=10", 'unknown key "stagse" in plan; did you mean "stages"?'),
        ("pln.stages=10", 'unknown key "pln" in the team file; did you mean "plan"?'),
        ("plan.stages=ten", 'plan.stages must be a whole number, got "ten"'),
        ("plan.stages=0", "plan.stages must be at least 1, got 0"),
        ("plan.stages", "must be KEY=VALUE with a dotted key, such as plan.stages=10"),
        ("plan..stages=1", "must be KEY=VALUE with a dotted key, such as plan.stages=10"),
        ("=1", "must be KEY=VALUE with a dotted key, such as plan.stages=10"),
        ("name.first=x", 'name is "trial" and has no keys below it'),
        ("team.agents.eve.model=tiny", 'team.agents has no item "eve"; it has ann, bob'),
        ("team.agents.2.model=tiny", 'team.agents has no item "2"; it has ann, bob'),
        ("team.agents.ann.modl=tiny", 'unknown key "modl" in team.agents.ann; did you mean "model"?'),
        ("team.agents.1.max_tokens=0", "team.agents.bob.max_tokens must be at least 1, got 0"),
        ("team.answer=an", 'team.answer must be last, majority or an agent, got "an"; did you mean "ann"?'),
        (
            "task={name: data}",
            "task data needs its data, which does not come along: give task.path, or task.train and task.test",
        ),
        ("plan.order=[a", "not valid YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence"),
    ],
)
def test_mistaken_override(override: str, expected: str) -> None:
    assert errors(BASE, override) == f'override "{override}": {expected}'


def test_mistakes_of_overrides_follow_those_of_the_file_in_the_order_given() -> None:
    assert heads(BASE + "seed: x\n", "plan.stages=x", "=", "device=gpu", "plan.gamma=0") == [
        'team.yaml:8:7: seed must be a whole number, got "x"',
        'override "plan.stages=x": plan.stages must be a whole number, got "x"',
        'override "=": must be KEY=VALUE with a dotted key, such as plan.stages=10',
        'override "device=gpu": device must be auto, cpu, cuda or cuda:N, got "gpu"',
        'override "plan.gamma=0": plan.gamma must be greater than 0, got 0',
    ]


# --- what the team gives its agents ---------------------------------------------------------------------------


def test_agents_take_from_the_team_what_they_leave_out() -> None:
    text = """\
name: trial
task: {name: data, path: x}
team:
  model: org/model
  system_prompt: Be brief.
  max_tokens: 9
  lora: {rank: 4, targets: [q_proj]}
  agents:
    - name: plain
    - {name: own, system_prompt: "", max_tokens: 2, sees: blind, frozen: true, train: lora, lora: {rank: 8}}
    - {name: whole, model: tiny}
    - {name: full, train: full}
"""
    plain, own, whole, full = loads(text).team.agents
    team_lora = LoraConfig(rank=4, alpha=32.0, targets=("q_proj",))
    assert plain == AgentConfig(
        name="plain", model="org/model", system_prompt="Be brief.", max_tokens=9, train="lora", lora=team_lora
    )
    assert own == AgentConfig(
        name="own",
        model="org/model",
        system_prompt="",
        max_tokens=2,
        train="lora",
        lora=LoraConfig(rank=8, alpha=32.0, targets=("q_proj",)),  # key by key
        sees="blind",
        frozen=True,
    )
    assert whole.train == "full"  # a tiny model is trained whole unless told otherwise
    assert full.train == "full"


def test_models_refuse_alike_from_python() -> None:
    agents = (AgentConfig(name="a", model="tiny"), AgentConfig(name="b", model="tiny"))
    with pytest.raises(ValidationError, match='got "c"; one of: last, majority, a, b'):
        TeamConfig(agents=agents, answer="c")
    with pytest.raises(ValidationError, match="needs two or more agents called a1, a2 and so on"):
        TeamFile(name="x", task=Roles.Config(name="roles"), team=TeamConfig(agents=agents[:1]))
    with pytest.raises(ValidationError, match="frozen"):
        agents[0].model = "other"  # type: ignore[misc]


def test_paths_are_relative_to_the_team_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "base").mkdir(parents=True)
    file = tmp_path / "team.yaml"
    file.write_text(
        """\
name: trial
task: {name: data, path: data/q.jsonl, grader: "python:reward.py:score"}
team:
  agents:
    - {name: a, model: models/base}
    - {name: b, model: org/model}
    - {name: c, model: ./other}
    - {name: d, model: tiny}
"""
    )
    team_file = load_team_file(file)
    assert isinstance(team_file.task, DataTask.Config)
    assert team_file.task.path == str(tmp_path / "data" / "q.jsonl")
    assert team_file.task.grader == f"python:{tmp_path / 'reward.py'}:score"
    assert [agent.model for agent in team_file.team.agents] == [
        str(tmp_path / "models" / "base"),
        "org/model",
        str(tmp_path / "other"),
        "tiny",
    ]
    stored = tmp_path / "runs" / "team.yaml"  # a stored copy means the same from another folder
    stored.parent.mkdir()
    stored.write_text(dump(team_file))
    assert load_team_file(stored) == team_file


# --- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_plan_without_changes_is_the_preset(preset: str) -> None:
    assert PlanConfig(preset=preset).plan() == PRESETS[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_reference_says_of_a_preset_makes_it(preset: str) -> None:
    """And it speaks of every key that a preset decides."""
    assert PlanConfig(preset="teamtr", **preset_differences(preset)).plan() == PRESETS[preset]
    decided = {k.key.removeprefix("plan.") for k in schema_keys() if k.default == "the preset's"}
    assert decided == {*PRESET_KEYS, "radius_nats_per_token"}


def test_plan_changes_what_is_given_and_nothing_else() -> None:
    plan = PlanConfig(
        preset="dapo",
        group_size=4,
        radius_nats_per_token=0.002,
        gamma=0.9,
        a_clip=math.inf,
        clip=0.1,
        order="random",
        resample_every=2,
        beta=0.5,
        normalize=False,
        adapt_radius=True,
        reference_kl=0.01,
        overlong_filter=False,
        overlong_cache=0.5,
        dynamic_sampling_limit=4,
    ).plan()
    assert plan == replace(
        PRESETS["dapo"],
        group_size=4,
        radii=Radii(nats=0.002, per_token=True, adapt=True),
        gamma=0.9,
        advantage=GroupAdvantage(normalize=False, clip=math.inf),
        objective=Objective(ratio="token", clip_low=0.1, clip_high=0.1, average_over="tokens", reference_kl=0.01),
        order=Order("random"),
        resample=Resample(every=2),
        region=Region(gate=False, beta=0.5, adapt_beta=False),
        overlong=Overlong(filter=False, cache=0.5),
        dynamic_sampling=DynamicSampling(on=True, limit=4),
    )
    assert PlanConfig(preset="dapo", clip_high=0.5).plan().objective.clip_low == 0.2
    assert PlanConfig(preset="adaptive_radius", radius_nats_per_message=0.3).plan().radii == Radii(0.3, adapt=True)


def test_default_radius_is_written_out() -> None:
    assert PlanConfig().radius_nats_per_message == 0.01
    assert PlanConfig(radius_nats_per_token=0.1).radius_nats_per_message is None


# --- round trip -----------------------------------------------------------------------------------------------

_texts = st.text(max_size=30)  # hypothesis leaves out surrogates, which are no text
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.long
@settings(max_examples=15)
@given(
    prompt=_texts,
    learning_rate=st.floats(min_value=0, allow_infinity=False),
    radius=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    a_clip=st.none() | st.floats(min_value=0, exclude_min=True),
    per_token=st.booleans(),
    targets=st.lists(_texts.filter(bool), min_size=1, max_size=3) | _texts.filter(bool),
    template_kwargs=st.dictionaries(_texts, _values, max_size=3),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True),
)
def test_dump_loads_back_to_an_equal_object(
    prompt: str,
    learning_rate: float,
    radius: float,
    a_clip: float | None,
    per_token: bool,
    targets: Any,
    template_kwargs: dict[str, Any],
    name: str,
) -> None:
    unit = "radius_nats_per_token" if per_token else "radius_nats_per_message"
    team_file = TeamFile.model_validate(
        {
            "name": name,
            "task": {"name": "data", "path": "x", "grader": "regex", "pattern": "(a|b)"},
            "team": {
                "agents": [{"name": "a", "model": "tiny", "system_prompt": prompt}, {"name": "b", "model": "o/m"}],
                "lora": {"targets": targets},
                "template_kwargs": template_kwargs,
            },
            "plan": {unit: radius, "a_clip": a_clip},
            "learner": {"learning_rate": learning_rate},
        }
    )
    text = dump(team_file)
    loaded = loads(text)
    assert loaded == team_file
    assert dump(loaded) == text


# --- recipes and the list of keys -----------------------------------------------------------------------------


@pytest.mark.long
def test_every_recipe_loads_and_says_what_it_shows() -> None:
    known = recipes()
    assert list(known) == ["code-exchange", "lora-shared-base", "own-data", "roles", "smollm2-sums", "tool-lookup"]
    for name, recipe in known.items():
        team_file = load_team_file(recipe.path)
        assert team_file.name == name
        assert loads(dump(team_file)) == team_file
        assert recipe_text(name).startswith(f"# {recipe.summary}\n")
        assert 40 < len(recipe.summary) < 120


def test_recipes_are_what_they_say() -> None:
    code = load_team_file(recipes()["code-exchange"].path)
    assert [(agent.name, agent.model, agent.max_tokens) for agent in code.team.agents] == [
        ("left", "tiny", 2),
        ("right", "tiny", 2),
        ("speaker", "tiny", 3),
    ]
    assert code.plan.plan() == replace(PRESETS["auto"], stages=50)
    roles = load_team_file(recipes()["roles"].path)
    assert [(agent.name, agent.sees) for agent in roles.team.agents] == [(f"a{i}", "blind") for i in range(1, 6)]
    shared = load_team_file(recipes()["lora-shared-base"].path)
    assert len({agent.model for agent in shared.team.agents}) == 1
    assert [(agent.train, agent.lora.rank) for agent in shared.team.agents] == [("lora", 16), ("lora", 16), ("lora", 8)]
    own = load_team_file(recipes()["own-data"].path)
    assert {agent.train for agent in own.team.agents} == {"lora"}


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match='no recipe "code"; did you mean "code-exchange"'):
        recipe_text("code")


def test_schema_keys_list_every_key_with_a_description() -> None:
    keys = {(key.key, key.when): key for key in schema_keys()}
    assert len(keys) == len(schema_keys())
    assert [key.key for key in schema_keys() if not (key.description.endswith(".") and key.type)] == []
    assert [key.key for key in schema_keys() if key.required] == [
        "name",
        "task.name",
        "task.rewards.NUMBER.function",
        "team.agents.NAME.name",
        "tools.mcp.NAME.name",
        "tools.mcp.NAME.command",
        "cluster.groups.NUMBER.agents",
    ]

    def shown(key: str, when: str = "") -> tuple[str, str]:
        return keys[key, when].type, keys[key, when].default

    assert shown("plan.group_size") == ("whole number >= 2", "16")
    assert shown("plan.beta") == ("number >= 0", "the preset's")
    assert shown("task.name") == (" | ".join(task_names()), "")
    assert shown("task.held_out", "task.name is data") == ("number > 0, < 1", "none")
    assert shown("team.lora.targets") == ("text | list of text", '"all-linear"')
    assert shown("task.player.max_tokens", "task.name is arbench:dc | arbench:gn") == (
        "whole number >= 1",
        "128",
    )
    assert shown("team.agents.NAME.lora.rank") == ("whole number >= 1", "the team's")
    assert shown("team.template_kwargs") == ("mapping of text to any value", "{}")
    assert shown("learner.betas") == ("list of 2: number >= 0, < 1", "[0.9, 0.99]")


TASK_OF = {
    "code": "{name: code}",
    "roles": "{name: roles}",
    "sums": "{name: sums}",
    "lookup": "{name: lookup}",
    "math": "{name: math, test: x.jsonl}",
    "zebralogic": "{name: zebralogic, test: x.jsonl}",
    "autologi": "{name: autologi, test: x.jsonl}",
    "planbench": "{name: planbench, test: x.jsonl}",
    "arbench:dc": "{name: 'arbench:sp', test: x.jsonl, player: {model: y}}",
    "taubench:airline": "{name: 'taubench:airline', test: x.jsonl, player: {model: y}}",
    "arbench:sp": "{name: 'arbench:sp', test: x.jsonl, player: {model: y}}",
    "gym:NAME": "{name: 'gym:chain_sum'}",
    "python:FILE:CLASS": "{name: 'python:x.py:X'}",
}
ODD_VALUES = ("", "-1", "x", "[[1]]", "{a: {b: 1}}", ".nan")


@pytest.mark.long
@pytest.mark.parametrize("key", schema_keys(), ids=lambda key: f"{key.key} {key.when}")
def test_listed_keys_exist_and_odd_values_give_a_message(key: SchemaKey) -> None:
    """What help lists can be set, and whatever it is set to, the worst that comes is a ConfigError."""
    task = TASK_OF.get(key.when.removeprefix("task.name is ").split(" | ")[0], DATA)
    dotted = key.key.replace("NAME", "ann")
    messages = []
    for value in ODD_VALUES:
        try:
            loads(BASE.replace(DATA, task), overrides=[f"{dotted}={value}"])
        except ConfigError as error:
            messages += [mistake.message for mistake in error.mistakes]
    assert messages  # every key has values that are wrong
    assert not any("unknown key" in message or " is wrong: " in message for message in messages), messages


@pytest.mark.long
def test_import_is_light() -> None:
    program = "import sys, teamtr.config; print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_error_reaches_the_process_that_asked() -> None:
    """As it is: a pool of processes that cannot unpickle one waits for ever."""
    with pytest.raises(ConfigError) as caught:
        loads("name: x\nplan: {stagse: 3}\n", "team.yaml")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert str(sent) == str(caught.value)
    assert sent.mistakes == caught.value.mistakes
