"""Attention problems: ragged batches over paged memory that holds NaN wherever no row's context lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paged import ragged_metadata
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels.paged_attention import PlanAttention

Row = tuple[int, int]
"""Query tokens, context tokens."""


class Problem:
    """A batch over caches that hold NaN everywhere but in the rows' own contexts, in scattered blocks."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        shared_blocks: int = 0,
        seed: int = 0,
    ) -> None:
        """Every row's block table begins with the same `shared_blocks` blocks, which hold the same tokens."""
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        counts = [-(-context // block_size) - shared_blocks for _, context in rows]
        num_blocks = shared_blocks + sum(counts) + 3
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        shared = [free.pop() for _ in range(shared_blocks)]
        tables = [shared + [free.pop() for _ in range(count)] for count in counts]
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.key_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.value_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.contexts: list[tuple[Tensor, Tensor]] = []
        for table, (_, context) in zip(tables, rows, strict=True):
            keys = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            values = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(context)])
            self.key_cache.view(-1, num_kv_heads, head_dim)[slots] = keys
            self.value_cache.view(-1, num_kv_heads, head_dim)[slots] = values
            self.contexts.append((keys, values))
        for keys, values in self.contexts:
            # The row that came last wrote the shared blocks.
            keys[: shared_blocks * block_size] = self.contexts[-1][0][: shared_blocks * block_size]
            values[: shared_blocks * block_size] = self.contexts[-1][1][: shared_blocks * block_size]
        total = sum(query for query, _ in rows)
        # Part of a wider tensor, as it is in the model.
        self.query = torch.randn(total, num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
        self.scale = head_dim**-0.5
        self.rows = rows
        self.block_size = block_size
        self.metadata: AttentionMetadata = ragged_metadata(
            [(table, context - query, query) for table, (query, context) in zip(tables, rows, strict=True)], block_size
        )

        self._tables = tables

    def run(self, plan_attention: PlanAttention) -> Tensor:
        """Attend with all rows at once: [T, num_heads, head_dim]."""
        with torch.inference_mode():
            attend = plan_attention(self.metadata, self.block_size)
            return attend(self.query, self.key_cache, self.value_cache, self.scale)

    def run_part(self, plan_attention: PlanAttention, row: int, start: int, stop: int) -> Tensor:
        """Attend with one row alone, of which only its query tokens [start, stop) are computed now."""
        query_len, context_len = self.rows[row]
        before = context_len - query_len
        first = sum(length for length, _ in self.rows[:row])
        metadata = ragged_metadata([(self._tables[row], before + start, stop - start)], self.block_size)
        with torch.inference_mode():
            attend = plan_attention(metadata, self.block_size)
            return attend(self.query[first + start : first + stop], self.key_cache, self.value_cache, self.scale)

    def dense(self) -> Tensor:
        """Attention over each row's own tensors, in float64, one query token and head at a time."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.key_cache.shape[2]
        token = 0
        for (query_len, context_len), (keys, values) in zip(self.rows, self.contexts, strict=True):
            for position in range(context_len - query_len, context_len):
                for head in range(self.query.shape[1]):
                    seen_keys = keys[: position + 1, head // group].double()
                    weights = (self.scale * seen_keys @ self.query[token, head].double()).softmax(0)
                    out[token, head] = weights @ values[: position + 1, head // group].double()
                token += 1
        return out
