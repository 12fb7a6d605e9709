"""AR-Bench, situation puzzles: find the story behind a strange situation by asking a referee yes-or-no questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from teamtr.chat.render import ChatMessages
from teamtr.errors import UserError
from teamtr.grading.thinking import after_thinking
from teamtr.settings.section import key
from teamtr.tasks.base import WrongAnswer
from teamtr.tasks.benchmarks.arbench.task import ENVIRONMENT, ArBench, budget, row_id, text_in
from teamtr.tasks.benchmarks.arbench.texts import Texts, fill
from teamtr.tasks.players import Player
from teamtr.tasks.registry import task
from teamtr.types import Message, Problem, Reply, Situation, Verdict

REFEREE = "referee"
_ANSWERS = {"yes": "Yes", "no": "No", "unknown": "Unknown"}


def character_f1(said: str, truth: str) -> float:
    """F1 of the characters of two texts as multisets, white space and case included: the benchmark's score.

    It gives partial credit and ignores order: a text of the same letters in another order has F1 1, and two unrelated
    stories of the benchmark's length have about 0.85.
    """
    common = sum((Counter(said) & Counter(truth)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(truth)
    return 2 * precision * recall / (precision + recall)


_COMMON_WORDS = """
a an the and or but if so as of to in on at by for from with into out up then than that this these those there here he
she it they him her them his hers its their who whom which what when where why how i you we me us my your our is are was
were be been being am do does did done has have had will would can could may might must not no
"""
_EVERYWHERE = frozenset(_COMMON_WORDS.split())


def word_f1(said: str, truth: str) -> float:
    """F1 of the longest common subsequence of words (ROUGE-L), ignoring case, punctuation and common words: letters
    earn nothing, another story next to nothing. Takes time linear in the number of words said."""
    words, right = (re.findall(r"\w+", text.casefold()) for text in (said, truth))
    if not _EVERYWHERE.issuperset(right):  # a story of common words alone is compared by them
        words, right = ([word for word in text if word not in _EVERYWHERE] for text in (words, right))
    common = _common_in_order(words, right)
    return 2 * common / (len(words) + len(right)) if common else 0.0


def _common_in_order(said: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence; a bit of ``row`` is 0 where a word of ``right`` adds to it."""
    places: dict[str, int] = {}
    for place, word in enumerate(right):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(right)) - 1
    row = every
    for word in said:
        found = row & places.get(word, 0)
        row = ((row + found) | (row - found)) & every
    return len(right) - row.bit_count()


SCORES = {"characters": character_f1, "words": word_f1}
HACKABLE = (
    "arbench:sp: score: characters is the benchmark's own and knows no order: the letters of any English text of the "
    "right length earn about 0.88. Set score: words to train on it"
)


def story_in(text: str) -> str:
    """The text after the reasoning, without the marker that the benchmark's prompt asks for, and with white space
    normalized."""
    return " ".join(re.sub(r"^\s*(?:A|Answer):", "", after_thinking(text)).split())


@task("arbench:sp")
class SituationPuzzles(ArBench):
    """``arbench:sp``. The reward is the benchmark's character F1 of the reply (after its reasoning) against ``bottom``;
    with ``score: words``, F1 of the words that both have in the same order.

    The benchmark has no threshold from which a story counts as found, and its score allows none. So "right" means the
    true story word for word (up to white space and case), which only shows that grading works; report the mean reward.
    """

    class Config(ArBench.Config):
        """Situation puzzles: the story behind a strange situation, asked for round by round."""

        score: Literal["characters", "words"] = key(
            "characters",
            "The reward: F1 of characters, the benchmark's own (letters in any order earn 0.88), or of words in order.",
        )

    kind: ClassVar[str] = "sp"

    def __init__(
        self,
        splits: Mapping[str, Sequence[Problem]] | None = None,
        *,
        player: Player | None = None,
        prompts: Path | str | None = None,
        score: str = "characters",
    ) -> None:
        super().__init__(splits, player=player, prompts=prompts)
        if score not in SCORES:
            raise UserError(f"arbench:sp has no score {score!r}: use one of {', '.join(SCORES)}")
        self._score = SCORES[score]
        if score == "characters":
            self.warnings += (HACKABLE,)

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """A row has ``surface`` (the situation that is shown) and ``bottom`` (the story)."""
        surface, bottom = text_in(row, "surface", where), text_in(row, "bottom", where)
        return Problem(
            id=row_id(row, surface[:40]),
            prompt=fill(self.texts["statement"], surface=surface),
            answer=bottom,
            columns={"surface": surface, **{key: row[key] for key in ("supernatural", "someone_dies") if key in row}},
        )

    @property
    def environment(self) -> Referee:
        return Referee(self.require_player(REFEREE), self.texts)

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [_verdict(problem.answer, text, self._score) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        return story_in(text).casefold() or None

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        story = str(problem.answer)
        words = story.split()
        place = int(rng.integers(len(words)))
        return [
            WrongAnswer("only what was told", str(problem.columns["surface"])),
            WrongAnswer("half the story", " ".join(words[: len(words) // 2])),
            WrongAnswer("one word missing", " ".join(words[:place] + words[place + 1 :])),
            WrongAnswer("one word more", " ".join([*words[:place], "never", *words[place:]])),
            WrongAnswer("told twice", f"{story} {story}"),
            WrongAnswer("another story", "It was all a dream."),
            WrongAnswer("empty", " "),
        ]

    def labels(self, problem: Problem) -> dict[str, str]:
        flags = {key: value for key, value in problem.columns.items() if isinstance(value, bool)}
        return {key: "yes" if value else "no" for key, value in flags.items()}


@dataclass(frozen=True)
class Referee:
    """The environment: answers with Yes, No or Unknown, whatever the player says, so it cannot reveal the story."""

    player: Player
    texts: Texts

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        asked = [i for i, s in enumerate(situations) if s.acts and s.acts[-1].strip()]
        said = self.player.answer([self._prompt(situations[i]) for i in asked], seed=seed) if asked else []
        answers = dict(zip(asked, said, strict=True))
        return [self._reply(s, word_in(answers[i]) if i in answers else None) for i, s in enumerate(situations)]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return (ENVIRONMENT, REFEREE)

    def _prompt(self, situation: Situation) -> ChatMessages:
        surface, bottom = situation.problem.columns["surface"], situation.problem.answer
        return [
            {"role": "system", "content": fill(self.texts["player"], surface=surface, bottom=bottom)},
            {"role": "user", "content": after_thinking(situation.acts[-1])},
        ]

    def _reply(self, situation: Situation, answer: str | None) -> Reply:
        told = budget(self.texts, situation, surface=situation.problem.columns["surface"])
        if not situation.acts:
            return Reply((Message(ENVIRONMENT, told),))
        if answer is None:
            return Reply((Message(ENVIRONMENT, f"{self.texts['lost']}\n{told}"),))
        return Reply((Message(REFEREE, answer), Message(ENVIRONMENT, told)))


def word_in(text: str) -> str:
    """The first Yes, No or Unknown in the player's answer; Unknown if there is none."""
    found = re.search(r"\b(?:yes|no|unknown)\b", text, re.IGNORECASE)
    return _ANSWERS[found[0].lower()] if found else "Unknown"


def _verdict(bottom: str, text: str, score_of: Callable[[str, str], float]) -> Verdict:
    told, score = story_in(text), score_of(after_thinking(text), bottom)
    if not told:
        return Verdict("unparsed", score)
    return Verdict("right" if told.casefold() == story_in(bottom).casefold() else "wrong", score, told)
