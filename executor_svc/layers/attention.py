"""Self-attention over paged KV memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers shares in one step."""

    cos: Tensor
    """float32 [T, head_dim / 2]"""
    sin: Tensor
    """float32 [T, head_dim / 2]"""
    slot_mapping: Tensor
    """int64 [T]"""
    paged_attention: PagedAttention


class SelfAttention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions; Q, K and V come out of one product."""

    def __init__(self, qkv: Linear, output: Linear, *, head_dim: int, kernels: KernelSet) -> None:
        self._qkv = qkv
        self._output = output
        self._scale = head_dim**-0.5
        self._kernels = kernels

    def __call__(self, x: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]. Writes the keys and values of the T tokens into the caches."""
        query = self._kernels.rotary_write_kv(
            self._qkv(x), step.cos, step.sin, step.slot_mapping, key_cache, value_cache
        )
        attended = step.paged_attention(query, key_cache, value_cache, self._scale)
        return self._output(attended.flatten(1))
