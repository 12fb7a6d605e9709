"""Refusals of the operating system while models are written, as the OSError that every other writer raises."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

_NUMBER = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
"""How libraries written in Rust (safetensors, tokenizers) spell the operating system's error in a text."""


@contextmanager
def raising_os_errors() -> Iterator[None]:
    """A full disk inside safetensors or tokenizers is an OSError with its number; whoever owns the file explains it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = _NUMBER.search(str(error))
        if found is not None:
            number = int(found[1] or found[2])
            raise OSError(number, os.strerror(number)) from error
        if isinstance(error, SafetensorError):
            raise OSError(errno.EIO, str(error)) from error
        raise
