"""Where a step's tokens lie: their positions, KV slots and rows, from counters and block tables alone.

No token id is needed for it, so it can be done before all of them are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowLayout:
    """R rows that run, N of which sample, and their T tokens, row after row."""

    num_scheduled_tokens: Ints
    """int64 [R]."""
    sampling: Ints
    """int64 [N]: which of the R reach the last token of their sequence, and so sample."""
    last_tokens: Tensor
    """int64 [N]: where among the T tokens the last one of each sampling row is."""
    row_of: Ints
    """int64 [T]: which of the R each token is of."""
    positions: Ints
    """int64 [T]."""
    metadata: AttentionMetadata


def lay_out(
    scheduled: Ints, computed: Ints, num_tokens: Ints, block_tables: npt.NDArray[np.int32], *, block_size: int
) -> RowLayout:
    """Lay out the next `scheduled` tokens of R stays, which have `computed` of their `num_tokens`; int64 [R] each.

    block_tables is int32 [R, B], and reaches the last token of the longest row.
    """
    query_start, context_lens, row_of, positions, slot_mapping = token_places(
        block_tables, np.arange(len(scheduled)), computed, scheduled, block_size
    )
    sampling = np.flatnonzero(context_lens == num_tokens)
    return RowLayout(
        num_scheduled_tokens=scheduled,
        sampling=sampling,
        last_tokens=torch.from_numpy(query_start[1:][sampling].astype(np.int64) - 1),
        row_of=row_of,
        positions=positions,
        metadata=AttentionMetadata(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            query_lens=tuple(scheduled.tolist()),
            context_lens_host=tuple(context_lens.tolist()),
        ),
    )


def token_places(
    block_tables: npt.NDArray[np.int32], table_rows: Ints, computed: Ints, scheduled: Ints, block_size: int
) -> tuple[npt.NDArray[np.int32], Ints, Ints, Ints, Ints]:
    """Lay out the next `scheduled` tokens of R stays, T in all, before they count as `computed`; int64 [R] each.

    table_rows, int64 [R], says which rows of block_tables are theirs. Return where each row's tokens begin, int32
    [R + 1]; the rows' contexts, int64 [R]; and of each token its row, its position and the KV slot that it is written
    to, int64 [T] each.
    """
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int32)
    np.cumsum(scheduled, out=query_start[1:])
    row_of = np.repeat(np.arange(len(scheduled)), scheduled)
    positions = np.arange(query_start[-1]) + (computed - query_start[:-1])[row_of]
    block_ids = block_tables[table_rows[row_of], positions // block_size].astype(np.int64)
    slot_mapping = block_ids * block_size + positions % block_size
    return query_start, computed + scheduled, row_of, positions, slot_mapping
