"""GELU and ReLU, compiled for every instruction set: error bounds against float64 over all of float32, ends, NaN."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels

# As activation.cpp states them.
BOUNDS = {False: 6.0, True: 4.0}
"""Units in the last place, by `tanh`."""
TINY = 2.0**-120
"""Results below it may come out as zero."""

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3}}

each_form = pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@cache
def _samples() -> Tensor:
    """Finite float32 of every exponent and both signs, and closer together where GELU bends."""
    everywhere = torch.arange(0, 2**31, 3001).to(torch.int32).view(torch.float32)
    positive = torch.cat([everywhere[everywhere.isfinite()], torch.linspace(0, 16, 400_001)])
    return torch.cat([positive, -positive])


def _exact(x: Tensor, tanh: bool) -> Tensor:
    """Return GELU in float64, without cancellation in the lower tail."""
    x = x.double()
    if not tanh:
        return x * 0.5 * torch.erfc(-x / math.sqrt(2))
    twice = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    decay = torch.exp(-twice.abs())
    return x * torch.where(twice >= 0, 1.0, decay) / (1 + decay)


@each_form
def test_the_error_bound_holds(compiled: KernelSet, tanh: bool) -> None:
    """From the smallest numbers to the largest, results are within the stated units in the last place of float64's."""
    x = _samples()
    result, exact = compiled.gelu(x[None], tanh=tanh)[0].double(), _exact(x, tanh)
    assert result.isfinite().all()
    nearest = exact.float().abs()
    unit = (torch.nextafter(nearest, torch.tensor(torch.inf)) - nearest).double()
    error = (result - exact).abs()
    assert (error[exact.abs() < TINY] <= TINY).all()
    assert ((error / unit)[exact.abs() >= TINY]).max() <= BOUNDS[tanh]


@each_form
def test_the_exact_function_is_torch_s(tanh: bool) -> None:
    """What the bound is held against is the function that torch computes, where torch's own has digits."""
    x = torch.linspace(-4, 40, 10_001)
    torch_s = torch.nn.functional.gelu(x.double(), approximate="tanh" if tanh else "none")
    torch.testing.assert_close(_exact(x, tanh), torch_s, rtol=1e-9, atol=1e-14)


@each_form
def test_the_ends(compiled: KernelSet, tanh: bool) -> None:
    """Far above it is x itself, far below it is zero and never positive; infinities and NaN are what the formula gives;
    zeros keep their sign. So it is with the reference, save where a square overflows: what torch makes of that is its
    processor's.
    """
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38, 40.0, -40.0, 1e4, -1e4])
    result = compiled.gelu(x[None], tanh=tanh)[0]
    expected = torch.tensor([torch.inf, torch.nan, torch.nan, 0.0, -0.0, 3e38, -0.0, 40.0, -0.0, 1e4, -0.0])
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit()[3:], expected.signbit()[3:])
    reference = build_kernels("reference").gelu(x[None], tanh=tanh)[0]
    same = ~(x.abs() > 1e4)
    torch.testing.assert_close(result[same], reference[same], rtol=0, atol=0, equal_nan=True)
    below = compiled.gelu(torch.linspace(-60, -1e-30, 100_001)[None], tanh=tanh)
    assert (below <= 0).all()


@each_form
def test_outside_the_dip_it_never_falls(compiled: KernelSet, tanh: bool) -> None:
    """Above its minimum near -0.75 GELU rises, and below it falls, by more than rounding can hide."""
    for begin, end, sign in ((-0.7, 12.0, 1), (-12.0, -0.8, -1)):
        result = compiled.gelu(torch.linspace(begin, end, 2001)[None], tanh=tanh)[0]
        assert (sign * result.diff() >= 0).all()


@each_form
@each_dtype
@pytest.mark.parametrize("width", [1, 17, 96, 1537])
def test_both_forms_equal_float64(any_set: KernelSet, dtype: torch.dtype, tanh: bool, width: int) -> None:
    """Of every set, gelu is GELU, and gelu_and_mul that of the first half times the second, of the input's dtype."""
    gate_up = (4 * torch.randn((37, 2 * width), generator=torch.Generator().manual_seed(width))).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = _exact(gate, tanh)
    for result, exact in (
        (any_set.gelu(gate, tanh=tanh), expected),
        (any_set.gelu_and_mul(gate_up, tanh=tanh), expected * up.double()),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, **TOLERANCES[dtype])


@each_form
@each_dtype
@pytest.mark.parametrize("width", [1, 17, 96, 1537])
def test_the_gated_form_is_the_plain_one_times_up(
    compiled: KernelSet, dtype: torch.dtype, tanh: bool, width: int
) -> None:
    """gelu_and_mul is gelu of the first half, times the second, rounded to the dtype once."""
    gate_up = (4 * torch.randn((37, 2 * width), generator=torch.Generator().manual_seed(width))).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = (compiled.gelu(gate, tanh=tanh) * up).to(dtype)
    assert torch.equal(compiled.gelu_and_mul(gate_up, tanh=tanh), expected)


@each_form
@each_dtype
def test_rows_and_nan_are_by_themselves(compiled: KernelSet, dtype: torch.dtype, tanh: bool) -> None:
    """Bit for bit an element does not depend on those around it, also on several threads; NaN stays at its place."""
    x = (3 * torch.randn((70, 1001), generator=torch.Generator().manual_seed(0))).to(dtype)
    x[5, 77] = x[6, 1000] = torch.nan
    pair = torch.cat((x, x.flip(1).nan_to_num(1.0)), dim=1)
    for whole, one in (
        (compiled.gelu(x, tanh=tanh), lambda row: compiled.gelu(x[row : row + 1], tanh=tanh)),
        (compiled.gelu_and_mul(pair, tanh=tanh), lambda row: compiled.gelu_and_mul(pair[row : row + 1], tanh=tanh)),
        (compiled.relu(x), lambda row: compiled.relu(x[row : row + 1])),
    ):
        assert whole.isnan().nonzero().tolist() == [[5, 77], [6, 1000]]
        for row in range(70):
            assert torch.equal(whole[row : row + 1].view(torch.uint8), one(row).view(torch.uint8))


@each_form
def test_bfloat16_is_rounded_once(compiled: KernelSet, tanh: bool) -> None:
    """A result is float32's, rounded to the nearest, ties to even, as torch rounds."""
    x = _samples().bfloat16()
    x = x[None, x.isfinite()]
    assert torch.equal(compiled.gelu(x, tanh=tanh), compiled.gelu(x.float(), tanh=tanh).bfloat16())


@each_dtype
@pytest.mark.parametrize("width", [1, 17, 96])
def test_relu(any_set: KernelSet, dtype: torch.dtype, width: int) -> None:
    """What is below zero becomes zero, what is above stays as it is, and so does NaN."""
    x = torch.randn((33, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(any_set.relu(x), torch.where(x < 0, 0, x), rtol=0, atol=0, equal_nan=True)
    assert any_set.relu(x[:0]).shape == (0, width)
