"""The strings on which two tokenizers are compared: the team's own, from all that there are, and difficult ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from made_run import made_batch, made_run
from teamtr.chat.tokenizers import adversarial, compare_tokenizers
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.randomness import generator
from teamtr.swap import compared_strings, run_strings
from teamtr.swap.strings import DIFFICULT, FILES, spread

AGENTS = ("left", "right", "speaker")


def stored(folder: Path, stages: int) -> Path:
    """A run of which every kept batch says words of its own."""
    batches = [made_batch(AGENTS, problems=2, group=2, said=f"batch {k} ") for k in range(3 * stages)]
    return made_run(folder, stages=stages, batches=batches)


def test_a_thousand_of_the_teams_own_spread_over_all_and_every_difficult_one_after_them():
    own = [f"context {k}" for k in range(3000)]
    strings = compared_strings(own)
    assert len(strings) == 1000 + DIFFICULT
    places = [int(string.split()[1]) for string in strings[:1000]]
    assert places[0] == 0
    assert places[-1] == 2999
    assert all(2 <= after - before <= 4 for before, after in itertools.pairwise(places))
    difficult = strings[1000:]
    assert difficult == adversarial(generator(0, "strings"), DIFFICULT)
    for sign in ("<think>", "数学", "  ", '"arguments"', "\t"):
        assert any(sign in string for string in difficult), sign


@pytest.mark.parametrize("count", [0, 1, 999, 1000])
def test_few_of_its_own_are_all_there_and_so_are_the_difficult_ones(count):
    own = [f"context {k}" for k in range(count)]
    strings = compared_strings(own)
    assert strings[:count] == own
    assert len(strings) == count + DIFFICULT == count + 1000


def test_a_runs_own_strings_are_of_its_first_and_of_its_last_conversations(tmp_path):
    few = run_strings(stored(tmp_path / "few", 2))
    assert len(set(few)) == len(few)
    assert {k for k in range(6) if any(f"batch {k} " in string for string in few)} == set(range(6))
    many = run_strings(stored(tmp_path / "many", 10))
    read = sorted(k for k in range(30) if any(f"batch {k} " in string for string in many))
    assert len(read) == FILES
    assert (read[0], read[-1]) == (0, 29)
    assert max(after - before for before, after in itertools.pairwise(read)) == 2


@pytest.mark.long
def test_the_same_tokenizer_is_identical(tmp_path):
    own = run_strings(stored(tmp_path / "run", 1))
    assert len(own) > 10
    found = compare_tokenizers(character_tokenizer(), character_tokenizer(), compared_strings(own))
    assert found.identical
    assert found.same == found.strings == len(own) + DIFFICULT


def test_spread_takes_no_item_twice():
    for size in (1, 7, 10, 11, 19, 1000):
        taken = spread(range(size), 10)
        assert len(set(taken)) == len(taken) == min(size, 10)
        assert (taken[0], taken[-1]) == (0, size - 1)


def test_difficult_strings_are_of_many_kinds_and_named_by_their_seed():
    strings = adversarial(generator(0, "x"), 200)
    assert strings == adversarial(generator(0, "x"), 200)
    assert len(set(strings)) > 180
    for sign in ("  ", "数学", "<think>", '"arguments"', "\t", "0"):
        assert any(sign in s for s in strings), sign
