"""Warnings about settings that change nothing in this team, where only its models, its task or its tools show it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from teamtr.config import LoraConfig, TeamFile
from teamtr.session.build import Session
from teamtr.settings.section import Section

OF_ANY_TOOL = ("steps", "tell", "max_characters")
"""The keys of the section ``tools`` that are about tools of the task, too."""


def without_effect(session: Session) -> Iterator[str]:
    """Warnings about settings that differ from their defaults and change nothing."""
    settings = session.team_file
    yield from _of_team(settings)
    if not settings.warmup.tokens:
        for name in _given(settings.warmup, "learning_rate", "batch"):
            yield f"warmup.{name} changes nothing: there is no warm-up without warmup.tokens"
    if not settings.trackers:
        for name in _given(settings.tracking, *type(settings.tracking).model_fields)[:1]:
            yield f"tracking.{name} changes nothing: no trackers are given; set trackers, such as trackers: [wandb]"
    if session.context.tools is None:
        for name in _given(settings.tools, *OF_ANY_TOOL):
            yield f"tools.{name} changes nothing: there are no tools; see docs/tools.md"
    if settings.learner.certify_share and session.task.reward_range is None:
        yield (
            "learner.certify_share changes nothing: the range of this task's rewards is not known, so that no update "
            "has certificates"
        )
    yield from _unread_by_templates(session)


def _of_team(settings: TeamFile) -> Iterator[str]:
    team = settings.team
    if all(agent.frozen for agent in team.agents):
        yield "every agent is frozen: there is nobody to train"
    if all(agent.train == "full" for agent in team.agents) and team.lora != LoraConfig():
        yield "team.lora changes nothing: no agent trains an adapter; set team.train: lora, or leave it out"
    if team.model is not None and all(agent.model != team.model for agent in team.agents):
        yield f"team.model: {team.model} changes nothing: every agent has a model of its own"


def _given(section: Section, *names: str) -> list[str]:
    """Those of these keys that differ from their defaults."""
    fields = type(section).model_fields
    return [name for name in names if getattr(section, name) != fields[name].default]


def _unread_by_templates(session: Session) -> Iterator[str]:
    """A warning for every key of ``team.template_kwargs`` that no chat template of the team reads: templates ignore
    what they do not know."""
    codecs = session.context.codecs.values()
    tokenizers = [tokenizer for codec in codecs if (tokenizer := getattr(codec, "tokenizer", None)) is not None]
    for name in session.team_file.team.template_kwargs if tokenizers else ():
        if not any(_reads(tokenizer, name) for tokenizer in tokenizers):
            yield f"team.template_kwargs.{name} changes nothing: no chat template of the team reads it"


def _reads(tokenizer: Any, name: str) -> bool:
    """Whether the tokenizer's template, or the method that applies it, knows this name."""
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    return name in known or re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is not None
