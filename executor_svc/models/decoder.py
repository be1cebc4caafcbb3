"""The decoder: embedding, layers, final norm, head. Inference only; the caller enters torch.inference_mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.record import StepBody
from executor_svc.kv_cache import KVCache
from executor_svc.layers.attention import AttentionStep, SelfAttention
from executor_svc.layers.mlp import GatedMlp
from executor_svc.layers.rotary import RotaryAngles
from executor_svc.models.config import ModelConfig


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and MLP, each behind a norm; the residual adds are fused with the norms that follow them."""

    input_norm: Tensor
    attention: SelfAttention
    post_attention_norm: Tensor
    mlp: GatedMlp


class CausalLM:
    """A loaded model."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        *,
        embedding: Linear,
        device: torch.device,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = RotaryAngles(config.rotary, device)
        self._kv_cache: KVCache | None = None
        self._body: StepBody

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states, after the final norm: [T, hidden] of the model's dtype, until the next call.

        token_ids is int64 [T], T at least 1, each below vocab_size. Writes keys and values of the T tokens to kv_cache.
        """
        if kv_cache is not self._kv_cache:
            self._kv_cache = kv_cache
            self._body = self._kernels.record(partial(self._run, kv_cache))
        cos, sin = self._rotary(metadata.positions)
        plan = self._kernels.plan_attention(metadata, kv_cache.block_size)
        return self._body((token_ids, cos, sin, metadata.slot_mapping), plan)

    def _run(self, kv_cache: KVCache, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """All that lies between a step's inputs and its last hidden states; see StepBody."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        token_ids, cos, sin, slot_mapping = inputs
        step = AttentionStep(cos, sin, slot_mapping, attention)
        residual = self._embedding.weight_rows(token_ids)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = layer.attention(x, step, kv_cache.keys[index], kv_cache.values[index])
            x = kernels.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            x = kernels.add_rms_norm(layer.mlp(x), residual, next_norm, eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab_size], of hidden [N, hidden] as forward gave them."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size)).float()
        return self._head(hidden).float()
