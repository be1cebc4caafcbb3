"""Self-attention over paged KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers shares in one step."""

    angles: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines, float32 [T, rotary_dim / 2] each, under every rotary setting of the model."""
    slot_mapping: Tensor
    """int64 [T]"""
    paged_attention: PagedAttention


class SelfAttention:
    """Grouped-query attention (Ainslie et al. 2023); Q, K and V come out of one product."""

    def __init__(
        self,
        qkv: Callable[[Tensor], Tensor],
        output: Callable[[Tensor], Tensor],
        *,
        scale: float,
        angles: int,
        window: int = 0,
        soft_cap: float = 0.0,
        kernels: KernelSet,
    ) -> None:
        """`angles` is the layer's place in AttentionStep.angles. Scale, window and soft cap: see PagedAttention."""
        self._qkv = qkv
        self._output = output
        self._scale = scale
        self._angles = angles
        self._window = window
        self._soft_cap = soft_cap
        self._rotary_write_kv = kernels.rotary_write_kv

    def __call__(self, x: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]. Writes the keys and values of the T tokens into the caches."""
        cos, sin = step.angles[self._angles]
        query = self._rotary_write_kv(self._qkv(x), cos, sin, step.slot_mapping, key_cache, value_cache)
        attended = step.paged_attention(
            query, key_cache, value_cache, self._scale, window=self._window, soft_cap=self._soft_cap
        )
        return self._output(attended.flatten(1))


class NormedQkv:
    """The product of Q, K and V with RMSNorm on queries and keys, over each head or over all heads of a token."""

    def __init__(
        self,
        qkv: Linear,
        query_weight: Tensor,
        key_weight: Tensor,
        *,
        sizes: tuple[int, int],
        eps: float,
        kernels: KernelSet,
    ) -> None:
        """`sizes`: elements of all queries, and of all keys, of a token. A weight is as long as what is normed at
        once.
        """
        self._qkv = qkv
        self._arguments = sizes, query_weight, key_weight, eps
        self._norm = kernels.norm_query_key

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, (num_heads + 2 * num_kv_heads) * head_dim]."""
        return self._norm(self._qkv(x), *self._arguments)
