"""A transformers model as a policy: a whole model, or one adapter on a base that the team shares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from teamtr.answers import Sample
from teamtr.engines.critic import LinearHead, ValueHead
from teamtr.engines.hashing import hash_config
from teamtr.engines.kept import Keep
from teamtr.engines.paged.buffers import NOBODY
from teamtr.engines.paged.jobs import Speaker
from teamtr.engines.paged.place import Paged
from teamtr.engines.paged.pool import SamplerPool
from teamtr.engines.paged.row_adapters import why_not
from teamtr.engines.paged.sampler import Server
from teamtr.engines.policy import Head, Policy, Precision, WriteTo
from teamtr.engines.sampling import PLAINLY, TokenSampler
from teamtr.engines.slices import is_spread, summed
from teamtr.engines.torch.attention import (
    Mixing,
    Packed,
    Unsupported,
    attending,
    goes_end_to_end,
    require_attention_alone,
    require_even_heads,
    text_config,
)
from teamtr.engines.torch.fused_lora import FusedLora
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.packing import Spread, pack
from teamtr.engines.torch.plain_sampling import PlainSampler, pad_batch
from teamtr.engines.torch.policy_files import PolicyFiles, belongs_to
from teamtr.engines.torch.products import are_small, without_onednn
from teamtr.engines.transfer import send
from teamtr.errors import UserError, first_line
from teamtr.ports import Follow, Heard, unfollowed, unheard
from teamtr.randomness import lengths_of, uniforms
from teamtr.types import Floats, Ids

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class TransformerPolicy(Policy):
    """A policy over ``model``, a causal LM of transformers. With ``adapter``, it is a PEFT model and only that adapter
    is trained; several policies then share one ``model`` and switch its active adapter before they compute.

    ``alike``: a policy of the same model that was made with a new adapter (which changes nothing) on the same layers.
    Its checks of the architecture are reused.

    The body runs in ``precision``; the head accumulates in float32 whatever its inputs, because rounding there alone
    can cost more KL than a radius.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        adapter: str | None = None,
        temperature: float = 1.0,
        precision: Precision = "fp32",
        base_version: str = "",
        serving: SamplerPool | None = None,
        fused: FusedLora | None = None,
        alike: TransformerPolicy | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.base_version = base_version
        self.temperature = temperature
        self.precision: str = "fp32"  # during the checks below
        self.causal_lm = model.get_base_model() if adapter else model
        self.device = next(self.causal_lm.parameters()).device
        self.end_ids = end_ids_of(self.causal_lm, tokenizer)
        self.config_version = hash_config(self.causal_lm.config, self.end_ids)
        self.serving = serving
        self.fused = fused
        self._layouts: ExitStack | None = None
        self._small = are_small(self.causal_lm)
        self.recomputes = False
        self.packs = True
        self._pads = True
        if alike is None:
            self._check()
        else:
            self.packs, self._pads, self.serving = alike.packs, alike._pads, alike.serving
        self.precision = precision

    @property
    def sampling_path(self) -> str:
        if self.serving is not None:
            return f"paged {self.serving.precision}"
        return f"plain {self.precision}"

    def frozen_half_bytes(self) -> int:
        """Memory of half-precision copies of the base's weights, kept beside the full ones when training uses them."""
        if self.fused is None or self.precision not in _HALF:
            return 0
        weights: list[Tensor] = []
        if not self.fused.spread:
            weights += [*(layer.weight for layer in self.fused.linears), *self.fused.unfused]
        if self.precision == "fp16":
            weights.append(self.causal_lm.get_output_embeddings().weight)
        return sum(2 * weight.numel() for weight in weights if weight.dtype == torch.float32)

    # -- weights ----------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters)

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Cached: a base with the adapters of a whole team has thousands of modules."""
        if self.adapter is None:
            return dict(self.model.named_parameters())
        return {k: p for k, p in self.model.named_parameters() if belongs_to(k, self.adapter)}

    def initial_parameters(self) -> dict[str, Tensor]:
        """An adapter that changes nothing equals its base, whatever its first factors were initialized to. They are
        zeros here, so that the same policy has one hash."""
        found = super().initial_parameters()
        if self.adapter is None:
            return found
        moved = torch.tensor([sum(int(t.count_nonzero()) for name, t in found.items() if ".lora_B." in name)])
        if any(map(is_spread, self.parameters().values())):
            moved = summed(moved)
        return found if int(moved) else {name: torch.zeros_like(tensor) for name, tensor in found.items()}

    @cached_property
    def model_parameters(self) -> int:
        return sum(p.numel() for name, p in self.causal_lm.named_parameters() if "lora_" not in name)

    @cached_property
    def _files(self) -> PolicyFiles:
        return PolicyFiles(self.model, self.tokenizer, self.adapter, self._parameters)

    def to_write(self, *, write: bool = True) -> WriteTo:
        return self._files.to_write(write=write)

    def load_weights(self, folder: Path) -> None:
        self._files.load(folder)

    def start_from(self, folder: Path) -> None:
        """Loads a stored adapter to start from. Raises ModelError if its tensors have other shapes."""
        self._files.start_from(folder)

    # -- computing --------------------------------------------------------------------------------------------

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Activates the adapter, sets the precision of matrix products, and keeps the layouts of packed batches in
        place for layers that the backward pass recomputes."""
        if self.adapter is not None and self.model.active_adapter != self.adapter:
            self.model.set_adapter(self.adapter)
        if self.fused is not None:
            self.fused.adapter = self.adapter or ""
            self.fused.dtype = self.dtype
        before = torch.backends.cuda.matmul.allow_tf32
        # float16 fits into TF32 without rounding, so a head over half-precision features loses nothing by it.
        torch.backends.cuda.matmul.allow_tf32 = self.precision != "fp32"
        outer = self._layouts
        try:
            with without_onednn(self._small and self.precision == "fp32"), ExitStack() as self._layouts:
                yield
        finally:
            self._layouts = outer
            torch.backends.cuda.matmul.allow_tf32 = before

    def _body(self, layout: Packed | None = None, **inputs: Any) -> Any:
        """The decoder's output; with a layout, for tokens packed end to end."""
        dtype = _HALF.get(self.precision) if self.fused is None or self.fused.unfused else None
        with ExitStack() as stack:
            if self._layouts is None:
                stack.enter_context(self.computing())
            if dtype:
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
            if self.fused is not None:
                stack.enter_context(self.fused.passing())
            if layout is None:
                return self.causal_lm.get_decoder()(**inputs)
            assert self._layouts is not None
            with ExitStack() as own:
                own.enter_context(attending(self.causal_lm, layout))
                found = self.causal_lm.get_decoder()(**inputs)
                self._layouts.push(own.pop_all())  # only a pass that succeeded is recomputed for its gradient
                return found

    @property
    def can_recompute(self) -> bool:
        return bool(getattr(self.causal_lm, "supports_gradient_checkpointing", False))

    def recompute_activations(self) -> bool:
        if self.recomputes or not self.can_recompute:
            return False
        self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers recomputes in training mode only, which must then differ from evaluation in nothing else.
        for module in self.causal_lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif getattr(module, "attention_dropout", 0.0):
                module.attention_dropout = 0.0
        self.recomputes = True
        return True

    def features(self, prompts: Sequence[Ids], messages: Sequence[Ids]) -> Tensor:
        if self.causal_lm.training != (self.recomputes and torch.is_grad_enabled()):  # train() is slow, unlike this
            self.causal_lm.train(not self.causal_lm.training)
        if not all(map(len, prompts)):
            raise UserError(
                "an empty prompt: there is no token before the message that its first one could follow from"
            )
        rows = [np.concatenate([p, m[:-1]]) for p, m in zip(prompts, messages, strict=True)]
        if self.packs:
            try:
                return self._packed_features(rows, prompts)
            except Unsupported as reason:
                self._leave_packing(reason)
        ids_BL, mask_BL, position_BL = pad_batch(rows, side="right", device=self.device)
        hidden_BLH = self._body(
            input_ids=ids_BL, attention_mask=mask_BL, position_ids=position_BL, use_cache=False
        ).last_hidden_state
        places = [b * hidden_BLH.shape[1] + np.arange(len(row)) for b, row in enumerate(rows)]
        return self._predicting(hidden_BLH.flatten(0, 1), places, prompts)

    def _packed_features(self, rows: Sequence[Ids], prompts: Sequence[Ids]) -> Tensor:
        packing = pack(rows)
        hidden_NH = self._body(
            Packed.of(packing, self.device, self.dtype),
            input_ids=send(packing.ids_N.astype(np.int64), self.device)[None],
            position_ids=send(packing.position_N, self.device)[None],
            use_cache=False,
        ).last_hidden_state[0]
        return self._predicting(hidden_NH, packing.rows, prompts)

    def _predicting(self, hidden_NH: Tensor, rows: Sequence[NDArray[np.int64]], prompts: Sequence[Ids]) -> Tensor:
        """The hidden states that predict message tokens, where row b is at ``rows[b]``."""
        places = np.concatenate([row[len(prompt) - 1 :] for row, prompt in zip(rows, prompts, strict=True)])
        return Spread.of(places, len(hidden_NH), self.device)(hidden_NH)

    def head(self) -> Head:
        layer = self.causal_lm.get_output_embeddings()
        return OutputLayer(layer.weight, layer.bias, self.temperature, self._half_of_head(layer.weight))

    def frozen_head(self) -> Head:
        layer = self.causal_lm.get_output_embeddings()
        trained = self.adapter is None
        weight = layer.weight.detach().clone() if trained else layer.weight
        bias = layer.bias.detach().clone() if trained and layer.bias is not None else layer.bias
        return OutputLayer(weight, bias, self.temperature, self._half_of_head(weight))

    def value_head(self) -> ValueHead:
        return LinearHead(self.causal_lm.get_output_embeddings().weight.shape[1], self.device)

    def _half_of_head(self, weight: Tensor) -> Tensor | None:
        """The head's weight in float16, if training with adapters uses it. The copy is cached, since the weight never
        changes. A weight stored in half precision is returned as it is and cast on the fly."""
        if self.fused is None or self.precision != "fp16" or self.device.type != "cuda" or weight.requires_grad:
            return None
        return self.fused.half_of(weight, torch.float16) if weight.dtype == torch.float32 else weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the body computes in."""
        return _HALF.get(self.precision, torch.float32)

    @property
    def end_to_end(self) -> bool:
        return self.packs and goes_end_to_end(self.device, self.dtype)

    @property
    def positions(self) -> int | None:
        room: int | None = getattr(text_config(self.causal_lm), "max_position_embeddings", None)
        return room

    def require_room(self, tokens: int) -> None:
        room = self.positions
        if room is not None and tokens > room:
            raise UserError(
                f"a prompt and its message need {tokens} tokens, but {type(self.causal_lm).__name__} has {room} "
                "positions; shorten max_tokens, the rounds or the problems"
            )
        rope = getattr(text_config(self.causal_lm), "rope_parameters", None) or {}
        steady = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and steady is not None and tokens > steady:
            raise UserError(
                f"a prompt and its message need {tokens} tokens; beyond {steady}, {type(self.causal_lm).__name__} "
                "turns all positions of a batch by other angles as soon as one sequence is that long, and "
                "log-probabilities depend on their company; shorten max_tokens, the rounds or the problems"
            )

    def _check(self) -> None:
        try:
            self._check_head()
            self._check_layouts()
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # anything that an unknown architecture raises
            raise UserError(self._why_not(error)) from error

    @torch.no_grad()
    def _check_head(self) -> None:
        """Raises UserError if the architecture scales or caps its logits after the head, for which ours would be wrong,
        or if a token attends to later ones, so that a message has no probability."""
        self.causal_lm.eval()
        ids = torch.tensor([[3, 2, 1, 0]], device=self.device)
        with self.computing():
            theirs = self.causal_lm(input_ids=ids).logits[0].float() / self.temperature
            ours = self.head()(self.causal_lm.get_decoder()(input_ids=ids).last_hidden_state[0])
            early = self.causal_lm(input_ids=ids[:, :2]).logits[0].float() / self.temperature
        if float((torch.log_softmax(theirs[:2], -1) - torch.log_softmax(early, -1)).abs().max()) > 1e-2:
            raise UserError(
                f"{type(self.causal_lm).__name__} reads what comes later as well: it does not write from left to right "
                "(some need is_decoder: true in their config)"
            )
        gap = float((torch.log_softmax(theirs, -1) - torch.log_softmax(ours, -1)).abs().max())
        if gap > 1e-2:
            raise UserError(
                f"{type(self.causal_lm).__name__} changes its logits after the output layer (difference {gap:.2g} "
                "nats); this architecture is not supported"
            )

    @torch.no_grad()
    def _check_layouts(self) -> None:
        """Packed rows, KV blocks and left padding need an architecture whose tokens interact in attention alone;
        otherwise falls back to paths without them."""
        try:
            with self.computing():
                listening = require_attention_alone(self.causal_lm)
        except Unsupported as reason:
            self._leave_packing(reason)
            if self.serving is not None:
                self._leave_serving(reason)
            if isinstance(reason, Mixing):
                self._pads = False
                self._check_cache()
            return
        if self.serving is not None:
            try:
                require_even_heads(listening, self.causal_lm)
            except Unsupported as reason:
                self._leave_serving(reason)

    def _why_not(self, error: Exception) -> str:
        remedy = "this architecture is not supported"
        if self.adapter is not None:
            remedy += " with adapters on these layers; name attention and MLP layers in lora.targets, or train: full"
        return f"{type(self.causal_lm).__name__} does not run ({type(error).__name__}: {first_line(error)}); {remedy}"

    def _leave_packing(self, reason: Unsupported) -> None:
        self.packs = False
        warnings.warn(
            f"{type(self.causal_lm).__name__} has {reason}: batches are padded instead of packed", stacklevel=3
        )

    def _check_cache(self) -> None:
        """Checks that a message drawn with the cache has the same log-probabilities when scored as a whole."""
        prompts = [np.array([3, 2, 1], dtype=np.int32), np.array([1, 2, 3, 2, 1], dtype=np.int32)]
        drawn = self._sample_plainly(prompts, uniforms(0, 2, 4), TokenSampler(1.0))
        messages = [sample.token_ids for sample in drawn]
        logp_NV = torch.log_softmax(self.head()(self.features(prompts, messages)) * self.temperature, -1).cpu().numpy()
        ids = np.concatenate(messages)
        gap = float(np.abs(logp_NV[np.arange(len(ids)), ids] - np.concatenate([s.logprobs for s in drawn])).max())
        if gap > 1e-2:
            raise UserError(
                f"{type(self.causal_lm).__name__} gives other logits token by token than at once (difference {gap:.2g} "
                "nats); this architecture is not supported"
            )

    # -- sampling ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Ids],
        noise_BT: Floats,
        drawing: TokenSampler = PLAINLY,
        *,
        version: str = "",
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        self.require_room(max(map(add, map(len, prompts), lengths_of(noise_BT))))
        while True:
            samples = self._sample(prompts, noise_BT, drawing, version, heard, follow)
            if all(np.isfinite(s.logprobs).all() for s in samples):
                return samples
            self._sample_otherwise()

    def _sample_otherwise(self) -> None:
        """Samples in the fallback precision from now on; raises UserError if there is none."""
        broken = f"{type(self.causal_lm).__name__} gives logits that are not finite ({self.sampling_path})"
        if self.serving is None or not self.serving.fall_back():
            raise UserError(
                f"{broken}: its weights are broken, or sampling.precision is too narrow for them (bf16 and fp32 "
                "have more range than fp16)"
            )
        warnings.warn(f"{broken}: sampled again, and from now on with {self.sampling_path}", stacklevel=3)

    @property
    def samples_from_a_copy(self) -> bool:
        return self.serving is not None

    @torch.no_grad()
    def take_up(self, version: str) -> None:
        if (paged := self.paged(version, PLAINLY)) is not None:
            paged.speaker.take_up()

    @property
    def batch(self) -> str:
        by_row = self.serving is not None and self.serving.adapters == "by_row" and self.adapter is not None
        return f"adapters of {self.base_version}" if by_row and why_not(self.causal_lm) is None else ""

    def paged(self, version: str, drawing: TokenSampler) -> Paged | None:
        """The server of this architecture, and this agent as a ``Speaker`` there."""
        if self.serving is None:
            return None
        try:
            server = self._server(self.serving)
        except Unsupported as reason:
            self._leave_serving(reason)
            return None
        rows, weights = server.copy.rows, {"version": version, "base": self.base_version}
        if rows is not None and self.adapter is not None and rows.applies(self.causal_lm, self.adapter):
            lane: Hashable = (id(rows), drawing)
            number, take_up = (
                rows.number[self.adapter],
                partial(server.copy.put, self.causal_lm, self.adapter, **weights),
            )
        else:
            lane = (id(self), drawing)
            number, take_up = NOBODY, partial(server.copy.fill, self.causal_lm, self.adapter, **weights)
        speaker = Speaker(version, drawing, self.end_ids, lane, number, take_up, self.keep)
        return Paged(server, speaker, self._leave_serving, self._sample_otherwise)

    def _sample(
        self,
        prompts: Sequence[Ids],
        uniform_BT: NDArray[np.float64],
        drawing: TokenSampler,
        version: str,
        heard: Heard,
        follow: Follow,
    ) -> list[Sample]:
        if (paged := self.paged(version, drawing)) is not None:
            try:
                return paged.server.say(paged.speaker, prompts, uniform_BT, heard=heard, follow=follow)
            except Unsupported as reason:
                self._leave_serving(reason)
        keep = None if self.keep is None or not version else partial(self.keep, version)
        return self._sample_plainly(prompts, uniform_BT, drawing, heard, follow, keep)

    def keep_features(self, keep: Keep | None) -> None:
        """On a CPU, where runs repeat bit for bit, features must not depend on KV blocks that earlier calls left: a
        resumed run has none."""
        if keep is not None and self.serving is not None:
            if not self.serving.keeps:
                raise RuntimeError("this sampler was made without keeps: it has no room for features")
            if self.device.type == "cpu":
                self.serving.forget_pages()
        self.keep = keep

    def reserve(self, rows: int, prompt: int, message: int) -> None:
        """Allocates the memory for sampling this many messages of at most these lengths."""
        if self.serving is not None:
            try:
                self._server(self.serving).reserve([prompt] * rows, message)
            except Unsupported as reason:
                self._leave_serving(reason)

    def _server(self, pool: SamplerPool) -> Server:
        holds = () if self.fused is None else (self.fused.let_go,)
        return pool.server_of(self.causal_lm, *holds)

    def _leave_serving(self, reason: Unsupported) -> None:
        self.serving = None
        warnings.warn(
            f"{type(self.causal_lm).__name__} has {reason}: sampling falls back to the plain, slower path",
            stacklevel=3,
        )

    def _sample_plainly(
        self,
        prompts: Sequence[Ids],
        uniform: Floats,
        drawing: TokenSampler,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
        keep: Callable[[Ids, Ids, Tensor], None] | None = None,
    ) -> list[Sample]:
        plain = PlainSampler(
            self.causal_lm, self.device, self._body, self.head, self.temperature, self.end_ids, self._pads, keep
        )
        with without_onednn(self._small and self.precision == "fp32"):  # for the head as well
            return plain.sample(prompts, uniform, drawing, heard, follow)


def end_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end token that the model or its tokenizer declares."""
    found: set[int] = set()
    for holder in (tokenizer, getattr(model, "generation_config", None), model.config, text_config(model)):
        declared = getattr(holder, "eos_token_id", None)
        if declared is not None:
            found.update([declared] if isinstance(declared, int) else declared)
    if not found:
        raise UserError("neither the model nor its tokenizer declares an end token: a message could never stop")
    return frozenset(found)
