"""The likeliest token of a head, found while its products come by: as the logits have it, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from instruction_sets import each_library

from executor_svc.kernels.linear.cpu import make_pack_linear
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library

ROWS = (1, 2, 16, 17, 33, 70)


@each_library
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocabulary", [5, 16, 203, 1024])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_it_is_the_first_of_the_highest_logits(
    isa: InstructionSet, threads: int, vocabulary: int, has_bias: bool
) -> None:
    """With any number of rows; each logit is there twice, and a row of zeros has them all alike, 0 and -0."""
    generator = torch.Generator().manual_seed(vocabulary)
    weight = torch.randn((vocabulary, 40), generator=generator).bfloat16()
    weight[vocabulary // 2 :] = weight[: vocabulary - vocabulary // 2].clone()
    bias = torch.randn(vocabulary, generator=generator).bfloat16() if has_bias else None
    linear = make_pack_linear(load_library(threads, isa))(weight, bias)
    x = torch.randn((max(ROWS), 40), generator=generator).bfloat16()
    x[0] = 0
    for rows in ROWS:
        found = linear.likeliest(x[:rows])
        assert found is not None
        token_ids, is_finite = found
        assert is_finite.all()
        logits = linear.logits(x[:rows])
        highest = logits == logits.max(1, keepdim=True).values
        assert torch.equal(token_ids, highest.int().argmax(1))


@each_library
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(isa: InstructionSet) -> None:
    """Not a number, or beyond the largest float32 either way, wherever among the columns."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((150, 33), generator=generator).bfloat16()
    weight[149, 32], weight[3, 32] = 3e38, -3e38
    linear = make_pack_linear(load_library(2, isa))(weight, None)
    x = torch.randn((40, 33), generator=generator).bfloat16()
    x[:, 32] = 0
    sound = linear.likeliest(x)
    assert sound is not None
    x[7, 0], x[20, 32], x[39, 5] = torch.nan, 3e38, torch.inf
    found = linear.likeliest(x)
    assert found is not None
    assert found[1].logical_not().nonzero().flatten().tolist() == [7, 20, 39]
    assert torch.equal(found[0][found[1]], sound[0][found[1]])


def test_float32_weights_have_no_such_kernel() -> None:
    """The logits are written, and looked at."""
    linear = make_pack_linear(load_library(2))(torch.ones((40, 33)), None)
    assert linear.likeliest(torch.ones((2, 33))) is None
