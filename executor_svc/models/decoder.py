"""The decoder: embedding, layers, final norm, head. Inference only; the caller enters torch.inference_mode.

What a model has and has not is decided when it is built. A layer takes x, which its attention reads, and the residual,
and gives the x of the next one: the norm that comes after a residual add is fused with it, so a layer ends with the
next one's first norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kernels.elementwise import AddTo
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.record import StepBody
from executor_svc.kv_cache import KVCache
from executor_svc.layers.attention import AttentionStep, SelfAttention
from executor_svc.layers.norm import Norm
from executor_svc.layers.rotary import RotaryAngles
from executor_svc.models.config import ModelConfig

Sublayer = Callable[[Tensor], Tensor]


class DecoderLayer(Protocol):
    """Attention and MLP with their norms and residual adds."""

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Give the next layer's x [T, hidden]. Changes the residual [T, hidden] IN PLACE."""


class SequentialLayer:
    """One sublayer after the other, each added to the residual."""

    def __init__(self, attention: SelfAttention, mlp_norm: Norm, mlp: Sublayer, next_norm: Norm) -> None:
        self._attention = attention
        self._mlp_norm = mlp_norm.add
        self._mlp = mlp
        self._next_norm = next_norm.add

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """See DecoderLayer."""
        x = self._mlp_norm(self._attention(x, step, key_cache, value_cache), residual)
        return self._next_norm(self._mlp(x), residual)


class AfterAddLayer:
    """Each sublayer's sum with what it read is normed, and that is the residual from then on."""

    def __init__(self, attention: SelfAttention, attention_norm: Norm, mlp: Sublayer, mlp_norm: Norm) -> None:
        self._attention = attention
        self._attention_norm = attention_norm.add
        self._mlp = mlp
        self._mlp_norm = mlp_norm.add

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,  # noqa: ARG002 - x is the residual here
        step: AttentionStep,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """See DecoderLayer."""
        x = self._attention_norm(self._attention(x, step, key_cache, value_cache), x)
        return self._mlp_norm(self._mlp(x), x)


class ParallelLayer:
    """Attention and MLP side by side, added to the residual together."""

    def __init__(
        self, attention: SelfAttention, mlp_norm: Norm | None, mlp: Sublayer, add_to: AddTo, next_norm: Norm
    ) -> None:
        """`mlp_norm`: None where the MLP reads what attention reads."""
        self._attention = attention
        self._mlp_norm = None if mlp_norm is None else mlp_norm.alone
        self._mlp = mlp
        self._add_to = add_to
        self._next_norm = next_norm.add

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """See DecoderLayer."""
        mlp = self._mlp(x if self._mlp_norm is None else self._mlp_norm(residual))
        return self._next_norm(self._add_to(self._attention(x, step, key_cache, value_cache), mlp), residual)


@dataclass(frozen=True)
class Ends:
    """What stands before the first layer and after the last one."""

    embedding: Linear
    head: Linear
    first_norm: Norm
    positions: Tensor | None = None
    """[positions, hidden]."""
    project_in: Linear | None = None
    project_out: Linear | None = None


class CausalLM:
    """A loaded model."""

    code = "octavo"
    """Whose code it is. Its bits depend on the batch only where those of its kernels do."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        *,
        ends: Ends,
        layers: Sequence[DecoderLayer],
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
    ) -> None:
        """`longest`: tokens that a sequence may get."""
        self.config = config
        self.dtype = dtype
        """Of weights and hidden states."""
        self._plan_attention = kernels.plan_attention
        self._record = kernels.record
        self._kv_cache: KVCache | None = None
        self._body: StepBody
        self._ends = ends
        self._layers = layers
        self._angles = [RotaryAngles(rotary, device, longest) for rotary in config.rotaries]
        self._has_still_layers = any(layer.rotary is None for layer in config.layers)
        # As the models' own code has it, in the weights' dtype.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states, after the final norm: [T, hidden] of the model's dtype, until the next call.

        token_ids is int64 [T], T at least 1, each below vocab_size. Writes keys and values of the T tokens to kv_cache.
        """
        if kv_cache is not self._kv_cache:
            self._kv_cache = kv_cache
            self._body = self._record(partial(self._run, kv_cache))
        positions = metadata.positions
        inputs = [self._embed(token_ids, positions), metadata.slot_mapping]
        for rotary in self._angles:
            inputs.extend(rotary(positions))
        if self._has_still_layers:
            none = torch.empty((len(positions), 0), device=positions.device)
            inputs.extend((none, none))
        return self._body(inputs, self._plan_attention(metadata, kv_cache.block_size))

    def _run(self, kv_cache: KVCache, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """All that lies between a step's inputs and its last hidden states, see StepBody: the residual, slot_mapping,
        and the angles of every rotary setting.
        """
        residual, slot_mapping, *angles = inputs
        step = AttentionStep(tuple(zip(angles[::2], angles[1::2], strict=True)), slot_mapping, attention)
        x = self._ends.first_norm.alone(residual)
        for layer, key_cache, value_cache in zip(self._layers, kv_cache.keys, kv_cache.values, strict=True):
            x = layer(x, residual, step, key_cache, value_cache)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab_size], of hidden [N, hidden] as forward gave them."""
        config, ends = self.config, self._ends
        if not len(hidden):
            return hidden.new_empty((0, config.vocab_size)).float()
        if ends.project_out is not None:
            hidden = ends.project_out(hidden)
        logits = ends.head.logits(hidden)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.logit_soft_cap:
            logits.div_(config.logit_soft_cap).tanh_().mul_(config.logit_soft_cap)
        return logits

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        ends = self._ends
        x = ends.embedding.weight_rows(token_ids)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        if ends.project_in is not None:
            x = ends.project_in(x)
        if ends.positions is not None:
            x += ends.positions[positions]
        return x
