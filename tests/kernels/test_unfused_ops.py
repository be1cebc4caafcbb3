"""The ops that graphs run where passes are off, and the fused ops of graphs alone. Every set against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear_activation import Epilogue

SHAPES = [(1, 1), (1, 8), (3, 33), (40, 576)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _apart(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows that lie further apart than they are wide, with NaN between."""
    whole = torch.full((rows, width + 5), torch.nan, dtype=dtype)
    whole[:, 2 : width + 2] = _random(rows, width, dtype=dtype, seed=seed)
    return whole[:, 2 : width + 2]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_products_and_silu(any_set: KernelSet, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """New contiguous tensors of rows that lie apart, each computed in float32 and rounded once."""
    x, y = (_apart(*shape, dtype, seed) for seed in (1, 2))
    kept = x.clone()
    for given, expected in (
        (any_set.add(x, y), x + y),
        (any_set.multiply(x, y), (x.float() * y.float()).to(dtype)),
        (any_set.silu(x), functional.silu(x.float()).to(dtype)),
    ):
        assert given.is_contiguous()
        torch.testing.assert_close(given, expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-7)
    assert torch.equal(x, kept)


@each_dtype
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (20, 5), (64, 32), (64, 0)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rotary_and_write_are_what_the_fused_op_does(
    any_set: KernelSet, dtype: torch.dtype, head_dim: int, half: int, tokens: int
) -> None:
    """Queries turned, keys turned and written, values written: bit for bit as rotary_write_kv, out of columns of one
    projection; slots that nobody has keep their bytes.
    """
    heads, kv_heads = 6, 2
    qkv = _random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(4 * 16, generator=torch.Generator().manual_seed(2))[:tokens] + 16
    caches = [[torch.full((5, 16, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)] for _ in range(2)]
    fused = any_set.rotary_write_kv(qkv, angles.cos(), angles.sin(), slots, *caches[0])
    by_head = qkv.view(tokens, -1, head_dim)
    query, key, value = by_head.split((heads, kv_heads, kv_heads), dim=1)
    turned = [any_set.rotary(each, angles.cos(), angles.sin()) for each in (query, key)]
    any_set.write_kv(turned[1], value, slots, *caches[1])
    assert torch.equal(turned[0], fused)
    assert all(map(torch.equal, *caches))


@each_dtype
@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (40, 576)])
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_norm_gelu(any_set: KernelSet, dtype: torch.dtype, shape: tuple[int, int], tanh: bool) -> None:
    """Bit for bit the set's own GELU of its own LayerNorm, with a bias and without."""
    x, weight, bias = _random(*shape, dtype=dtype), _random(shape[1], dtype=dtype), _random(shape[1], dtype=dtype)
    kept = x.clone()
    for given in (bias, None):
        expected = any_set.gelu(any_set.layer_norm(x, weight, given, 1e-5), tanh=tanh)
        assert torch.equal(any_set.norm_gelu(x, weight, given, 1e-5, tanh=tanh), expected)
    assert torch.equal(x, kept)


@each_dtype
@pytest.mark.parametrize("epilogue", ["gelu", "gelu_tanh", "relu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_linear_activation(any_set: KernelSet, dtype: torch.dtype, epilogue: Epilogue) -> None:
    """The activation of what the layer gives; the layer and x are as before."""
    linear = any_set.pack_linear(_random(48, 40, dtype=dtype) / 6, _random(48, dtype=dtype))
    x = _random(5, 40, dtype=dtype)
    kept, product = x.clone(), linear(x)
    form = {"tanh": "tanh" in epilogue} if "gelu" in epilogue else {}
    expected = getattr(any_set, epilogue.replace("_tanh", ""))(linear(x), **form)
    given = any_set.linear_activation(linear, x, epilogue)
    torch.testing.assert_close(given, expected, rtol=1e-6 if dtype == torch.float32 else 1.6e-2, atol=1e-6)
    assert torch.equal(x, kept)
    assert torch.equal(linear(x), product)


def test_rows_must_be_whole(compiled: KernelSet) -> None:
    """A transposed argument, or heads that lie apart, would be read wrongly, and are refused."""
    x, heads = _random(4, 4).T, _random(4, 2, 12)[:, :, :8]
    with pytest.raises(ValueError, match="side by side"):
        compiled.add(x, x)
    with pytest.raises(ValueError, match="side by side"):
        compiled.rotary(heads, torch.ones(4, 4), torch.ones(4, 4))
