"""How a step's attention is cut into programs, by Triton's kernels: pure, on the host. Where the device alone knows the
contexts, decode_plan cuts there, and alike.

The query heads that share a KV head are laid one after the other for each token: these lines, group times as many as
there are query tokens, are cut into tiles of some fixed number, and each tile reads every key that one of its lines
reads. Where tiles are few and contexts long, a tile's keys are cut into parts too, for programs that run side by side;
their results are then merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from executor_svc.kernels.paged_attention import RaggedBatch

Ints = npt.NDArray[np.int64]

SMALL_TILE = 16
"""Lines of a row in decode, unless it has more: the least that a matrix unit takes."""
LEAST_PART = 256
"""Tokens below which a part is not worth its merge."""
PART_STEP = 64
PROGRAMS_PER_PROCESSOR = 4
"""Programs wanted for each multiprocessor, so that one that ends late keeps few waiting."""


@dataclass(frozen=True)
class Work:
    """The programs of the rows whose tiles are equally tall."""

    tile: int
    """Lines of a tile."""
    items: npt.NDArray[np.int32]
    """[I, 5]: row, first line, first token, end of its tokens, and the partial result that it writes, -1 for none."""
    merges: npt.NDArray[np.int32]
    """[M, 4]: row, first line, first partial result, how many."""
    num_partials: int


def plan_work(
    batch: RaggedBatch, *, group: int, num_kv_heads: int, window: int, large_tile: int, processors: int
) -> list[Work]:
    """Cut a step, once for rows of few lines and once for the others, of which there may be none.

    `window` as in PagedAttention; `large_tile` is the height of the others' tiles.
    """
    assert batch.context_lens_host is not None  # else decode_plan
    query_lens, context_lens = np.array(batch.query_lens), np.array(batch.context_lens_host)
    low_tile = small_tile(group, large_tile)
    is_small = query_lens * group <= low_tile
    cuts = [
        _Tiles(np.flatnonzero(chosen), query_lens[chosen], context_lens[chosen], group, window, tile)
        for tile, chosen in ((low_tile, is_small), (large_tile, ~is_small))
        if chosen.any()
    ]
    tokens = sum(int(cut.lengths.sum()) for cut in cuts) * num_kv_heads
    wanted = -(-tokens // (processors * PROGRAMS_PER_PROCESSOR))
    part = max(LEAST_PART, -(-wanted // PART_STEP) * PART_STEP)
    return [cut.work(part) for cut in cuts]


def small_tile(group: int, large_tile: int) -> int:
    """Lines of a tile of rows of few lines."""
    return min(max(SMALL_TILE, 1 << (group - 1).bit_length()), large_tile)


@dataclass(frozen=True)
class PlacedWork:
    """Work whose tables lie on the device."""

    tile: int
    items: Tensor
    """int32 [I, 5], as Work.items."""
    merges: Tensor
    """int32 [M, 4], as Work.merges."""
    num_partials: int


class _Tiles:
    """Every tile of some rows, and the tokens that it reads."""

    def __init__(self, rows: Ints, query_lens: Ints, context_lens: Ints, group: int, window: int, tile: int) -> None:
        counts = -(-query_lens * group // tile)
        of_row = np.repeat(np.arange(len(rows)), counts)
        self._tile = tile
        self._rows = rows[of_row]
        self._first_lines = (np.arange(len(of_row)) - np.repeat(counts.cumsum() - counts, counts)) * tile
        before = (context_lens - query_lens)[of_row]
        last_tokens = np.minimum((self._first_lines + tile - 1) // group, query_lens[of_row] - 1)
        self._ends = before + last_tokens + 1
        first_positions = before + self._first_lines // group
        self._begins = np.maximum(first_positions + 1 - window, 0) if window else np.zeros_like(before)
        self.lengths: Ints = self._ends - self._begins

    def work(self, part: int) -> Work:
        """Cut the tiles into parts of so many tokens."""
        counts = -(-self.lengths // part)
        is_cut = counts > 1
        cut_counts = counts * is_cut
        first_partials = cut_counts.cumsum() - cut_counts
        of_tile = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(of_tile)) - np.repeat(counts.cumsum() - counts, counts)
        begins = self._begins[of_tile] + index * part
        ends = np.minimum(begins + part, self._ends[of_tile])
        partials = np.where(is_cut[of_tile], first_partials[of_tile] + index, -1)
        items = np.stack((self._rows[of_tile], self._first_lines[of_tile], begins, ends, partials), axis=1)
        # The longest first: none of them begins when the others have ended.
        items = items[np.argsort(begins - ends, kind="stable")]
        merges = np.stack((self._rows, self._first_lines, first_partials, counts), axis=1)[is_cut]
        return Work(self._tile, items.astype(np.int32), merges.astype(np.int32), int(cut_counts.sum()))
