"""Logit bias, one place at a time."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.logit_bias import LARGEST_LOGIT


def add_logit_bias(logits: Tensor, *, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """See the contract."""
    for row, token, value in zip(rows.tolist(), token_ids.tolist(), values, strict=True):
        logits[row, token] = (logits[row, token] + value).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
