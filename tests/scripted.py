"""A team whose messages come from a function of the prompt, one token per letter, so that tokens can be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from teamtr.answers import Sample
from teamtr.baselines import Cast
from teamtr.grading import last_number
from teamtr.rollout import RolloutContext
from teamtr.streams import InTurns
from teamtr.tasks import Task
from teamtr.team import Agent, Router, Schedule, Team
from teamtr.types import Floats, Ids, Problem, Verdict

Script = Callable[[str, str, float], str]
"""(agent, its whole prompt, a number in [0, 1)) -> its message."""

END = 3  # not a letter


class Letters:
    """A codec with one token per letter; a prompt is the texts of its messages, one per line."""

    def encode(self, messages: Sequence[dict[str, str]]) -> Ids:
        return np.array([ord(c) for c in "\n".join(m["content"] for m in messages)], dtype=np.int32)

    def encode_message(self, text: str) -> Ids:
        return np.array([*map(ord, text), END], dtype=np.int32)

    def decode(self, token_ids: Ids) -> str:
        return "".join(chr(i) for i in token_ids if i != END)


class Scripted(InTurns):
    """A sampler that records its calls; every token of a message has the probability that ``sure`` gives."""

    def __init__(self, script: Script, sure: Callable[[str], float] = lambda text: 1.0) -> None:
        self.script, self.sure = script, sure
        self.asked: list[tuple[str, str, str]] = []
        self.prompt_tokens = self.sampled_tokens = 0

    def version(self, agent: str) -> str:
        return f"weights of {agent}"

    def sample(self, agent: str, prompts: Sequence[Ids], noise_BT: Floats, **settings: object) -> list[Sample]:
        samples = []
        for prompt, noise_T in zip(prompts, noise_BT, strict=True):
            asked = "".join(map(chr, prompt))
            text = self.script(agent, asked, float(noise_T[0]))
            self.asked.append((agent, asked, text))
            ids = Letters().encode_message(text)[: len(noise_T)]
            logprobs = np.full(len(ids), np.log(self.sure(text)), dtype=np.float32)
            finish = "stop" if ids[-1] == END else "length"
            samples.append(Sample(ids, logprobs, finish, self.version(agent)))
            self.prompt_tokens += len(prompt)
            self.sampled_tokens += len(ids)
        return samples


class Numbers(Task):
    """Right if the last number of the answer is the problem's."""

    reward_range = 1.0

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        found = [(problem, self.extract(answer)) for problem, answer, _ in episodes]
        return [
            Verdict("unparsed", 0.0) if said is None else _verdict(said == str(problem.answer), said)
            for problem, said in found
        ]

    def extract(self, text: str) -> str | None:
        number = last_number(text)
        return None if number is None else str(number)


def _verdict(right: bool, said: str) -> Verdict:
    return Verdict("right" if right else "wrong", float(right), said)


def problems(count: int = 2) -> list[Problem]:
    """Problem k asks for the number 40 + k."""
    return [Problem(id=f"p{k}", prompt=f"problem {k}", answer=40 + k) for k in range(count)]


def cast_of(
    script: Script,
    names: Sequence[str] = ("ann",),
    *,
    answer: str = "last",
    router: Router | None = None,
    agent: str | None = None,
    max_tokens: int | None = None,
    sure: Callable[[str], float] = lambda text: 1.0,
) -> tuple[Cast, Scripted]:
    sampler = Scripted(script, sure)
    team = Team(
        tuple(
            Agent(name, sampler.version(name), system_prompt=f"You are {name.upper()}.", max_tokens=64)
            for name in names
        )
    )
    context = RolloutContext(
        sampler, dict.fromkeys(names, Letters()), router or Schedule.repeated(names), Numbers(), answer
    )
    return Cast(context, team, agent, max_tokens), sampler
