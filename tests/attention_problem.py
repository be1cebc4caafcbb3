"""Attention problems: ragged batches over paged memory that holds NaN wherever no row's window looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paged import ragged_metadata
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels.paged_attention import PlanAttention
from executor_svc.kv_cache import NULL_BLOCK

Row = tuple[int, int]
"""Query tokens, context tokens."""


class Problem:
    """A batch over caches that hold NaN everywhere but in what some row's window sees, in scattered blocks."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        shared_blocks: int = 0,
        window: int = 0,
        soft_cap: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Every row's block table begins with the same `shared_blocks` blocks, which hold the same tokens. With a
        window the null block stands in place of blocks that all of a row's query tokens have passed.
        """
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
        self.rows = rows
        self.block_size = block_size
        self.window = window
        self.soft_cap = soft_cap
        self.scale = head_dim**-0.5
        self.contexts: list[tuple[Tensor, Tensor]] = []
        for _, context in rows:
            keys = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            values = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            for own, first in zip((keys, values), self.contexts[0] if self.contexts else (), strict=False):
                own[: shared_blocks * block_size] = first[: shared_blocks * block_size]
            self.contexts.append((keys, values))
        for table, (query, context), (keys, values) in zip(tables, rows, self.contexts, strict=True):
            seen = range(self._passed(context - query), context)
            slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in seen])
            self.key_cache.view(-1, num_kv_heads, head_dim)[slots] = keys[seen.start :]
            self.value_cache.view(-1, num_kv_heads, head_dim)[slots] = values[seen.start :]
        total = sum(query for query, _ in rows)
        # Part of a wider tensor, as it is in the model.
        self.query = torch.randn(total, num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
        self.metadata = self._metadata(
            [(table, context - query, query) for table, (query, context) in zip(tables, rows, strict=True)]
        )
        self._tables = tables

    def run(self, plan_attention: PlanAttention) -> Tensor:
        """Attend with all rows at once: [T, num_heads, head_dim]."""
        return self._attend(plan_attention, self.metadata, self.query)

    def run_part(self, plan_attention: PlanAttention, row: int, start: int, stop: int) -> Tensor:
        """Attend with one row alone, of which only its query tokens [start, stop) are computed now."""
        query_len, context_len = self.rows[row]
        before = context_len - query_len
        first = sum(length for length, _ in self.rows[:row])
        metadata = self._metadata([(self._tables[row], before + start, stop - start)])
        return self._attend(plan_attention, metadata, self.query[first + start : first + stop])

    def dense(self) -> Tensor:
        """Attention over each row's own tensors, in float64, one query token and head at a time."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.key_cache.shape[2]
        token = 0
        for (query_len, context_len), (keys, values) in zip(self.rows, self.contexts, strict=True):
            for position in range(context_len - query_len, context_len):
                seen = slice(self._passed(position), position + 1)
                for head in range(self.query.shape[1]):
                    scores = self.scale * keys[seen, head // group].double() @ self.query[token, head].double()
                    if self.soft_cap:
                        scores = self.soft_cap * (scores / self.soft_cap).tanh()
                    out[token, head] = scores.softmax(0) @ values[seen, head // group].double()
                token += 1
        return out

    def _passed(self, position: int) -> int:
        """Tokens that the window of the query token at a position has passed."""
        return max(position + 1 - self.window, 0) if self.window else 0

    def _metadata(self, rows: Sequence[tuple[list[int], int, int]]) -> AttentionMetadata:
        """Give the step's metadata; each row is its blocks, the tokens computed before, and those to compute."""
        metadata = ragged_metadata(rows, self.block_size)
        for row, (_, computed, _) in enumerate(rows):
            metadata.block_tables[row, : self._passed(computed) // self.block_size] = NULL_BLOCK
        return metadata

    def _attend(self, plan_attention: PlanAttention, metadata: AttentionMetadata, query: Tensor) -> Tensor:
        with torch.inference_mode():
            attend = plan_attention(metadata, self.block_size)
            caches = (self.key_cache, self.value_cache)
            return attend(query, *caches, self.scale, window=self.window, soft_cap=self.soft_cap)
