r"""Extracts the answer that a reply states: the policy, in one place.

Only what follows the thinking is read (``thinking.py``). The answer is the first of these that is present:

1. the last ``\boxed{...}`` (or ``\fbox{...}``) whose braces balance and which is not empty;
2. the later of the last ``Answer: ...`` (``the answer is ...``, ``答案是 ...``) and the last ``#### ...`` before a
   number;
3. the whole text, if it is nothing but an answer: one line with at most two words;
4. only with ``last_number=True``, the last number in the text.

Text that is too long is never an answer, and announcements are only searched for in the last 50,000 characters, so that
a megabyte of text costs a few milliseconds.
"""

from __future__ import annotations

import re
from collections import deque

from teamtr.grading.answers import last_number as last_number_in
from teamtr.grading.thinking import after_thinking

LONGEST_ANSWER = 2000  # characters; the longest of the benchmarks has 159

_BOXES = ("\\boxed", "\\fbox", "\\framebox")
_COMMAND = re.compile(r"\\[a-z]+\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_ANSWER = re.compile(r"(?:\banswer\b[*_`]*[^\S\n]*(?:is\b|are\b|:|：)|答案[是为:：])[*_`:：]*", re.IGNORECASE)
_HASHES = re.compile(r"####")
_HINTS = {_ANSWER: ("answer", "答案"), _HASHES: ("####",)}  # a pattern is only tried if one of these occurs
_NUMBER_LINE = re.compile(r"\\?[$€£]?\s*[-+−]?\s*\\?[$€£]?\d[\d.,/]*\s*(?:\\?%|[A-Za-z°]+)?\.?")
_MATH = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$([^$\s](?:[^$]*[^$\s\\])?)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]"
)  # from the last opening delimiter: otherwise each of thousands would search for its end again
_DISPLAYED = re.compile(r"[\s*_`]*(?:\$\$.+?\$\$|\\\[.+?\\\])", re.DOTALL)
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z])")
_MOST_TRIED = 20  # boxes or announcements, from the end
_TAIL = 50_000  # characters at the end that are searched for an announcement
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def stated_answer(reply: str, *, last_number: bool = False) -> str | None:
    """The answer that the reply states, as written; None if it states none."""
    after = after_thinking(reply)
    said = last_boxed(after) or _announced(after) or _bare(after) or (_last_number(after) if last_number else None)
    return said if said and len(said) <= LONGEST_ANSWER else None


def last_boxed(text: str) -> str | None:
    """The content of the last box that is closed and not empty, stripped."""
    end = len(text)
    for _ in range(_MOST_TRIED):
        end = max(text.rfind(box, 0, end) for box in _BOXES)
        if end < 0:
            return None
        inside = _inside_braces(text[end : end + LONGEST_ANSWER + 20])
        if inside:
            return inside
    return None


def _inside_braces(text: str) -> str | None:
    """The content of the braces that directly follow the command; None if there are none, or they are not closed."""
    command = _COMMAND.match(text)
    if command is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, command.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[command.end() : brace.start()].strip()
    return None


def _announced(text: str) -> str | None:
    tail = text[-_TAIL:]
    folded = tail.casefold()
    patterns = [pattern for pattern, hints in _HINTS.items() if any(hint in folded for hint in hints)]
    found = [said for pattern in patterns if (said := _last_announced(pattern, tail)) is not None]
    return max(found)[1] if found else None


def _last_announced(pattern: re.Pattern[str], text: str) -> tuple[int, str] | None:
    """(position, text) of the last announcement that is not empty; ``####`` only announces a number or a formula."""
    for match in reversed(deque(pattern.finditer(text), maxlen=_MOST_TRIED)):
        line = _line_at(text, match.end())
        said = tidy(line)
        if "\\boxed" in said:
            continue  # an empty box, or one cut short
        if said and (pattern is _ANSWER or _NUMBER_LINE.fullmatch(said) or _MATH.fullmatch(line)):
            return match.start(), said
    return None


def _line_at(text: str, at: int) -> str:
    """The rest of the line, or the next nonblank line if nothing is left of this one; a displayed formula in full."""
    rest = text[at : at + 2 * LONGEST_ANSWER]
    if displayed := _DISPLAYED.match(rest):
        return displayed.group().strip(" \t\r\n*_`").replace("\n", " ")
    line = rest.partition("\n")[0].strip(" \t\r*_`")
    return line or rest.strip().partition("\n")[0].strip(" \t\r*_`")


def tidy(said: str) -> str:
    """The text without emphasis, further sentences, a final full stop, and words around a single formula."""
    said = said.strip(" \t\r\n*_`")
    said = _SENTENCE_END.split(said, maxsplit=1)[0]
    formulas = list(_MATH.finditer(said))
    if len(formulas) == 1:
        outside = said[: formulas[0].start()] + said[formulas[0].end() :]
        if not re.search(r"\d|\\", outside):
            said = next(inside for inside in formulas[0].groups() if inside is not None)
    return said.strip().rstrip(".;,。；，").strip("*_` ")


def _bare(text: str) -> str | None:
    if len(text) > 10 * LONGEST_ANSWER:
        return None
    said = text.strip()
    if not said or "\n" in said or len(said) > LONGEST_ANSWER or "\\boxed" in said:
        return None
    outside_text = re.sub(r"\\(?:text|mbox|mathrm|operatorname)\s*\{[^{}]*\}", "", said)
    return tidy(said) if len(_WORD.findall(outside_text)) <= 2 else None


def _last_number(text: str) -> str | None:
    number = last_number_in(text)
    return None if number is None else str(number)
