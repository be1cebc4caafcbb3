"""What is put right in Triton's interpreter does what a GPU does, and is still needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

interpreter = pytest.importorskip("triton_interpreter", reason="Triton has no build for this platform")

from triton_products import product_of, rounded  # noqa: E402


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    """To the nearest, halves to the even one: over every exponent, at and beside the halves, infinities and NaN."""
    patterns = np.arange(0, 1 << 32, 32_749, dtype=np.uint64).astype(np.uint32)
    halves = (np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16) | 0x8000
    numbers = torch.from_numpy(np.concatenate((patterns, halves, halves + 1, halves - 1)).view(np.float32))
    expected = numbers.bfloat16()
    interpreter.use()
    torch.testing.assert_close(rounded(numbers), expected, rtol=0, atol=0, equal_nan=True)


def test_a_product_of_bfloat16_is_that_of_its_numbers() -> None:
    """tl.dot of bfloat16 gives, to float32's rounding, what float64 gives."""
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    interpreter.use()
    torch.testing.assert_close(product_of(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_without_the_widening_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter by itself multiplies the bits of bfloat16 as whole numbers: once it no longer does, that goes."""
    interpreter.use()
    builder = interpreter.interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", interpreter._create_dot)
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    assert (product_of(a, a) - 16).abs().min() > 1e6
