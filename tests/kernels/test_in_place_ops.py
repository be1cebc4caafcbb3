"""Ops that work in place: sums, multiples, norms of queries and keys. Every set against torch, or its own RMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executor_svc.kernels import KernelSet

SHAPES = [(1, 1), (1, 8), (3, 33), (17, 96), (64, 576)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_add_to(any_set: KernelSet, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The second argument becomes the sum, rounded once, and is what is given; the first is left alone."""
    x, y = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=1)
    before, expected = x.clone(), x + y
    given = any_set.add_to(x, y)
    assert given.data_ptr() == y.data_ptr()
    assert torch.equal(y, expected)
    assert torch.equal(x, before)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [0.22, 1.0, -3.0])
def test_scale(any_set: KernelSet, dtype: torch.dtype, shape: tuple[int, int], factor: float) -> None:
    """Every element is multiplied in float32 and rounded once, in its place."""
    x = _random(*shape, dtype=dtype)
    expected = (x.float() * factor).to(dtype)
    given = any_set.scale(x, factor)
    assert given.data_ptr() == x.data_ptr()
    assert torch.equal(x, expected)


def test_sums_keep_infinities_and_nan(any_set: KernelSet) -> None:
    """Nothing is made of what is no number: it stays, element by element."""
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0, 3e38]])
    y = torch.tensor([[1.0, torch.inf, 2.0, torch.nan, 3e38]])
    expected = x + y
    assert torch.equal(any_set.add_to(x, y).nan_to_num(7.0), expected.nan_to_num(7.0))


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("head_dim", [8, 20, 64])
@pytest.mark.parametrize("is_whole", [False, True], ids=["each head", "all heads together"])
def test_norm_query_key(any_set: KernelSet, dtype: torch.dtype, rows: int, head_dim: int, is_whole: bool) -> None:
    """Queries and keys become, bit for bit, what the set's own RMSNorm gives of each of them; values stay."""
    sizes = 6 * head_dim, 2 * head_dim
    lengths = sizes if is_whole else (head_dim, head_dim)
    qkv = _random(rows, sum(sizes) + 2 * head_dim, dtype=dtype)
    weights = [_random(length, dtype=dtype, seed=length + place) for place, length in enumerate(lengths)]
    query, key, value = qkv.clone().split((*sizes, 2 * head_dim), dim=1)
    parts = [
        any_set.rms_norm(part.reshape(-1, len(weight)), weight, 1e-6).view(rows, -1)
        for part, weight in zip((query, key), weights, strict=True)
    ]
    given = any_set.norm_query_key(qkv, sizes, *weights, 1e-6)
    assert given.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv, torch.cat((*parts, value), dim=1))


def test_what_lies_apart_is_refused(compiled: KernelSet) -> None:
    """The compiled kernels change memory as it lies: a slice with gaps is an error, not another tensor's end."""
    x = torch.zeros(4, 16)
    with pytest.raises(ValueError, match="must be contiguous"):
        compiled.scale(x[:, :8], 2.0)
    with pytest.raises(ValueError, match="must be contiguous"):
        compiled.add_to(x[:, :8], torch.zeros(4, 8))
    with pytest.raises(ValueError, match="must be contiguous"):
        compiled.norm_query_key(x[:, :8], (4, 2), torch.ones(2), torch.ones(2), 1e-6)
