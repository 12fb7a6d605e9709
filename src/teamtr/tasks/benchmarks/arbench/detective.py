"""AR-Bench, detective cases: five suspects, one of them the murderer; each round the team questions one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from teamtr.chat.render import ChatMessages
from teamtr.grading.thinking import after_thinking
from teamtr.tasks.base import WrongAnswer
from teamtr.tasks.benchmarks.arbench.task import ENVIRONMENT, ArBench, budget, row_id, text_in, unusable
from teamtr.tasks.benchmarks.arbench.texts import Texts, fill
from teamtr.tasks.players import Player
from teamtr.tasks.registry import task
from teamtr.text import shown
from teamtr.types import Message, Problem, Reply, Situation, Verdict

LETTERS = "ABCDE"


class Question(NamedTuple):
    suspect: str
    text: str


def letter_in(text: str) -> str | None:
    """The last letter A to E in the rest of the line after the first "Answer:", as the benchmark's evaluator finds it:
    capitals only, inside words too. None if there is none."""
    line = re.search(r"Answer:\s*(.*)", after_thinking(text))
    letters = re.findall(r"[A-E]", line[1]) if line else []
    return letters[-1] if letters else None


def question_in(text: str, suspects: Sequence[str]) -> Question | None:
    """The suspect that a message addresses, and the question. The suspect is the one named first: between the last
    "Suspect:" and "Question:", or anywhere in a message without "Suspect:". The question is what follows the last
    "Question:", or the whole message. Reasoning is ignored. None if either is missing."""
    text = after_thinking(text)
    *_, named = re.split(r"suspect:", text, flags=re.IGNORECASE)
    if named != text:
        named = re.split(r"question:", named, maxsplit=1, flags=re.IGNORECASE)[0]
    places = [(place, name) for name in suspects if (place := _place_of(name, suspects, named)) is not None]
    asked = re.split(r"question:", text, flags=re.IGNORECASE)[-1].strip("* \n\t")
    return Question(min(places)[1], asked) if places and asked else None


def _place_of(name: str, suspects: Sequence[str], text: str) -> int | None:
    """Where the text first names this suspect, by full name or by a last name that no other suspect has."""
    surname = name.split()[-1]
    shared = [other.split()[-1].casefold() for other in suspects].count(surname.casefold()) > 1
    found = re.search(
        rf"(?<!\w)(?:{re.escape(name)}|{re.escape(name if shared else surname)})(?!\w)", text, re.IGNORECASE
    )
    return found.start() if found else None


@task("arbench:dc")
class DetectiveCases(ArBench):
    """``arbench:dc``. The right answer is the murderer's letter."""

    kind: ClassVar[str] = "dc"

    def problem(self, row: Mapping[str, Any], where: str = "") -> Problem:
        """A row has ``initial_information`` (what the detective knows, with suspects in the order of the letters),
        ``suspects`` (what each of them knows and does) and ``label`` (the murderer's index in that order)."""
        known = row.get("initial_information")
        if not isinstance(known, Mapping):
            raise unusable(where, f"'initial_information' must be an object, found {shown(known)}")
        named = _people(known, "suspect", ("name", "introduction"), where)
        hidden = _people(row, "suspects", ("name", "story", "task"), where)
        names = [person["name"] for person in named]
        if len(set(names)) < len(names) or not 2 <= len(names) <= len(LETTERS):
            raise unusable(where, f"a case has two to five suspects of different names, found {names}")
        if Counter(names) != Counter(person["name"] for person in hidden):
            raise unusable(where, f"'suspects' and 'initial_information' must name the same people, found {names}")
        label = row.get("label")
        if type(label) is not int or not 0 <= label < len(names):
            raise unusable(where, f"'label' must be a place from 0 to {len(names) - 1}, found {shown(label)}")
        background = _background(known, named, where)
        return Problem(
            id=row_id(row, background[:40]),
            prompt=fill(self.texts["statement"], background=background),
            answer=LETTERS[label],
            columns={"background": background, "names": names, "suspects": hidden},
        )

    @property
    def environment(self) -> Interrogation:
        return Interrogation(self.require_player("suspects"), self.texts)

    def grade_replies(self, replies: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        return [_verdict(problem.answer, letter_in(text)) for problem, text in replies]

    def extract(self, text: str) -> str | None:
        return letter_in(text)

    def gold(self, problem: Problem) -> str:
        return f"Reason: the evidence points there.\nAnswer: {problem.answer}"

    def wrong(self, problem: Problem, rng: np.random.Generator) -> list[WrongAnswer]:
        right = str(problem.answer)
        other = str(rng.choice([letter for letter in LETTERS if letter != right]))
        return [
            WrongAnswer("another suspect", f"Answer: {other}"),
            WrongAnswer("two answers", f"Answer: {right} or {other}"),
            WrongAnswer("right too late", f"Answer: {other}\nAnswer: {right}"),
            WrongAnswer("right, but not after the marker", f"{right} did it.\nAnswer: nobody can tell."),
            WrongAnswer("a small letter", f"Answer: {right.lower()}"),
            WrongAnswer("no marker", f"It was {right}."),
            WrongAnswer("no such letter", "Answer: F"),
            WrongAnswer("empty", ""),
        ]

    def labels(self, problem: Problem) -> dict[str, str]:
        return {"murderer": str(problem.answer)}


@dataclass(frozen=True)
class Interrogation:
    """The environment: suspects answer questions, each in its own role and with only its own questions as history."""

    player: Player
    texts: Texts

    def reply(self, situations: Sequence[Situation], *, seed: int) -> list[Reply]:
        asked = {
            i: question
            for i, s in enumerate(situations)
            if s.acts and (question := question_in(s.acts[-1], s.problem.columns["names"])) is not None
        }
        prompts = [self._prompt(situations[i], question) for i, question in asked.items()]
        said = self.player.answer(prompts, seed=seed) if prompts else []
        answers = {
            i: Message(question.suspect, text.strip()) for (i, question), text in zip(asked.items(), said, strict=True)
        }
        return [self._reply(situation, answers.get(i)) for i, situation in enumerate(situations)]

    def speakers(self, problem: Problem) -> tuple[str, ...]:
        return (ENVIRONMENT, *problem.columns["names"])

    def _prompt(self, situation: Situation, question: Question) -> ChatMessages:
        role = next(person for person in situation.problem.columns["suspects"] if person["name"] == question.suspect)
        chat = [{"role": "system", "content": fill(self.texts["player"], **role)}]
        for act, reply in zip(situation.acts[:-1], situation.replies[1:], strict=True):
            earlier = question_in(act, situation.problem.columns["names"])
            if earlier is not None and earlier.suspect == question.suspect:
                chat.append({"role": "user", "content": earlier.text})
                chat.append({"role": "assistant", "content": reply.messages[0].text})
        return [*chat, {"role": "user", "content": question.text}]

    def _reply(self, situation: Situation, answer: Message | None) -> Reply:
        columns = situation.problem.columns
        choices = ", ".join(f"{letter}. {name}" for letter, name in zip(LETTERS, columns["names"], strict=False))
        told = budget(self.texts, situation, background=columns["background"], choices=choices)
        if not situation.acts:
            return Reply((Message(ENVIRONMENT, told),))
        if answer is None:
            lost = fill(self.texts["lost"], names=", ".join(columns["names"]))
            return Reply((Message(ENVIRONMENT, f"{lost}\n{told}"),))
        return Reply((answer, Message(ENVIRONMENT, told)))


def _people(row: Mapping[str, Any], key: str, fields: Sequence[str], where: str) -> list[dict[str, str]]:
    people = row.get(key)
    if not isinstance(people, list) or not all(isinstance(person, Mapping) for person in people):
        raise unusable(where, f"{key!r} must be a list of people, found {shown(people)}")
    return [{name: text_in(person, name, where) for name in fields} for person in people]


def _background(known: Mapping[str, Any], suspects: Sequence[Mapping[str, str]], where: str) -> str:
    """The case as it is described to the detective."""
    victim = known.get("victim")
    if not isinstance(victim, Mapping):
        raise unusable(where, f"'victim' must be an object, found {shown(victim)}")
    facts = [
        f"Time: {text_in(known, 'time', where)}",
        f"Place: {text_in(known, 'location', where)}",
        f"Victim: {text_in(victim, 'name', where)}. {text_in(victim, 'introduction', where)}",
        f"Cause of death: {text_in(victim, 'cause_of_death', where)}",
        f"Weapon: {text_in(victim, 'murder_weapon', where)}",
        "Suspects, one of whom is the murderer:",
    ]
    return "\n".join([*facts, *(f"- {person['name']}: {person['introduction']}" for person in suspects)])


def _verdict(right: str, letter: str | None) -> Verdict:
    if letter is None:
        return Verdict("unparsed", 0.0)
    return Verdict("right", 1.0, letter) if letter == right else Verdict("wrong", 0.0, letter)
