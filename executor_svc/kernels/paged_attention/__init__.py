"""Contract of paged attention (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention").
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PagedAttention(Protocol):
    """Attention over one step's ragged batch. The same object serves every layer of the step."""

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
        """Give softmax(scale * query @ keys.T) @ values per head, causal, as a new contiguous [T, num_heads, head_dim].

        query is [T, num_heads, head_dim], possibly a view with the last two dimensions contiguous; the caches are
        [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype, with the step's own keys and values already
        written. num_heads is a multiple of num_kv_heads: query head h reads KV head h // (num_heads / num_kv_heads).
        Query token i of a row with q tokens and context c sits at position p = c - q + i and reads positions 0 to p,
        with a window w above 0 (Beltagy et al. 2020) only those after p - w, itself being the last. A soft cap above 0
        (Gemma 2) turns each scaled score s into soft_cap * tanh(s / soft_cap) before the softmax.
        Slots that no query token of the row reads may hold anything, NaN included, and change no output; so may the
        null block, which stands in the table for blocks that every window has passed.
        Scores and sums are accumulated in float32. Nothing is changed.
        """


class RaggedBatch(Protocol):
    """The part of AttentionMetadata that attention reads; see there."""

    @property
    def query_start(self) -> Tensor:
        """int32 [R + 1]."""

    @property
    def context_lens(self) -> Tensor:
        """int32 [R]."""

    @property
    def block_tables(self) -> Tensor:
        """int32 [R, B]."""

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Host copy."""

    @property
    def context_lens_host(self) -> tuple[int, ...] | None:
        """Host copy. None: nothing of the host's may be read, so that what attention launches can be captured once and
        made again over other contexts, blocks and rows that lie in the same tensors. Every row is then one token. Sets
        that run on GPUs take it, and the reference.
        """


class PlanAttention(Protocol):
    """Works out once a step what every layer's attention shares: grouping, masks, work space."""

    def __call__(self, batch: RaggedBatch, block_size: int) -> PagedAttention:
        """Plan a step of at least one row. The result may hold on to the batch's tensors."""
