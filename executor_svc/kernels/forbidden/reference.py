"""Forbidden tokens, row by row."""

from __future__ import annotations

from torch import Tensor


def forbid_tokens(logits: Tensor, *, token_ids: Tensor, begins: Tensor, ends: Tensor) -> None:
    """See the contract."""
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        logits[row, token_ids[begin:end]] = float("-inf")
