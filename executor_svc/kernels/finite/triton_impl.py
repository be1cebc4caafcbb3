"""The check for finite numbers by a Triton kernel: a program for each row, or for each piece of a row of logits, which
one program alone would read longer than a product takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget

MAX_BLOCK = 4096
PIECE = 16_384
"""Elements of a row that a program looks at."""
BUDGETS = {"_finite_rows": Budget(registers=64, shared_bytes=1024)}


@triton.jit
def _finite_rows(values, finite, width, row_stride, piece: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * piece
    is_bad = tl.zeros([block], dtype=tl.int32)
    for begin in range(first, tl.minimum(first + piece, width), block):
        at = begin + tl.arange(0, block)
        value = tl.load(values + row * row_stride + at, mask=at < width, other=0.0).to(tl.float32)
        # False of NaN too.
        is_bad |= ((tl.abs(value) < float("inf")) == 0).to(tl.int32)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(finite + place, (tl.max(is_bad, axis=0) == 0).to(tl.uint8))


def finite_rows(values: Tensor) -> Tensor:
    """See FiniteRows."""
    if values.stride(-1) != 1:
        values = values.contiguous()
    rows, width = values.shape
    pieces = max(1, triton.cdiv(width, PIECE))
    finite = torch.empty((rows, pieces), dtype=torch.uint8, device=values.device)
    if rows:
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _finite_rows[(rows, pieces)](values, finite, width, values.stride(0), piece=PIECE, block=block)
    is_finite = finite.view(torch.bool)
    return is_finite[:, 0] if pieces == 1 else is_finite.all(dim=1)
