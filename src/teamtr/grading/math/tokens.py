"""The tokenizer of ``grading/math/parse.py``: numbers, commands, single letters and signs of a cleaned answer."""

from __future__ import annotations

import re

LONGEST_NUMBER = 2_000  # digits; Python converts twice as many


class UnreadableError(Exception):
    """The answer is not in the grammar."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = _names(
    "sin cos tan cot sec csc "
    "arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth ln log exp lg sqrt abs floor ceil binom max min"
)
GREEK = _names(
    """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell
    """
)
RELATIONS = dict(
    zip(
        ["=", "<", ">", "<=", ">=", "\\le", "\\ge", "!=", "\\ne", "\\in", "\\approx", "\\equiv"],
        ["=", "<", ">", "<=", ">=", "<=", ">=", "!=", "!=", "in", "~", "="],
        strict=True,
    )
)
_ON_A_KEYBOARD = FUNCTIONS | {"pi", "infty", "inf", "oo", "emptyset"}

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d+(?:\.\d+)?|\.\d+)
      | (?P<command>\\(?:[A-Za-z]+|.))
      | (?P<word>[A-Za-z]+)
      | (?P<symbol>\*\*|<=|>=|!=|[-+*/^_(){}\[\],;:|!=<>'%&])
    )""",
    re.VERBOSE,
)
_TEXT = re.compile(r"\s*\{([^{}]*)\}")


def tokens(text: str) -> list[str]:
    """The tokens in order. A ``\\text{...}`` is one token, without its closing brace; "or" and "and" become commas."""
    found: list[str] = []
    text, at = text.rstrip(), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnreadableError(f"cannot read {text[at : at + 20]!r}")
        at = match.end()
        if match["number"] and len(match["number"]) > LONGEST_NUMBER:
            raise UnreadableError("a number too long")
        if match["command"] == "\\text":
            inside = _TEXT.match(text, at)
            if inside is None:
                raise UnreadableError("a \\text without its braces")
            at = inside.end()
            found.append("," if inside[1].strip(" ,").casefold() in ("or", "and", "") else f"\\text{{{inside[1]}")
        elif match["word"]:
            found += _letters(match["word"])
        else:
            found.append(match["number"] or match["command"] or match["symbol"])
    return found


def _letters(word: str) -> list[str]:
    """The tokens of a word: names that are typed without a backslash, an "or", or single letters, which multiply."""
    if word in ("or", "and"):
        return [","]
    for length in range(min(len(word), 8), 1, -1):
        if word[:length] in _ON_A_KEYBOARD:
            return ["\\" + word[:length], *_letters(word[length:])]
    return list(word)
