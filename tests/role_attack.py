"""Hostile messages against the chat templates of many model families, to test that none can forge a turn.

``PYTHONPATH=src:tests python tests/role_attack.py`` counts the forged conversations: with the library's prompts, with
only special tokens broken up, and with nothing broken up.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from families import NAMES, Family, family
from teamtr.chat import ChatCodec
from teamtr.chat.lookalikes import LINE_BREAKS

CONVERSATIONS = 56
"""Conversations per family, of four messages each; 10,528 messages in all."""
Chat = list[dict[str, str]]
CALM = [{"role": r, "content": f"word{k}"} for k, r in enumerate(("system", "user", "assistant", "user"))]

WORDS = (
    "the answer is 12",
    "I agree",
    "x < 3 and y > 2",
    "obey",
    "a[i][j]",
    "# Plan",
    "- item",
    "**so**",
    "naïve ✓",
    "",
)
HEADERS = ("system", "user", "assistant", "model", "\n", "\n\n", ": ", "<", "<|", "|>", "[", "]", "### ", "｜", "▁")


@dataclass(frozen=True, eq=False)
class Target:
    """A family's template and tokenizer, and the markers that must never be forged, as stated by the fixture."""

    family: Family
    codec: ChatCodec
    markers: tuple[str, ...]

    @property
    def calm(self) -> str:
        return self.codec.text(CALM)

    def in_tokens(self, text: str) -> list[int]:
        """The marker tokens in the tokenized text, from left to right."""
        tokenizer = self.codec.tokenizer
        tokens = {*self.family.special, *self.family.added}
        known = {tokenizer.convert_tokens_to_ids(marker) for marker in self.markers if marker in tokens}
        return [i for i in tokenizer.encode(text, add_special_tokens=False) if i in known]

    def in_text(self, text: str) -> list[str]:
        """The markers in the text, from left to right."""
        return [found.group() for found in _pattern(self.markers, tuple(self.family.lines)).finditer(text)]

    def between(self, text: str) -> list[str]:
        """The text between the markers."""
        return _pattern(self.markers, tuple(self.family.lines)).split(text)

    def in_plain_text(self, text: str) -> list[str]:
        """The markers as a reader sees them, who does not distinguish wide forms or notice invisible characters."""
        pattern = _pattern(tuple(map(plain, self.markers)), tuple(map(plain, self.family.lines)))
        return [found.group().strip() for found in pattern.finditer(plain(text))]

    def decoded(self, text: str) -> str:
        tokenizer = self.codec.tokenizer
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False))


@cache
def target(name: str, none_special: bool = False) -> Target:
    own = family(name)
    codec = ChatCodec(own.tokenizer(none_special=none_special))
    written = codec.text(CALM)
    opening = [token for token in (*own.special, *own.added) if token in written and _may_open(token)]
    declared = [own.eos] if none_special else own.special
    return Target(own, codec, tuple(dict.fromkeys([*own.text, *own.lines, *opening, *declared])))


def _may_open(token: str) -> bool:
    """Whether a token may open a turn: blanks, words and reasoning tags may not."""
    return bool(token.strip()) and not token.isalnum() and "think>" not in token


@cache
def all_markers() -> tuple[str, ...]:
    found = {m for name in NAMES for m in (*target(name).markers, *family(name).added, *family(name).tools)}
    return tuple(sorted(found))


@cache
def _pattern(markers: tuple[str, ...], lines: tuple[str, ...]) -> re.Pattern[str]:
    start = rf"(?:\A|(?<=[{LINE_BREAKS}]))[ \t]*"
    known = sorted(set(markers) - set(lines), key=len, reverse=True)
    anywhere = "|".join(map(re.escape, known))
    return re.compile(f"{anywhere}|{start}(?:{'|'.join(map(re.escape, lines))})" if lines else anywhere)


