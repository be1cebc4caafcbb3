"""Activations by the compiled kernels, see activation.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.activation import Gelu, GeluAndMul, Relu, SiluAndMul
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary


def make_silu_and_mul(library: NativeLibrary) -> SiluAndMul:
    """Make the op."""
    return _make_gated(library, "octavo_silu_and_mul")


def make_gelu_and_mul(library: NativeLibrary) -> GeluAndMul:
    """Make the op."""
    by_erf, by_tanh = (_make_gated(library, f"octavo_gelu_{form}_and_mul") for form in ("erf", "tanh"))

    def gelu_and_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
        return by_tanh(gate_up) if tanh else by_erf(gate_up)

    return gelu_and_mul


def make_gelu(library: NativeLibrary) -> Gelu:
    """Make the op."""
    by_erf, by_tanh = (_make_plain(library, f"octavo_gelu_{form}") for form in ("erf", "tanh"))

    def gelu(x: Tensor, *, tanh: bool) -> Tensor:
        return by_tanh(x) if tanh else by_erf(x)

    return gelu


def make_relu(library: NativeLibrary) -> Relu:
    """Make the op."""
    return _make_plain(library, "octavo_relu")


def _make_gated(library: NativeLibrary, name: str) -> SiluAndMul:
    run = library.function(name, ADDRESS, ADDRESS, INT64, INT64, INT32)

    def gate(gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        run(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, gate_up.dtype == torch.bfloat16)
        return out

    return gate


def _make_plain(library: NativeLibrary, name: str) -> Relu:
    run = library.function(name, ADDRESS, ADDRESS, INT64, INT64, INT32)

    def activate(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        run(x.data_ptr(), out.data_ptr(), *x.shape, x.dtype == torch.bfloat16)
        return out

    return activate
