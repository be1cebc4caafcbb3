"""The cut of rows of one token each by a Triton kernel, as paged_attention/work.py cuts them on the host.

One launch stands in a graph where as many torch operations as there are lines below would each cost a launch of their
own, in every step. Every program works out the whole running sum of the rows, which is little, and writes its share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget
from executor_svc.kernels.paged_attention import work
from executor_svc.kernels.paged_attention.work import PlacedWork

BUDGETS = {"_plan_decode": Budget(registers=96, shared_bytes=4096)}
MIN_ROWS = 64
"""Rows that a form of the kernel takes at least, so that there are few forms."""
MOST_PAIRS = 2048
"""Pairs of an item and a row that a program looks at."""
LEAST_PART = tl.constexpr(work.LEAST_PART)
PART_STEP = tl.constexpr(work.PART_STEP)


@triton.jit
def _lengths(context_lens, row, is_row, window):
    """The first token that rows of one token read, the end of what they read, and how many these are; int32."""
    end = tl.load(context_lens + row, mask=is_row, other=0)
    begin = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    return begin, end, end - begin


@triton.jit(do_not_specialize=["rows", "num_items", "row_tiles", "num_kv_heads", "programs", "window", "tile"])
def _plan_decode(
    context_lens,
    items,
    merges,
    rows,
    num_items,
    row_tiles,
    num_kv_heads,
    programs,
    window,
    tile,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    each = tl.arange(0, block_rows)
    _, _, lengths = _lengths(context_lens, each, each < rows, window)
    total = tl.sum(lengths.to(tl.int64), axis=0) * row_tiles * num_kv_heads
    wanted = (total + programs - 1) // programs
    part = tl.maximum((wanted + PART_STEP - 1) // PART_STEP * PART_STEP, LEAST_PART).to(tl.int32)
    # Items of each row, and where they end in the table.
    row_items = (lengths + part - 1) // part * row_tiles
    row_ends = tl.cumsum(row_items, axis=0)

    at = tl.program_id(0) * block + tl.arange(0, block)
    is_before = row_ends[None, :] <= at[:, None]
    is_before = is_before & (each < rows)[None, :]
    row = tl.sum(is_before.to(tl.int32), axis=1)
    inner = at - tl.sum(tl.where(is_before, row_items[None, :], 0), axis=1)
    is_item = row < rows
    row = tl.minimum(row, rows - 1)
    begin, end, length = _lengths(context_lens, row, is_item, window)
    count = tl.maximum((length + part - 1) // part, 1)
    # Left over, it names no line of a row, and its program does nothing.
    line = tl.where(is_item, inner // count, row_tiles) * tile
    begin = begin + tl.where(is_item, inner % count, 0) * part
    end = tl.minimum(begin + part, end)
    item = items + at * 5
    is_in = at < num_items
    tl.store(item, row, mask=is_in)
    tl.store(item + 1, line, mask=is_in)
    tl.store(item + 2, begin, mask=is_in)
    tl.store(item + 3, end, mask=is_in)
    tl.store(item + 4, tl.where(is_item & (count > 1), at, -1), mask=is_in)

    row = at // row_tiles
    is_tile = row < rows
    _, _, length = _lengths(context_lens, row, is_tile, window)
    count = (length + part - 1) // part
    first = tl.sum(tl.where(each[None, :] < row[:, None], row_items[None, :], 0), axis=1) + at % row_tiles * count
    merge = merges + at * 4
    tl.store(merge, row, mask=is_tile)
    tl.store(merge + 1, tl.where(count > 1, at % row_tiles, row_tiles) * tile, mask=is_tile)
    tl.store(merge + 2, first, mask=is_tile)
    tl.store(merge + 3, tl.where(count > 1, count, 0), mask=is_tile)


def plan_decode(
    context_lens: Tensor, *, group: int, num_kv_heads: int, window: int, large_tile: int, processors: int
) -> PlacedWork:
    """Cut rows of one token each, as plan_work does, on the device: contexts are int32 [R] there.

    Parts are as long as plan_work's, so there are never more of them than one for each tile, and what fills the
    processors beside. So many the tables have for any contexts; those left over name no line of a row, and their
    programs do nothing.
    """
    rows, tile = len(context_lens), work.small_tile(group, large_tile)
    row_tiles = -(-group // tile)
    tiles, programs = rows * row_tiles, processors * work.PROGRAMS_PER_PROCESSOR
    num_items = tiles + programs // num_kv_heads
    items = torch.empty((num_items, 5), dtype=torch.int32, device=context_lens.device)
    merges = torch.empty((tiles, 4), dtype=torch.int32, device=context_lens.device)
    block_rows = max(MIN_ROWS, triton.next_power_of_2(rows))
    block = max(1, MOST_PAIRS // block_rows)
    _plan_decode[(triton.cdiv(num_items, block),)](
        context_lens,
        items,
        merges,
        rows,
        num_items,
        row_tiles,
        num_kv_heads,
        programs,
        window,
        tile,
        block_rows=block_rows,
        block=block,
    )
    return PlacedWork(tile, items, merges, num_partials=num_items)
