"""A linear layer with its activation by one op: the bits of both, one after the other, on every instruction set."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from instruction_sets import each_library

from executor_svc.kernels.activation.cpu import make_gelu, make_gelu_and_mul, make_relu, make_silu_and_mul
from executor_svc.kernels.linear.cpu import make_pack_linear
from executor_svc.kernels.linear_activation import Epilogue
from executor_svc.kernels.linear_activation.cpu import make_linear_activation
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library

ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 70)
EPILOGUES: tuple[Epilogue, ...] = ("gelu", "gelu_tanh", "relu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


@each_library
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Halves of whole panels, an odd number of them among those; and halves that end within one.
@pytest.mark.parametrize("out_features", [32, 96, 224, 480, 90])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_the_bits_are_those_of_both_in_turn(
    isa: InstructionSet, epilogue: Epilogue, dtype: torch.dtype, out_features: int, has_bias: bool
) -> None:
    """With few rows and many, a width that fills the depth of a tile and one that does not; NaN stays in its row."""
    library = load_library(2, isa)
    pack_linear, linear_activation = make_pack_linear(library), make_linear_activation(library)
    gelu, gelu_and_mul = make_gelu(library), make_gelu_and_mul(library)
    activations = {
        "gelu": partial(gelu, tanh=False),
        "gelu_tanh": partial(gelu, tanh=True),
        "relu": make_relu(library),
        "silu_and_mul": make_silu_and_mul(library),
        "gelu_and_mul": partial(gelu_and_mul, tanh=False),
        "gelu_tanh_and_mul": partial(gelu_and_mul, tanh=True),
    }
    generator = torch.Generator().manual_seed(out_features)
    for in_features in (64, 77):
        weight = torch.randn((out_features, in_features), generator=generator).to(dtype)
        bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
        linear = pack_linear(weight, bias)
        x = torch.randn((max(ROWS), in_features), generator=generator).to(dtype)
        x[5, 3] = torch.nan
        for rows in ROWS:
            expected = activations[epilogue](linear(x[:rows]))
            result = linear_activation(linear, x[:rows], epilogue)
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
            assert result.isnan().any(1).nonzero().flatten().tolist() == [5] * (rows > 5)
