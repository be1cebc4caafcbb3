"""Norms and the gated activation, compiled for every instruction set: odd shapes, NaN, and rows by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.norm import reference as norm_reference

TOLERANCES = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3}}
WIDTHS = (1, 2, 7, 31, 32, 33, 64, 100, 576, 2048, 2051)

each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])


def _random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return bool((first.view(torch.uint8) == second.view(torch.uint8)).all())


@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_float64(compiled: KernelSet, dtype: torch.dtype, width: int) -> None:
    """Both norms are within rounding of float64's, over widths that fill no vector and rows that fill no share."""
    x, residual = _random(37, width, dtype=dtype, scale=3.0), _random(37, width, dtype=dtype, seed=1)
    weight = _random(width, dtype=dtype, seed=2)
    total = residual + x
    expected = norm_reference.rms_norm(total.double().to(torch.float32), weight.float(), 1e-5)
    normed = compiled.add_rms_norm(x, residual, weight, 1e-5)
    assert _same_bits(residual, total)
    assert _same_bits(normed, compiled.rms_norm(total, weight, 1e-5))
    torch.testing.assert_close(normed.float(), expected, **TOLERANCES[dtype])


def _layer_norm_in_float64(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    difference = wide - wide.mean(-1, keepdim=True)
    normed = difference / (difference.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


@each_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norms_equal_float64(any_set: KernelSet, dtype: torch.dtype, with_bias: bool, width: int) -> None:
    """LayerNorm, alone and of a sum, is within rounding of float64's; x is left alone, the residual becomes the sum."""
    x, residual = _random(37, width, dtype=dtype, scale=3.0), _random(37, width, dtype=dtype, seed=1)
    weight = _random(width, dtype=dtype, seed=2)
    bias = _random(width, dtype=dtype, seed=3) if with_bias else None
    total, before = residual + x, x.clone()
    normed = any_set.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert _same_bits(residual, total)
    assert _same_bits(x, before)
    assert _same_bits(normed, any_set.layer_norm(total, weight, bias, 1e-5))
    expected = _layer_norm_in_float64(total, weight, bias, 1e-5)
    torch.testing.assert_close(normed.double(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("mean", [0.0, 1e3, -1e5, 3e6])
@pytest.mark.parametrize("width", [33, 576, 2051])
def test_a_large_mean_costs_no_digits(compiled: KernelSet, mean: float, width: int) -> None:
    """The variance is that of the differences: rows far from zero come out as float64 has them, and rows of one value,
    whose mean float32 cannot hold, as zeros.
    """
    x, weight = _random(9, width, dtype=torch.float32) + mean, _random(width, dtype=torch.float32, seed=1)
    expected = _layer_norm_in_float64(x, weight, None, 1e-5)
    torch.testing.assert_close(compiled.layer_norm(x, weight, None, 1e-5).double(), expected, rtol=4e-6, atol=4e-6)
    constant = torch.full((3, width), mean + 0.1)
    assert torch.equal(compiled.layer_norm(constant, weight.abs(), None, 1e-5), torch.zeros(3, width))


@each_dtype
@pytest.mark.parametrize("width", [1, 7, 33, 576, 1537])
def test_silu_and_mul_equals_float64(compiled: KernelSet, dtype: torch.dtype, width: int) -> None:
    """The gate is within rounding of float64's, from deep below zero, where it is nearly nothing, to far above."""
    gate_up = _random(37, 2 * width, dtype=dtype, scale=30.0)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200.0, 200.0, 0.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up).float()
    result = compiled.silu_and_mul(gate_up)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, **TOLERANCES[dtype])


@each_dtype
@pytest.mark.parametrize("width", [33, 576, 2048])
def test_a_row_does_not_depend_on_the_others(compiled: KernelSet, dtype: torch.dtype, width: int) -> None:
    """Bit for bit, a row among others, on several threads, is the row alone."""
    x, weight = _random(70, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    gate_up = _random(70, 2 * width, dtype=dtype, seed=2)
    normed, gated = compiled.rms_norm(x, weight, 1e-5), compiled.silu_and_mul(gate_up)
    centered = compiled.layer_norm(x, weight, weight, 1e-5)
    for row in range(70):
        assert _same_bits(normed[row : row + 1], compiled.rms_norm(x[row : row + 1], weight, 1e-5))
        assert _same_bits(centered[row : row + 1], compiled.layer_norm(x[row : row + 1], weight, weight, 1e-5))
        assert _same_bits(gated[row : row + 1], compiled.silu_and_mul(gate_up[row : row + 1]))


@each_dtype
def test_nan_stays_in_its_row(compiled: KernelSet, dtype: torch.dtype) -> None:
    """One NaN makes its row NaN, by an addition too, and no other; in the gate it stays at its place."""
    for place in (0, 40, 98):
        x, weight = _random(5, 99, dtype=dtype), _random(99, dtype=dtype, seed=1).abs() + 0.5
        x[2, place] = torch.nan
        sums = compiled.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)
        layer_sums = compiled.add_layer_norm(x, torch.zeros_like(x), weight, None, 1e-5)
        layers = compiled.layer_norm(x, weight, weight, 1e-5)
        for normed in (compiled.rms_norm(x, weight, 1e-5), sums, layers, layer_sums):
            assert normed.isnan().any(dim=1).tolist() == [False, False, True, False, False]
            assert normed[2].isnan().all()
        for half in (0, 99):
            gate_up = _random(5, 198, dtype=dtype)
            gate_up[2, half + place] = torch.nan
            assert compiled.silu_and_mul(gate_up).isnan().nonzero().tolist() == [[2, place]]


@each_dtype
def test_heads_are_normed_each(compiled: KernelSet, dtype: torch.dtype) -> None:
    """Any leading dimensions are rows, also of a wider tensor; no rows give none."""
    wide, weight = _random(6, 9, 40, dtype=dtype), _random(40, dtype=dtype, seed=1)
    heads = wide[:, 2:5]
    normed = compiled.rms_norm(heads, weight, 1e-6)
    assert _same_bits(normed, compiled.rms_norm(heads.reshape(18, 40), weight, 1e-6).view(6, 3, 40))
    assert compiled.rms_norm(wide[:0, 0], weight, 1e-6).shape == (0, 40)
    centered = compiled.layer_norm(heads, weight, None, 1e-6)
    assert _same_bits(centered, compiled.layer_norm(heads.reshape(18, 40), weight, None, 1e-6).view(6, 3, 40))
    assert compiled.layer_norm(wide[:0, 0], weight, weight, 1e-6).shape == (0, 40)
    assert compiled.silu_and_mul(wide[:0, 0]).shape == (0, 20)


def test_a_residual_that_does_not_lie_together_is_refused(compiled: KernelSet) -> None:
    """What is changed in place cannot be a copy."""
    with pytest.raises(ValueError, match="contiguous"):
        compiled.add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 8)[:, ::2], torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        compiled.add_layer_norm(torch.zeros(2, 4), torch.zeros(2, 8)[:, ::2], torch.ones(4), None, 1e-5)
