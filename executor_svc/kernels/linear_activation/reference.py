"""A linear layer and its activation, one after the other, of any set's ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from executor_svc.kernels.activation import Gelu, GeluAndMul, Relu, SiluAndMul
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.linear_activation import Epilogue, LinearActivation


def make_linear_activation(
    *, gelu: Gelu, relu: Relu, silu_and_mul: SiluAndMul, gelu_and_mul: GeluAndMul
) -> LinearActivation:
    """Make the op out of a set's activations."""
    activations: dict[Epilogue, Callable[[Tensor], Tensor]] = {
        "gelu": partial(gelu, tanh=False),
        "gelu_tanh": partial(gelu, tanh=True),
        "relu": relu,
        "silu_and_mul": silu_and_mul,
        "gelu_and_mul": partial(gelu_and_mul, tanh=False),
        "gelu_tanh_and_mul": partial(gelu_and_mul, tanh=True),
    }

    def linear_activation(linear: Linear, x: Tensor, epilogue: Epilogue) -> Tensor:
        return activations[epilogue](linear(x))

    return linear_activation
