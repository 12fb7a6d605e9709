"""The sampler's kernels in plain torch: its CPU path, and the reference that the kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from teamtr.engines.paged.work_split import Together
from teamtr.engines.torch.rotation import Rotation


def gather_pages(pool: Tensor, table_P: Tensor, length: int) -> Tensor:
    """The first ``length`` keys or values of one row, [kv heads, length, dim]."""
    pages = pool[table_P.long()]  # [P, K, PAGE, D]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def decode_attention(
    query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, key_pool: Tensor, value_pool: Tensor,
    table_NP: Tensor, length_N: Tensor, scale: float, rotation: Rotation | None = None,
    together: Together | None = None,
) -> Tensor:  # fmt: skip
    """``together`` is ignored: it changes how pages are read, not what is computed."""
    if rotation is not None:
        query_NHD, key_NKD = rotation.query(query_NHD), rotation.key(key_NKD)
    page = key_pool.shape[2]
    here_N = table_NP.gather(1, (length_N // page).long()[:, None]).squeeze(1).long()
    slot_N = (length_N % page).long()
    key_pool[here_N, :, slot_N] = key_NKD.to(key_pool.dtype)
    value_pool[here_N, :, slot_N] = value_NKD.to(value_pool.dtype)
    out = torch.empty_like(query_NHD)
    for n, past in enumerate(length_N.tolist()):
        keys, values = (gather_pages(pool, table_NP[n], past + 1) for pool in (key_pool, value_pool))
        out[n] = scaled_dot_product_attention(
            query_NHD[n][:, None], keys.to(query_NHD.dtype), values.to(query_NHD.dtype), scale=scale, enable_gqa=True
        ).squeeze(1)
    return out


def rotate_into_pages(
    query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rotation: Rotation, key_pool: Tensor, value_pool: Tensor,
    page_N: Tensor, slot_N: Tensor,
) -> Tensor:  # fmt: skip
    key_pool[page_N, :, slot_N] = rotation.key(key_NKD).to(key_pool.dtype)
    value_pool[page_N, :, slot_N] = value_NKD.to(value_pool.dtype)
    return rotation.query(query_NHD)


def prefill_attention(
    query_NHD: Tensor, key_pool: Tensor, value_pool: Tensor, table_RP: Tensor, blocks: Tensor, scale: float
) -> Tensor:
    out = torch.empty_like(query_NHD)
    for row, first, count, position in blocks.T.tolist():
        query = query_NHD[first : first + count].transpose(0, 1)
        keys, values = (gather_pages(p, table_RP[row], position + count) for p in (key_pool, value_pool))
        seen = torch.arange(position + count)[None] <= position + torch.arange(count)[:, None]
        attended = scaled_dot_product_attention(
            query, keys.to(query.dtype), values.to(query.dtype), attn_mask=seen.to(query.device), scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        out[first : first + count] = attended.transpose(0, 1)
    return out
