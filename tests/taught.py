"""Caches trained tiny bases, one per message form, as for every user (``teamtr.session.taught``).

Dozens of tests build the same small team, and would spend most of their time on its warm-up. Tests of the warm-up
itself, and of runs that must repeat it, use ``teaching_for_real``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teamtr.store.cache import OFF, VARIABLE


def remember_teaching(folder: Path) -> None:
    """From now on, cache trained bases in this folder, in this process and those that it starts."""
    os.environ[VARIABLE] = str(folder)


@contextmanager
def teaching_for_real() -> Iterator[None]:
    before = os.environ[VARIABLE]
    os.environ[VARIABLE] = OFF
    try:
        yield
    finally:
        os.environ[VARIABLE] = before
