"""Products of many rows, which are worked on in sections, passes and parts: the bits of each row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from instruction_sets import each_library
from torch import Tensor

from executor_svc.kernels.linear.cpu import make_pack_linear
from executor_svc.kernels.linear_activation.cpu import make_linear_activation
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library

# Of more than 2048 inputs and half a MiB of activations: two passes of which one has a step less; three, with inputs
# that do not fill the depth of a tile, once with rows of which one is left for the last tiles; four; and five, of rows
# that fill but one tile and a part of another.
LONG = [(128, 2080), (70, 4100), (65, 4100), (33, 8192), (17, 8224)]
# Rows that come by in several groups, with one pass and with more.
GROUPS = [(300, 2048), (390, 4100)]
# Rows enough for a section of each thread: twice some that do not fill the last tiles, of which one has inputs for two
# stretches that do not go up in whole steps; and long inputs as well, whose passes have stretches.
MANY = [(385, 77), (450, 620), (400, 2080)]
CASES = [
    *((threads, *size) for threads in (1, 2) for size in LONG),
    *((1, *size) for size in GROUPS),
    *((threads, *size) for threads in (2, 3) for size in MANY),
]


@each_library
@pytest.mark.parametrize(("threads", "rows", "in_features"), CASES)
# An odd number of panels of a tile each, more than one share of them, and an even number.
@pytest.mark.parametrize("out_features", [90, 202, 224])
def test_each_row_has_the_bits_that_it_has_alone(
    isa: InstructionSet, threads: int, rows: int, in_features: int, out_features: int
) -> None:
    """Whatever becomes of the sums: a sum, with a bias, a logit, activated and multiplied by its other half."""
    library = load_library(threads, isa)
    pack_linear, linear_activation = make_pack_linear(library), make_linear_activation(library)
    generator = torch.Generator().manual_seed(in_features)
    weight = (torch.randn((out_features, in_features), generator=generator) / in_features**0.5).bfloat16()
    bias = torch.randn(out_features, generator=generator).bfloat16()
    x = torch.randn((rows, in_features), generator=generator).bfloat16()
    x[7, 3] = torch.nan
    for linear in (pack_linear(weight, None), pack_linear(weight, bias)):
        activated = partial(linear_activation, linear)
        ways: list[Callable[[Tensor], Tensor]] = [
            linear,
            linear.logits,
            partial(activated, epilogue="gelu"),
            partial(activated, epilogue="silu_and_mul"),
        ]
        for way in ways:
            alone = torch.cat([way(x[row : row + 1]) for row in range(rows)])
            for _ in range(2):  # what a call leaves behind is nothing to the next
                torch.testing.assert_close(way(x), alone, rtol=0, atol=0, equal_nan=True)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(pack_linear(weight, None)(x).double(), exact, rtol=0.01, atol=0.01, equal_nan=True)


@each_library
@pytest.mark.parametrize("rows", [70, 390])
def test_the_likeliest_is_that_of_the_logits(isa: InstructionSet, rows: int) -> None:
    """It is looked for in the last pass alone: what the others hold is no logit. Of equals it is the first."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand((203, 4100), generator=generator).bfloat16()
    weight[150:] = weight[:53]
    linear = make_pack_linear(load_library(3, isa))(weight, None)
    x = torch.rand((rows, 4100), generator=generator).bfloat16()
    x[:, 2048:] = -x[:, 2048:]
    found = linear.likeliest(x)
    assert found is not None
    logits = linear.logits(x)
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(found[0].long(), first)
    assert (first < 53).any()
    assert found[1].all()


# 2048 inputs, and half a MiB of activations, are the most that one pass takes.
PASSES = {
    (128, 2080): 2,
    (70, 4100): 3,
    (33, 8192): 4,
    (17, 8224): 5,
    (300, 2048): 1,
    (64, 4096): 1,
    (65, 4096): 2,
    (450, 620): 1,
    (16, 8224): 1,
}


@each_library
@pytest.mark.parametrize(("size", "passes"), PASSES.items(), ids=str)
def test_long_inputs_take_passes(isa: InstructionSet, size: tuple[int, int], passes: int) -> None:
    """Of tiles' products: each is a round of the team."""
    library = load_library(2, isa)
    linear = make_pack_linear(library)(torch.zeros((64, size[1]), dtype=torch.bfloat16), None)
    x = torch.zeros(size, dtype=torch.bfloat16)
    before = library.num_rounds()
    linear(x)
    assert library.num_rounds() - before == (passes if "amx" in isa.name else 1)
