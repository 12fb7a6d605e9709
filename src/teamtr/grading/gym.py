"""Runs reasoning-gym in a worker, never in the training process.

Four of its scorers call ``eval`` on a model's text, and five pass it to sympy's ``parse_expr``, which evaluates it too.
Five do so with text of the question, and one family runs stored programs to make its questions. So the training process
never imports it: the ``WorkerPool`` runs these factories. Before a scorer gets text that it would evaluate, we check
that evaluating it cannot call anything of Python (``EVALUATED``). An answer that could do so scores 0.

Questions are made in a separate process with a fixed hash seed: several families iterate over sets of strings, and
would make other questions at every start of Python.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teamtr.grading.workers.worker import Grader, Item

_FUNCTION = re.compile(r"(a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|Abs|Rational|pi)")

# JSON has no tuples, but these two scorers compare with tuples.
_TUPLES = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}


def calls_nothing(text: str) -> bool:
    """Whether the text has no round bracket, so that it cannot contain a call."""
    return "(" not in text


def is_expression(text: str) -> bool:
    """Whether the text is arithmetic of numbers and one-letter variables; longer names must be math functions."""
    plain = re.fullmatch(r"[\w\s.+\-*/^(),]*", text) and not re.search(r"\.\s*[^\W\d]", text)
    names = re.findall(r"[^\W\d]\w*", text)
    return bool(plain) and all((len(n) == 1 and n != "_") or _FUNCTION.fullmatch(n) for n in names)


def is_bit_arithmetic(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-Fx\s+\-*<>&|^~()]*", text) is not None


Check = Callable[[str], bool]

EVALUATED: dict[str, Check] = {
    "binary_matrix": calls_nothing,
    "n_queens": calls_nothing,
    "spiral_matrix": calls_nothing,
    "string_insertion": calls_nothing,
    "countdown": is_expression,
    "intermediate_integration": is_expression,
    "polynomial_multiplication": is_expression,
    "puzzle24": is_expression,
    "simple_integration": is_expression,
}
"""Families whose scorer evaluates a model's text, and the check that the text must pass."""

EVALUATED_OF_THE_QUESTION: dict[str, tuple[str, Check]] = {
    "bitwise_arithmetic": ("problem", is_bit_arithmetic),
    "intermediate_integration": ("integrand", is_expression),
    "number_sorting": ("answer", calls_nothing),
    "polynomial_multiplication": ("answer", is_expression),
    "simple_integration": ("integrand", is_expression),
}
"""Families whose scorer evaluates this part of the question, which may come from a file, and the check for it."""


def families() -> Grader:
    """A grader that returns the names of all families for any item."""
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    return lambda items: [names for _ in items]


def scores(family: str, parameters: dict[str, Any]) -> Grader:
    """A grader that returns the family's own score of ``item["answer"]`` for the question ``item["entry"]``; None if
    the scorer raises because it cannot read the answer."""
    scorer = _dataset(family, {**parameters, "seed": 0, "size": 1})

    check = EVALUATED.get(family)

    def scored(items: list[Item]) -> Iterator[float | None]:
        for item in items:
            entry = _usable(family, item["entry"])
            if check is not None and not check(item["answer"]):
                yield 0.0
                continue
            try:
                yield float(scorer.score_answer(item["answer"], entry))
            except Exception:  # a third-party scorer on model output may raise anything, which is no verdict
                yield None

    return scored


def entries(family: str, parameters: dict[str, Any]) -> Grader:
    """A grader that returns question ``item["index"]`` of the dataset with ``item["seed"]`` and ``item["size"]``, as
    {"question", "answer", "metadata"}."""
    order = {"sys_path": sys.path, "family": family, "parameters": parameters}

    def made(items: list[Item]) -> Iterator[Any]:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as orders:
                json.dump({**order, "items": items}, orders)
            for line in process.stdout:
                reply = json.loads(line)
                if "error" in reply:
                    raise RuntimeError(reply["error"])
                yield reply["entry"]
        finally:
            process.kill()
            process.wait()

    return made


def _dataset(family: str, settings: dict[str, Any]) -> Any:
    factory = importlib.import_module("reasoning_gym.factory")
    try:
        return factory.create_dataset(family, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        known = sorted({field.name for field in fields(factory.DATASETS[family][1])} - {"seed", "size"})
        raise ValueError(f"{error} (the parameters are {', '.join(known) or 'none'})") from None


def _usable(family: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The question in the form that its scorer expects. Raises ValueError if evaluating a part of it is not safe."""
    metadata = entry["metadata"]
    if family in EVALUATED_OF_THE_QUESTION:
        key, check = EVALUATED_OF_THE_QUESTION[family]
        if not check({**metadata, "answer": entry["answer"]}[key]):
            raise ValueError(f"the {key!r} of a question of {family} would be evaluated, and is not what it should be")
    boards = {key: tuple(map(tuple, metadata[key])) for key in _TUPLES.get(family, ())}
    return {**entry, "metadata": {**metadata, **boards}}


def _plain(value: Any) -> Any:
    """Converts what JSON does not support: numpy numbers to numbers, sets to lists, anything else to its ``str``."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.item() if hasattr(value, "item") else str(value)


def main() -> None:
    """Make the questions requested on stdin, and write one line of JSON for each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the programs that make questions may print
    order = json.load(sys.stdin)
    sys.path[:] = order["sys_path"]
    dataset: Any = None
    settings: dict[str, int] = {}
    for item in order["items"]:
        try:
            if settings != {"seed": item["seed"], "size": item["size"]}:
                settings = {"seed": item["seed"], "size": item["size"]}
                dataset = _dataset(order["family"], {**order["parameters"], **settings})
            line = json.dumps({"entry": dataset[item["index"]]}, default=_plain)
        except Exception as error:
            line = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        print(line, file=replies, flush=True)


if __name__ == "__main__":
    main()
