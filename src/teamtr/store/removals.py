"""Removes folders in a background thread: a file system may take longer to free a few files than to write them.

A folder is renamed before it comes here (``atomic.set_aside``), so a process that dies meanwhile leaves a leftover that
readers ignore.
"""

from __future__ import annotations

import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from teamtr.store.atomic import explained


class Removals:
    """Removes folders one after the other, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="removing")
        self._begun: deque[tuple[Path, Future[None]]] = deque()

    def begin(self, folder: Path) -> None:
        self._begun.append((folder, self._thread.submit(shutil.rmtree, folder)))

    def finish(self) -> None:
        """Wait until all are removed. Raises StoreError if one could not be removed."""
        while self._begun:
            folder, removed = self._begun.popleft()
            with explained(folder):
                removed.result()

    def end(self) -> None:
        """Wait, without raising: what could not be removed is a leftover."""
        self._thread.shutdown()
