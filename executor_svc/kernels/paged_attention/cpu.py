"""Paged attention by torch's fused scaled_dot_product_attention, over contexts gathered block by block.

Rows with one query token are gathered together, padded to the longest of their group; other rows go one by one. What
all layers share (groups, masks, work space) is made once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from executor_svc.kernels.paged_attention import RaggedBatch

GROUP_TOKENS = 8192
"""Most padded context tokens gathered at once: the copy should still be in cache when attention reads it."""
GROUP_PADDING = 256
"""Padding tokens that cost about as much as one more group."""


@dataclass(frozen=True)
class _Row:
    """One row by itself, its context exact."""

    start: int
    stop: int
    blocks: Tensor
    context_len: int
    mask: Tensor | None
    """float32 [q, context_len], added to the scores; None where a causal or no mask does."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, work: _WorkSpace) -> Tensor:
        keys, values = work.gather(key_cache, value_cache, self.blocks)
        keys = keys[: self.context_len].transpose(0, 1).unsqueeze(0)
        values = values[: self.context_len].transpose(0, 1).unsqueeze(0)
        rows = query[self.start : self.stop]
        if len(rows) == 1:
            return _attend_one_token(rows, keys, values, None, scale)
        attended = F.scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


@dataclass(frozen=True)
class _Group:
    """Two or more rows of one query token each, their contexts padded to one length."""

    tokens: Tensor | None
    """int64 [rows]: the rows' tokens; None where the group is the whole batch."""
    num_rows: int
    blocks: Tensor
    """int32 [rows * blocks a row]"""
    unowned: Tensor
    """int64: gathered positions outside their row's context, in [rows * padded length]."""
    mask: Tensor
    """float32 [rows, 1, 1, padded length], added to the scores."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, work: _WorkSpace) -> Tensor:
        keys, values = work.gather(key_cache, value_cache, self.blocks)
        # The mask alone does not keep NaN out: 0 * NaN is NaN.
        keys.index_fill_(0, self.unowned, 0)
        values.index_fill_(0, self.unowned, 0)
        rows = query if self.tokens is None else query.index_select(0, self.tokens)
        keys = keys.view(self.num_rows, -1, *keys.shape[1:]).transpose(1, 2)
        values = values.view(self.num_rows, -1, *values.shape[1:]).transpose(1, 2)
        return _attend_one_token(rows, keys, values, self.mask, scale)


def _attend_one_token(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with one query token a row: query [rows, num_heads, d], keys and values [rows, num_kv_heads, length, d].

    The query heads that share a KV head stand in as its query tokens, so that keys and values are read once for them.
    """
    num_kv_heads = keys.shape[1]
    grouped = query.view(len(query), num_kv_heads, query.shape[1] // num_kv_heads, query.shape[2])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)


class _WorkSpace:
    """Memory for the gathered keys and values: taken once a step, used by every layer."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._memory: tuple[Tensor, Tensor] | None = None

    def gather(self, key_cache: Tensor, value_cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the blocks' keys and values out: two [blocks * block_size, num_kv_heads, head_dim], valid until the next
        call.
        """
        if self._memory is None:
            shape = (self._num_blocks, *key_cache.shape[1:])
            self._memory = (key_cache.new_empty(shape), value_cache.new_empty(shape))
        keys, values = (memory[: len(blocks)] for memory in self._memory)
        torch.index_select(key_cache, 0, blocks, out=keys)
        torch.index_select(value_cache, 0, blocks, out=values)
        return keys.flatten(0, 1), values.flatten(0, 1)


class CpuAttention:
    """See PagedAttention."""

    def __init__(self, rows: Sequence[_Row], groups: Sequence[_Group]) -> None:
        self._rows = rows
        self._groups = groups
        parts: list[_Row | _Group] = [*rows, *groups]
        self._work = _WorkSpace(max(len(part.blocks) for part in parts))

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """See PagedAttention."""
        out = torch.empty(query.shape, dtype=query.dtype)
        for row in self._rows:
            out[row.start : row.stop] = row.attend(query, key_cache, value_cache, scale, self._work)
        for group in self._groups:
            attended = group.attend(query, key_cache, value_cache, scale, self._work)
            if group.tokens is None:
                return attended.contiguous()
            out.index_copy_(0, group.tokens, attended)
        return out


def plan_attention(batch: RaggedBatch, block_size: int) -> CpuAttention:
    """See PlanAttention."""
    starts = batch.query_start.tolist()
    query_lens, context_lens = batch.query_lens, batch.context_lens_host
    grouped = group_rows([row for row, length in enumerate(query_lens) if length == 1], context_lens)
    alone = [row for row, length in enumerate(query_lens) if length > 1]
    alone += [members[0] for members in grouped if len(members) == 1]
    rows = []
    for row in alone:
        query_len, context_len = query_lens[row], context_lens[row]
        blocks = batch.block_tables[row, : -(-context_len // block_size)]
        mask = None if query_len in (1, context_len) else _causal_mask(query_len, context_len)
        rows.append(_Row(starts[row], starts[row + 1], blocks, context_len, mask))
    groups = [_group(members, batch, starts, block_size) for members in grouped if len(members) > 1]
    return CpuAttention(rows, groups)


def group_rows(rows: Iterable[int], context_lens: Sequence[int]) -> list[list[int]]:
    """Partition rows so that those of one group have contexts of similar length; each group in ascending order.

    A group's padding stays within GROUP_PADDING tokens, and its padded size within GROUP_TOKENS unless it is one row.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(rows, key=lambda row: -context_lens[row]):
        short_by = longest - context_lens[row]
        full = not groups or (len(groups[-1]) + 1) * longest > GROUP_TOKENS
        if full or padding + short_by > GROUP_PADDING:
            groups.append([row])
            longest, padding = context_lens[row], 0
        else:
            groups[-1].append(row)
            padding += short_by
    return [sorted(group) for group in groups]


def _group(members: list[int], batch: RaggedBatch, starts: list[int], block_size: int) -> _Group:
    index = torch.tensor(members)
    lengths = batch.context_lens[index]
    blocks = batch.block_tables[index, : -(-int(lengths.max()) // block_size)]
    unowned = torch.arange(blocks.shape[1] * block_size) >= lengths[:, None]
    mask = torch.zeros(unowned.shape).masked_fill_(unowned, -torch.inf)
    whole_batch = len(members) == starts[-1]
    return _Group(
        tokens=None if whole_batch else torch.tensor([starts[row] for row in members]),
        num_rows=len(members),
        blocks=blocks.flatten(),
        unowned=unowned.flatten().nonzero().flatten(),
        mask=mask[:, None, None, :],
    )


def _causal_mask(query_len: int, context_len: int) -> Tensor:
    return torch.full((query_len, context_len), -torch.inf).triu_(context_len - query_len + 1)
