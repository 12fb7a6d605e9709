"""Sampling with transformers' own KV cache, on any device: all rows of a batch token by token, until the last one
ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from teamtr.answers import Sample
from teamtr.engines.policy import Head
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.attention import text_config
from teamtr.engines.transfer import send
from teamtr.ports import Follow, Heard, unfollowed
from teamtr.progress import Work, working
from teamtr.types import Finish, Floats, Ids


@dataclass(frozen=True)
class PlainSampler:
    """Samples a batch of prompts. ``body`` is the decoder, which returns hidden states; ``head`` gives the layer that
    maps them to logits. Without ``pads`` padding would be read: prompts of one length are sampled at a time, and
    identical ones do not share a prefill. ``keep`` is called for each message with the prompt, the message, and the
    features that its tokens were drawn from, [T, H]."""

    causal_lm: Any
    device: torch.device
    body: Callable[..., Any]
    head: Callable[[], Head]
    temperature: float
    end_ids: frozenset[int]
    pads: bool
    keep: Callable[[Ids, Ids, Tensor], None] | None = None

    def sample(
        self, prompts: Sequence[Ids], noise_BT: Floats, drawing: TokenSampler, heard: Heard, follow: Follow
    ) -> list[Sample]:
        if self.pads:
            return self._in_lockstep(prompts, noise_BT, drawing, heard, follow)
        found: dict[int, Sample] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            rows = [b for b, prompt in enumerate(prompts) if len(prompt) == length]
            own = [prompts[b] for b in rows]
            told = partial(_told_as, heard, rows)
            following = follow if follow is unfollowed else partial(_followed_as, follow, rows)
            drawn = self._in_lockstep(own, noise_BT[rows], drawing, told, following)
            found.update(zip(rows, drawn, strict=True))
        return [found[b] for b in range(len(prompts))]

    def _in_lockstep(
        self, prompts: Sequence[Ids], noise_BT: Floats, drawing: TokenSampler, heard: Heard, follow: Follow
    ) -> list[Sample]:
        with working("tokens", noise_BT.size, "tokens") as work:
            return self._decode(prompts, noise_BT, drawing, heard, follow, work)

    def _decode(
        self,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        drawing: TokenSampler,
        heard: Heard,
        follow: Follow,
        work: Work,
    ) -> list[Sample]:
        """Decodes all prompts token by token; identical prompts are prefilled once, if the cache can be copied."""
        from transformers import DynamicCache

        self.causal_lm.eval()
        max_tokens = noise_BT.shape[1]
        slots: dict[bytes, int] = {}
        names = [p.tobytes() if self.pads else str(b).encode() for b, p in enumerate(prompts)]
        slot_B = [slots.setdefault(name, len(slots)) for name in names]
        unique = {s: p for p, s in zip(prompts, slot_B, strict=True)}
        ids_UL, mask_UL, position_UL = pad_batch([unique[s] for s in range(len(slots))], "left", self.device)
        cache = DynamicCache(config=text_config(self.causal_lm))
        hidden_UH = self.body(
            input_ids=ids_UL, attention_mask=mask_UL, position_ids=position_UL, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        pick_B = torch.tensor(slot_B, device=self.device)
        if len(slots) < len(prompts):
            cache.batch_select_indices(pick_B)
        hidden_BH, mask_BL, position_B = hidden_UH[pick_B], mask_UL[pick_B], position_UL[pick_B, -1]

        head = self.head()
        uniform_BT = torch.tensor(np.nan_to_num(noise_BT), device=self.device)
        ends = torch.tensor(sorted(self.end_ids), device=self.device)
        open_B = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        features: list[Tensor] = []
        samples: dict[int, Sample] = {}

        def end(rows_B: Tensor, finish: Finish) -> None:
            for row, sample in _written(rows_B, tokens, scores, finish):
                samples[row] = sample
                if self.keep is not None:
                    self.keep(prompts[row], sample.token_ids, torch.stack([hidden_BH[row] for hidden_BH in features]))
                heard(row, sample)

        speaking = len(prompts)
        for u in range(max_tokens):
            ids_B, logp_B = drawing(head(hidden_BH) * self.temperature, uniform_BT[:, u])
            work.advance(speaking)
            tokens.append(ids_B)
            scores.append(logp_B)
            if self.keep is not None:
                features.append(hidden_BH)
            stops_B = open_B & torch.isin(ids_B, ends)
            unwanted_B = None if follow is unfollowed else _unwanted(follow, open_B, u, ids_B) & ~stops_B
            end(stops_B, "stop")
            open_B = open_B & ~stops_B
            if unwanted_B is not None:
                end(unwanted_B, "length")
                open_B = open_B & ~unwanted_B
            speaking = int(open_B.sum())
            if u + 1 == max_tokens or not speaking:
                break
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(prompts), 1)], dim=1)
            position_B = position_B + open_B  # one that has ended may have no further position
            hidden_BH = self.body(
                input_ids=ids_B[:, None],
                attention_mask=mask_BL,
                position_ids=position_B[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        end(open_B, "length")
        return [samples[row] for row in range(len(prompts))]


def _written(
    rows_B: Tensor, tokens: Sequence[Tensor], scores: Sequence[Tensor], finish: Finish
) -> Iterator[tuple[int, Sample]]:
    """The samples of these rows, of all tokens so far."""
    rows = rows_B.nonzero().squeeze(-1)
    if not len(rows):
        return
    ids = torch.stack([ids_B[rows] for ids_B in tokens], 1).cpu().numpy().astype(np.int32)
    logp = torch.stack([logp_B[rows] for logp_B in scores], 1).float().cpu().numpy()
    yield from ((row, Sample(ids[k], logp[k], finish)) for k, row in enumerate(rows.tolist()))


def _unwanted(follow: Follow, open_B: Tensor, before: int, ids_B: Tensor) -> Tensor:
    """Reports the next token of every open row to ``follow``; returns which rows are not wanted any more."""
    left_B = torch.zeros_like(open_B)
    ids = ids_B.cpu().numpy().astype(np.int32)
    for row in open_B.nonzero().squeeze(-1).tolist():
        left_B[row] = not follow(row, before, ids[row : row + 1])
    return left_B


def _told_as(heard: Heard, rows: Sequence[int], place: int, sample: Sample) -> None:
    heard(rows[place], sample)


def _followed_as(follow: Follow, rows: Sequence[int], place: int, before: int, token_ids: Ids) -> bool:
    return follow(rows[place], before, token_ids)


def pad_batch(
    rows: Sequence[Ids], side: Literal["left", "right"], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, positions). Mask and positions are computed from lengths, never from the padded ids."""
    longest = max(len(r) for r in rows)
    ids_BL = np.zeros((len(rows), longest), dtype=np.int64)
    mask_BL = np.zeros((len(rows), longest), dtype=np.int64)
    for b, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids_BL[b, where] = row
        mask_BL[b, where] = 1
    position_BL = np.maximum(mask_BL.cumsum(1) - 1, 0)
    return send(ids_BL, device), send(mask_BL, device), send(position_BL, device)
