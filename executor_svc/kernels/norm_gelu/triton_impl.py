"""LayerNorm and GELU by one Triton kernel: a program takes whole rows into registers, read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.activation.triton_impl import _gelu_of
from executor_svc.kernels.gpu import Budget

MAX_WIDTH = 1 << 15
"""Elements of a row that a program's registers hold."""
BUDGETS = {"_norm_gelu": Budget(registers=128, shared_bytes=1024)}


@triton.jit
def _norm_gelu(x, weight, bias, out, width, eps, has_bias: tl.constexpr, is_tanh: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded as if it had been written out between.
    value = value.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, _gelu_of(value, is_tanh).to(out.dtype.element_ty), mask=inside)


def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, tanh: bool) -> Tensor:
    """See NormGelu. ValueError past MAX_WIDTH."""
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements; a norm takes at most {MAX_WIDTH}")
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        block = triton.next_power_of_2(width)
        _norm_gelu[(rows,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            width,
            eps,
            has_bias=bias is not None,
            is_tanh=tanh,
            block=block,
            num_warps=min(32, max(4, block // 1024)),
        )
    return out
