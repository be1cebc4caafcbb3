"""The check for finite numbers by a Triton kernel: a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget

MAX_BLOCK = 4096
BUDGETS = {"_finite_rows": Budget(registers=64, shared_bytes=1024)}


@triton.jit
def _finite_rows(values, finite, width, row_stride, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    is_bad = tl.zeros([block], dtype=tl.int32)
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        value = tl.load(values + row * row_stride + at, mask=at < width, other=0.0).to(tl.float32)
        # False of NaN too.
        is_bad |= ((tl.abs(value) < float("inf")) == 0).to(tl.int32)
    tl.store(finite + row, (tl.max(is_bad, axis=0) == 0).to(tl.uint8))


def finite_rows(values: Tensor) -> Tensor:
    """See FiniteRows."""
    if values.stride(-1) != 1:
        values = values.contiguous()
    finite = torch.empty(len(values), dtype=torch.uint8, device=values.device)
    if len(values):
        width = values.shape[1]
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _finite_rows[(len(values),)](values, finite, width, values.stride(0), block=block)
    return finite.view(torch.bool)
