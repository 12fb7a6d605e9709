"""The team file: its schema, its defaults, and errors that point at the line.

A team file is YAML 1.2 (core schema: ``no`` is text, ``1e-5`` a number, ``012`` twelve). It is parsed into frozen
pydantic models. An unknown key, a wrong type or a value out of range is refused. All mistakes in a file are reported at
once, each in the format of compiler messages::

    team.yaml:12:5: unknown key "radious" in plan; did you mean "radius_nats_per_message"?
       12 |     radious: 0.01
          |     ^^^^^^^

Values may be overridden by dotted keys, ``plan.stages=10`` or ``team.agents.left.model=tiny``.

Processing: text -> plain data with the place of every path (``source``) -> ``overrides`` -> the models (``schema``),
whose errors are mapped back to places (``validate``). The models are the only list of keys: help, docs and "did you
mean" read them through ``schema_keys``.
"""

from teamtr.config.errors import ConfigError
from teamtr.config.file import (
    changed,
    changed_for_evaluation,
    dump,
    from_data,
    is_of_task,
    load_team_file,
    loads,
)
from teamtr.config.json_schema import json_schema, json_schema_text
from teamtr.config.keys import SchemaKey, schema_keys
from teamtr.config.plan import PlanConfig, plan_keys
from teamtr.config.recipe import recipe_text, recipes
from teamtr.config.reference import reference
from teamtr.config.schema import TeamFile
from teamtr.config.several import Setting, several
from teamtr.config.team import AgentConfig, LoraConfig, TeamConfig
from teamtr.config.upgrade import dumps_stored, loads_stored

__all__ = [
    "AgentConfig",
    "ConfigError",
    "LoraConfig",
    "PlanConfig",
    "SchemaKey",
    "Setting",
    "TeamConfig",
    "TeamFile",
    "changed",
    "changed_for_evaluation",
    "dump",
    "dumps_stored",
    "from_data",
    "is_of_task",
    "json_schema",
    "json_schema_text",
    "load_team_file",
    "loads",
    "loads_stored",
    "plan_keys",
    "recipe_text",
    "recipes",
    "reference",
    "schema_keys",
    "several",
]
