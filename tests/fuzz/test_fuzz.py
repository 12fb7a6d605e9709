"""A hundred inputs and more for every reader: none raises what is not ours. ``make fuzz`` gives each 100,000, and looks
at the cost as well."""

from __future__ import annotations

import time

import pytest

from fuzz.driver import Outcome, Reader, inputs, try_reader
from fuzz.readers import readers

READERS = {reader.name: reader for reader in readers()}
INPUTS = 150


@pytest.mark.parametrize("name", READERS)
def test_no_input_makes_a_reader_raise_what_is_not_ours(name: str) -> None:
    outcome = try_reader(READERS[name], INPUTS, timed=False)
    assert outcome.inputs >= INPUTS
    assert [(failure["why"], failure["text"][:80]) for failure in outcome.failures] == []


def test_inputs_are_always_the_same() -> None:
    for reader in READERS.values():
        assert list(inputs(reader, 60, seed=1)) == list(inputs(reader, 60, seed=1))
    assert list(inputs(READERS["json"], 60, seed=1)) != list(inputs(READERS["json"], 60, seed=2))


def fuzzed(read, **options) -> Outcome:
    return try_reader(Reader("r", "r", read, ("seed",), ("a", "(")), 50, **options)


@pytest.mark.long
def test_the_driver_sees_what_is_not_ours_and_what_is_slow() -> None:
    def raises(text: str) -> None:
        if "a" in text:
            raise RecursionError("too deep")

    def burns(text: str) -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    assert 0 < len(fuzzed(raises).failures) < 50
    assert "RecursionError: too deep" in fuzzed(raises).failures[0]["why"]
    slow = try_reader(Reader("r", "r", burns, ("seed",), ("a",)), 3)
    assert "ms for" in slow.failures[0]["why"]
    assert try_reader(Reader("r", "r", burns, ("seed",), ("a",)), 3, timed=False).failures == []
    assert fuzzed(str.strip).failures == []
