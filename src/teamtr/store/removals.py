"""Folders that nobody finds any more are removed in a thread of their own: a file system may take longer to free a few
files than to write them, and nothing waits for it.

A folder is out of the way before it comes here (``atomic.set_aside``): a process that dies meanwhile leaves a leftover.
"""

from __future__ import annotations

import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from teamtr.store.atomic import explained


class Removals:
    """One after the other, in the order in which they were begun."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="removing")
        self._begun: deque[tuple[Path, Future[None]]] = deque()

    def begin(self, folder: Path) -> None:
        self._begun.append((folder, self._thread.submit(shutil.rmtree, folder)))

    def finish(self) -> None:
        """Wait until all are gone. Raises StoreError where one could not be removed."""
        while self._begun:
            folder, removed = self._begun.popleft()
            with explained(folder):
                removed.result()

    def end(self) -> None:
        """Wait, and raise nothing: what could not be removed is a leftover."""
        self._thread.shutdown()
