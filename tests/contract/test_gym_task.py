"""reasoning-gym: the same questions at every start, its own scorers behind the fence, nothing evaluated that calls."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teamtr.errors import UserError
from teamtr.grading import WorkerPool
from teamtr.grading.gym import EVALUATED, EVALUATED_OF_THE_QUESTION, calls_nothing, is_bit_arithmetic, is_expression
from teamtr.tasks.benchmarks.gym import UNUSABLE, Gym

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("reasoning_gym") is None,
        reason="reasoning-gym is not installed: pip install 'teamtr[gym]'",
    ),
]

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


@pytest.fixture(scope="module")
def sums() -> Iterator[Gym]:
    """A few hundred different questions, so that some come again."""
    task = Gym("chain_sum", parameters=SMALL_SUMS, sizes={"train": 100, "test": 20})
    yield task
    task.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, 2.0, preload=["reasoning_gym"]) as workers:
        yield workers


def score(pool: WorkerPool, family: str, answers: list[str], metadata: dict[str, Any], answer: str = "") -> list[Any]:
    """What becomes of each answer: the score, or how it failed."""
    entry = {"question": "?", "answer": answer, "metadata": metadata}
    items = [{"answer": said, "entry": entry} for said in answers]
    results = pool.submit("teamtr.grading.gym:scores", items, {"family": family, "parameters": {}})
    return [result.value if result.kind == "ok" else result.kind for result in results]


def check(task: Gym) -> None:
    """The gold answers are right; five kinds of wrong answer are not."""
    problems = task.problems("test")
    assert problems
    golds = task.grade_replies([(problem, task.gold(problem)) for problem in problems])
    assert [(v.kind, v.reward) for v in golds] == [("right", 1.0)] * len(problems), task.name
    rng = np.random.default_rng(0)
    for problem in problems:
        wrong = task.wrong(problem, rng)
        assert len({answer.kind for answer in wrong}) >= 5
        verdicts = task.grade_replies([(problem, answer.reply) for answer in wrong])
        assert not [a.kind for a, v in zip(wrong, verdicts, strict=True) if v.right], task.name
        assert all(v.kind in ("wrong", "unparsed") for v in verdicts), task.name


# Questions


def test_train_and_test_are_apart_and_nothing_comes_twice(sums: Gym) -> None:
    train, test = sums.problems("train"), sums.problems("test")
    prompts = {split: {p.prompt for p in problems} for split, problems in (("train", train), ("test", test))}
    assert not prompts["train"] & prompts["test"]
    assert len(prompts["train"]) == len(train) < 100  # a birthday problem: some questions do come again
    assert len(prompts["test"]) == len(test) > 0
    assert len({p.id for p in (*train, *test)}) == len(train) + len(test)
    assert any(f"train has {len(train)} questions; {100 - len(train)} more" in warning for warning in sums.warnings)
    assert all(p.prompt.count(" + ") + p.prompt.count(" - ") == 1 for p in train)  # the parameters reached the family
    assert "reasoning_gym" not in sys.modules  # it is imported by workers only


def test_questions_say_how_hard_they_are_and_travel_as_json(sums: Gym) -> None:
    problem = sums.problems("test")[0]
    assert sums.labels(problem) == {"difficulty": "num_digits 1-1, num_terms 2-2"}
    assert json.loads(json.dumps(problem.columns)) == problem.columns


def test_questions_are_the_same_at_every_start_even_where_a_family_goes_through_sets() -> None:
    """As this one does: with a random hash seed the two draws differ."""
    items = [{"seed": 5, "size": 4, "index": index} for index in range(4)]
    setup = {"family": "isomorphic_strings", "parameters": {}}
    with WorkerPool(1, 60.0) as pool:
        first, second = (pool.submit("teamtr.grading.gym:entries", items, setup) for _ in range(2))
    assert [result.kind for result in first] == ["ok"] * 4
    assert first == second


@pytest.mark.slow
def test_the_draw_depends_on_the_seed_alone() -> None:
    drawn = []
    for seed in (0, 0, 1):
        task = Gym("word_ladder", sizes={"test": 5}, seed=seed)
        drawn.append(task.problems("test"))
        task.close()
    assert drawn[0] == drawn[1]
    assert {p.prompt for p in drawn[0]}.isdisjoint(p.prompt for p in drawn[2])


def test_an_entry_of_reasoning_gym_is_a_row(sums: Gym) -> None:
    problem = sums.problem({"question": "2 + 2 =", "answer": "4", "metadata": {}})
    assert [v.kind for v in sums.grade_replies([(problem, "4"), (problem, "5")])] == ["right", "wrong"]
    assert sums.labels(problem) == {}
    with pytest.raises(UserError, match=r"^line 3: an entry needs 'question'"):
        sums.problem({"question": 4}, where="line 3")


# Scores


def test_gold_is_right_and_wrong_is_wrong(sums: Gym) -> None:
    check(sums)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("4", "4"),
        (" 4\n", "4"),
        ("It is <answer>4</answer>, I think.", "4"),
        ("<answer>5</answer> no, <answer> 4 </answer>", "4"),
        ("<think><answer>5</answer></think>4", "4"),
        ("<answer>4", "<answer>4"),
        ("<answer> </answer>", None),
        ("", None),
    ],
)
def test_what_the_scorer_is_given(sums: Gym, reply: str, answer: str | None) -> None:
    assert sums.extract(reply) == answer


def test_the_score_is_the_reward_and_only_one_is_right(sums: Gym) -> None:
    problem = sums.problem({"question": "2 + 2 =", "answer": "4", "metadata": {}})
    (verdict,) = sums.grade_replies([(problem, "It is 4.")])
    assert (verdict.kind, verdict.reward) == ("wrong", 1 / 8)  # its scorer: the share of the text that is the answer


def test_a_text_that_a_scorer_cannot_read_has_no_score(pool: WorkerPool) -> None:
    assert score(pool, "prime_factorization", ["2 × 3", "two"], {"factors": [2, 3]}, "2 × 3") == [1.0, None]


def test_boards_that_were_tuples_are_tuples_again(pool: WorkerPool) -> None:
    board = {"input": [[0, 1]], "output": [[1, 0], [2, 3]]}
    assert score(pool, "arc_agi", ["1 0\n2 3", "1 0\n2 4"], board) == [1.0, 0.05]


# Hostile text

FOUR_AND_TWO = {"numbers": [4, 2], "target": 6}
HOSTILE = [
    "__import__('pathlib').Path({path!r}).touch()",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "open({path!r}, 'w')",
    "exec(\"open({path!r}, 'w')\")",
    "(lambda: open({path!r}, 'w'))()",
    "1+eval(\"open({path!r}, 'w').write('x')\")",
]


def test_an_endless_expression_is_timed_out_and_spoils_no_other(pool: WorkerPool) -> None:
    assert score(pool, "countdown", ["9**9**9**9**9", "4 + 2"], FOUR_AND_TWO) == ["timeout", 1.0]


@pytest.mark.parametrize(
    ("family", "metadata", "answer"),
    [("countdown", FOUR_AND_TWO, "2 + 4"), ("n_queens", {"valid_answers": ["Q _\n_ Q"]}, "Q _\n_ Q")],
)
def test_a_program_is_not_run(
    family: str, metadata: dict[str, Any], answer: str, pool: WorkerPool, tmp_path: Path
) -> None:
    """Both scorers would run it: the first through sympy, the second through eval."""
    path = tmp_path / "made by the answer"
    programs = [text.format(path=str(path)) for text in HOSTILE]
    assert score(pool, family, [answer, *programs], metadata) == [1.0] + [0.0] * len(programs)
    assert not path.exists()


def test_a_question_from_a_file_is_not_run_either(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "made by the question"
    assert score(pool, "bitwise_arithmetic", ["0x3"], {"problem": "(0x1 + 0x2)"}) == [1.0]
    assert score(pool, "bitwise_arithmetic", ["0x3"], {"problem": f"open({str(path)!r}, 'w')"}) == ["crash"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("3*(4 + 5) - 2/7", True),
        ("-x**2*exp(-3*x)/9 + C", True),
        ("2x + sin(x)*Abs(y)", True),
        ("x.real", False),
        ("x . real", False),
        ("x[0]", False),
        ("'x'", False),
        ("open(x)", False),
        ("1open(x)", False),
        ("ｏｐｅｎ(x)", False),
        ("_(x)", False),
        ("__import__", False),
        ("lambda: x", False),
        ("Integral(x, x)", False),  # of which sympy knows the derivative, whatever is integrated
    ],
)
def test_what_may_be_evaluated_as_an_expression(text: str, plain: bool) -> None:
    assert is_expression(text) is plain


def test_what_else_may_be_evaluated() -> None:
    assert calls_nothing("[[1, 0], ['a', \"b\"]]")
    assert not calls_nothing("f ()")
    assert is_bit_arithmetic("((0x1f + 0xA0) << 3) & ~7")
    assert not is_bit_arithmetic("print(1)")


def test_every_family_that_evaluates_is_known() -> None:
    """The sources of the installed version are searched, without running them."""
    package = Path(str(importlib.util.find_spec("reasoning_gym").origin)).parent  # type: ignore[union-attr]
    scorers = {
        file.stem: body
        for file in package.rglob("*.py")
        if (body := file.read_text(encoding="utf-8").partition("def score_answer")[2].partition("\n    def ")[0])
    }
    assert len(scorers) > 50
    evaluating = {name for name, body in scorers.items() if "eval(" in body or "parse_expr(" in body}
    assert evaluating <= set(EVALUATED) | set(EVALUATED_OF_THE_QUESTION)
    assert set(EVALUATED) <= evaluating


# Refusals


@pytest.mark.parametrize(
    ("family", "settings", "complaint"),
    [
        ("chain_sums", {}, "has no family 'chain_sums'; the nearest is 'chain_sum'"),
        ("rush_hour", {}, "cannot be used: it states no answer"),
        ("chain_sum", {"parameters": {"terms": 3}}, "(the parameters are allow_negation, max_digits"),
        ("chain_sum", {"parameters": {"seed": 3}}, "'seed' is not a parameter of the family"),
        ("chain_sum", {"sizes": {"train": 0}}, "sizes are of train and test"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(family: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        Gym(family, **settings)
    assert complaint in str(error.value)


# All families

PARTS = 12


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_takes_its_own_answers_and_refuses_wrong_ones(part: int, pool: WorkerPool) -> None:
    """All but those that ``UNUSABLE`` names, and questions without a fair answer."""
    (names,) = pool.submit("teamtr.grading.gym:families", [{}])
    assert set(UNUSABLE) | set(EVALUATED) < set(names.value)
    for family in names.value[part::PARTS]:
        if family not in UNUSABLE:
            task = Gym(family, sizes={"test": 3}, seed=1)
            check(task)
            task.close()


@pytest.mark.slow
def test_unusable_families_are_still_so(pool: WorkerPool) -> None:
    """Should a later version mend them, they can be used."""
    for family in ("boxnet", "rush_hour"):
        with WorkerPool(1, 60.0) as maker:
            items = [{"seed": 0, "size": 3, "index": index} for index in range(3)]
            made = maker.submit("teamtr.grading.gym:entries", items, {"family": family, "parameters": {}})
        assert [result.value["answer"] for result in made] == [None] * 3
    assert score(pool, "game_of_life_halting", ["no idea"], {}, answer="False") == [1.0]
