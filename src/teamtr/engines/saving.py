"""The stored state of a learner: captured at one moment, written at another.

Errors of the operating system while models are written are raised as the OSError that every other writer raises.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from teamtr.engines.hashing import hash_tensors

OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_FILE = "critic.safetensors"
"""The file of an agent's critic in a checkpoint, beside its weights and its optimizer."""

_NUMBER = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
"""How libraries written in Rust (safetensors, tokenizers) spell an operating system's error number in a message."""


@dataclass(frozen=True)
class LearnerFiles:
    """A learner's state, all in host memory, where another thread can read it; the learner must not change before it is
    written. ``version`` is that of the weights, which ``write_weights`` writes. ``critic``: None without one."""

    version: str
    write_weights: Callable[[Path], None]
    moments: Mapping[str, Tensor]
    counters: Mapping[str, Tensor]
    critic: Mapping[str, Tensor] | None

    def fingerprint(self) -> str:
        critic = None if self.critic is None else hash_tensors(self.critic)
        return fingerprint_of(self.version, hash_tensors(self.moments), self.counters, critic)

    def save(self, folder: Path) -> None:
        with raising_os_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self.write_weights(folder)
            optimizer = {name: moment.contiguous() for name, moment in self.moments.items()} | dict(self.counters)
            save_file(optimizer, folder / OPTIMIZER_FILE)
            if self.critic is not None:
                save_file({name: tensor.contiguous() for name, tensor in self.critic.items()}, folder / CRITIC_FILE)


def fingerprint_of(version: str, moments: str, counters: Mapping[str, Tensor], critic: str | None) -> str:
    """A hash of a learner's stored state, from the hashes of its parts."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(version.encode())
    digest.update(moments.encode())
    digest.update(json.dumps([float(x) for x in counters.values()]).encode())
    if critic is not None:
        digest.update(critic.encode())
    return digest.hexdigest()


def files_of(save: Callable[[str], object]) -> dict[str, bytes]:
    """The files that ``save`` writes into a folder, by relative name."""
    with raising_os_errors(), tempfile.TemporaryDirectory() as made:
        save(made)
        files = [path for path in sorted(Path(made).rglob("*")) if path.is_file()]
        return {path.relative_to(made).as_posix(): path.read_bytes() for path in files}


def put_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)


@contextmanager
def raising_os_errors() -> Iterator[None]:
    """Converts a full disk and other system errors inside safetensors or tokenizers to an OSError with its number,
    which the owner of the file explains."""
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
