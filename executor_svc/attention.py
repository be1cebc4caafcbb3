"""What attention must know of one step's batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch: R rows of the tokens of one sequence each, T tokens in all, row after row.

    A token attends to every token of its own sequence at its own or an earlier position. Its key and value are written
    to its slot before attention reads, so a row's query tokens are part of its context.
    """

    positions: Tensor
    """int64 [T]: position of each token in its sequence, from 0."""
    slot_mapping: Tensor
    """int64 [T]: where its key and value go, block_id * block_size + offset. Padding goes to a slot of block 0."""
    query_start: Tensor
    """int32 [R + 1]: the tokens of row r are query_start[r] to query_start[r + 1]."""
    context_lens: Tensor
    """int32 [R]: tokens of the sequence whose KV exists after this step: those before plus the row's own. At least 1.
    """
    block_tables: Tensor
    """int32 [R, B]: block ids of each row's sequence in order, padded with 0, the null block."""
    query_lens: tuple[int, ...]
    """Row lengths, at least 1 each: host copy of the differences of query_start."""
    context_lens_host: tuple[int, ...] | None
    """Host copy of context_lens. None: only the device knows them, and every row is one token (see RaggedBatch)."""
