"""Limits that depend on the model."""

from __future__ import annotations

import pytest

from gateway.requests import GenerateCommand
from gateway.validation import check_parameters


@pytest.mark.parametrize(("vocab_size", "most"), [(8, 8), (20, 20), (49152, 20)])
def test_no_more_alternatives_than_tokens(vocab_size: int, most: int) -> None:
    """E11: alternatives go up to 20, or to the vocabulary where that is smaller; one more is refused by name."""
    assert list(check_parameters(GenerateCommand(top_logprobs=most), vocab_size)) == []
    (violation,) = check_parameters(GenerateCommand(top_logprobs=most + 1), vocab_size)
    assert violation.field == "output.top_logprobs"
    assert str(most) in violation.description
