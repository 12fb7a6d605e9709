"""What this machine offers a run, and what will be slower, weaker or missing here, with the reason and the remedy."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from teamtr.engines.paged.pool import has_kernels
from teamtr.errors import first_line
from teamtr.grading.sandbox.client import WALLS, Sandbox
from teamtr.ports import GB
from teamtr.session.environment import LIBRARIES
from teamtr.session.processes import usable_cores
from teamtr.text import counted
from teamtr.version import __version__

LITTLE_DISK_GB = 5.0
"""Less than this is reported: checkpoints of a small team with adapters fill it within a run."""
EXTRAS = {
    "gym": ("reasoning_gym", "tasks gym:NAME"),
    "hub": ("datasets", "data sets by hub id"),
    "parquet": ("pyarrow", ".parquet files"),
    "plot": ("matplotlib", "teamtr figures and teamtr lab --figure"),
    "tensorboard": ("tensorboard", "a tracker"),
    "wandb": ("wandb", "a tracker"),
    "mlflow": ("mlflow", "a tracker"),
    "trackio": ("trackio", "a tracker"),
    "ray": ("ray", "teams over several processes"),
    "mcp": ("mcp", "tools of MCP servers"),
}
"""By the extra's name: the module that it installs, and its purpose."""
NVIDIA = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Finding:
    """One finding about the machine. ``degraded`` says what is worse here, why, and what to do; None means nothing
    is."""

    area: str
    what: str
    found: str
    degraded: str | None = None


def examine(folder: Path) -> list[Finding]:
    """All findings, in the order in which they are printed. ``folder`` is where runs would be written."""
    return [*_versions(), *_extras(), *_devices(), *_kernels(), *_sandbox(), *_disk(folder)]


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "teamtr", __version__)
    yield Finding("versions", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in LIBRARIES:
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("versions", name, "not installed", f"{name} is missing: install teamtr anew with pip")
            continue
        yield Finding("versions", name, f"{found} ({_build()})" if name == "torch" else found)


def _build() -> str:
    """What this torch was built for."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "ROCm" if getattr(torch.version, "hip", None) else "CPU build"


def _extras() -> Iterator[Finding]:
    for extra, (module, use) in EXTRAS.items():
        there = find_spec(module) is not None
        absent = f"not installed; for {use}: pip install 'teamtr[{extra}]'"
        yield Finding("extras", extra, "installed" if there else absent)


def _devices() -> Iterator[Finding]:
    cores, threads = counted(usable_cores(), "core"), counted(torch.get_num_threads(), "thread")
    yield Finding("devices", "CPU", f"{cores} usable, {threads} by torch")
    if (memory := memory_bytes()) is not None:
        yield Finding("devices", "memory", f"{memory / GB:.1f} GB available")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            free, whole = torch.cuda.mem_get_info(number)
            told = f"{card.name}, {free / GB:.1f} of {whole / GB:.1f} GB free, capability {card.major}.{card.minor}"
            yield Finding("devices", f"cuda:{number}", told)
        return
    why = None
    if NVIDIA.exists():
        why = "there is an NVIDIA card that torch cannot use, so that models run on the CPU: " + (
            "this torch is a CPU build; install a CUDA build (docs/install.md)"
            if torch.version.cuda is None
            else "its driver is missing or too old for this torch; `nvidia-smi` tells"
        )
    yield Finding("devices", "GPU", "none: models run on the CPU", why)


def memory_bytes() -> int | None:
    """Available memory in bytes, if the system reports it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _kernels() -> Iterator[Finding]:
    there = has_kernels()
    if not torch.cuda.is_available():
        yield Finding("kernels", "paged sampler", "on a GPU only; a CPU samples with plain torch")
    elif there:
        yield Finding("kernels", "paged sampler", "triton kernels")
    else:
        why = "without triton the GPU samples several times slower: install a CUDA build of torch, which brings it"
        yield Finding("kernels", "paged sampler", "plain torch", why)


def _sandbox(make: Callable[[], Sandbox] = Sandbox) -> Iterator[Finding]:
    """Try the isolation layers around code of datasets and models."""
    try:
        with make() as sandbox:
            missing = sandbox.missing()
    except Exception as error:  # whatever prevents its start
        why = f"code of datasets and models cannot be run ({first_line(error)[:200]}): autologi and its like fail"
        yield Finding("sandbox", "processes", "does not start", why)
        return
    for wall in WALLS:
        if wall in missing:
            why = f"untrusted code is kept in by limits and the other walls only; {missing[wall]}"
            yield Finding("sandbox", wall, "missing", why)
        else:
            yield Finding("sandbox", wall, "raised")


def _disk(folder: Path) -> Iterator[Finding]:
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for what, place in (("runs", folder), ("temporary files", Path(tempfile.gettempdir())), ("model cache", cache)):
        there = _existing(place)
        try:
            free = shutil.disk_usage(there).free / GB
        except OSError as error:
            yield Finding("disk", what, f"{place}: unknown", f"{place} cannot be looked at: {error.strerror}")
            continue
        why = None
        if free < LITTLE_DISK_GB:
            why = f"only {free:.1f} GB are free in {there}: a run that fills the disk stops until there is room again"
        yield Finding("disk", what, f"{place}: {free:.1f} GB free", why)
    yield _locks(_existing(folder))


def _existing(place: Path) -> Path:
    """The path itself, or the nearest existing folder above it."""
    return next(each for each in (place.absolute(), *place.absolute().parents) if each.is_dir())


def _locks(folder: Path) -> Finding:
    """Whether files can be locked there, which ensures that only one process writes a run."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        told = os.strerror(error.errno or errno.EIO)
        why = f"no run can be written in {folder} ({told}): train where you may write, on a file system with locks"
        return Finding("disk", "locks", "none", why)
    return Finding("disk", "locks", f"{folder}: fine")
