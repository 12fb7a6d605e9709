"""Hashes that identify weights and configurations. Weights are hashed where the tensors are: names, shapes and bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from teamtr.engines.slices import first_element, is_spread, own, summed

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOT_COMPUTED_WITH = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "auto_map"}
_FACTORS = (-7046029254386353131, -4417276706812531889)
KEPT_LENGTH = 1 << 14
"""For tensors of at most this many words, the factors of the places are cached (8 MB at most). A tiny model is hashed
several times in every update, and computing the factors would take half of that time."""
CHUNK, CPU_CHUNK = 1 << 22, 1 << 15
"""Words processed at once: many on a GPU; on a CPU few enough that intermediates stay in a core's cache and that torch
does not split the work over threads itself."""


def hash_tensors(tensors: Mapping[str, Tensor], salt: str = "", like: Mapping[str, Tensor] | None = None) -> str:
    """A hash of names, shapes and bits, the same on every device and computed where the tensors are. Of partitioned
    tensors every rank hashes its own rows, and all ranks obtain the hash of the whole. ``like``: for tensors that are
    partitioned like some weight, that weight, by the tensors' names."""
    digest = hashlib.blake2b(salt.encode(), digest_size=16)
    layouts = {name: (like or {}).get(name, tensor) for name, tensor in tensors.items()}
    here = {name: own(tensor.detach()) for name, tensor in tensors.items()}
    alike: dict[tuple[torch.dtype, int, torch.device, int], list[str]] = {}
    for name in sorted(tensors):
        part = here[name]
        alike.setdefault((part.dtype, part.numel(), part.device, first_element(layouts[name])), []).append(name)
    folds: dict[str, list[int]] = {}
    for (*_, first), names in alike.items():
        folds.update(zip(names, _folds([here[name] for name in names], first).tolist(), strict=True))
    if spread := [name for name in sorted(tensors) if is_spread(layouts[name])]:
        folds.update(zip(spread, summed(torch.tensor([folds[name] for name in spread])).tolist(), strict=True))
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(layouts[name].shape)} {folds[name]}".encode())
    return digest.hexdigest()


def hash_config(config: Any, end_ids: Iterable[int]) -> str:
    """A hash of a model's configuration and of the tokens that end a message. Settings count only where they differ
    from the defaults of the config's class, because a newer transformers may have more settings."""
    said = {key: value for key, value in config.to_diff_dict().items() if key not in NOT_COMPUTED_WITH}
    text = json.dumps([said, sorted(end_ids)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folds(tensors: Sequence[Tensor], first_place: int = 0) -> Tensor:
    """Two sums for each of the equally long tensors, modulo 2^64: over all words, times odd factors that depend on the
    place. An adapter has hundreds of small tensors, so those of one size are processed together. Large ones are summed
    in spans of places, whose order does not matter, by as many threads as torch may use."""
    words = [t.contiguous().reshape(-1).view(_WORDS[t.element_size()]) for t in tensors]
    length, on_cpu = len(words[0]), words[0].device.type == "cpu"
    chunk = CPU_CHUNK if on_cpu else CHUNK
    threads = torch.get_num_threads() if on_cpu else 1
    if threads == 1 or length < 8 * threads * chunk:
        return _span_folds(words, range(0, length, chunk), first_place)
    step = chunk * -(-length // (8 * threads * chunk))
    spans = [range(start, min(start + step, length), chunk) for start in range(0, length, step)]
    with ThreadPoolExecutor(threads) as pool:
        return torch.stack(list(pool.map(lambda span: _span_folds(words, span, first_place), spans))).sum(0)


def _span_folds(words: Sequence[Tensor], starts: range, first_place: int) -> Tensor:
    """The contribution of the chunks that begin at these places to the sums."""
    length, chunk, device = len(words[0]), starts.step, words[0].device
    at_once = max(1, chunk // max(1, length))
    factors_of = _kept_factors if length <= KEPT_LENGTH else _factors
    sums = torch.zeros(len(words), 2, dtype=torch.int64, device=device)
    for start in starts:
        factors = factors_of(first_place + start, min(chunk, length - start), device)
        of_ones = [(k + 1) * factors[k].sum() for k in range(2)]  # k + 1 is added to every word
        for first in range(0, len(words), at_once):
            some = torch.stack([w[start : start + chunk].long() for w in words[first : first + at_once]])
            for k in range(2):
                sums[first : first + at_once, k] += (some * factors[k]).sum(1) + of_ones[k]
    return sums


def _factors(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two odd factors for each of ``count`` places, starting at ``first``."""
    place, factors = torch.arange(first + 1, first + count + 1, device=device), []
    for k in range(2):
        factor = place * _FACTORS[k]
        factor.bitwise_xor_(factor >> 29).mul_(_FACTORS[1 - k])
        factors.append(factor.bitwise_xor_(factor >> 32).bitwise_or_(1))
    return factors[0], factors[1]


_kept_factors = lru_cache(maxsize=32)(_factors)
