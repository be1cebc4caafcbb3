"""Paged attention by Triton kernels, prefill and decode alike: online softmax over a tile's keys (Dao 2023,
"FlashAttention-2"), long contexts in parts that are merged (Dao et al. 2023, "Flash-Decoding"). work.py cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.decode_plan.triton_impl import plan_decode
from executor_svc.kernels.device_math.triton_impl import tanh
from executor_svc.kernels.gpu import Budget, Gpu
from executor_svc.kernels.paged_attention import PagedAttention, PlanAttention, RaggedBatch
from executor_svc.kernels.paged_attention.work import PlacedWork, Work, plan_work

LOG2_E = tl.constexpr(1.4426950408889634)
# One program's registers are at least a half of a multiprocessor's; its shared memory is what the smaller cards have.
BUDGETS = {
    "_attend": Budget(registers=255, shared_bytes=101_376),
    "_merge": Budget(registers=128, shared_bytes=1024),
}


# What differs from step to step, and from layer to layer, makes no other kernel.
@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend(
    query,
    key_cache,
    value_cache,
    out,
    partials,
    partial_sums,
    items,
    block_tables,
    query_start,
    context_lens,
    scale,
    soft_cap,
    window,
    query_stride,
    table_stride,
    num_kv_heads,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    tile: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
):
    item = items + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    row = tl.load(item)
    first_line = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    partial = tl.load(item + 4)
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    context_len = tl.load(context_lens + row)

    line = first_line + tl.arange(0, tile)
    token = line // group
    head = kv_head * group + line % group
    position = context_len - query_len + token
    dim = tl.arange(0, block_dim)
    inside = (token < query_len)[:, None] & (dim < head_dim)[None, :]
    source = query + (start + token).to(tl.int64)[:, None] * query_stride + (head * head_dim)[:, None] + dim[None, :]
    lines = tl.load(source, mask=inside, other=0.0)

    highest = tl.full([tile], float("-inf"), dtype=tl.float32)
    total = tl.zeros([tile], dtype=tl.float32)
    mixed = tl.zeros([tile, block_dim], dtype=tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for at in range(begin, end, block_tokens):
        read = at + tl.arange(0, block_tokens)
        is_read = read < end
        block = tl.load(table + read // block_size, mask=is_read, other=0).to(tl.int64)
        slot = ((block * block_size + read % block_size) * num_kv_heads + kv_head) * head_dim
        # What lies in slots that are not read may be NaN, which times 0 is NaN: they are not loaded.
        keys = tl.load(
            key_cache + slot[None, :] + dim[:, None], mask=is_read[None, :] & (dim < head_dim)[:, None], other=0.0
        )
        scores = tl.dot(lines, keys, input_precision="ieee") * scale
        if has_cap:
            scores = soft_cap * tanh(scores / soft_cap)
        seen = is_read[None, :] & (read[None, :] <= position[:, None])
        if has_window:
            seen = seen & (read[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        highest_now = tl.maximum(highest, tl.max(scores, axis=1))
        # A line that has seen nothing yet: infinity less infinity is NaN.
        shift = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        values = tl.load(
            value_cache + slot[:, None] + dim[None, :], mask=is_read[:, None] & (dim < head_dim)[None, :], other=0.0
        )
        mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
        highest = highest_now

    if partial < 0:
        num_heads = num_kv_heads * group
        target = out + ((start + token).to(tl.int64) * num_heads + head)[:, None] * head_dim + dim[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        place = (partial.to(tl.int64) * num_kv_heads + kv_head) * tile + tl.arange(0, tile)
        some = tl.where(total == 0.0, 1.0, total)
        tl.store(partials + place[:, None] * block_dim + dim[None, :], mixed / some[:, None])
        tl.store(partial_sums + place, highest + tl.log2(total))


@triton.jit
def _merge(
    partials,
    partial_sums,
    out,
    merges,
    query_start,
    num_kv_heads,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
    block_dim: tl.constexpr,
):
    merge = merges + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    row = tl.load(merge)
    first_line = tl.load(merge + 1)
    first = tl.load(merge + 2)
    count = tl.load(merge + 3)
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start

    dim = tl.arange(0, block_dim)
    highest = tl.full([tile], float("-inf"), dtype=tl.float32)
    total = tl.zeros([tile], dtype=tl.float32)
    mixed = tl.zeros([tile, block_dim], dtype=tl.float32)
    base = (first.to(tl.int64) * num_kv_heads + kv_head) * tile + tl.arange(0, tile)
    for index in range(count):
        place = base + index * num_kv_heads * tile
        log_sum = tl.load(partial_sums + place)
        values = tl.load(partials + place[:, None] * block_dim + dim[None, :])
        highest_now = tl.maximum(highest, log_sum)
        shift = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        weight = tl.exp2(log_sum - shift)
        decay = tl.exp2(highest - shift)
        total = total * decay + weight
        mixed = mixed * decay[:, None] + values * weight[:, None]
        highest = highest_now

    line = first_line + tl.arange(0, tile)
    token = line // group
    head = kv_head * group + line % group
    inside = (token < query_len)[:, None] & (dim < head_dim)[None, :]
    num_heads = num_kv_heads * group
    target = out + ((start + token).to(tl.int64) * num_heads + head)[:, None] * head_dim + dim[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Shape:
    """How large a program's pieces are."""

    large_tile: int
    block_tokens: int
    small_warps: int
    """Of a program whose tile is smaller than the large one."""
    large_warps: int
    num_stages: int


