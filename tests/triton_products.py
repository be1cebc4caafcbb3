"""Small Triton kernels that show how the interpreter computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(a, b, out):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    place = rows * 16 + columns
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@triton.jit
def _round(x, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < count, other=0.0).to(tl.bfloat16), mask=at < count)


def product_of(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two [16, 16] with tl.dot: float32 [16, 16]."""
    out = torch.empty(16, 16)
    _product[(1,)](a, b, out)
    return out


def rounded(x: Tensor) -> Tensor:
    """Round float32 [N] to bfloat16."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    _round[(triton.cdiv(len(x), 4096),)](x, out, len(x), block=4096)
    return out
