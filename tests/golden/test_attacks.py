"""Attacks on every grader: what each of them earns, and that docs/graders.md says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks import HONEST, HOUSES, Attack, attacks
from teamtr.grading.math.rules import GSM8K, GSM8K_OR_STATED, RULES, MathGrader
from teamtr.tasks.benchmarks.arbench import DetectiveCases, GuessingNumbers, SituationPuzzles
from teamtr.tasks.benchmarks.planbench.blocks import BLOCKSWORLD, problem_pddl
from teamtr.tasks.benchmarks.planbench.task import PlanBench
from teamtr.tasks.benchmarks.zebralogic import ZebraLogic
from teamtr.tasks.data.task import DataTask
from teamtr.types import Problem

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- attacks: made by tests/golden/test_attacks.py -->", "<!-- end of attacks -->"
MATH = {**RULES, "gsm8k": GSM8K_OR_STATED, "official": GSM8K}


def problem_of(grader: str, gold: str) -> Problem:
    if grader == "zebralogic":
        rows = [[str(k), *cells.values()] for k, cells in enumerate(HOUSES.values(), start=1)]
        return ZebraLogic().problem({"puzzle": "Who?", "solution": {"header": ["House", "Name"], "rows": rows}})
    if grader == "planbench":
        start = [("handempty",), ("ontable", "b"), ("on", "a", "b"), ("clear", "a")]
        return PlanBench().problem({"problem_pddl": problem_pddl(BLOCKSWORLD.domain, start, [("ontable", "a")])})
    return Problem(id="1", prompt="?", answer=gold)


def rewards(grader: str, rows: list[Attack], tmp_path: Path) -> list[float]:
    if grader in MATH:
        with MathGrader(MATH[grader]) as math:
            return [verdict.reward for verdict in math.grade([(row.reply, row.gold) for row in rows])]
    pairs = [(problem_of(grader, row.gold), row.reply) for row in rows]
    if grader.startswith("data "):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(json.dumps({"question": f"{k}?", "answer": "1"}) for k in range(2)))
        kind = grader.removeprefix("data ")
        data = DataTask(file, grader=kind, held_out=0, pattern=r"(?m)^#### (.+)$" if kind == "regex" else None)
        try:
            return [verdict.reward for verdict in data.grade([(problem, text, ()) for problem, text in pairs])]
        finally:
            data.close()
    task = {
        "zebralogic": ZebraLogic,
        "planbench": PlanBench,
        "arbench:gn": GuessingNumbers,
        "arbench:dc": DetectiveCases,
        "arbench:sp": SituationPuzzles,
        "arbench:sp words": lambda: SituationPuzzles(score="words"),
    }[grader]()
    return [verdict.reward for verdict in task.grade_replies(pairs)]


@pytest.fixture(scope="module")
def earned(tmp_path_factory: pytest.TempPathFactory) -> dict[Attack, float]:
    every = [*attacks(), *HONEST]
    found: dict[Attack, float] = {}
    for grader in dict.fromkeys(row.grader for row in every):
        rows = [row for row in every if row.grader == grader]
        found |= dict(zip(rows, rewards(grader, rows, tmp_path_factory.mktemp("data")), strict=True))
    return found


def test_there_are_enough_attacks() -> None:
    every = [*attacks(), *HONEST]
    assert len(attacks()) >= 120
    assert len(set(every)) == len(every)
    assert all(row.deserved == 0 for row in attacks())
    assert all(row.deserved == 1 for row in HONEST)
    assert all(bool(row.why) == (row.earned is not None) for row in every)


@pytest.mark.long
def test_every_reply_earns_what_it_deserves_or_what_is_documented(earned: dict[Attack, float]) -> None:
    off = {row: got for row, got in earned.items() if abs(got - row.expected) > 0.05}
    assert not off


def written(earned: dict[Attack, float]) -> str:
    return "\n".join(_lines(earned))


def _lines(earned: dict[Attack, float]) -> Iterator[str]:
    yield "| grader | attacks | earn nothing | earn something | honest replies | right |"
    yield "|---|---|---|---|---|---|"
    for grader in dict.fromkeys(row.grader for row in earned):
        tried = [got for row, got in earned.items() if row.grader == grader and row.deserved == 0]
        honest = [got for row, got in earned.items() if row.grader == grader and row.deserved == 1]
        beaten = sum(abs(got) > 0.05 for got in tried)
        yield f"| `{grader}` | {len(tried)} | {len(tried) - beaten} | {beaten} | {len(honest)} | {sum(honest):g} |"
    tried = [got for row, got in earned.items() if row.deserved == 0]
    beaten = sum(abs(got) > 0.05 for got in tried)
    honest = [got for row, got in earned.items() if row.deserved == 1]
    yield f"| all | {len(tried)} | {len(tried) - beaten} | {beaten} | {len(honest)} | {sum(honest):g} |"
    yield ""
    yield "What still earns something, and why:"
    yield ""
    yield "| grader | truth | reply | earns | why |"
    yield "|---|---|---|---|---|"
    for row in earned:
        if row.why:
            reply, gold = (_shown(text) for text in (row.reply, row.gold))
            yield f"| `{row.grader}` | {gold} | {reply} | {row.expected:g} | {row.why} |"


def _shown(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "..."
    return "`" + short.replace("\n", " ⏎ ").replace("|", "\\|") + "`"


def test_the_documentation_says_what_comes_out(earned: dict[Attack, float]) -> None:
    page = (ROOT / "docs/graders.md").read_text()
    assert BEGIN in page
    assert END in page
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == written(earned)