def _shape(gpu: Gpu, head_dim: int, dtype: torch.dtype) -> _Shape:
    """Choose what fits into registers and shared memory."""
    block_dim = max(16, triton.next_power_of_2(head_dim))
    is_wide = block_dim > 128
    if dtype == torch.float32:
        # No matrix unit takes it at full precision: the sums are the threads' own, and small pieces do not spill.
        warps = 8 if block_dim > 64 else 4
        return _Shape(16 if is_wide else 32, 16 if is_wide else 32, warps, warps, num_stages=1)
    block_tokens = 32 if is_wide else 64
    row_bytes = block_dim * dtype.itemsize
    # Keys and values of each stage, and the queries.
    stages = (gpu.shared_bytes - 64 * row_bytes) // (2 * block_tokens * row_bytes)
    small_warps, large_warps = 8 if is_wide else 4, 8 if block_dim > 64 else 4
    return _Shape(64, block_tokens, small_warps, large_warps, num_stages=max(1, min(3, stages)))


def _placed(work: Work, device: torch.device) -> PlacedWork:
    """Put the tables of work on the device."""
    tables = torch.from_numpy(work.items), torch.from_numpy(work.merges)
    if device.type == "cuda":
        # Else the copy would wait for what the device is doing.
        tables = tables[0].pin_memory(), tables[1].pin_memory()
    items, merges = (table.to(device, non_blocking=True) for table in tables)
    return PlacedWork(work.tile, items, merges, work.num_partials)


class TritonAttention:
    """One step's batch. How it is cut depends on the layer's heads and window, and is worked out once for each kind."""

    def __init__(self, batch: RaggedBatch, block_size: int, gpu: Gpu) -> None:
        self._batch = batch
        self._block_size = block_size
        self._gpu = gpu
        self._works: dict[tuple[int, int, int, int], list[PlacedWork]] = {}

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
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key_cache.shape[2]
        shape = _shape(self._gpu, head_dim, query.dtype)
        out = query.new_empty((num_tokens, num_heads, head_dim))
        for work in self._cut(num_heads // num_kv_heads, num_kv_heads, window, shape.large_tile, query.device):
            self._run(work, shape, query, key_cache, value_cache, out, scale, window, soft_cap)
        return out

    def _cut(
        self, group: int, num_kv_heads: int, window: int, large_tile: int, device: torch.device
    ) -> list[PlacedWork]:
        kind = group, num_kv_heads, window, large_tile
        if kind not in self._works:
            self._works[kind] = self._plan(*kind, device)
        return self._works[kind]

    def _plan(
        self, group: int, num_kv_heads: int, window: int, large_tile: int, device: torch.device
    ) -> list[PlacedWork]:
        sizes = {"group": group, "num_kv_heads": num_kv_heads, "window": window, "large_tile": large_tile}
        processors = self._gpu.processors
        if self._batch.context_lens_host is None:
            return [plan_decode(self._batch.context_lens, **sizes, processors=processors)]
        return [_placed(work, device) for work in plan_work(self._batch, **sizes, processors=processors)]

    def _run(
        self,
        work: PlacedWork,
        shape: _Shape,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> None:
        batch, tile = self._batch, work.tile
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = key_cache.shape[2]
        block_dim = max(16, triton.next_power_of_2(head_dim))
        lines = work.num_partials * num_kv_heads * tile
        partials = query.new_empty((lines, block_dim), dtype=torch.float32)
        partial_sums = query.new_empty((lines,), dtype=torch.float32)
        sizes = {"group": num_heads // num_kv_heads, "head_dim": head_dim, "tile": tile, "block_dim": block_dim}
        _attend[(len(work.items), num_kv_heads)](
            query,
            key_cache,
            value_cache,
            out,
            partials,
            partial_sums,
            work.items,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            scale,
            soft_cap,
            window,
            query.stride(0),
            batch.block_tables.stride(0),
            num_kv_heads,
            block_size=self._block_size,
            has_window=window > 0,
            has_cap=soft_cap > 0,
            block_tokens=shape.block_tokens,
            num_warps=shape.small_warps if tile < shape.large_tile else shape.large_warps,
            num_stages=shape.num_stages,
            **sizes,
        )
        if len(work.merges):
            _merge[(len(work.merges), num_kv_heads)](
                partials, partial_sums, out, work.merges, batch.query_start, num_kv_heads, **sizes
            )


def make_plan_attention(gpu: Gpu) -> PlanAttention:
    """Make the op for a GPU."""

    def plan_attention(batch: RaggedBatch, block_size: int) -> PagedAttention:
        return TritonAttention(batch, block_size, gpu)

    return plan_attention
