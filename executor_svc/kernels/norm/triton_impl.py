"""RMSNorm and LayerNorm by one Triton kernel: a program takes whole rows into registers, read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.gpu import Budget

MAX_WIDTH = 1 << 15
"""Elements of a row that a program's registers hold."""
TILE = 2048
"""Elements that a program takes at least: short rows, such as heads, go several to a program."""
BUDGETS = {"_normalize": Budget(registers=128, shared_bytes=1024)}


@triton.jit(do_not_specialize=["rows"])
def _normalize(
    x,
    residual,
    weight,
    bias,
    out,
    rows,
    inner_rows,
    outer_stride,
    inner_stride,
    width,
    eps,
    centers: tl.constexpr,
    adds: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.arange(0, block)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    source = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    target = row[:, None] * width + columns[None, :]
    value = tl.load(x + source[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + target, total, mask=inside)
        value = total.to(tl.float32)
    if centers:
        mean = tl.sum(value, axis=1) / width
        value = tl.where(inside, value - mean[:, None], 0.0)
    spread = tl.sum(value * value, axis=1) / width
    value *= tl.rsqrt(spread + eps)[:, None]
    value *= tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if has_bias:
        value += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See RmsNorm. ValueError past MAX_WIDTH, as from the others."""
    return _launch(x, None, weight, None, eps, centers=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See AddRmsNorm. ValueError where the residual is not contiguous."""
    return _launch(x, residual, weight, None, eps, centers=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See LayerNorm."""
    return _launch(x, None, weight, bias, eps, centers=True)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See AddLayerNorm. ValueError where the residual is not contiguous."""
    return _launch(x, residual, weight, bias, eps, centers=True)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, centers: bool
) -> Tensor:
    width = x.shape[-1]
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements; a norm takes at most {MAX_WIDTH}")
    if residual is not None and not residual.is_contiguous():
        raise ValueError("the residual is changed in place, and must be contiguous")
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() not in (2, 3):
        x = x.view(-1, width)
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    rows = out.numel() // width
    outer_stride, inner_rows, inner_stride = (x.stride(0), 1, 0) if x.dim() == 2 else (x.stride(0), *_inner(x))
    block = triton.next_power_of_2(width)
    tile_rows = max(1, TILE // block)
    _normalize[(triton.cdiv(rows, tile_rows),)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        inner_rows,
        outer_stride,
        inner_stride,
        width,
        eps,
        centers=centers,
        adds=residual is not None,
        has_bias=bias is not None,
        tile_rows=tile_rows,
        block=block,
        num_warps=min(32, max(4, block // 1024)),
    )
    return out


def _inner(x: Tensor) -> tuple[int, int]:
    return x.shape[1], x.stride(1)
