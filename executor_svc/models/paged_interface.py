"""Octavo's paged attention as transformers' models call it: through their attention interface.

A step's rows lie in one flat row of tokens with their own positions. No mask is made: which tokens a token sees follows
from the step's block tables. What attention cannot do is refused here, the first time that a model asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kv_cache import KVCache

NAME = "octavo_paged"
"""What `attn_implementation` is called."""
_KNOWN_TENSORS = frozenset({"position_ids", "position_embeddings", "cache_position"})
"""Tensors that models hand on to attention though it has no use for them."""


class RefusedAttentionError(Exception):
    """A model asks for an attention that is not there. The message says what."""


@dataclass(frozen=True)
class LayerAttention:
    """How a layer calls attention."""

    num_kv_heads: int
    head_dim: int
    """Of keys, or of values where theirs are wider."""
    window: int


@dataclass
class PagedContext:
    """What the attention of one model's layers shares. `begin` a step, then run the model."""

    kernels: KernelSet | None = None
    """None: nothing is to be computed."""
    layers: dict[int, LayerAttention] = field(default_factory=dict)
    """Of every layer that has called, by its number."""
    _metadata: AttentionMetadata | None = None
    _kv_cache: KVCache | None = None
    _paged_attention: PagedAttention | None = None

    def install(self, model: nn.Module) -> None:
        """Make this the context of every layer of a model."""
        for module in model.modules():
            module._octavo_context = self  # type: ignore[assignment]

    def begin(self, metadata: AttentionMetadata, kv_cache: KVCache) -> None:
        """Take a step's rows."""
        assert self.kernels is not None  # the caller
        self._metadata, self._kv_cache = metadata, kv_cache
        self._paged_attention = self.kernels.plan_attention(metadata, kv_cache.block_size)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """Write keys and values [1, heads, T, width] of a layer; give attention's output [1, T, heads, width]."""
        width = max(key.shape[-1], value.shape[-1])
        if layer not in self.layers:
            self.layers[layer] = LayerAttention(key.shape[1], width, window)
        value_width, num_heads = value.shape[-1], query.shape[1]
        if query.is_meta:
            return query.new_empty((1, query.shape[2], num_heads, value_width))
        metadata, kv_cache, paged_attention = self._metadata, self._kv_cache, self._paged_attention
        assert self.kernels is not None  # begin
        assert metadata is not None  # begin
        assert kv_cache is not None  # begin
        assert paged_attention is not None  # begin
        parts = [functional.pad(part[0], (0, width - part.shape[-1])) for part in (query, key, value)]
        qkv = torch.cat(parts).transpose(0, 1).flatten(1)
        none = torch.empty((len(qkv), 0), device=qkv.device)
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        flat = self.kernels.rotary_write_kv(qkv, none, none, metadata.slot_mapping, keys, values)
        attended = paged_attention(flat, keys, values, scale, window=window, soft_cap=soft_cap)
        return attended[None, :, :, :value_width]


@torch.library.custom_op("octavo::attend", mutates_args=())
def attend_exported(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int, soft_cap: float
) -> Tensor:
    """Stands for attention in an exported graph: see PagedContext.attend. Never run."""
    raise NotImplementedError


@attend_exported.register_fake
def _attend_shape(
    query: Tensor,
    key: Tensor,  # noqa: ARG001 - the signature of the op
    value: Tensor,
    layer: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    window: int,  # noqa: ARG001
    soft_cap: float,  # noqa: ARG001
) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1]))


@dataclass
class ExportContext(PagedContext):
    """The context of layers that are exported: attention becomes one node."""

    op = torch.ops.octavo.attend.default

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """See PagedContext."""
        result: Tensor = self.op(query, key, value, layer, scale, window, soft_cap)
        return result


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """See AttentionInterface of transformers: query, key and value are [1, heads, T, width]."""
    context = getattr(module, "_octavo_context", None)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(context, PagedContext) or not isinstance(layer, int):
        raise RefusedAttentionError("a layer calls attention without its number")
    if attention_mask is not None:
        raise RefusedAttentionError("attention with a mask or bias of its own (such as ALiBi)")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RefusedAttentionError("attention that looks ahead")
    for name, argument in others.items():
        if isinstance(argument, Tensor) and name not in _KNOWN_TENSORS:
            raise RefusedAttentionError(f"attention with {name}")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise RefusedAttentionError("attention to other tokens than the step's own (cross-attention, or a cache)")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return context.attend(layer, query, key, value, scale, sliding_window or 0, softcap or 0.0), None


AttentionInterface.register(NAME, paged_attention_forward)
