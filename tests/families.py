"""Chat templates of many model families (tests/fixtures/templates), each with a tiny byte-level tokenizer.

Which tokens a family declares special differs between its releases. Tests therefore use every family twice: as in the
fixture, and with only the end token declared special.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fixtures" / "templates"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.jinja")))


@dataclass(frozen=True)
class Family:
    """A model family. ``special`` and ``added`` are tokens of its tokenizer, declared special or not. ``text`` are
    markers that its template writes as plain text, ``lines`` markers that it writes only at the start of a line.
    ``tools`` enclose tool calls and results; an agent's own text may contain them."""

    name: str
    template: str
    eos: str
    bos: str | None = None
    special: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    normalizer: str | None = None

    @classmethod
    def read(cls, name: str) -> Family:
        head, template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").split("\n---\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        return cls(name, template.removesuffix("\n"), **{key: json.loads(value) for key, value in fields.items()})

    def tokenizer(self, *, none_special: bool = False) -> Any:
        """A tokenizer with one token per byte, and the family's tokens. ``none_special``: as some stored tokenizers,
        with only the end token declared special."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
        if self.normalizer is not None:
            core.normalizer = _normalizer(self.normalizer)
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.added])
        declared = [text for text in self.special if not none_special or text == self.eos]
        core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in declared])
        rest = [text for text in self.special if text not in declared]
        core.add_tokens([AddedToken(text, special=False, normalized=False) for text in rest])
        known = {} if self.bos is None or none_special else {"bos_token": self.bos}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token=self.eos, clean_up_tokenization_spaces=False, **known
        )
        tokenizer.chat_template = self.template.replace("bos_token", repr(self.bos)) if none_special else self.template
        return tokenizer


@cache
def family(name: str) -> Family:
    return Family.read(name)


def _normalizer(name: str) -> Any:
    from tokenizers import normalizers

    blanks = normalizers.Replace(" ", "\u2581")
    return {
        "nfc": normalizers.NFC(),
        "blanks": blanks,
        "sentencepiece": normalizers.Sequence([normalizers.Prepend("\u2581"), blanks]),
    }[name]
