"""Paged attention, plain: row by row, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.kernels.paged_attention import RaggedBatch


@dataclass(frozen=True)
class ReferenceAttention:
    """The step's rows as they are."""

    block_tables: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """See PagedAttention."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        start = 0
        for row, (query_len, context_len) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            # What the first query token no longer sees may be anything, and is left out rather than masked.
            unseen = max(context_len - query_len + 1 - window, 0) if window else 0
            skipped = unseen // self.block_size
            blocks = self.block_tables[row, skipped : -(-context_len // self.block_size)]
            seen = slice(unseen - skipped * self.block_size, context_len - skipped * self.block_size)
            keys = key_cache[blocks].flatten(0, 1)[seen]
            values = value_cache[blocks].flatten(0, 1)[seen]
            stop = start + query_len
            out[start:stop] = attend(query[start:stop], keys, values, scale, window=window, soft_cap=soft_cap)
            start = stop
        return out


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention of the last q of c positions: query [q, num_heads, d], keys and values [c, num_kv_heads, d]."""
    query_len, num_heads, _ = query.shape
    context_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,chd->hqc", query.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_positions = torch.arange(context_len - query_len, context_len, device=query.device)[:, None]
    positions = torch.arange(context_len, device=query.device)
    hidden = positions > query_positions
    if window:
        hidden |= positions <= query_positions - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqc,chd->qhd", weights, values).to(query.dtype)


def plan_attention(batch: RaggedBatch, block_size: int) -> ReferenceAttention:
    """See PlanAttention."""
    return ReferenceAttention(batch.block_tables, batch.query_lens, batch.context_lens_host, block_size)
