"""The user's cache folder: what can be made anew at any time, named by a hash of everything that makes it.

``TEAMTR_CACHE`` names another folder, and ``TEAMTR_CACHE=off`` keeps nothing. What is damaged is as good as missing.
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
"""Files of one kind; whoever adds one removes the oldest beyond that."""

KERNELS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""The variables by which torch and triton are told where compiled kernels lie, and where they lie in our folder."""

log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Where this user's cache is; None where it is switched off, or where the user has no home, which is told."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() == OFF:
        return None
    home = os.environ.get("XDG_CACHE_HOME", "")
    # An XDG path that is not absolute is to be ignored (XDG Base Directory Specification).
    place = Path(said) if said else (Path(home) if os.path.isabs(home) else Path("~/.cache")) / "teamtr"
    try:
        return place.expanduser().absolute()
    except RuntimeError:  # as in a container whose user is a number and nothing else
        log.warning("nothing is kept for the next run: %s has no home folder (set %s=FOLDER)", place, VARIABLE)
        return None


def keep_kernels() -> None:
    """Kernels that torch and triton compile from now on are kept here, unless the environment says where. Their own
    place is the folder for temporary files, which a restart, or the end of a job, empties; there they stay where ours
    cannot be written, for compiling would fail."""
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
    """What was kept under this key; None where nothing is, or where it is damaged, which is told."""
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
    """Keep it for the next run. A cache that cannot be written costs time and nothing else: it is told."""
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
    """Other processes may be at it too: what is gone is no error."""
    changed: dict[Path, float] = {}
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            changed[file] = file.stat().st_mtime
    for file in sorted(changed, key=changed.__getitem__)[:-KEPT]:
        file.unlink(missing_ok=True)
