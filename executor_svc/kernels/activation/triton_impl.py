"""Activations by Triton kernels: one pass over memory each, a program for each piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.device_math.triton_impl import tanh
from executor_svc.kernels.gpu import Budget

MAX_BLOCK = 2048
BUDGETS = {"_gated": Budget(registers=64), "_gelu": Budget(registers=64)}


@triton.jit
def _gelu_of(x, is_tanh: tl.constexpr):
    if is_tanh:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))  # sqrt(2 / pi)
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)


@triton.jit
def _gated(gate_up, out, width, is_gelu: tl.constexpr, is_tanh: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if is_gelu:
        gate = _gelu_of(gate, is_tanh)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu(x, out, count, is_tanh: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, _gelu_of(value, is_tanh).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See SiluAndMul."""
    return _launch_gated(gate_up, is_gelu=False, is_tanh=False)


def gelu_and_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """See GeluAndMul."""
    return _launch_gated(gate_up, is_gelu=True, is_tanh=tanh)


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """See Gelu."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if count := x.numel():
        block = min(MAX_BLOCK, triton.next_power_of_2(count))
        _gelu[(triton.cdiv(count, block),)](x, out, count, is_tanh=tanh, block=block)
    return out


def relu(x: Tensor) -> Tensor:
    """See Relu. One pass already."""
    return torch.relu(x)


def _launch_gated(gate_up: Tensor, *, is_gelu: bool, is_tanh: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if out.numel():
        block = min(MAX_BLOCK, triton.next_power_of_2(width))
        _gated[(rows, triton.cdiv(width, block))](gate_up, out, width, is_gelu=is_gelu, is_tanh=is_tanh, block=block)
    return out
