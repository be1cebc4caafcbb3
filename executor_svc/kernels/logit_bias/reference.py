"""Logit bias, one token at a time."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.logit_bias import LARGEST_LOGIT


def add_logit_bias(logits: Tensor, *, token_ids: Tensor, values: Tensor, begins: Tensor, ends: Tensor) -> None:
    """See the contract."""
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        for token, value in zip(token_ids[begin:end].tolist(), values[begin:end], strict=True):
            logits[row, token] = (logits[row, token] + value).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
