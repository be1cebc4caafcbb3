"""The decoder's small ops: the reference against transformers and float64, every set against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from executor_svc.kernels import KernelSet, build_kernels

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 64)
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2}}

each_set = pytest.mark.usefixtures("kernels")
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, so that an output that nobody wrote shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return fill

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))
    with torch.inference_mode():
        yield


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCES[dtype])


@each_set
@each_dtype
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 8), (17, 33), (48, 64), (130, 96)])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear(
    kernels: KernelSet, dtype: torch.dtype, rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    """A packed weight gives x @ weight.T + bias as float64 does, at any number of rows, and leaves x alone."""
    x = _random(rows, in_features, dtype=dtype)
    weight = _random(out_features, in_features, dtype=dtype, seed=1, scale=in_features**-0.5)
    bias = _random(out_features, dtype=dtype, seed=2) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    before = x.clone()
    _check(kernels.pack_linear(weight, bias)(x), expected, dtype)
    assert torch.equal(x, before)


@each_set
@each_dtype
@pytest.mark.parametrize("hidden", [8, 33, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(kernels: KernelSet, dtype: torch.dtype, rows: int, hidden: int) -> None:
    """RMSNorm is transformers' own, computed in float64, and leaves x alone."""
    x, weight = _random(rows, hidden, dtype=dtype, scale=3.0), _random(hidden, dtype=dtype, seed=1)
    module = LlamaRMSNorm(hidden, eps=1e-5).double()
    module.weight.data = weight.double()
    before = x.clone()
    wide = x.double()
    expected = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    _check(kernels.rms_norm(x, weight, 1e-5), expected, dtype)
    torch.testing.assert_close(module(wide).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


@each_set
@each_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(kernels: KernelSet, dtype: torch.dtype, rows: int) -> None:
    """The residual becomes the rounded sum, in place; the result is the norm of that sum; x is left alone."""
    x, residual = _random(rows, 96, dtype=dtype), _random(rows, 96, dtype=dtype, seed=1)
    weight = _random(96, dtype=dtype, seed=2)
    total, before = residual + x, x.clone()
    normed = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    _check(normed, kernels.rms_norm(total, weight, 1e-6), dtype)


@each_set
def test_rms_norm_of_zeros_is_zero(kernels: KernelSet) -> None:
    """A row of zeros gives zeros, not NaN."""
    assert torch.equal(kernels.rms_norm(torch.zeros(3, 8), torch.ones(8), 1e-5), torch.zeros(3, 8))


@each_set
@each_dtype
@pytest.mark.parametrize("intermediate", [1, 17, 96])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul(kernels: KernelSet, dtype: torch.dtype, rows: int, intermediate: int) -> None:
    """The first half goes through SiLU and multiplies the second, large magnitudes included."""
    gate_up = _random(rows, 2 * intermediate, dtype=dtype, scale=8.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    _check(kernels.silu_and_mul(gate_up), expected, dtype)


def test_unknown_kernel_set_is_an_error() -> None:
    """A set that does not exist is refused with the names of those that do."""
    with pytest.raises(ValueError, match="unknown kernel set 'trition'; known: reference, cpu, triton"):
        build_kernels("trition")


@each_set
def test_a_set_has_every_op(kernels: KernelSet) -> None:
    """Every field that does not describe the set is a callable: nothing falls back silently."""
    described = ("name", "build", "batch_invariant")
    ops = {field: value for field, value in vars(kernels).items() if field not in described}
    assert all(callable(op) for op in ops.values())


def test_what_the_cpu_set_leaves_to_torch_is_named() -> None:
    """The routing of tokens to experts and the sum of what these give, which the log of the start lists."""
    assert build_kernels("cpu").by_reference == ("route_experts", "join_experts")


def test_a_missing_op_is_an_error() -> None:
    """A set cannot be made without one of its ops."""
    ops = vars(build_kernels("reference"))
    del ops["rms_norm"]
    with pytest.raises(TypeError, match="rms_norm"):
        KernelSet(**ops)
