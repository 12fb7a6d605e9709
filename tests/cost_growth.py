"""How a cost grows with its input, told in CPU time of this process: no clock on the wall, which other work slows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def assert_linear(work: Callable[[str], object], text_of: Callable[[int], str], characters: int) -> None:
    """Four times the text costs about four times as much; what is quadratic costs sixteen times as much.

    The best of three tries each, in turn. The thirtieth of a second is for what costs next to nothing: a quadratic law
    over hundreds of thousands of characters takes many seconds, even in one of the string methods. The collector
    waits meanwhile: what it costs depends on all that other tests have left in memory.
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
