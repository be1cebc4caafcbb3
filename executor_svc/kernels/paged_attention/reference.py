"""Paged attention, plain: row by row, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.kernels.paged_attention import PagedAttention, RaggedBatch


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


@dataclass(frozen=True)
class ReferenceDecode:
    """Rows of one token, whose contexts the host does not know: all of each table is read, the unseen is masked."""

    block_tables: Tensor
    context_lens: Tensor

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
        rows, num_heads, head_dim = query.shape
        num_kv_heads = key_cache.shape[2]
        positions = torch.arange(self.block_tables.shape[1] * key_cache.shape[1], device=query.device)
        seen = positions < self.context_lens[:, None]
        if window:
            seen &= positions >= self.context_lens[:, None] - window
        # What is not seen may be NaN, which a weight of 0 does not take away.
        unseen = ~seen[:, :, None, None]
        keys = key_cache[self.block_tables].flatten(1, 2).float().masked_fill(unseen, 0)
        values = value_cache[self.block_tables].flatten(1, 2).float().masked_fill(unseen, 0)
        grouped = query.float().reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("rkgd,rckd->rkgc", grouped, keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("rkgc,rckd->rkgd", weights, values)
        return mixed.reshape(rows, num_heads, head_dim).to(query.dtype)


def plan_attention(batch: RaggedBatch, block_size: int) -> PagedAttention:
    """See PlanAttention."""
    if batch.context_lens_host is None:
        return ReferenceDecode(batch.block_tables, batch.context_lens)
    return ReferenceAttention(batch.block_tables, batch.query_lens, batch.context_lens_host, block_size)
