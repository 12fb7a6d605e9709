"""A task made from rows and reward functions, with the interface of TRL's trainers."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple, TextIO

from teamtr.errors import UserError
from teamtr.grading.printed import Printed
from teamtr.grading.workers.worker import reward_value
from teamtr.tasks import Task
from teamtr.tasks.data.chat import Chat, is_chat, read_chat
from teamtr.tasks.data.graders import GIVEN
from teamtr.tasks.data.rows import image_refusal
from teamtr.tasks.data.split import OwnNames, name_of
from teamtr.tasks.rewards import BadReward, Part, Value, breakdown_of, messages_of
from teamtr.types import Problem, Verdict

RewardFunc = Callable[..., Sequence[Value]]
Row = Mapping[str, Any]
Dataset = Iterable[Row]
"""A list of dicts, a ``datasets.Dataset``, or any iterable of rows."""

PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "solution", "target")


class RewardTask(Task):
    """Problems from rows; the reward is the weighted sum of your functions.

    A function is called as ``f(prompts=..., completions=..., conversations=..., **columns)`` with one entry per episode
    and returns one reward per episode: a number, a mapping from agents to numbers, or a list with a number for each
    message of an agent (``teamtr.tasks.rewards``). ``completions`` are the team's answers. ``conversations`` are all
    messages of each episode, as ``{"role": ..., "name": ..., "content": ...}``. Every column of the rows except the
    prompt is passed as a list. A function without ``**columns`` gets only the arguments in its signature. Functions run
    in this process; put code that may hang or crash into its own file (``grader: python:FILE:FUNCTION`` in a team
    file), where it runs in a worker that can be killed.

    Args:
        reward_funcs: one function, or several whose rewards are added.
        weights: weights of the functions, in their order; 1 each by default.
        train: rows with a ``prompt`` (or ``question``, ``problem``): a string, or chat messages, of which the user's
            message is used. ``answer`` (or ``solution``, ``target``) is the reference answer, if there is one; without
            it, the assistant's message after the user's, if there is one.
        test: held-out rows; without them, a tenth of the prompts of ``train`` is held out.
        threshold: a reward of at least this counts as success.
        reward_range: largest minus smallest reward, if known; needed for certificates.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        train: Dataset,
        test: Dataset | None = None,
        *,
        weights: Sequence[float] | None = None,
        threshold: float = 1.0,
        reward_range: float | None = None,
    ) -> None:
        self.functions = tuple(reward_funcs) if isinstance(reward_funcs, Sequence) else (reward_funcs,)
        if not self.functions or not all(map(callable, self.functions)):
            raise UserError(f"reward_funcs must be a function, a list of functions or a Task, got {reward_funcs!r:.80}")
        self.weights = _weights(weights, len(self.functions))
        self.names = _names(self.functions)
        rows, left_out = _read(train, "train_dataset")
        if test is None:
            rows, held_out = _hold_out(rows)
        else:
            held_out, more = _read(test, "eval_dataset")
            left_out += more
        super().__init__({"train": rows, "test": held_out})
        if left_out:
            self.warnings += (f"the system prompts of {left_out} rows are left out: give agents a system_prompt",)
        self.threshold = threshold
        self.reward_range = reward_range

    def grade(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[Verdict]:
        columns = {name: [p.columns.get(name) for p, _, _ in episodes] for name in self._columns(episodes)}
        given = {
            **columns,
            "prompts": [p.prompt for p, _, _ in episodes],
            "completions": [answer for _, answer, _ in episodes],
            "conversations": [messages_of(texts) for _, _, texts in episodes],
        }
        values = [self._called(function, given, len(episodes)) for function in self.functions]
        named = list(zip(self.names, self.weights, values, strict=True))
        return [
            self._verdict([Part(name, said[k], weight) for name, weight, said in named], texts)
            for k, (_, _, texts) in enumerate(episodes)
        ]

    def _columns(self, episodes: Sequence[tuple[Problem, str, Sequence[str]]]) -> list[str]:
        return sorted({name for problem, _, _ in episodes for name in problem.columns})

    def _called(self, function: RewardFunc, given: Mapping[str, Any], count: int) -> list[Value]:
        name = _name(function)
        wanted = _wanted(function, given)
        heard: Any = _Heard(sys.stdout, self.printed)
        with redirect_stdout(heard):
            rewards = function(**wanted)
        try:
            found: list[Value] = [reward_value(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward function {name} must return a list of rewards (numbers, mappings from agents to numbers, or "
                f"lists with a number for each message), got {rewards!r:.100}"
            ) from error
        if len(found) != count:
            raise UserError(f"reward function {name} returned {len(found)} rewards for {count} completions")
        return found

    def _verdict(self, parts: Sequence[Part], texts: Sequence[str]) -> Verdict:
        try:
            made = breakdown_of(parts, texts)
        except BadReward as error:
            raise UserError(f"reward function {error}") from None
        reward = made.reward
        if not math.isfinite(reward):
            self.failures[f"a reward was {reward}"] += 1
            return Verdict("crash", reward)
        told = made if made.is_personal or len(parts) > 1 else None
        return Verdict("right" if reward >= self.threshold else "wrong", reward, breakdown=told)

    @property
    def own_code(self) -> object:
        return (self.functions, self.threshold, *(() if set(self.weights) == {1.0} else self.weights))

    def describe(self) -> str:
        """The task's name in a run folder: the names of its functions, with weights other than 1."""
        named = zip(self.functions, self.weights, strict=True)
        return "+".join(_name(f) if weight == 1.0 else f"{weight:g}*{_name(f)}" for f, weight in named)


def _name(function: RewardFunc) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names(functions: Sequence[RewardFunc]) -> tuple[str, ...]:
    """Names of the parts of the reward in logs and charts; a second function of the same name becomes NAME-2."""
    seen, names = Counter[str](), []
    for function in functions:
        name = str(getattr(function, "__name__", type(function).__name__))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(names)


def _weights(given: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if given is None:
        return (1.0,) * count
    weights = tuple(map(float, given))
    if len(weights) != count or not all(map(math.isfinite, weights)):
        raise UserError(f"reward_weights must be {count} finite numbers, one for each reward function, got {given!r}")
    return weights


class _Heard:
    """Writes to a stream and keeps a copy of the text; all other attributes are the stream's own."""

    def __init__(self, shown: TextIO, kept: Printed) -> None:
        self._shown = shown
        self._kept = kept

    def write(self, text: str) -> int:
        self._kept.add(text)
        return self._shown.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


def _wanted(function: RewardFunc, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments that the function's signature accepts."""
    signature, wanted = inspect.signature(function), given
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        wanted = {name: value for name, value in given.items() if name in signature.parameters}
    try:
        signature.bind(**wanted)
    except TypeError as error:
        raise UserError(f"reward function {_name(function)}: {error}; there are {', '.join(sorted(given))}") from None
    return wanted


class _Rows(NamedTuple):
    """The problems of rows, and how many of them had a system prompt, which is left out."""

    problems: tuple[Problem, ...]
    without_system: int


def _read(rows: Dataset, what: str) -> _Rows:
    found, names, without_system = list[Problem](), OwnNames(), 0
    for k, row in enumerate(rows):
        where = f"{what}: row {k}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where} is a {type(row).__name__}; give dicts with a 'prompt'")
        for name, value in row.items():
            if refused := image_refusal(str(name), value):
                raise UserError(f"{where}, column {name!r}: {refused}")
        if taken := [name for name in GIVEN if name in row]:
            raise UserError(f"{where}: a reward function gets {', '.join(GIVEN)}: rename its column {taken[0]!r}")
        column = next((name for name in PROMPTS if name in row), None)
        if column is None:
            raise UserError(f"{where} has no 'prompt' (nor 'question' or 'problem'); it has {sorted(row)}")
        asked = _asked(row[column], where)
        without_system += asked.has_system
        columns = {str(name): value for name, value in row.items() if name != column}
        if asked.reply is not None and not any(name in row for name in ANSWERS):
            columns["answer"] = asked.reply
        answer = next((columns[name] for name in ANSWERS if name in columns), None)
        name = name_of(row, ("id",), hashlib.blake2b(asked.prompt.encode(), digest_size=6).hexdigest())
        found.append(Problem(names.own(name), asked.prompt, answer, columns=columns))
    if not found:
        raise UserError(f"{what} has no rows")
    return _Rows(tuple(found), without_system)


def _asked(prompt: Any, where: str) -> Chat:
    """A prompt as text: a string, or the user's message from a list of chat messages, with the reply to it."""
    if isinstance(prompt, str):
        return Chat(prompt, None, False)
    if is_chat(prompt):
        return read_chat(prompt, where)
    raise UserError(f"{where}: its prompt is a {type(prompt).__name__}; give a string or chat messages")


def _hold_out(problems: tuple[Problem, ...]) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Hold out a tenth of the prompts, at least one, by a hash of their text. Rows with the same prompt stay
    together."""
    prompts = sorted({p.prompt for p in problems}, key=lambda text: hashlib.blake2b(text.encode()).digest())
    if len(prompts) < 2:
        raise UserError("one prompt cannot be shared out: give an eval_dataset, or rows with other prompts")
    held = set(prompts[: max(1, len(prompts) // 10)])
    return tuple(p for p in problems if p.prompt not in held), tuple(p for p in problems if p.prompt in held)
