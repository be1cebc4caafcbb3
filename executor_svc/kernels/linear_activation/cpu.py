"""A linear layer and its activation by compiled kernels: the products' kernel takes the activation of its sums where it
has such an epilogue, see ../linear/bf16.h; elsewhere the activation is a second pass, in place where it can be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.activation import Relu
from executor_svc.kernels.activation.cpu import make_gelu_and_mul, make_silu_and_mul
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.linear.cpu import NativeLinear
from executor_svc.kernels.linear_activation import Epilogue, LinearActivation, reference
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary


def make_linear_activation(library: NativeLibrary) -> LinearActivation:
    """Make the op."""
    gelu_erf, gelu_tanh = _make_in_place(library, "octavo_gelu_erf"), _make_in_place(library, "octavo_gelu_tanh")

    def gelu(x: Tensor, *, tanh: bool) -> Tensor:
        return gelu_tanh(x) if tanh else gelu_erf(x)

    in_turn = reference.make_linear_activation(
        gelu=gelu,
        relu=_make_in_place(library, "octavo_relu"),
        silu_and_mul=make_silu_and_mul(library),
        gelu_and_mul=make_gelu_and_mul(library),
    )

    def linear_activation(linear: Linear, x: Tensor, epilogue: Epilogue) -> Tensor:
        activated = linear.activated(x, epilogue) if isinstance(linear, NativeLinear) else None
        return in_turn(linear, x, epilogue) if activated is None else activated

    return linear_activation


def _make_in_place(library: NativeLibrary, name: str) -> Relu:
    run = library.function(name, ADDRESS, ADDRESS, INT64, INT64, INT32)

    def activate(x: Tensor) -> Tensor:
        # The layer's own result: every element is read before it is written.
        run(x.data_ptr(), x.data_ptr(), *x.shape, x.dtype == torch.bfloat16)
        return x

    return activate
