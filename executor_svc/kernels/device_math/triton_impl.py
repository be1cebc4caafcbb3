"""Arithmetic that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32, to a few units in the last place.

    Triton has none outside the vendors' libraries. Near 0, where 1 - exp(-2x) would cancel, it is its series.
    """
    size = tl.abs(x)
    square = x * x
    series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    near = x * (1.0 + square * (-1.0 / 3.0 + square * series))
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def ordered(x):
    """int32 keys that order as the float32 numbers x do; 0 and -0 have one key, NaN lies above or below all others."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def round_to_even(x):
    """The nearest whole number of float64 x, below 2^51 in size, as int64; halves go to the even one."""
    # In the second sum the fraction has no place.
    shift: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52
    return ((x + shift) - shift).to(tl.int64)
