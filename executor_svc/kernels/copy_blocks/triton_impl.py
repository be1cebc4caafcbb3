"""Block copy by a Triton kernel: a program for each piece of a block, keys and values together."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget

MAX_PIECE = 4096
BUDGETS = {"_copy_blocks": Budget(registers=64)}


@triton.jit
def _copy_blocks(key_cache, value_cache, sources, targets, block_elements, piece: tl.constexpr):
    source = tl.load(sources + tl.program_id(0)) * block_elements
    target = tl.load(targets + tl.program_id(0)) * block_elements
    at = tl.program_id(1) * piece + tl.arange(0, piece)
    inside = at < block_elements
    tl.store(key_cache + target + at, tl.load(key_cache + source + at, mask=inside, other=0.0), mask=inside)
    tl.store(value_cache + target + at, tl.load(value_cache + source + at, mask=inside, other=0.0), mask=inside)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See CopyBlocks."""
    if not len(sources):
        return
    block_elements = key_cache[0].numel()
    piece = min(MAX_PIECE, triton.next_power_of_2(block_elements))
    grid = (len(sources), triton.cdiv(block_elements, piece))
    _copy_blocks[grid](key_cache, value_cache, sources, targets, block_elements, piece=piece)
