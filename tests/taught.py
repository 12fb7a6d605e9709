"""The tiny base is taught once for each form and kept, as it is for every user (``teamtr.session.taught``).

Dozens of tests build the same small team, and most of their time went into teaching it anew. The tests of teaching
itself, and of a run that must repeat it, ask for ``teaching_for_real``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teamtr.store.cache import OFF, VARIABLE


def remember_teaching(folder: Path) -> None:
    """From now on, in this process and those that it starts: bases that were taught are kept in this folder."""
    os.environ[VARIABLE] = str(folder)


@contextmanager
def teaching_for_real() -> Iterator[None]:
    before = os.environ[VARIABLE]
    os.environ[VARIABLE] = OFF
    try:
        yield
    finally:
        os.environ[VARIABLE] = before
