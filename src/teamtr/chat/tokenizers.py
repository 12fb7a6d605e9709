"""Compares two tokenizers. Only with identical ids is there an exact KL between their models (app:align).

The paper's check (app:pnp-protocol) is made on strings, not on file names: equal ids on up to a thousand
of the team's own contexts and on a thousand adversarial strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SHOWN = 20
"""Differences kept in a report; all are counted."""


@dataclass(frozen=True)
class Difference:
    """A string that the two tokenize differently: the first position at which the ids differ, and up to 8 ids there."""

    string: str
    position: int
    ids_a: tuple[int, ...]
    ids_b: tuple[int, ...]


@dataclass(frozen=True)
class Compatibility:
    """A comparison's result. ``vocabulary_a`` and ``_b`` are vocabulary sizes, ``end_a`` and ``_b`` the end tokens."""

    strings: int
    same: int
    vocabulary_a: int
    vocabulary_b: int
    end_a: int | None
    end_b: int | None
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether all strings have the same ids and messages the same end token, so that the exact KL applies."""
        return self.same == self.strings and self.end_a == self.end_b

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        if self.identical:
            return f"identical ids on {self.strings} strings and the same end token: the exact KL applies"
        ends = "" if self.end_a == self.end_b else f"; messages end with token {self.end_a} and {self.end_b}"
        return f"{self.strings - self.same} of {self.strings} strings have other ids{ends}: the exact KL does not apply"


def compare_tokenizers(a: Any, b: Any, strings: Sequence[str]) -> Compatibility:
    """Encode every string with both, without adding special tokens, and compare the ids."""
    pairs = zip(strings, _ids(a, strings), _ids(b, strings), strict=True)
    differences = [_difference(string, ids_a, ids_b) for string, ids_a, ids_b in pairs if ids_a != ids_b]
    return Compatibility(
        strings=len(strings),
        same=len(strings) - len(differences),
        vocabulary_a=len(a),
        vocabulary_b=len(b),
        end_a=a.eos_token_id,
        end_b=b.eos_token_id,
        differences=tuple(differences[:SHOWN]),
    )


def _ids(tokenizer: Any, strings: Sequence[str]) -> list[list[int]]:
    """The ids of all strings, in one call, which a fast tokenizer distributes over threads."""
    if not strings:
        return []
    found: list[list[int]] = tokenizer(list(strings), add_special_tokens=False)["input_ids"]
    return found


def _difference(string: str, ids_a: list[int], ids_b: list[int]) -> Difference:
    pairs = zip(ids_a, ids_b, strict=False)
    position = next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(ids_a), len(ids_b)))
    after = slice(position, position + 8)
    return Difference(string, position, tuple(ids_a[after]), tuple(ids_b[after]))


# -- adversarial strings --------------------------------------------------------------------------------------

_WORDS = (
    "the",
    "answer",
    "is",
    "naïve",
    "don't",
    "x_1",
    "Übermaß",
    "数学",
    "ответ",
    "مرحبا",
    "e\u0301",
    "\u200b",
    "🙂",
    "👩‍👩‍👧",
)
_BLANKS = (" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", " \n ", "")
_MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|im_end|>",
    "</s>",
    "<end>",
    "[INST]",
    "```json",
    "\\boxed{",
)


def adversarial(rng: np.random.Generator, count: int) -> list[str]:
    """Strings that are, in turn, full of white space, letters of many scripts, digits, markup and tool calls."""
    makers = (_blanks, _words, _digits, _markup, _tool_json)
    return [makers[k % len(makers)](rng) for k in range(count)]


def _pick(rng: np.random.Generator, choices: Sequence[str], count: int) -> Iterator[str]:
    return (choices[int(k)] for k in rng.integers(len(choices), size=count))


def _blanks(rng: np.random.Generator) -> str:
    pairs = zip(_pick(rng, _WORDS, 6), _pick(rng, _BLANKS, 6), strict=True)
    return "".join(blank + word for word, blank in pairs) + next(_pick(rng, _BLANKS, 1))


def _words(rng: np.random.Generator) -> str:
    return "".join(chr(int(c)) for c in rng.choice([*range(32, 127), *range(0xA1, 0x250), *range(0x4E00, 0x4E80)], 24))


def _digits(rng: np.random.Generator) -> str:
    number = "".join(map(str, rng.integers(10, size=int(rng.integers(1, 30)))))
    return next(
        _pick(rng, (f"{number}", f"-{number}.{number}", f"${number},000", f"{number} + {number} =", f"1e{number}"), 1)
    )


def _markup(rng: np.random.Generator) -> str:
    pairs = zip(_pick(rng, _MARKS, 4), _pick(rng, _WORDS, 4), strict=True)
    return "".join(f"{mark}{word}" for mark, word in pairs)


def _tool_json(rng: np.random.Generator) -> str:
    arguments = dict(zip(_pick(rng, _WORDS, 3), _pick(rng, (*_WORDS, *_BLANKS), 3), strict=True))
    body = {"name": next(_pick(rng, _WORDS, 1)), "arguments": {**arguments, "n": int(rng.integers(10**9))}}
    return json.dumps(body, ensure_ascii=bool(rng.integers(2)), indent=2 if rng.integers(2) else None)
