"""The user's cache folder, for data that can be recomputed at any time; a key is a hash of all inputs.

``TEAMTR_CACHE`` names another folder, and ``TEAMTR_CACHE=off`` turns the cache off. A damaged entry is a cache miss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from teamtr.store.atomic import StoreError, remove_leftovers, write_atomic

VARIABLE = "TEAMTR_CACHE"
OFF = "off"
KEPT = 200
"""Maximum number of files of one kind; adding one removes the oldest beyond that."""

KERNELS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""The variables that set the kernel caches of torch and triton, and the names of these caches in our folder."""

log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The user's cache folder; None if the cache is off, or, with a warning, if the user has no home folder."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() == OFF:
        return None
    home = os.environ.get("XDG_CACHE_HOME", "")
    # An XDG path that is not absolute is to be ignored (XDG Base Directory Specification).
    place = Path(said) if said else (Path(home) if os.path.isabs(home) else Path("~/.cache")) / "teamtr"
    try:
        return place.expanduser().absolute()
    except RuntimeError:  # as in a container whose user has only a numeric id
        log.warning("nothing is kept for the next run: %s has no home folder (set %s=FOLDER)", place, VARIABLE)
        return None


def keep_kernels() -> None:
    """Keep the kernels that torch and triton compile from now on in this cache, unless the environment sets another
    folder. Their default is the folder for temporary files, which is emptied by a restart or at the end of a job. It
    remains in use if our folder is not writable, because compiling would fail there."""
    unset = [variable for variable in KERNELS if variable not in os.environ]
    folder = cache_folder() if unset else None
    if folder is None:
        return
    for variable in unset:
        place = folder / KERNELS[variable]
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                os.environ[variable] = str(place)
        except OSError as error:
            log.warning(
                "compiled kernels are not kept for the next run: %s (%s=FOLDER puts them elsewhere)", error, VARIABLE
            )


def cached(kind: str, key: str) -> bytes | None:
    """The data stored under this key; None if there is none, or, with a warning, if it is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    file = folder / kind / key
    try:
        body = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): made anew", file, error.strerror)
        return None
    digest, data = body[:32], body[32:]
    if hashlib.sha256(data).digest() != digest:
        log.warning("%s is damaged (its sha256 differs): made anew", file)
        return None
    return data


def keep(kind: str, key: str, data: bytes) -> None:
    """Store data for the next run. If the cache cannot be written, there is only a warning."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        write_atomic(folder / kind / key, hashlib.sha256(data).digest() + data)
        remove_leftovers(folder / kind, recursive=False)
        _drop_oldest(folder / kind)
    except (StoreError, OSError) as error:
        log.warning("not kept for the next run: %s (%s=%s keeps nothing)", error, VARIABLE, OFF)


def _drop_oldest(folder: Path) -> None:
    """Other processes may be doing the same, so a missing file is no error."""
    changed: dict[Path, float] = {}
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            changed[file] = file.stat().st_mtime
    for file in sorted(changed, key=changed.__getitem__)[:-KEPT]:
        file.unlink(missing_ok=True)