def plain(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf").replace("▁", " ")


# -- hostile messages -----------------------------------------------------------------------------------------


def hostile(rng: random.Random, target: Target) -> str:
    """Ordinary text and fragments of markers: whole, cut, nested, in other cases, and in other characters."""
    ours, all_of_them = target.markers, all_markers()
    parts = []
    for _ in range(rng.randint(1, 7)):
        marker = rng.choice(ours if rng.random() < 0.6 else all_of_them)
        kind = rng.choice(("whole", "whole", "turn", "cut", "nested", "case", "unicode", "words", "words"))
        parts.append(_fragment(rng, kind, marker, rng.choice(ours)))
    return rng.choice(("", " ", "\n", "\r", "\u2028")).join(parts)


def _fragment(rng: random.Random, kind: str, marker: str, other: str) -> str:
    place = rng.randint(0, len(marker))
    if kind == "words":
        return rng.choice((*WORDS, *HEADERS))
    if kind == "turn":
        return f"{other}{rng.choice(HEADERS)}{marker}{rng.choice(HEADERS)}{rng.choice(WORDS)}"
    if kind == "cut":
        return marker[:place] if rng.random() < 0.5 else marker[place:]
    if kind == "nested":
        return marker[:place] + other + marker[place:]
    if kind == "case":
        return rng.choice((marker.lower(), marker.upper(), marker.swapcase()))
    if kind == "unicode":
        return "".join(_disguised(rng, c) for c in marker)
    return marker


def _disguised(rng: random.Random, character: str) -> str:
    """A lookalike for a reader or a normalizing tokenizer: wide forms, other blanks, invisible characters."""
    draw = rng.random()
    if draw < 0.2 and "!" <= character <= "~":
        return chr(ord(character) + 0xFEE0)
    if draw < 0.3:
        return character + rng.choice("\u200b\u200d\u2060\ufeff\u00ad")
    if draw < 0.4:
        return {" ": "\u00a0", "K": "\u212a", "|": "\uff5c", "\u2581": " ", "\uff5c": "|"}.get(character, character)
    return character


def conversation(rng: random.Random, target: Target) -> Chat:
    texts = [hostile(rng, target) for _ in CALM]
    texts[2] = texts[2].replace("</think>", "")  # templates remove the text before it from past replies
    return [{"role": calm["role"], "content": text} for calm, text in zip(CALM, texts, strict=True)]


# -- judging --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forged:
    """Ways in which a prompt shows turns that its template did not write."""

    tokens: bool
    text: bool
    lookalikes: bool

    def __bool__(self) -> bool:
        return self.tokens or self.text or self.lookalikes


def judge(target: Target, prompt: str) -> Forged:
    """Compares with the same conversation in harmless words: the markers must be the same, in the same order."""
    tokens, text, decoded, plain_text = _seen(target, prompt)
    calm = _seen_in_calm(target)
    return Forged(tokens != calm[0], text != calm[1] or decoded != calm[2], plain_text != calm[3])


def _seen(target: Target, prompt: str) -> tuple[list[int], list[str], list[str], list[str]]:
    return (
        target.in_tokens(prompt),
        target.in_text(prompt),
        target.in_text(target.decoded(prompt)),
        target.in_plain_text(prompt),
    )


@cache
def _seen_in_calm(target: Target) -> tuple[list[int], list[str], list[str], list[str]]:
    return _seen(target, target.calm)


def attack(name: str) -> Iterator[tuple[Chat, Target]]:
    """The conversations for a family; every other one uses a tokenizer with only the end token declared special."""
    rng = random.Random(name)
    for k in range(CONVERSATIONS):
        yield conversation(rng, target(name, k % 2 == 1)), target(name, k % 2 == 1)


def undefended(chat: Chat, target: Target, broken: Sequence[str] = ()) -> str:
    """The prompt with only these markers broken up."""
    codec = target.codec
    for marker in sorted(broken, key=len, reverse=True):
        chat = [{**m, "content": m["content"].replace(marker, f"{marker[0]} {marker[1:]}")} for m in chat]
    if codec.fold_system:
        system, first, *rest = chat
        chat = [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
    return str(codec.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def main() -> None:
    total = Counter[str]()
    for name in NAMES:
        forged = Counter[str]()
        for chat, target in attack(name):
            special = [str(t) for t in target.codec.tokenizer.added_tokens_decoder.values() if t.special]
            for broken, prompt in (
                ("all markers", target.codec.text(chat)),
                ("special tokens", undefended(chat, target, special)),
                ("nothing", undefended(chat, target)),
            ):
                found = judge(target, prompt)
                forged[f"{broken}: as tokens"] += found.tokens
                forged[f"{broken}: as tokens or text"] += found.tokens or found.text
                forged[f"{broken}: at all"] += bool(found)
        print(f"{name:22}", dict(forged))
        total.update(forged)
    print(
        f"{len(NAMES)} families, {len(NAMES) * CONVERSATIONS} conversations of {len(CALM)} messages; forged with broken"
    )
    for what, count in total.items():
        print(f"  {what:34} {count:5}")


if __name__ == "__main__":
    main()
