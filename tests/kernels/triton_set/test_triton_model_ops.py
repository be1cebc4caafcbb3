"""Norms, activations, rotary embedding and block copy by Triton, interpreted: the bodies of the other sets, and what
these have not.
"""

from __future__ import annotations

import pytest
import torch
from test_decoder_ops import (
    nan_memory,
    test_a_set_has_every_op,
    test_add_rms_norm,
    test_rms_norm,
    test_rms_norm_of_zeros_is_zero,
    test_silu_and_mul,
)
from test_norm_activation import (
    test_a_residual_that_does_not_lie_together_is_refused,
    test_a_row_does_not_depend_on_the_others,
    test_heads_are_normed_each,
    test_nan_stays_in_its_row,
    test_norms_equal_float64,
    test_silu_and_mul_equals_float64,
)
from test_rotary_write_kv import (
    Problem,
    test_nan_stays_with_its_token,
    test_padding_is_written_to_the_null_block_only,
    test_slots,
)
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.activation import reference as activation
from executor_svc.kernels.copy_blocks import reference as copying
from executor_svc.kernels.norm import reference as norm
from executor_svc.kernels.rotary_write_kv import QkNorm
from executor_svc.kernels.rotary_write_kv.reference import rotary_write_kv

__all__ = [
    "nan_memory",
    "test_a_residual_that_does_not_lie_together_is_refused",
    "test_a_row_does_not_depend_on_the_others",
    "test_a_set_has_every_op",
    "test_add_rms_norm",
    "test_heads_are_normed_each",
    "test_nan_stays_in_its_row",
    "test_nan_stays_with_its_token",
    "test_norms_equal_float64",
    "test_padding_is_written_to_the_null_block_only",
    "test_rms_norm",
    "test_rms_norm_of_zeros_is_zero",
    "test_silu_and_mul",
    "test_silu_and_mul_equals_float64",
    "test_slots",
]

TOLERANCES = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16", "float16"])


def _random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@each_dtype
@pytest.mark.parametrize("width", [1, 33, 1500])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_layer_norm_equals_the_reference(kernels: KernelSet, dtype: torch.dtype, width: int, has_bias: bool) -> None:
    """LayerNorm, alone and after an addition, is the reference's, far from zero too; the residual is the sum."""
    x, residual = _random(5, width, dtype=dtype) + 3, _random(5, width, dtype=dtype, seed=1)
    weight = _random(width, dtype=dtype, seed=2)
    bias = _random(width, dtype=dtype, seed=3) if has_bias else None
    total = residual + x
    expected = norm.layer_norm(total, weight, bias, 1e-5)
    normed = kernels.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, kernels.layer_norm(total, weight, bias, 1e-5))
    torch.testing.assert_close(normed, expected, **TOLERANCES[dtype])


@each_dtype
@pytest.mark.parametrize("width", [1, 17, 2100])
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_gelu_equals_the_reference(kernels: KernelSet, dtype: torch.dtype, width: int, tanh: bool) -> None:
    """Both forms, alone and gated, from deep below zero to far above, near zero too."""
    gate_up = _random(3, 2 * width, dtype=dtype, scale=3.0)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200.0, 200.0, 1e-3
    expected = activation.gelu(gate_up, tanh=tanh), activation.gelu_and_mul(gate_up, tanh=tanh)
    actual = kernels.gelu(gate_up.clone(), tanh=tanh), kernels.gelu_and_mul(gate_up.clone(), tanh=tanh)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCES[dtype])


def test_relu_equals_the_reference(kernels: KernelSet) -> None:
    """ReLU keeps NaN."""
    x = torch.tensor([[-1.0, 0.0, 2.0, torch.nan]])
    torch.testing.assert_close(kernels.relu(x.clone()), activation.relu(x), equal_nan=True)


@each_dtype
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((8, 1), 30), ((1, 1), 2), ((40, 8), 10)])
def test_rotary_equals_the_reference(
    kernels: KernelSet, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    """Heads of any width; those turned in part, or not at all, keep their other elements bit for bit."""
    problem = Problem(5, heads=heads, head_dim=head_dim, dtype=dtype)
    for half in {head_dim // 2, head_dim // 3, 0}:
        problem.cos, problem.sin = (each[:, :half].contiguous() for each in (problem.cos, problem.sin))
        actual, expected = problem.run(kernels.rotary_write_kv), problem.run(rotary_write_kv)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, **TOLERANCES[dtype])


@each_dtype
@pytest.mark.parametrize("half", [12, 7, 0])
def test_normed_heads_equal_the_reference(kernels: KernelSet, dtype: torch.dtype, half: int) -> None:
    """Query and key heads are normed by their own weights before they are turned; values are not."""
    problem = Problem(5, heads=(5, 2), head_dim=24, dtype=dtype)
    problem.cos, problem.sin = (each[:, :half].contiguous() for each in (problem.cos, problem.sin))
    qk_norm = QkNorm(_random(24, dtype=dtype, seed=1), _random(24, dtype=dtype, seed=2), 1e-6)
    sets = [kernels.rotary_write_kv, rotary_write_kv]
    results = [problem.run(lambda *inputs, op=op: op(*inputs, qk_norm=qk_norm)) for op in sets]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **TOLERANCES[dtype])


@each_dtype
@pytest.mark.parametrize("shape", [(7, 3, 2, 10), (7, 16, 4, 80)], ids=str)
def test_blocks_are_copied(triton_set: KernelSet, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Targets become their sources, keys and values each; every other block keeps its bits, NaN too."""
    from executor_svc.kernels.copy_blocks.triton_impl import copy_blocks

    caches = [_random(*shape, dtype=dtype, seed=seed) for seed in (1, 2)]
    caches[0][6] = torch.nan
    expected = [cache.clone() for cache in caches]
    sources, targets = torch.tensor([0, 4, 4]), torch.tensor([5, 1, 3])
    copying.copy_blocks(*expected, sources, targets)
    copy_blocks(*caches, sources, targets)
    for one, other in zip(caches, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    copy_blocks(*caches, sources[:0], targets[:0])
