"""The texts of tokens, from the tokenizers in a run's checkpoint."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from teamtr.analysis.report.conversations import Spell
from teamtr.analysis.report.reading import Reading
from teamtr.store import RunFolder

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def speller(reading: Reading) -> Spell:
    """A function from agent and token to text; it returns None if the agent's tokenizer cannot be read."""
    tokenizers = {agent: _tokenizer(reading, agent, str(version)) for agent, version in reading.agents.items()}

    @cache
    def spell(agent: str, token: int) -> str | None:
        tokenizer = tokenizers.get(agent)
        if tokenizer is None or not 0 <= token < tokenizer.get_vocab_size():
            return None
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return spell


def _tokenizer(reading: Reading, agent: str, version: str) -> Any:
    from tokenizers import Tokenizer  # only a report with conversations needs it

    if not (_NAME.fullmatch(agent) and _NAME.fullmatch(version)):
        return None
    path = RunFolder(reading.folder).checkpoints.folder / "agents" / agent / version / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text())
    except Exception:  # the library raises plain Exception for a file it does not understand
        return None
