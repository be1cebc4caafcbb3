"""The check for finite rows."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels import KernelSet


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 16, 17, 63, 64, 576, 2049])
def test_one_bad_number_anywhere_is_seen(any_set: KernelSet, dtype: torch.dtype, width: int) -> None:
    """NaN and infinity of either sign, at any place, mark their row and no other."""
    bad = [float("nan"), float("inf"), float("-inf")]
    places = sorted({0, width // 2, max(width - 2, 0), width - 1})
    values = torch.randn(len(bad) * len(places) + 2, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    for row, (number, place) in enumerate((number, place) for number in bad for place in places):
        values[row, place] = number
    finite = any_set.finite_rows(values)
    assert (finite.dtype, finite.tolist()) == (torch.bool, [False] * (len(values) - 2) + [True] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_numbers_are_finite(any_set: KernelSet, dtype: torch.dtype) -> None:
    """Numbers whose sum overflows are still finite, as are zeros and the smallest."""
    info = torch.finfo(dtype)
    rows = torch.tensor([[info.max] * 40, [-info.max] * 40, [info.tiny] * 40, [0.0] * 40], dtype=dtype)
    assert any_set.finite_rows(rows).all()


def test_rows_of_a_wider_tensor(any_set: KernelSet) -> None:
    """What lies beside the rows does not count."""
    values = torch.full((4, 50), torch.nan)
    values[:, 10:43] = 1.0
    assert any_set.finite_rows(values[:, 10:43]).all()
    assert len(any_set.finite_rows(values[:0])) == 0
