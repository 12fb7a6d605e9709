"""Checks how cost grows with input size, in CPU time of this process, since wall-clock time depends on other work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def assert_linear(work: Callable[[str], object], text_of: Callable[[int], str], characters: int) -> None:
    """Asserts that four times the text costs less than ten times as much; quadratic work would cost sixteen times.

    The best of three alternating tries counts. The allowance of 0.03 s is for work that costs almost nothing: quadratic
    work on hundreds of thousands of characters takes many seconds, even within one string method. Garbage collection is
    off meanwhile, since its cost depends on what other tests have left in memory.
    """
    texts = text_of(characters // 4), text_of(characters)
    spent: tuple[list[float], list[float]] = [], []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            for text, times in zip(texts, spent, strict=True):
                started = time.process_time()
                work(text)
                times.append(time.process_time() - started)
    finally:
        if collecting:
            gc.enable()
    small, large = map(min, spent)
    assert large < 10 * small + 0.03, f"{small:.3f} s for {characters // 4} characters, {large:.3f} s for {characters}"
