"""The texts of AR-Bench's environments, in our words or in the benchmark's own.

A text is a template with names in braces. Unknown names are left unchanged, because stories may contain braces.

    statement   the problem, without the number of rounds
    opening     before the first round: there will be ``rounds``
    round       after every reply but the last: ``left`` rounds are left, the next is number ``turn``
    final       instead of ``round`` when no round is left
    lost        in reply to a message that asks nothing
    others      depending on the game
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teamtr.bounded_json import read_json
from teamtr.errors import UserError

Texts = Mapping[str, str]

OWN: Mapping[str, Texts] = {
    "gn": {
        "statement": (
            "A secret number has four different digits from 0 to 9; it may begin with 0. Find it by guessing. Each "
            "guess is answered with how many of its digits are in the right place, and how many occur in the secret "
            "but stand in the wrong place. The last four digits in a row of your message are your guess."
        ),
        "opening": "Guesses that are answered: {rounds}. After them you give a final answer. Make your first guess.",
        "round": "Rounds left: {left}.",
        "final": "Rounds left: 0. Give your final answer: four digits.",
        "lost": "There are no four digits in a row in this message; the round is lost.",
        "feedback": "{right} in the right place, {wrong} in the wrong place.",
        "won": "{guess} is the secret number.",
    },
    "sp": {
        "statement": (
            "{surface}\n\nThere is a story behind this. Find it by asking a referee who knows it: each question must "
            "be one that can be answered with yes or no, and the answer is Yes, No or Unknown. In the end, tell the "
            "whole story."
        ),
        "opening": "Questions that are answered: {rounds}. After them you tell the story. Ask your first question.",
        "round": "Rounds left: {left}.",
        "final": "Rounds left: 0. Tell the whole story now, and nothing else.",
        "lost": "This message is empty; the round is lost.",
        "player": (
            "You are the referee of a guessing game. The players know this:\n{surface}\n\nOnly you know the whole "
            "story:\n{bottom}\n\nA player asks a question about it. Answer with a single word: Yes if the story says "
            "so or it follows from it, No if the opposite does, Unknown if the story leaves it open or the question "
            "cannot be answered with yes or no."
        ),
    },
    "dc": {
        "statement": (
            "{background}\n\nFind the murderer by questioning the suspects; they may lie. In each round you ask one "
            "suspect one question, in this form:\nSuspect: the name\nQuestion: your question"
        ),
        "opening": "Questions that are answered: {rounds}. After them you name the murderer. Ask your first question.",
        "round": "Rounds left: {left}.",
        "final": (
            "Rounds left: 0. Who is the murderer? {choices}\nGive your reasons, then a last line with one letter, in "
            "this form:\nAnswer: X"
        ),
        "lost": (
            "This message does not name a suspect and ask a question; the round is lost. The suspects are {names}."
        ),
        "player": (
            "You are {name}, one of the suspects in a murder case, and are questioned by a detective. What you know "
            "of that day:\n{story}\n\nWhat you are to do: {task}\n\nStay in your role and answer each question in one "
            "sentence."
        ),
    },
}

# Our text names, and the benchmark's with its placeholders. Its {turn} is the number of rounds in the opening and the
# current round elsewhere. Its detective names suspect and question in two messages, ours in one: our description of
# the form is kept.
_BENCHMARKS: Mapping[str, Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "gn": {
        "opening": ("propose_template", {"turn": "rounds"}),
        "round": ("guess_prompt", {}),
        "final": ("final_guess_prompt", {}),
        "lost": ("refine_prompt", {}),
        "feedback": ("eval_prompt", {"same_pos": "right", "diff_pos": "wrong"}),
    },
    "sp": {
        "opening": ("propose_template", {"turn": "rounds", "question": "surface"}),
        "final": ("get_answer_prompt", {}),
        "player": ("system_prompt_with_2shots", {"question": "surface", "answer": "bottom"}),
    },
    "dc": {
        "opening": ("propose_template", {"turn": "rounds"}),
        "round": ("question_propose_prompt", {}),
        "final": ("select_murderer_template", {"choice": "choices"}),
        "player": ("respond_template", {}),
    },
}
_BENCHMARKS_STATEMENT = {
    "gn": "",
    "sp": "",
    "dc": "In each round you ask one suspect one question, in this form:\nSuspect: the name\nQuestion: your question",
}


def texts_of(kind: str, prompts: Path | str | None = None) -> Texts:
    """Our texts, or those of the benchmark's prompts.json wherever it has one."""
    if prompts is None:
        return OWN[kind]
    file = Path(prompts)
    try:
        theirs: Any = read_json(file.read_bytes())[kind]
    except OSError as error:
        raise UserError(f"{file}: cannot read the prompts ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: must be a JSON object with an object of texts under {kind!r}") from None
    texts = {**OWN[kind], "statement": _BENCHMARKS_STATEMENT[kind]}
    for ours, (name, renamed) in _BENCHMARKS[kind].items():
        text = theirs.get(name) if isinstance(theirs, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{file}: no text {name!r} under {kind!r}: use the benchmark's own prompts.json")
        texts[ours] = fill(text, **{old: f"{{{new}}}" for old, new in renamed.items()}).strip()
    texts["opening"] += f"\n{texts['round']}"  # the benchmark opens its first round like any other
    return texts


def fill(template: str, **fields: object) -> str:
    """The template with its names in braces replaced; inserted text is not expanded again."""
    return re.sub(r"\{(\w+)\}", lambda name: str(fields.get(name[1], name[0])), template)
